"""Groups whose folders have two names, whose record cannot be written, and loads beside saves of other threads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn

import tierbed
from support.embeddings import make
from support.forked import in_process
from support.killed import remarks, step
from support.limits import descriptors
from support.ranks import run_ranks
from support.shell import command
from support.stores import options
from support.together import Model, at, killed, killed_at, played, played_from
from tierbed.distributed import World
from tierbed.embedding.saving.snapshot_manager import SnapshotManager
from tierbed.embedding.state_dict.model_snapshots import ModelSnapshots
from tierbed.engine.errors import StoreError
from tierbed.snapshots.files.reader import Snapshot
from tierbed.snapshots.files.writer import NewSnapshots
from tierbed.snapshots.store.folder import StoreFolder

ONE, TWO, MIXED = ("host",), ("host", "host"), ("ssd", "host")
IDS = torch.arange(50)


@pytest.mark.parametrize(
    ("plan", "number", "found", "said"),
    [
        *(("begin; close", number, [1], "was not closed by its last run; restored snapshot") for number in range(1, 5)),
        ("close; open; begin; load first", 1, [2], ""),
        ("close; open; begin; load first", 2, [1], "was being loaded when the last run was killed"),
    ],
)
def test_a_kill_in_a_close_or_a_load_says_what_was_going_on(tmp_path, plan, number, found, said, caplog) -> None:
    plan = f"step 1; save first; step 1; {plan}"
    assert killed_at(tmp_path, "rename", number, played_from, tmp_path, ONE, plan) == "killed"
    assert Model(tmp_path, ONE).at() == found
    warned = " ".join(remarks(caplog))
    assert said in warned
    assert ("not closed" in warned) == ("not closed" in said)
    assert bool(warned) == bool(said)


def embedding(name: str, path: Path, **settings: Any) -> Any:
    store = tierbed.make_host_mem_store_options(persistent_path=path, **settings)
    return tierbed.Embedding(None, 4, name=name, store=store)


def trained(model: Any) -> tierbed.EagerOptimizer:
    """One step of an embedding, or of a list of them, by an optimizer, which is returned."""
    optimizer = tierbed.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    sum(one(IDS).sum() for one in (model if isinstance(model, nn.ModuleList) else [model])).backward()
    optimizer.step()
    return optimizer


def through_a_link(path: Path) -> None:
    """A run in which one of two embeddings has its folder by a symbolic link."""
    (path / "real").mkdir(exist_ok=True)
    (path / "link").unlink(missing_ok=True)
    (path / "link").symlink_to(path / "real")
    for folder in ("real", "link"):
        both = nn.ModuleList([embedding("a", path / folder), embedding("b", path / "real")])
        trained(both).save_snapshot(folder)
        for one in both:
            one.close()


def test_embeddings_of_a_group_may_name_their_folder_by_a_link(tmp_path) -> None:
    in_process(through_a_link, tmp_path)


def mixed_then_fresh(path: Path) -> list[int]:
    members = [
        make(options("host", path, open=mode), name=name, tables=1) for name, mode in (("b", "mixed"), ("a", "fresh"))
    ]
    sizes = [one.size() for one in members]
    trained(nn.ModuleList(members))
    return sizes


def test_one_embedding_opened_mixed_and_another_fresh_are_trained(tmp_path) -> None:
    killed(played, tmp_path, TWO, "step 1; save first; step 1")
    for place in (tmp_path / "b" / "snapshots").iterdir():
        place.rename(tmp_path / place.name)
    assert in_process(mixed_then_fresh, tmp_path) == [0, 0]


def test_stores_without_a_common_step_are_loaded_one_by_one(tmp_path) -> None:
    killed(played, tmp_path, TWO, "step 2; a save first; step 2; b save second; step 1")
    for name, snapshot in (("a", "first"), ("b", "second")):
        assert "they have no saved step in common" in killed(at, tmp_path, TWO)
        assert command("snapshot", "load", tmp_path / name, snapshot) == 0
    assert at(tmp_path, TWO) == [2, 4]


class Pair(ModelSnapshots, nn.Module):
    """Two embeddings that are saved together and trained apart."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.members = nn.ModuleList(embedding(name, path, state_dict_snapshots=True) for name in "ab")


def test_a_save_whose_second_record_cannot_be_written_is_taken_back_in_both(tmp_path, monkeypatch) -> None:
    pair = Pair(tmp_path)
    kept = [trained(one) for one in pair.members]
    pair.save_snapshot("first")
    for one, optimizer in zip(pair.members, kept, strict=True):
        one(IDS).sum().backward()
        optimizer.step()
    change = StoreFolder.change

    def fails(folder: StoreFolder, **fields: Any) -> None:
        if folder.path.name == "b":
            raise StoreError("no room")
        change(folder, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(StoreFolder, "change", fails)
        with pytest.raises(StoreError, match="no room"):
            pair.save_snapshot("second")
    for one in pair.members:
        assert one.last_snapshot == "first"
        assert one.state_dict()
        one.save_snapshot("increment", "incremental")


def test_a_load_waits_for_a_save_that_another_thread_begins_meanwhile(tmp_path, monkeypatch) -> None:
    model = Model(tmp_path, TWO)
    model.steps(2)
    model.save_snapshot("all")
    finish = SnapshotManager.wait_for_save
    begun: list[Any] = []

    def finish_and_begin(snapshots: SnapshotManager) -> None:
        finish(snapshots)
        if not begun:
            thread = Thread(target=lambda: begun.append(model.save_snapshot("beside", background=True)))
            thread.start()
            thread.join()

    monkeypatch.setattr(SnapshotManager, "wait_for_save", finish_and_begin)
    load = Thread(target=lambda: model.load_snapshot("all"), daemon=True)
    load.start()
    load.join(60)
    assert not load.is_alive()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_kill_in_a_first_close_leaves_the_moment_without_rows(tmp_path, number) -> None:
    assert killed_at(tmp_path, "rename", number, played_from, tmp_path, MIXED, "at; begin; a close") == "killed"
    killed(played, tmp_path, MIXED, "at; b save first; step 1")
    assert Model(tmp_path, MIXED).at() == [0, 0]


def pruned_while_saved(world: World, path: Path) -> int:
    """Rank 0 prunes, as another process may request, while a background save gets its name."""
    member = make(options("host", path), "adagrad", name="rows", tables=1, seed=0, world=world)
    step(member)
    saving = member.save_snapshot("beside", background=True)
    put: Callable[[NewSnapshots], None] = NewSnapshots.publish

    def prune_and_put(new: NewSnapshots) -> None:
        member.table_handle().snapshot_manager.prune_on_rank_0(5, None)
        put(new)

    NewSnapshots.publish = prune_and_put  # type: ignore[method-assign]
    saving.wait()
    NewSnapshots.publish = put  # type: ignore[method-assign]
    return len(Snapshot.open(path / "rows" / "snapshots" / "beside").manifest.files)


def test_a_prune_leaves_a_snapshot_of_ranks_that_gets_its_name(tmp_path) -> None:
    assert all(run_ranks(2, pruned_while_saved, tmp_path))


def test_a_save_needs_few_descriptors_and_what_a_caller_changes_in_its_description_is_not_read_again(tmp_path) -> None:
    member = embedding("rows", tmp_path)
    member.put(torch.arange(5000), torch.ones(5000, 4))
    with descriptors(24):
        member.save_snapshot("first")
    place = tmp_path / "rows" / "snapshots" / "first"
    Snapshot.open(place).manifest.description["tables"].append("changed")
    assert "changed" not in Snapshot.open(place).manifest.description["tables"]
