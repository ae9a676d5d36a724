"""A prune folds snapshots that only later ones need: what is kept reads as before, whatever is killed or goes wrong."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from support.embeddings import contents, make, train
from support.examples import examples
from support.forked import Disk, disk_path, in_process
from support.records import note_snapshot
from support.shell import command
from support.small_snapshots import Chunk, description, flip_bit, keys_in, whole
from support.snapshot_parts import save_changes_in_parts, save_in_parts
from support.stores import options
from tierbed import EagerOptimizer, MultiTableEmbedding, make_host_mem_store_options
from tierbed.engine.errors import SnapshotError
from tierbed.engine.row_format import ROW_KEY_DTYPE, row_dtype
from tierbed.engine.table import background_save
from tierbed.snapshots import Snapshot, list_snapshots, write_incremental, write_snapshot
from tierbed.snapshots.files import reader
from tierbed.snapshots.files.read_errors import ReadIOError
from tierbed.snapshots.store import folding, save
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.retention import link_state_snapshot, prune

__all__ = ["disk_path"]
Folders = pytest.TempPathFactory
Row = tuple[int, int, int]  # bucket, table, number; in the order of snapshots
Table = dict[Row, float]

ROWS = st.tuples(st.sampled_from([0, 63]), st.integers(0, 2), st.integers(0, 3))
CHANGES = st.dictionaries(ROWS, st.none() | st.floats(0, 9, width=32), max_size=6)  # None deletes
FILLER = {(5, 1, number): 1.0 for number in range(300)}  # rows that make a full snapshot large


def chunks_of(table: dict[Row, Any]) -> list[Chunk]:
    chunks: list[Chunk] = []
    for bucket in sorted({row[0] for row in table}):
        rows = np.array(sorted(row for row in table if row[0] == bucket), np.uint64)
        array = np.zeros(len(rows), row_dtype(2))
        array["table"], array["updates"] = rows[:, 1], 1
        array["key"] = keys_in(bucket, rows[:, 1].astype(np.uint32), rows[:, 2])
        array["values"][:, 0] = [table[bucket, int(t), int(n)] or 0.0 for _, t, n in rows]
        array.sort(order=["table", "key"])
        chunks.append((bucket, array))
    return chunks


def save_version(folder: Path, number: int, before: Table | None, after: Table, parts: int | None) -> None:
    """Snapshot `s{number}`, full without `before`, else over the one that has the number below."""
    place, described = folder / f"s{number}", description(2, step=10 * number)
    if before is None:
        full: Any = place, described, chunks_of(after)
        write_snapshot(*full) if parts is None else save_in_parts(*full, parts)
        return
    none, no_keys = np.empty(0, row_dtype(2)), np.empty(0, ROW_KEY_DTYPE)
    written = chunks_of({row: value for row, value in after.items() if before.get(row) != value})
    gone = chunks_of({row: 0.0 for row in before if row not in after})
    changes = [(bucket, rows, no_keys) for bucket, rows in written]
    changes += [(b, none, np.array([(r["table"], r["key"]) for r in rows], ROW_KEY_DTYPE)) for b, rows in gone]
    changes.sort(key=lambda change: change[0])
    over: Any = place, Snapshot.open(folder / f"s{number - 1}"), described, len(after), changes
    write_incremental(*over) if parts is None else save_changes_in_parts(*over, parts)


def save_versions(folder: Path, changes: Sequence[dict[Row, float | None]]) -> None:
    """A chain: a full snapshot, and one over another for each of `changes`."""
    before: Table | None = None
    for number, change in enumerate([{}, *changes]):
        after = {row: value for row, value in ((before or FILLER) | change).items() if value is not None}
        save_version(folder, number, before, after, None)
        before = after


def bits(folder: Path) -> dict[str, bytes]:
    listing = list_snapshots(folder)
    assert not listing.damaged
    return {snapshot.name: whole(snapshot).tobytes() for snapshot in listing.snapshots}


@examples(0.4)
@example([({}, None, ""), ({(0, 0, 0): 0.0}, None, ""), *[({}, None, "")] * 2, ({}, None, "prune")], 1, None, 1, True)
@given(
    versions=st.lists(
        st.tuples(CHANGES, st.sampled_from([None, None, 1, 3]), st.sampled_from(["", "", "prune", "state"])),
        min_size=3,
        max_size=12,
    ),
    keep_last=st.integers(1, 3),
    keep_every=st.sampled_from([None, None, 40]),
    unfolded=st.integers(1, 4),
    has_large_base=st.booleans(),
)
def test_what_a_prune_keeps_reads_as_before(
    tmp_path_factory: Folders,
    versions: list[tuple[dict[Row, float | None], int | None, str]],
    keep_last: int,
    keep_every: int | None,
    unfolded: int,
    has_large_base: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch, StoreFolder(tmp_path_factory.mktemp("store")) as store:
        patch.setattr(folding, "MAX_UNFOLDED", unfolded)
        folder, before, expected = store.snapshots_path, None, dict[str, bytes]()
        for number, (change, parts, act) in enumerate(versions):
            start = before or (FILLER if has_large_base else {})
            after = {row: value for row, value in (start | change).items() if value is not None}
            save_version(folder, number, before, after, parts)
            name, before = f"s{number}", after
            expected[name] = b"".join(rows.tobytes() for _, rows in chunks_of(after))
            if act == "state":
                link = link_state_snapshot(store, Snapshot.open(folder / name).manifest.id, None)
                assert link is not None
                expected[link.name] = expected[name]
            if act == "prune":
                note_snapshot(store, name)
                plan = prune(store, keep_last, keep_every)
                gone = {snapshot.name for snapshot in (*plan.removed, *plan.folded)}
                expected = {name: rows for name, rows in expected.items() if name not in gone}
                assert bits(folder) == expected
                states = [name for name in expected if name.startswith("state_dict-")]
                assert expected.keys() >= {*[name for name in expected if name not in states][-keep_last:], *states}
                if keep_every is None and not states:
                    chain = len(Snapshot.open(folder / name).chain)
                    assert chain <= 1 + unfolded + keep_last
        assert bits(folder) == expected


CHAIN: list[dict[Row, float | None]] = [
    {(0, 0, 1): 1.0, (63, 2, 0): 2.0},
    {(0, 0, 1): None, (5, 1, 7): None, (0, 1, 2): 3.0},
    {(0, 0, 1): 4.0, (5, 1, 7): 5.0, (63, 2, 0): None},
    {(0, 1, 2): None},
    {(63, 2, 1): 6.0},
]


@pytest.mark.parametrize("kind", ["incremental", "full"])
def test_a_kill_at_any_moment_leaves_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(folding, "MAX_UNFOLDED", 2)
    if kind == "full":
        monkeypatch.setitem(FILLER, (5, 1, 300), 1.0)
        for row in [row for row in FILLER if row[2] > 20]:
            monkeypatch.delitem(FILLER, row)
    with StoreFolder(tmp_path / "store") as store:
        save_versions(store.snapshots_path, CHAIN)
        before, copies = bits(store.snapshots_path), dict[Any, Path]()
        sync = os.fsync

        def copy_and_sync(descriptor: int) -> None:
            """At a sync the folder is as a kill then would leave it. Copies it where other snapshots have a name."""
            finished = frozenset((s.name, s.manifest.parent) for s in list_snapshots(store.snapshots_path).snapshots)
            if finished not in copies:
                copies[finished] = tmp_path / f"copy{len(copies)}"
                shutil.copytree(store.path, copies[finished])
            sync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", copy_and_sync)
            plan = prune(store, 2)
        after = bits(store.snapshots_path)
    assert [[snapshot.name for snapshot in run] for run in plan.folds] == [
        ["s0"] * (kind == "full") + ["s1", "s2", "s3"]
    ]
    assert Snapshot.open(tmp_path / "store" / "snapshots" / "s3").kind == kind
    assert after.keys() == {"s3", "s4", "s5"} | ({"s0"} if kind == "incremental" else set())
    assert after.items() <= before.items()
    assert len(copies) == (5 if kind == "full" else 4)
    for copy in copies.values():
        found = bits(copy / "snapshots")
        assert found.keys() >= after.keys()
        assert found.items() <= before.items()
        with StoreFolder(copy) as store:
            prune(store, 2)
            assert bits(store.snapshots_path) == after
            assert not list(store.snapshots_path.glob(".*"))


def test_deletions_stay_while_the_full_snapshot_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_UNFOLDED", 1)
    with StoreFolder(tmp_path) as store:
        save_versions(store.snapshots_path, CHAIN)
        prune(store, 2)
        folded = Snapshot.open(store.snapshots_path / "s3").manifest
    assert (folded.parent and folded.parent.name, folded.deleted, folded.num_entries) == ("s0", 1, 4)


def fold_on_a_full_disk(path: Path) -> None:
    disk = Disk(path, 8 << 20)
    folding.MAX_UNFOLDED = 1
    with StoreFolder(path / "store") as store, pytest.MonkeyPatch.context() as patch:
        save_versions(store.snapshots_path, CHAIN)
        before, warnings = bits(store.snapshots_path), list[str]()
        patch.setattr(folding.log, "warning", lambda text, *values: warnings.append(text % values))
        with disk.full():
            assert not prune(store, 2).folds
        assert bits(store.snapshots_path) == before
        [said] = warnings
        assert said.startswith(
            "snapshots 's1', 's2' stay, because they cannot be folded into 's3': [Errno 28] No space"
        )
        assert len(prune(store, 2).folds) == 1


def test_a_fold_without_room_changes_nothing_and_is_told(disk_path: Path) -> None:
    in_process(fold_on_a_full_disk, disk_path)


def test_damage_that_a_fold_finds_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_UNFOLDED", 1)
    with StoreFolder(tmp_path) as store:
        save_versions(store.snapshots_path, CHAIN)
        before = bits(store.snapshots_path)
        flip_bit(store.snapshots_path / "s1" / "bucket-63.npy", -1)
        with pytest.raises(SnapshotError, match=r"s1/bucket-63.npy' is damaged: its checksum"):
            prune(store, 2)
        flip_bit(store.snapshots_path / "s1" / "bucket-63.npy", -1)
        assert bits(store.snapshots_path) == before
        assert not list(store.snapshots_path.glob(".*"))


def test_one_who_reads_a_chain_that_is_folded_is_told_to_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "MAX_UNFOLDED", 1)
    with StoreFolder(tmp_path) as store:
        save_versions(store.snapshots_path, [{(0, 0, row): float(number) for row in range(40)} for number in range(5)])
        last = Snapshot.open(store.snapshots_path / "s5")
        middle, reading = Snapshot.open(store.snapshots_path / "s3"), last.chunks(4)
        next(reading)
        prune(store, 2)
        with pytest.raises(ReadIOError, match="was replaced or removed while it was read: read it again"):
            list(reading)
        with pytest.raises(ReadIOError, match=r"s3' was replaced or removed while it was read"):
            middle.chain  # noqa: B018  # the parent is looked for
        last.verify()


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_with_a_prune_no_save_is_full_however_many_there_are(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in (save, reader):
        monkeypatch.setattr(module, "MAX_CHAIN", 12)
    kind = "checkpoint" if store == "ssd" else "full"
    for run in range(2):
        with make(options(store, tmp_path), "adagrad") as embedding:
            for number in range(15):
                train(embedding, [1000, number] if number else range(3000))
                embedding.save_snapshot(f"{run}-{number}", "incremental" if run or number else kind)
                embedding.delete([[number, number, number]])
                embedding.prune_snapshots(keep_last=2)
            rows = contents(embedding).tobytes()
            embedding.save_snapshot("last", "incremental", overwrite=True)
            embedding.prune_snapshots(keep_last=3)
            embedding.load_snapshot("last")
            assert contents(embedding).tobytes() == rows
            train(embedding, range(9))
            embedding.load_snapshot(f"{run}-14")
    chain = Snapshot.open(tmp_path / "rows" / "snapshots" / "1-14").chain
    assert [snapshot.kind for snapshot in chain] == [chain[0].kind] + ["incremental"] * (len(chain) - 1)
    assert "is full" not in caplog.text


def test_a_prune_during_a_background_save_folds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "MAX_UNFOLDED", 1)
    with make(options("host", tmp_path), "adagrad") as embedding:
        for number in range(5):
            train(embedding, [number] if number else range(3000))
            embedding.save_snapshot(f"s{number}", "incremental" if number else "full")
        table = embedding.table_handle().open_table
        with table.lock:  # the save cannot end
            saving = embedding.save_snapshot("s5", background=True)
            assert embedding.prune_snapshots(2) == []
        assert saving is not None
        saving.wait()
        assert embedding.prune_snapshots(3) == ["s1"]


class WatchedLock:
    """A lock that says when a thread begins to wait for it."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.waits = lock, Event()

    def __enter__(self) -> None:
        self.waits.set()
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_a_prune_that_waits_for_a_load_leaves_the_next_save_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_save, "PAUSE_RATIO", 1e9)  # the save lasts until somebody waits for it
    with make(options("host", tmp_path), "adagrad") as embedding:
        train(embedding, range(3000))
        embedding.save_snapshot("base")
        table = embedding.table_handle().open_table
        monkeypatch.setattr(table, "lock", lock := WatchedLock(table.lock))
        pruning = Thread(target=lambda: embedding.prune_snapshots(1))
        with lock.lock:
            pruning.start()
            lock.waits.wait()
            embedding.load_snapshot("base")  # replaces the table
            saving = embedding.save_snapshot("next", background=True)
        pruning.join()
        assert saving is not None
        saving.wait()


