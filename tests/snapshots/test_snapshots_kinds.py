"""Snapshots of each kind from every store: what they bring back."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from support.embeddings import DIM, ask_to_leave, attach, contents, make, train
from support.kinds import TYPES, grow, kinds_of, open_at
from support.records import last_snapshot
from support.stores import STORES, options
from tierbed.engine.errors import InputError, OptionError, SnapshotError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files import reader
from tierbed.snapshots.store import save as saving
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.status import store_status


@pytest.mark.parametrize(("store", "other"), list(zip(STORES, [*STORES[1:], STORES[0]], strict=True)))
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.rotated("types")
def test_every_kind_brings_the_rows_back_on_every_store(
    tmp_path: Path, store: str, other: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    states = []
    with (
        open_at(tmp_path, store, types=types) as embedding,
        open_at(tmp_path / "plain", store, types=types) as plain,
    ):
        for number, kind in enumerate(["full", *kinds_of(store), "incremental"]):
            grow(embedding, number)
            grow(plain, number)
            embedding.save_snapshot(f"s{number}", kind)
            states.append(contents(embedding).tobytes())
            assert contents(plain).tobytes() == states[-1]  # saving does not change training
        for number, state in reversed(list(enumerate(states))):
            embedding.load_snapshot(f"s{number}")
            assert contents(embedding).tobytes() == state
    snapshots = tmp_path / "rows" / "snapshots"
    with open_at(tmp_path / "other", other, types=types) as embedding:
        embedding.save_snapshot("empty")
        for number, state in enumerate(states):
            (tmp_path / "other" / "rows" / "snapshots" / f"s{number}").symlink_to(snapshots / f"s{number}")
            embedding.load_snapshot(f"s{number}")
            assert contents(embedding).tobytes() == state


def test_an_incremental_snapshot_goes_over_none_that_lacks_its_own_parent(tmp_path: Path) -> None:
    snapshots = tmp_path / "rows" / "snapshots"
    with open_at(tmp_path, "device") as embedding:
        train(embedding, range(9))
        embedding.save_snapshot("a")
        embedding.save_snapshot("b", "incremental")
        (snapshots / "a").rename(tmp_path / "elsewhere")
        with pytest.raises(SnapshotError, match="'b' lacks its parent: there is no snapshot 'a'"):
            embedding.save_snapshot("c", "incremental")
        (tmp_path / "elsewhere").rename(snapshots / "a")
        embedding.save_snapshot("c", "incremental")
    Snapshot.open(snapshots / "c").verify()


def test_switches_are_true_or_false(tmp_path: Path) -> None:
    with open_at(tmp_path, "device") as embedding:
        with pytest.raises(OptionError, match="background='yes': give True or False"):
            embedding.save_snapshot("a", background="yes")  # type: ignore[arg-type]
        embedding.save_snapshot("a")
        for switch in ({"strict": "no"}, {"weights_only": 1}):
            with pytest.raises(InputError, match="give True or False"):
                embedding.load_snapshot("a", **switch)  # type: ignore[arg-type]


def test_a_save_over_as_many_as_can_be_read_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (saving, reader):
        monkeypatch.setattr(module, "MAX_CHAIN", 3)
    with open_at(tmp_path, "device") as embedding:
        for name in "abcdef":
            train(embedding, range(9))
            embedding.save_snapshot(name, "full" if name == "a" else "incremental")
        state = contents(embedding).tobytes()
        embedding.load_snapshot("f")
        assert contents(embedding).tobytes() == state
    kinds = [Snapshot.open(tmp_path / "rows" / "snapshots" / name).kind for name in "abcdef"]
    assert kinds == ["full", "incremental", "incremental", "full", "incremental", "incremental"]
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "snapshot 'd' is full, not incremental with parent 'c': it has a chain of 2 parents, and at most that many can "
        "be read"
    ]


def test_a_snapshot_that_a_state_names_is_no_parent(tmp_path: Path) -> None:
    with make(options("host", tmp_path, state_dict_snapshots=True), "adagrad") as embedding:
        train(embedding, range(9))
        state = embedding.state_dict()
        train(embedding, range(9))
        embedding.load_state_dict(state)
        embedding.save_snapshot("a", "incremental")
        embedding.save_snapshot("b", "incremental")
    kinds = [Snapshot.open(tmp_path / "rows" / "snapshots" / name).kind for name in "ab"]
    assert kinds == ["full", "incremental"]


def test_rows_that_a_broken_off_erase_left_are_in_no_count(tmp_path: Path) -> None:
    with open_at(tmp_path, "device") as embedding:
        embedding.put(range(9), torch.ones(9, DIM), 0)
        embedding.save_snapshot("a")
        ask_to_leave(embedding.table_handle().table, [3, 4], "expired")
        embedding.save_snapshot("b", "incremental")
        assert embedding.size() == 7
        embedding.load_snapshot("b")
        assert contents(embedding)["key"].tolist().count(3) == 0
        assert embedding.size() == 7


@pytest.mark.parametrize("store", STORES)
def test_an_incremental_snapshot_costs_the_change(tmp_path: Path, store: str) -> None:
    with open_at(tmp_path, store) as embedding:
        train(embedding, torch.arange(1000))
        embedding.save_snapshot("a")
        for name in "bc":
            train(embedding, [1, 2, 5000])
            embedding.delete([7, 9], 0)
            embedding.save_snapshot(name, "incremental")
    whole, *later = (Snapshot.open(tmp_path / "rows" / "snapshots" / name) for name in "abc")
    assert whole.manifest.own_rows == 1000
    assert [s.manifest.own_rows for s in later] == [5, 3]
    assert [s.manifest.deleted for s in later] == [2, 0]
    assert [s.manifest.rows for s in later] == [999, 999]


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_its_parent_is_what_was_saved_or_loaded_last(tmp_path: Path, store: str) -> None:
    with open_at(tmp_path, store) as embedding:
        with pytest.raises(SnapshotError, match=r"kind='incremental' needs a parent.*have no snapshot.*'full'"):
            embedding.save_snapshot("none", "incremental")
        grow(embedding, 0)
        embedding.save_snapshot("a")
        grow(embedding, 1)
        embedding.save_snapshot("b", "incremental")
        embedding.load_snapshot("a")
        grow(embedding, 2)
        embedding.save_snapshot("c", "incremental")
        state = contents(embedding).tobytes()
    with open_at(tmp_path, store) as embedding:  # another run, which has noted nothing
        embedding.save_snapshot("d", "incremental")
        assert contents(embedding).tobytes() == state
        grow(embedding, 3)
        embedding.save_snapshot("e", "incremental")
        state = contents(embedding).tobytes()
        embedding.load_snapshot("c")
        embedding.load_snapshot("e")
        assert contents(embedding).tobytes() == state
    snapshots = tmp_path / "rows" / "snapshots"
    parents = {name: Snapshot.open(snapshots / name).manifest.parent for name in "bcde"}
    assert {name: parent and parent.name for name, parent in parents.items()} == {
        "b": "a",
        "c": "a",
        "d": "c",
        "e": "d",
    }
    assert Snapshot.open(snapshots / "d").manifest.own_rows == 0


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    with open_at(tmp_path, "host") as embedding:
        grow(embedding, 0)
        with pytest.raises(OptionError, match="kind='half': give one of 'full', 'incremental', 'checkpoint'"):
            embedding.save_snapshot("a", "half")
        with pytest.raises(
            OptionError, match="kind='checkpoint' needs RocksDB's files, which only cached_ssd stores have"
        ):
            embedding.save_snapshot("a", "checkpoint")
        assert not (tmp_path / "rows" / "snapshots").exists()
        assert embedding.last_snapshot is None


def test_attach_changes_nothing_that_is_loaded(tmp_path: Path) -> None:
    with open_at(tmp_path, "host", None) as embedding:
        embedding.put([1, 2], torch.ones(2, DIM), 0)
        embedding.save_snapshot("a")
        attach(embedding, "adam")
        embedding.load_snapshot("a")
        train(embedding, [1])
        assert embedding.size() == 2


@pytest.mark.parametrize("types", TYPES[:2], ids=str)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("types")
def test_training_goes_on_while_a_snapshot_is_saved_in_the_background(
    tmp_path: Path, store: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    with (
        open_at(tmp_path, store, types=types) as embedding,
        open_at(tmp_path / "plain", store, types=types) as plain,
    ):
        for rows in (embedding, plain):
            train(rows, torch.arange(3000))
        embedding.save_snapshot("first")
        embedding.save_snapshot("noted", "incremental")
        state = contents(embedding).tobytes()
        save = embedding.save_snapshot("behind", background=True)
        assert save is not None
        grow(embedding, 1, steps=10)
        assert save.wait()
        assert embedding.last_snapshot == "behind"
        grow(plain, 1, steps=10)
        assert contents(embedding).tobytes() == contents(plain).tobytes()
        after = contents(embedding).tobytes()
        embedding.save_snapshot("later", "incremental")
        embedding.load_snapshot("behind")
        assert contents(embedding).tobytes() == state
        embedding.load_snapshot("later")
        assert contents(embedding).tobytes() == after


def test_background_is_for_what_takes_long_and_names_what_is_wrong(tmp_path: Path) -> None:
    with open_at(tmp_path, "ssd") as embedding:
        train(embedding, torch.arange(100))
        for kind in ("incremental", "checkpoint"):
            with pytest.raises(OptionError, match=f"background=True, kind='{kind}': only kind='full'"):
                embedding.save_snapshot("a", kind, background=True)
        with pytest.raises(OptionError, match="kind='half': give one of"):
            embedding.save_snapshot("a", "half", background=True)
        save = embedding.save_snapshot("a", background=True)
        assert save is not None
        save.wait()
        with pytest.raises(SnapshotError, match=r"a' exists"):
            embedding.save_snapshot("a", background=True)
        (tmp_path / "rows" / "snapshots" / "b").symlink_to("/nowhere")
        with pytest.raises(SnapshotError, match=r"b' exists"):
            embedding.save_snapshot("b", background=True)


def test_what_a_killed_save_named_is_not_gone_back_to(tmp_path: Path) -> None:
    with open_at(tmp_path, "host") as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        state = contents(embedding).tobytes()
    with open_at(tmp_path / "another", "host") as embedding:
        grow(embedding, 1)
        embedding.save_snapshot("b")
    for store in (tmp_path, tmp_path / "another"):
        with StoreFolder(store / "rows") as folder:
            folder.clear_clean_marker()  # the process was killed
    (tmp_path / "another" / "rows" / "snapshots" / "b").rename(tmp_path / "rows" / "snapshots" / "b")
    assert last_snapshot(tmp_path / "rows") == "a"
    with open_at(tmp_path, "host") as embedding:
        assert contents(embedding).tobytes() == state


def test_a_store_that_was_filled_from_elsewhere_begins_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_at(tmp_path, "host") as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        state = contents(embedding).tobytes()
    snapshots = tmp_path / "new" / "rows" / "snapshots"
    shutil.copytree(tmp_path / "rows" / "snapshots", snapshots)
    assert store_status(snapshots.parent).state == "new"
    with open_at(tmp_path / "new", "host", open="error") as embedding:
        assert contents(embedding).tobytes() == state
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []
