from __future__ import annotations

import io
import os
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.scripts import run_script
from support.small_snapshots import (
    TYPES,
    Chunk,
    chunked,
    description,
    flip_bit,
    form_of,
    joined,
    least_keys,
    make_buckets,
    make_rows,
    save,
)
from tierbed.engine.errors import SnapshotError
from tierbed.engine.row_format import RowForm, row_dtype
from tierbed.snapshots import Snapshot, latest_snapshot, list_snapshots, write_snapshot
from tierbed.snapshots.files.format import npy_header
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.selection import Types

MANIFEST = "manifest.msgpack"


@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.parametrize("width", [1, 6, 257])
def test_rows_come_back_bit_for_bit(tmp_path: Path, width: int, types: Types) -> None:
    buckets = make_buckets(width, {0: 1, 1: 50, 17: 7, 63: 8}, types)
    seen: list[int] = []
    about = description(width, types)
    written = write_snapshot(tmp_path / "s", about, chunked(buckets), seen.append)
    snapshot = Snapshot.open(tmp_path / "s")
    assert snapshot.manifest == written
    assert (snapshot.name, snapshot.description, written.rows, sum(seen)) == ("s", about, 66, 66)
    assert written.total_bytes == sum(file.stat().st_size for file in (tmp_path / "s").glob("*.npy"))
    for max_rows in (1, 3, 65536):
        assert joined(snapshot.chunks(max_rows)) == {bucket: rows.tobytes() for bucket, rows in buckets.items()}
        assert max(len(rows) for _, rows in snapshot.chunks(max_rows)) <= max_rows
    seen.clear()
    snapshot.verify(seen.append)
    assert sum(seen) == 66


@pytest.mark.parametrize("types", TYPES, ids="-".join)
def test_numpy_alone_reads_a_bucket(tmp_path: Path, types: Types) -> None:
    save(tmp_path / "s", {3: 20}, types=types)
    rows = np.load(tmp_path / "s" / "bucket-03.npy", mmap_mode="r", allow_pickle=False)
    assert rows.dtype == form_of(6, types).dtype
    assert rows.tobytes() == make_rows(6, 20, 3, 3, types).tobytes()
    if types != TYPES[0]:
        names = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
        assert [rows[name].dtype.str for name in ("embedding", "sum")] == [names[type] for type in types]


@pytest.mark.parametrize("width", [1, 128, 1 << 20])
@pytest.mark.parametrize("rows", [1, (1 << 62) - 1])
def test_header_length_does_not_depend_on_the_count(width: int, rows: int) -> None:
    header = npy_header(row_dtype(width), rows)
    assert len(header) == 256
    assert header.endswith(b"\n")


def test_header_of_many_names_is_longer_whatever_the_count() -> None:
    form = RowForm(3, "bfloat16", [f"{'x' * 63}{n}" for n in range(9)], [3] * 9, ["bfloat16"] * 9)
    headers = [npy_header(form.dtype, rows) for rows in (1, (1 << 62) - 1)]
    assert {len(header) for header in headers} == {1792}
    assert np.load(io.BytesIO(headers[0] + bytes(form.dtype.itemsize))).dtype == form.dtype


def test_empty_table_and_empty_chunks_make_no_bucket_file(tmp_path: Path) -> None:
    for name, chunks in (("none", []), ("empty", [(2, np.zeros(0, row_dtype(6))), (9, np.zeros(0, row_dtype(6)))])):
        assert write_snapshot(tmp_path / name, description(), chunks).rows == 0
        snapshot = Snapshot.open(tmp_path / name)
        snapshot.verify()
        assert list(snapshot.chunks()) == []
        assert [file.name for file in snapshot.folder.iterdir()] == [MANIFEST]


def test_strided_chunks_and_scratch_reused_by_the_tier_are_written_right(tmp_path: Path) -> None:
    rows = make_rows(6, 30, bucket=4)

    def reused() -> Iterator[Chunk]:
        scratch = np.zeros(20, rows.dtype)
        for begin in range(0, 30, 10):
            scratch[::2] = rows[begin : begin + 10]
            yield 4, scratch[::2]

    write_snapshot(tmp_path / "s", description(), reused())
    assert joined(Snapshot.open(tmp_path / "s").chunks()) == {4: rows.tobytes()}