def test_the_shell_says_what_a_prune_folds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with StoreFolder(tmp_path / "store") as store:
        save_versions(store.snapshots_path, [{(0, 0, number): 1.0} for number in range(12)])
    arguments = "snapshot", "prune", str(tmp_path / "store"), "--keep-last", "1"
    for verb, dry_run in (("would fold", ["--dry-run"]), ("folded", [])):
        assert command(*arguments, *dry_run) == 0
        said = capsys.readouterr().out
        assert said.splitlines()[0] == f"{verb} s1 into s11"
        assert said.splitlines()[-1] == "0 of 13 snapshots, 0 B"


@pytest.mark.slow
def test_a_thousand_increments_take_little_disk(tmp_path: Path) -> None:
    """Increments of 1 % of the rows, whose ids follow a power law, each followed by a prune."""
    rows, chance, folder = 100_000, np.random.default_rng(3), tmp_path / "rows" / "snapshots"
    most = longest = saved = folded = 0

    def list_sizes() -> dict[str, int]:
        return {snapshot.name: snapshot.manifest.total_bytes for snapshot in list_snapshots(folder).snapshots}

    store = make_host_mem_store_options(persistent_path=str(tmp_path))
    with MultiTableEmbedding("rows", 16, torch.float32, torch.int64, None, store) as embedding:
        optimizer = EagerOptimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.1))
        for step in range(1001):
            drawn = np.unique((rows ** chance.random(rows // 4)).astype(np.int64) - 1)
            ids = chance.permutation(drawn)[: rows // 100] if step else np.arange(rows)
            embedding(torch.from_numpy(ids)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            embedding.save_snapshot(f"s{step}", "incremental" if step else "full")
            longest = max(longest, len(Snapshot.open(folder / f"s{step}").chain))
            before = list_sizes()
            embedding.prune_snapshots(keep_last=10)
            after = list_sizes()
            new = sum(size for name, size in after.items() if size != before[name])  # a fold wrote it beside the others
            most = max(most, sum(before.values()) + new)
            saved, folded = saved + before[f"s{step}"] * (step > 0), folded + new
            assert Snapshot.open(folder / f"s{step}").kind == ("incremental" if step else "full")
        embedding.save_snapshot("full")
    full = list_sizes()["full"]
    print(
        f"disk: {most / full:.2f}, {sum(after.values()) / full:.2f} at the end; folded {folded / saved:.2f}; {longest=}"
    )
    assert most <= 3 * full
    assert folded <= 3 * saved
    assert longest <= 1 + folding.MAX_UNFOLDED + 11
