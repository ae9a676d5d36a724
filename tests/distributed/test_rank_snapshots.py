"""Snapshots of rows over ranks: whole or not there, the same rows for any number of ranks, or an error on all."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.device_ranks import run_device_ranks
from support.embeddings import contents
from support.limits import file_size_limit
from support.live_rows import opened, step
from support.ranks import fails, on_ranks, run_kept, run_ranks
from tierbed import (
    GroupError,
    InputError,
    OptionError,
    Snapshot,
    SnapshotError,
    StoreError,
    export_snapshot,
)
from tierbed.distributed import World
from tierbed.engine import _core
from tierbed.engine.row_format import row_dtype
from tierbed.engine.table.background_save import BackgroundSave

Rows = NDArray[np.void]


def own_rows(embedding: Any) -> Rows:
    """The rows that this rank has, as copies."""
    table = embedding.table_handle().open_table
    rows = [rows.copy() for _, rows in table.scan()]
    return np.concatenate([np.empty(0, row_dtype(table.layout.width)), *rows])


def together(shares: list[Rows]) -> bytes:
    """The rows of all ranks in one order. Each is of its owner."""
    for rank, rows in enumerate(shares):
        owners = _core.find_owners(rows["table"].copy(), rows["key"].copy(), len(shares))
        assert set(owners.tolist()) <= {rank}
    return in_order(np.concatenate(shares))


def in_order(rows: Rows) -> bytes:
    return np.sort(rows, order=["table", "key"]).tobytes()


def stored(path: Path) -> bytes:
    """The rows of a snapshot, which is whole, in that order."""
    snapshot = Snapshot.open(path)
    snapshot.verify()
    return in_order(np.concatenate([rows for _, rows in snapshot.chunks()]))


def of_one(folder: Path, store: str, name: str) -> bytes:
    """The rows of a snapshot, loaded by one process."""
    with opened(None, folder, store) as embedding:
        embedding.load_snapshot(name)
        return in_order(contents(embedding))


def load_and_save(world: World, folder: Path, store: str, load: str | None, save: str) -> Rows:
    with opened(world, folder, store) as embedding:
        if load is None:
            for number in range(4):
                step(embedding, number)
            embedding.delete([5, 6], 0)
        else:
            report = embedding.load_snapshot(load)
            assert (report.rows, report.left_out) == (embedding.size(), 0)
        embedding.save_snapshot(save)
        assert embedding.last_snapshot == save
        return own_rows(embedding)


@pytest.mark.parametrize(
    ("ranks", "stores"),
    [
        ((2, 3, 1), ("host", "ssd", "cached_host")),
        pytest.param((1, 3, 2, 4), ("ssd", "device", "ssd", "ssd"), marks=pytest.mark.slow),
    ],
)
def test_rows_are_the_same_for_any_numbers_of_ranks_and_stores(
    tmp_path: Path, ranks: tuple[int, ...], stores: tuple[str, ...]
) -> None:
    found, exports = list[bytes](), []
    for number, (size, store) in enumerate(zip(ranks, stores, strict=True)):
        load = None if number == 0 else f"s{number - 1}"
        found.append(together(run_kept(size, load_and_save, tmp_path, store, load, f"s{number}")))
        path = tmp_path / "rows" / "snapshots" / f"s{number}"
        found.append(stored(path))
        snapshot = Snapshot.open(path)
        assert snapshot.manifest.num_shards == (None if size == 1 else size)
        export_snapshot(snapshot, tmp_path / f"x{number}", "snapshot")
        exports.append({file.name: file.read_bytes() for file in (tmp_path / f"x{number}").glob("*.npy")})
    assert {*found} == {found[0]}
    assert found[0]
    assert of_one(tmp_path, "device", f"s{len(ranks) - 1}") == found[0]
    assert all(export == exports[0] for export in exports)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["device", "cached_host", "ssd"])
def test_ranks_on_devices_save_and_load_the_rows_of_ranks_on_processors(tmp_path: Path, store: str) -> None:
    saved = together(run_device_ranks(2, load_and_save, tmp_path, store, None, "s0"))
    assert together(run_ranks(2, load_and_save, tmp_path / "here", store, None, "s0")) == saved
    assert together(run_device_ranks(3, load_and_save, tmp_path, store, "s0", "s1")) == saved
    assert of_one(tmp_path, store, "s1") == saved


def save_chain(world: World, folder: Path, store: str) -> list[Rows]:
    found = []
    with opened(world, folder, store) as embedding:
        for number in range(4):
            step(embedding, number)
            embedding.delete([number, 50 + number], 0)
            embedding.save_snapshot(f"s{number}", "full" if number == 0 else "incremental")
            found.append(own_rows(embedding))
        embedding.load_snapshot("s1")
        step(embedding, 9)
        embedding.save_snapshot("after", "incremental")
        found.append(own_rows(embedding))
    return found


@pytest.mark.parametrize("store", [pytest.param("host", marks=pytest.mark.slow), "ssd"])
def test_incremental_snapshots_have_what_changed_on_all_ranks(tmp_path: Path, store: str) -> None:
    shares = run_kept(2, save_chain, tmp_path, store)
    snapshots = tmp_path / "rows" / "snapshots"
    for number, name in enumerate(["s0", "s1", "s2", "s3", "after"]):
        assert Snapshot.open(snapshots / name).kind == ("full" if number == 0 else "incremental")
        assert stored(snapshots / name) == together([share[number] for share in shares])
    assert Snapshot.open(snapshots / "s1").manifest.num_entries < Snapshot.open(snapshots / "s1").manifest.rows
    assert Snapshot.open(snapshots / "after").manifest.parent.name == "s1"  # type: ignore[union-attr]
    wanted = together([share[3] for share in shares])
    assert together(run_kept(3, load_and_save, tmp_path, store, "s3", "again")) == wanted


@pytest.mark.parametrize("how", ["steps", "twice", "load", "close"])
@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.rotated("store")
@on_ranks(2, run_kept)
def test_a_save_in_the_background_has_the_rows_of_its_begin(world: World, tmp_path: Path, store: str, how: str) -> None:
    embedding, place = opened(world, tmp_path, store), tmp_path / "rows" / "snapshots"
    for number in range(3):
        step(embedding, number)
    rows = own_rows(embedding)
    save: Any = embedding.save_snapshot("s", background=True)
    assert not save.done
    if how == "steps":
        for number in range(3, 2000):
            step(embedding, number)
            if save.done:
                break
    elif how == "twice":
        step(embedding, 3)
        assert save.wait(60)
        rows, again = own_rows(embedding), embedding.save_snapshot("again", "incremental", background=True)
        step(embedding, 4)
        assert again is not None
        assert again.wait()
    elif how == "load":
        assert save.wait()
        embedding.load_snapshot("s")
        embedding.save_snapshot("s", background=True, overwrite=True)
        step(embedding, 3)
        embedding.load_snapshot("s")  # waits for it
    assert save.done == (how != "close")
    embedding.close()
    if how != "close":
        shares = world.all_gather_object("rows", rows.tobytes)
        name = "again" if how == "twice" else "s"
        assert stored(place / name) == in_order(np.frombuffer(b"".join(shares), rows.dtype))
        return
    with pytest.raises(StoreError, match="before all ranks wrote their rows; call its wait"):
        save.wait()
    assert all(name.startswith(".tmp-") for name in os.listdir(place))
    with opened(world, tmp_path, store) as embedding:
        assert embedding.size() > 0
        assert embedding.last_snapshot is None
        assert os.listdir(place) == []


@on_ranks(2)
def test_a_save_in_the_background_is_in_the_way_of_another(world: World, tmp_path: Path) -> None:
    def press(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code is BackgroundSave.wait.__code__:
            sys.setprofile(None)
            raise KeyboardInterrupt

    with opened(world, tmp_path) as embedding:
        step(embedding, 0)
        save: Any = embedding.save_snapshot("s", background=True)
        save._threads[0].wait()  # written on all ranks, which have not compared it
        with pytest.raises(StoreError, match="snapshot 's' is still being saved in the background"):
            embedding.table_handle().snapshot_manager.check_not_saving()
        sys.setprofile(press if world.rank == 1 else None)
        with pytest.raises(KeyboardInterrupt) if world.rank == 1 else contextlib.nullcontext():
            save.wait()
        while not save.done:
            save.wait()
        embedding.save_snapshot("t")
    assert stored(tmp_path / "rows" / "snapshots" / "s") == stored(tmp_path / "rows" / "snapshots" / "t")


REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda rows: rows.save_snapshot("c", "checkpoint"), OptionError, "kind='checkpoint' links the RocksDB files of"),
    (lambda rows: rows.save_snapshot("c", "half"), OptionError, "kind='half'"),
    (lambda rows: rows.save_snapshot("s"), SnapshotError, "exists: choose another name"),
    (lambda rows: rows.check_save("s"), SnapshotError, "exists: choose another name"),
    (lambda rows: rows.save_snapshot("../s"), SnapshotError, "cannot be used"),
    (lambda rows: rows.load_snapshot("none"), SnapshotError, "there is no snapshot 'none'"),
    (lambda rows: rows.load_snapshot("../snapshots/s"), SnapshotError, "cannot be used"),
    (lambda rows: rows.load_snapshot("s", where=lambda tables, keys: keys), InputError, "where= returned dtype int64"),
    (lambda rows: rows.prune_snapshots(0), OptionError, "keep_last=0"),
    (lambda rows: rows.save_snapshot("yx"[rows.world.rank]), GroupError, "rank 0: snapshot=y; rank 1: snapshot=x"),
]


@on_ranks(2, run_kept)
def test_what_one_rank_cannot_do_is_raised_on_all_and_leaves_nothing(world: World, tmp_path: Path) -> None:
    snapshots = tmp_path / "rows" / "snapshots"
    with opened(world, tmp_path) as embedding:
        step(embedding, 0)
        embedding.save_snapshot("s")
        for call, kind, part in REFUSED:
            assert part in fails(partial(call, embedding), kind)
        embedding.check_save("t")
        before = own_rows(embedding)
        with file_size_limit(300) if world.rank == 1 else contextlib.nullcontext():
            said = fails(lambda: embedding.save_snapshot("t"), SnapshotError)
        assert "rank 1: shard 1 of 2 of a snapshot was not written" in said
        assert own_rows(embedding).tobytes() == before.tobytes()
        assert embedding.last_snapshot == "s"
        step(embedding, 1)
        embedding.save_snapshot("t")
        assert embedding.last_snapshot == "t"
        embedding.save_snapshot("s", overwrite=True)
        step(embedding, 2)
        embedding.save_snapshot("i", "incremental")
        assert "it is the parent of 'i'" in fails(lambda: embedding.save_snapshot("s", overwrite=True), SnapshotError)
        assert embedding.prune_snapshots(1) == ["t"]
        assert sorted(os.listdir(snapshots)) == ["i", "s"]
        before = own_rows(embedding)
        world.sum(torch.zeros(1))
        damaged = sorted((snapshots / "s").glob("*-0001.npy"))[-1]
        if world.rank == 0:
            damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
        world.sum(torch.zeros(1))
        said = fails(lambda: embedding.load_snapshot("s"), SnapshotError)
        assert said.startswith("rank 1: ")
        assert damaged.name in said
        assert own_rows(embedding).tobytes() == before.tobytes()
        step(embedding, 3)
        embedding.save_snapshot("last")
    assert stored(snapshots / "last")


@on_ranks(2, run_kept)
def test_ranks_load_a_selection(world: World, tmp_path: Path) -> None:
    found: list[Any] = []
    with opened(world, tmp_path, "ssd") as embedding:
        for number in range(2):
            step(embedding, number)
        embedding.save_snapshot("s")
        size = embedding.size()
        for wrong, text in ((5, "tables=5: give a list of"), ([0], "tables=['0']; rank 1")):
            load = partial(embedding.load_snapshot, "s", tables=5 if world.rank else wrong)
            assert text in fails(load, (InputError, GroupError))
        for selection in ({"tables": [1]}, {"where": lambda tables, keys: keys % 2 == 0}, {"weights_only": True}):
            report = embedding.load_snapshot("s", **selection)
            assert report.rows + report.left_out == size
            assert report.rows == embedding.size()
            rows = own_rows(embedding)
            found.append((report.rows, {*rows["table"].tolist()}, {key % 2 for key in rows["key"].tolist()}))
        assert embedding.load_snapshot("s", strict=False).remarks == []
        step(embedding, 2)
    (some, of_table, _), (even, _, parity), (every, _, _) = found
    assert (of_table, parity) == ({1}, {0})
    assert 0 < even < every
    assert 0 < some < every