def test_writing_and_reading_hold_a_chunk_and_not_the_table(tmp_path: Path) -> None:
    rows = make_rows(64, 200)
    keys = least_keys(8, 60_000).reshape(300, 200)

    def growing() -> Iterator[Chunk]:
        rows["table"] = 0
        for part in keys:
            rows["key"] = part
            yield 8, rows.copy()

    tracemalloc.start()
    try:
        manifest = write_snapshot(tmp_path / "s", description(64), growing())
        for _ in Snapshot.open(tmp_path / "s").chunks(500):
            pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert manifest.total_bytes > 16e6
    assert peak < 4e6


@pytest.mark.parametrize("name", ["a", "epoch 3", "2024-01-01T00:00", "größe", "x" * 200, "-rf", "a..b"])
def test_ordinary_names_work(tmp_path: Path, name: str) -> None:
    save(tmp_path / name)
    assert [s.name for s in list_snapshots(tmp_path).snapshots] == [name]


def test_existing_name_is_never_overwritten(tmp_path: Path) -> None:
    before = save(tmp_path / "s", step=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("s", "empty", "dangling"):
        with pytest.raises(SnapshotError, match="exists: choose another name, or delete it"):
            save(tmp_path / name, step=2)
    assert Snapshot.open(tmp_path / "s").manifest == before


@pytest.mark.parametrize(
    "chunks",
    [
        [(1, make_rows(6, 3, bucket=1)), (0, make_rows(6, 3, bucket=0))],
        [(b, make_rows(6, 3, seed, b)) for seed, b in enumerate([1, 2, 1])],
        [(64, make_rows(6, 3))],
        [(-1, make_rows(6, 3))],
        [(0, make_rows(5, 3, bucket=0))],
        [(0, make_rows(6, 4, bucket=0).reshape(2, 2))],
        [(0, make_rows(6, 3, bucket=0)[::-1])],
        [(0, make_rows(6, 9, bucket=0)[[0, 1, 1]])],
        [(0, make_rows(6, 3, bucket=0)), (0, make_rows(6, 3, bucket=0)[2:])],
        [(0, make_rows(6, 3, bucket=1))],
    ],
)
def test_chunks_out_of_order_or_of_another_type_leave_nothing(tmp_path: Path, chunks: list[Chunk]) -> None:
    with pytest.raises(SnapshotError, match=r"bucket"):
        write_snapshot(tmp_path / "s", description(), chunks)
    assert list(tmp_path.iterdir()) == []


def test_error_while_rows_are_read_passes_through_and_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Chunk]:
        yield 0, make_rows(6, 10, bucket=0)
        yield 1, make_rows(6, 10, bucket=1)
        raise ValueError("the tier failed")

    save(tmp_path / "before")
    with pytest.raises(ValueError, match="the tier failed"):
        write_snapshot(tmp_path / "s", description(), failing())
    assert [entry.name for entry in tmp_path.iterdir()] == ["before"]
    save(tmp_path / "s")


@pytest.mark.parametrize(
    "change",
    [
        {"width": 0},
        {"width": 2},
        {"columns": ()},
        {"dtype": "float16"},
        {"dtype": "int8"},
        {"seed": None},
        {"step": -1},
        {"state_widths": []},
        {"state_widths": [2], "width": 5},
        {"state_widths": ["3"]},
        {"hyper": [1]},
    ],
)
def test_description_that_could_not_be_read_back_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(SnapshotError, match=f"{next(iter(change))}"):
        write_snapshot(tmp_path / "s", description() | change, [])
    assert list(tmp_path.iterdir()) == []


def test_description_that_msgpack_cannot_hold_is_refused(tmp_path: Path) -> None:
    for tables in ([np.float32(1)], [{1: 2}], [2**64]):
        with pytest.raises(SnapshotError, match=r"cannot be stored|holds values that JSON cannot"):
            write_snapshot(tmp_path / "s", description(tables=tables), [])
    assert list(tmp_path.iterdir()) == []


def test_a_row_state_takes_one_float(tmp_path: Path) -> None:
    manifest = write_snapshot(
        tmp_path / "s",
        description(4, columns=[3], optimizer="rowwise_adagrad", state_widths=[1]),
        [(0, make_rows(4, 5, bucket=0))],
    )
    assert manifest.form.width == 4


