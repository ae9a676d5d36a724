"""Snapshots of each kind from every store: what they bring back, whole and in part; what is left out is reported."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from support.embeddings import DIM, ask_to_leave, attach, contents, make, train
from support.kinds import KEYS, TYPES, grow, kinds_of, open_at
from support.records import last_snapshot
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import MultiTableEmbedding
from tierbed.engine.errors import CapacityError, InputError, OptimizerError, OptionError, SnapshotError
from tierbed.engine.row_format import to_float32, to_stored
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files import reader
from tierbed.snapshots.store import save as saving
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.status import read_store_status

LogCapture = pytest.LogCaptureFixture
Types = tuple[torch.dtype, torch.dtype]


@pytest.mark.parametrize(("store", "other"), list(zip(STORES, [*STORES[1:], STORES[0]], strict=True)))
@pytest.mark.parametrize("types", TYPES, ids=str)
@pytest.mark.rotated("types")
def test_every_kind_brings_the_rows_back_on_every_store(tmp_path: Path, store: str, other: str, types: Types) -> None:
    states = []
    plain_path = tmp_path / "plain"
    with open_at(tmp_path, store, types=types) as embedding, open_at(plain_path, "device", types=types) as plain:
        for number, kind in enumerate([*kinds_of(store), "incremental"]):
            for rows in (embedding, plain):
                grow(rows, number)
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


def test_a_save_over_the_longest_chain_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: LogCapture
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
    [said] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("snapshot 'd' is full, not incremental with parent 'c': it has a chain of 2 parents")


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


@pytest.mark.parametrize("store", ["device", "ssd_host"])
def test_an_incremental_snapshot_costs_the_change(tmp_path: Path, store: str) -> None:
    with open_at(tmp_path, store) as embedding:
        train(embedding, torch.arange(1000))
        embedding.save_snapshot("a")
        for name in "bc":
            train(embedding, [1, 2, 5000])
            embedding.delete([7, 9], 0)
            embedding.save_snapshot(name, "incremental")
    found = [Snapshot.open(tmp_path / "rows" / "snapshots" / name).manifest for name in "abc"]
    assert [(one.num_entries, one.deleted, one.rows) for one in found] == [(1000, 0, 1000), (5, 2, 999), (3, 0, 999)]


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_its_parent_is_what_was_saved_or_loaded_last(tmp_path: Path, store: str) -> None:
    with open_at(tmp_path, store) as embedding:
        with pytest.raises(SnapshotError, match=r"kind='incremental' needs a parent.*have no snapshot.*'full'"):
            embedding.save_snapshot("none", "incremental")
        grow(embedding, 0)
        states = {"a": contents(embedding).tobytes()}
        save = embedding.save_snapshot("a", background=True)
        grow(embedding, 1, steps=10)
        assert save is not None
        assert save.wait()
        states["b"] = contents(embedding).tobytes()
        embedding.save_snapshot("b", "incremental")
        for name in "ba":
            embedding.load_snapshot(name)
            assert contents(embedding).tobytes() == states[name]
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
    found = [Snapshot.open(tmp_path / "rows" / "snapshots" / name).manifest for name in "bcde"]
    assert [one.parent and one.parent.name for one in found] == ["a", "a", "c", "d"]
    assert found[2].num_entries == 0


def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    for store in ("host", "ssd"):
        with open_at(tmp_path / store, store) as embedding:
            grow(embedding, 0)
            for (kind, background), *named in (
                (("half", False), "kind='half'", "'full', 'incremental', 'checkpoint'"),
                (("half", True), "kind='half'"),
                (("checkpoint", True), "background=True, kind='checkpoint'"),
                *([(("checkpoint", False), "kind='checkpoint'", "cached_ssd")] if store == "host" else []),
            ):
                check_refusal((partial(embedding.save_snapshot, "a", kind, background), OptionError, *named))
            assert not (tmp_path / store / "rows" / "snapshots").exists()
            assert embedding.last_snapshot is None
    with open_at(tmp_path / "ssd", "ssd") as embedding:
        save = embedding.save_snapshot("a", background=True)
        assert save is not None
        save.wait()
        (tmp_path / "ssd" / "rows" / "snapshots" / "b").symlink_to("/nowhere")
        for name in "ab":
            check_refusal((partial(embedding.save_snapshot, name, background=True), SnapshotError, f"{name}' exists"))


def test_only_a_store_filled_from_elsewhere_goes_back_to_what_no_save_noted(tmp_path: Path, caplog: LogCapture) -> None:
    states = []
    for place, name in ((tmp_path, "a"), (tmp_path / "another", "b")):
        with open_at(place, "host") as embedding:
            grow(embedding, len(states))
            embedding.save_snapshot(name)
            states.append(contents(embedding).tobytes())
        with StoreFolder(place / "rows") as folder:
            folder.clear_clean_marker()  # the process was killed
    new = tmp_path / "new" / "rows" / "snapshots"
    shutil.copytree(tmp_path / "another" / "rows" / "snapshots", new)
    (tmp_path / "another" / "rows" / "snapshots" / "b").rename(tmp_path / "rows" / "snapshots" / "b")
    assert last_snapshot(tmp_path / "rows") == "a"
    with open_at(tmp_path, "host") as embedding:
        assert contents(embedding).tobytes() == states[0]
    caplog.clear()
    assert read_store_status(new.parent).state == "new"
    with open_at(tmp_path / "new", "host", open="error") as embedding:
        assert contents(embedding).tobytes() == states[1]
    assert [record for record in caplog.records if record.levelname == "WARNING"] == []


def rows_by_key(embedding: MultiTableEmbedding) -> dict[tuple[int, int], bytes]:
    return {(int(row["table"]), int(row["key"])): row.tobytes() for row in contents(embedding)}


def link(path: Path) -> None:
    """Snapshot "a" of `path` is also one of the embedding in `path` / "new"."""
    folder = path / "new" / "rows" / "snapshots"
    folder.mkdir(parents=True)
    (folder / "a").symlink_to(path / "rows" / "snapshots" / "a")


@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_a_part_of_a_snapshot_can_be_loaded(tmp_path: Path, store: str) -> None:
    with open_at(tmp_path, store) as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        all_rows = rows_by_key(embedding)
        report = embedding.load_snapshot("a", tables=[0, 2])
        assert rows_by_key(embedding) == {row: data for row, data in all_rows.items() if row[0] != 1}
        assert (report.rows, report.left_out) == (embedding.size(), len(all_rows) - embedding.size())
        assert report.remarks == []
        embedding.load_snapshot("a", tables=[1], where=lambda tables, keys: keys % 2 == 0)
        assert rows_by_key(embedding) == {r: data for r, data in all_rows.items() if r[0] == 1 and r[1] % 2 == 0}
        kept = rows_by_key(embedding)
        for wrong, *named in (
            ({"tables": [3]}, "tables=[3]", "0 to 2"),
            ({"tables": []}, "tables=[]"),
            ({"where": lambda tables, keys: 0.5}, "where= returned dtype float64 and shape ()", "bool"),
        ):
            check_refusal((partial(embedding.load_snapshot, "a", **wrong), InputError, *named))
        assert rows_by_key(embedding) == kept
        grow(embedding, 1)
        kept = rows_by_key(embedding)
        embedding.save_snapshot("b")
        embedding.load_snapshot("a", tables=[0])
        assert embedding.last_snapshot == "b"
        embedding.load_snapshot("a")
        assert embedding.last_snapshot == "a"
        embedding.load_snapshot("b")
    with open_at(tmp_path, store) as embedding:
        assert rows_by_key(embedding) == kept


@pytest.mark.parametrize("used_before", [False, True])
def test_the_way_to_another_optimizer_that_the_error_names_is_one(tmp_path: Path, used_before: bool) -> None:
    remedy = r"save_snapshot, close, .* and load_snapshot\(name, weights_only=True\)"
    with open_at(tmp_path, "host", "adagrad") as embedding:
        train(embedding, [1, 2, 3])
        with pytest.raises(OptimizerError, match=remedy):
            attach(embedding, "adam")
        embedding.save_snapshot("a")
        rows = embedding.get([1, 2, 3], 0)
    with open_at(tmp_path, "host", "adam") as embedding:
        if used_before:
            with pytest.raises(OptimizerError, match="weights_only=True"):
                train(embedding, [1])
        embedding.load_snapshot("a", weights_only=True)
        assert torch.equal(embedding.get([1, 2, 3], 0), rows)
        train(embedding, [1])
        assert embedding.table_handle().open_table.state.names == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("types", TYPES[:2], ids=str)
@pytest.mark.parametrize("store", ["device", "ssd"])
@pytest.mark.parametrize("before", ["adam", "catch-up"])
@pytest.mark.rotated("store")
def test_weights_alone_go_on_with_another_optimizer(tmp_path: Path, store: str, before: str, types: Types) -> None:
    with open_at(tmp_path, store, before, types) as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        looked_up = embedding.get(KEYS[0], 0)
        size = embedding.size()
    with open_at(tmp_path / "new", store, "adagrad", types) as embedding:
        train(embedding, [1, 2, 3])
        link(tmp_path)
        with pytest.raises(OptimizerError, match="weights_only=True"):
            embedding.load_snapshot("a")
        report = embedding.load_snapshot("a", weights_only=True)
        assert (report.rows, embedding.size()) == (size, size)
        assert torch.equal(embedding.get(KEYS[0], 0), looked_up)
        assert embedding.metrics()["table"]["step"] == 0
        first = contents(embedding).tobytes()
        report = embedding.load_snapshot("a", strict=False)
        assert "optimizer's state" in report.remarks[0]
        assert contents(embedding).tobytes() == first
        rows, initial = contents(embedding), np.float32(0.1)
        if types[1] == torch.bfloat16:
            initial = to_float32(to_stored(np.array([initial]), "bfloat16"), "bfloat16")[0]
        np.testing.assert_array_equal(embedding.table_handle().table.row_format.values(rows, "sum"), initial)
        assert (rows["step"] == 0).all()
        grow(embedding, 1)


def test_tables_that_the_embedding_lacks_are_left_out_and_told(tmp_path: Path) -> None:
    with open_at(tmp_path, "host") as embedding:
        grow(embedding, 0)
        embedding.save_snapshot("a")
        all_rows = rows_by_key(embedding)
    with make(options("host", tmp_path / "new"), "adam", tables=2) as embedding:
        train(embedding, [1, 2, 3])
        link(tmp_path)
        with pytest.raises(SnapshotError, match="holds 3 tables, not 2"):
            embedding.load_snapshot("a")
        report = embedding.load_snapshot("a", strict=False)
        assert report.remarks == ["snapshot 'a' has 3 tables, and the embedding 2: the others are left out"]
        assert rows_by_key(embedding) == {row: data for row, data in all_rows.items() if row[0] < 2}


def test_rows_of_an_id_that_has_become_padding_are_left_out(tmp_path: Path) -> None:
    with open_at(tmp_path, "device") as embedding:
        train(embedding, range(9))
        embedding.save_snapshot("a")
    with make(options("device", tmp_path, open="fresh"), "adam", padding_idx=3) as embedding:
        report = embedding.load_snapshot("a")
        assert (report.rows, report.left_out) == (8, 1)
        assert report.remarks == ["padding_idx=3 was none when snapshot 'a' was saved: rows of that id are left out"]
        assert embedding.size() == 8
        embedding.save_snapshot("b")
        assert embedding.load_snapshot("b").remarks == []


def test_a_part_that_fits_the_capacity_is_loaded_without_a_warning(tmp_path: Path, caplog: LogCapture) -> None:
    with open_at(tmp_path, "host", capacity=500) as embedding:
        train(embedding, torch.arange(400))
        embedding.save_snapshot("a")
    with open_at(tmp_path / "new", "host", capacity=100) as embedding:
        assert embedding.size() == 0
        link(tmp_path)
        caplog.clear()
        assert embedding.load_snapshot("a", where=lambda tables, keys: keys < 60).rows == 60
        assert caplog.messages == []
        train(embedding, torch.arange(60, 100))
        with pytest.raises(CapacityError):
            train(embedding, [1000])
