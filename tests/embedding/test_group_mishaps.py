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
from support.killed import step
from support.limits import descriptors
from support.ranks import run_ranks
from support.shell import command
from support.stores import options
from support.together import Model, keep_open, killed, killed_at
from tierbed.distributed import World
from tierbed.embedding.saving.snapshots import Snapshots
from tierbed.embedding.state_dict.model_snapshots import ModelSnapshots
from tierbed.engine.errors import StoreError
from tierbed.snapshots.files.reader import Snapshot
from tierbed.snapshots.files.writer import NewSnapshots
from tierbed.snapshots.store.folder import StoreFolder

TWO = ("host", "host")
IDS = torch.arange(50)


def embedding(name: str, path: Path, **settings: Any) -> Any:
    store = tierbed.make_host_mem_store_options(persistent_path=path, **settings)
    return tierbed.Embedding(None, 4, name=name, store=store)


def through_a_link(path: Path) -> None:
    """A run in which one of two embeddings has its folder by a symbolic link."""
    (path / "real").mkdir(exist_ok=True)
    (path / "link").unlink(missing_ok=True)
    (path / "link").symlink_to(path / "real")
    for folder in ("real", "link"):
        model = nn.ModuleDict({"a": embedding("a", path / folder), "b": embedding("b", path / "real")})
        optimizer = tierbed.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        sum(one(IDS).sum() for one in model.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.save_snapshot(folder)
        for one in model.values():
            one.close()


def test_embeddings_of_a_group_may_name_their_folder_by_a_link(tmp_path: Path) -> None:
    in_process(through_a_link, tmp_path)


def mixed_then_fresh(path: Path) -> list[int]:
    members = [embedding("b", path, open="mixed"), embedding("a", path, open="fresh")]
    sizes = [one.size() for one in members]
    model = nn.ModuleDict({one.name: one for one in members})
    optimizer = tierbed.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    sum(one(IDS).sum() for one in members).backward()
    optimizer.step()
    return sizes


def killed_after_a_save(path: Path) -> None:
    model = nn.ModuleDict({name: embedding(name, path) for name in "ab"})
    optimizer = tierbed.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for name in ("first", "second"):
        sum(one(IDS).sum() for one in model.values()).backward()  # type: ignore[union-attr]
        optimizer.step()
        if name == "first":
            optimizer.save_snapshot(name)
    keep_open(model)


def test_one_embedding_opened_mixed_and_another_fresh_are_trained(tmp_path: Path) -> None:
    killed(killed_after_a_save, tmp_path)
    for place in (tmp_path / "b" / "snapshots").iterdir():
        place.rename(tmp_path / place.name)
    assert in_process(mixed_then_fresh, tmp_path) == [0, 0]


def killed_without_a_common_step(path: Path) -> None:
    model = Model(path, TWO)
    for member, name in zip(model.members, ("first", "second"), strict=True):
        model.steps(2)
        member.save_snapshot(name)
    model.steps(1)


def opened(path: Path) -> list[int]:
    return Model(path, TWO).at()


def test_stores_without_a_common_step_are_loaded_one_by_one(tmp_path: Path) -> None:
    killed(killed_without_a_common_step, tmp_path)
    for name, snapshot in (("a", "first"), ("b", "second")):
        assert "they have no saved step in common" in killed(opened, tmp_path)
        assert command("snapshot", "load", tmp_path / name, snapshot) == 0
    assert killed(opened, tmp_path) == [2, 4]


class Pair(ModelSnapshots, nn.Module):
    """Two embeddings that are saved together and trained apart."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.members = nn.ModuleList(embedding(name, path, state_dict_snapshots=True) for name in "ab")
        self.optimizers = [
            tierbed.EagerOptimizer(torch.optim.SGD(one.parameters(), lr=0.1), one) for one in self.members
        ]

    def train_step(self) -> None:
        for one, optimizer in zip(self.members, self.optimizers, strict=True):
            one(IDS).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def test_a_save_whose_second_record_cannot_be_written_is_taken_back_in_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(tmp_path)
    pair.train_step()
    pair.save_snapshot("first")
    pair.train_step()
    change = StoreFolder.change

    def fails(folder: StoreFolder, **fields: Any) -> None:
        if folder.path.name == "b":
            raise StoreError("no room")
        change(folder, **fields)

    monkeypatch.setattr(StoreFolder, "change", fails)
    with pytest.raises(StoreError, match="no room"):
        pair.save_snapshot("second")
    monkeypatch.undo()
    for one in pair.members:
        assert one.last_snapshot == "first"
        assert one.state_dict()
        one.save_snapshot("increment", "incremental")


def test_a_load_waits_for_a_save_that_another_thread_begins_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(tmp_path, TWO)
    model.steps(2)
    model.save_snapshot("all")
    finish = Snapshots.finish_saving
    begun: list[Any] = []

    def finish_and_begin(snapshots: Snapshots) -> None:
        finish(snapshots)
        if not begun:
            thread = Thread(target=lambda: begun.append(model.save_snapshot("beside", background=True)))
            thread.start()
            thread.join()

    monkeypatch.setattr(Snapshots, "finish_saving", finish_and_begin)
    load = Thread(target=lambda: model.load_snapshot("all"), daemon=True)
    load.start()
    load.join(60)
    assert not load.is_alive()


def closed_after_a_save(path: Path, begin: Callable[[], None]) -> None:
    member = embedding("rows", path)
    member.put(IDS, torch.ones(50, 4))
    member.save_snapshot("first")
    member.put(IDS, torch.zeros(50, 4))
    begin()
    member.close()


@pytest.mark.parametrize("number", range(1, 5))
def test_a_kill_in_a_close_says_that_the_store_was_not_closed(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert killed_at(tmp_path, "rename", number, closed_after_a_save, tmp_path) == "killed"
    assert embedding("rows", tmp_path).get(IDS).eq(1).all()
    assert "was not closed by its last run; restored snapshot 'first'" in caplog.text


def loaded_once_closed(path: Path, begin: Callable[[], None]) -> None:
    with embedding("rows", path) as member:
        member.put(IDS, torch.ones(50, 4))
        member.save_snapshot("first")
        member.put(IDS, torch.zeros(50, 4))
    again = embedding("rows", path)
    begin()
    again.load_snapshot("first")


@pytest.mark.parametrize("number", [1, 2])
def test_a_kill_in_a_load_does_not_say_that_the_store_was_not_closed(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert killed_at(tmp_path, "rename", number, loaded_once_closed, tmp_path) == "killed"
    rows = embedding("rows", tmp_path).get(IDS)
    assert rows.eq(1).all() or (rows.eq(0).all() and number == 1)
    assert "not closed" not in caplog.text
    assert ("was being loaded when the last run was killed" in caplog.text) == (number == 2)


def closed_without_rows(path: Path, begin: Callable[[], None]) -> None:
    model = Model(path, ("ssd", "host"))
    model.at()
    begin()
    model.members[0].close()


def saved_alone_and_trained(path: Path) -> None:
    model = Model(path, ("ssd", "host"))
    model.at()
    model.members[1].save_snapshot("first")
    model.steps(1)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_kill_in_a_first_close_leaves_the_moment_without_rows(tmp_path: Path, number: int) -> None:
    assert killed_at(tmp_path, "rename", number, closed_without_rows, tmp_path) == "killed"
    killed(saved_alone_and_trained, tmp_path)
    assert Model(tmp_path, ("ssd", "host")).at() == [0, 0]


def pruned_while_saved(world: World, path: Path) -> int:
    """Rank 0 prunes, as another process may request, while a background save gets its name."""
    member = make(options("host", path), "adagrad", name="rows", tables=1, seed=0, world=world)
    step(member)
    saving = member.save_snapshot("beside", background=True)
    put: Callable[[NewSnapshots], None] = NewSnapshots.publish

    def prune_and_put(new: NewSnapshots) -> None:
        member.table_handle().snapshots.prune_here(5, None)
        put(new)

    NewSnapshots.publish = prune_and_put  # type: ignore[method-assign]
    saving.wait()
    NewSnapshots.publish = put  # type: ignore[method-assign]
    return len(Snapshot.open(path / "rows" / "snapshots" / "beside").manifest.files)


def test_a_prune_leaves_a_snapshot_of_ranks_that_gets_its_name(tmp_path: Path) -> None:
    assert all(run_ranks(2, pruned_while_saved, tmp_path))


def test_a_save_needs_few_descriptors(tmp_path: Path) -> None:
    member = embedding("rows", tmp_path)
    member.put(torch.arange(5000), torch.ones(5000, 4))
    with descriptors(24):
        member.save_snapshot("first")


def test_what_a_caller_changes_in_a_description_is_not_read_again(tmp_path: Path) -> None:
    member = embedding("rows", tmp_path)
    member.put(IDS, torch.ones(50, 4))
    member.save_snapshot("first")
    place = tmp_path / "rows" / "snapshots" / "first"
    Snapshot.open(place).manifest.description["tables"].append("changed")
    assert "changed" not in Snapshot.open(place).manifest.description["tables"]