def test_missing_snapshot_names_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"no snapshot 'c'.*existing ones: none"):
        Snapshot.open(tmp_path / "not there" / "c")
    save(tmp_path / "a")
    save(tmp_path / "b")
    with pytest.raises(SnapshotError, match=r"no snapshot 'c'.*existing ones: 'a', 'b'"):
        Snapshot.open(tmp_path / "c")


def test_order_is_that_of_saving_and_survives_deletion_and_clock(tmp_path: Path) -> None:
    assert latest_snapshot(tmp_path) is None
    assert latest_snapshot(tmp_path / "not there") is None
    for name in ("c", "a", "b"):
        save(tmp_path / name)
    assert [s.name for s in list_snapshots(tmp_path).snapshots] == ["c", "a", "b"]
    os.utime(tmp_path / "c")
    shutil.rmtree(tmp_path / "a")
    save(tmp_path / "a")
    (tmp_path / "notes.txt").touch()
    listing = list_snapshots(tmp_path)
    assert ([s.name for s in listing.snapshots], listing.damaged) == (["c", "b", "a"], {})
    latest = latest_snapshot(tmp_path)
    assert latest is not None
    assert latest.name == "a"


def test_leftovers_of_killed_processes_are_not_listed_and_removed_by_who_holds_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    save(folder / "a")
    shutil.copytree(folder / "a", folder / ".tmp-b")
    shutil.copytree(folder / "a", folder / ".tmp-c")
    assert [s.name for s in list_snapshots(folder).snapshots] == ["a"]
    save(folder / "b")
    assert sorted(entry.name for entry in folder.iterdir()) == [".tmp-c", "a", "b"], "it may be of another writer"
    with StoreFolder(tmp_path):
        assert sorted(entry.name for entry in folder.iterdir()) == ["a", "b"]


def test_damaged_latest_is_never_replaced_by_an_older_one(tmp_path: Path) -> None:
    save(tmp_path / "old")
    save(tmp_path / "new")
    flip_bit(tmp_path / "new" / "bucket-00.npy", 8 * 300)
    with pytest.raises(SnapshotError, match=r"new/bucket-00.npy.*checksum.*delete it and use another"):
        latest_snapshot(tmp_path)
    (tmp_path / "new" / MANIFEST).unlink()
    listing = list_snapshots(tmp_path)
    assert ([s.name for s in listing.snapshots], list(listing.damaged)) == (["old"], ["new"])
    with pytest.raises(SnapshotError, match="unknown which snapshot is the latest"):
        latest_snapshot(tmp_path)
    shutil.rmtree(tmp_path / "new")
    latest = latest_snapshot(tmp_path)
    assert latest is not None
    assert latest.name == "old"


def test_kill_at_any_instant_leaves_whole_snapshots_alone(tmp_path: Path) -> None:
    script = (
        "import os, random, signal, sys, time; from pathlib import Path; from support.small_snapshots import save\n"
        "folder, number = Path(sys.argv[1]), 0\n"
        "for round in range(10):\n"
        "    before = set(os.listdir(folder))\n"
        "    saver = os.fork()\n"
        "    while saver == 0:\n"
        "        name = f'{round}-{number}'; number += 1\n"
        "        save(folder / name, dict.fromkeys(range(0, 64, 9), 200), step=number)\n"
        "        os.write(1, f'saved {name}\\n'.encode())\n"
        "    while set(os.listdir(folder)) <= before: time.sleep(0.001)\n"
        "    time.sleep(random.uniform(0, 0.15))\n"
        "    os.kill(saver, signal.SIGKILL); os.waitpid(saver, 0)\n"
        "    leftovers = sum(name.startswith('.tmp-') for name in os.listdir(folder))\n"
        "    os.write(1, f'killed {leftovers}\\n'.encode())\n"
    )
    lines = [line.split() for line in run_script(script, tmp_path).stdout.splitlines()]
    saved = [word for what, word in lines if what == "saved"]
    leftovers = [int(word) for what, word in lines if what == "killed"]
    assert len(leftovers) == 10
    assert max(leftovers) > 0, "no saver was killed while saving"
    snapshots, damaged = list_snapshots(tmp_path)
    assert damaged == {}
    assert set(saved) <= {s.name for s in snapshots}
    for snapshot in snapshots:
        assert snapshot.manifest.rows == 8 * 200
        snapshot.verify()
    in_order = [s.name for s in snapshots if s.name in set(saved)]
    assert in_order == saved
