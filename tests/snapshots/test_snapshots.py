from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.small_snapshots import (
    TYPES,
    Chunk,
    chunked,
    description,
    flip_bit,
    form_of,
    joined,
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
@pytest.mark.rotated("width")
def test_rows_come_back_bit_for_bit_and_numpy_alone_reads_them(tmp_path: Path, width: int, types: Types) -> None:
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
    for bucket, rows in buckets.items():
        found = np.load(tmp_path / "s" / f"bucket-{bucket:02}.npy", mmap_mode="r", allow_pickle=False)
        assert (found.dtype, found.tobytes()) == (form_of(width, types).dtype, rows.tobytes())
    if types != TYPES[0] and width == 6:
        names = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
        assert [found[name].dtype.str for name in ("embedding", "sum")] == [names[type] for type in types]


def test_the_length_of_a_header_does_not_depend_on_the_count() -> None:
    form = RowForm(3, "bfloat16", [f"{'x' * 63}{n}" for n in range(9)], [3] * 9, ["bfloat16"] * 9)
    for dtype, length in ((row_dtype(1), 256), (row_dtype(1 << 20), 256), (form.dtype, 1792)):
        headers = [npy_header(dtype, rows) for rows in (1, (1 << 62) - 1)]
        assert {len(header) for header in headers} == {length}
        assert np.load(io.BytesIO(headers[0] + bytes(dtype.itemsize))).dtype == dtype


def test_strided_chunks_and_scratch_reused_by_the_tier_are_written_right_and_empty_ones_not_at_all(
    tmp_path: Path,
) -> None:
    rows = make_rows(6, 30, bucket=4)

    def reused() -> Iterator[Chunk]:
        scratch = np.zeros(20, rows.dtype)
        yield 2, scratch[:0]
        for begin in range(0, 30, 10):
            scratch[::2] = rows[begin : begin + 10]
            yield 4, scratch[::2]

    write_snapshot(tmp_path / "s", description(), reused())
    assert joined(Snapshot.open(tmp_path / "s").chunks()) == {4: rows.tobytes()}
    write_snapshot(tmp_path / "none", description(), [])
    for name, files in (("s", ["bucket-04.npy", MANIFEST]), ("none", [MANIFEST])):
        Snapshot.open(tmp_path / name).verify()
        assert sorted(file.name for file in (tmp_path / name).iterdir()) == files


def test_existing_name_is_never_overwritten(tmp_path: Path) -> None:
    before = save(tmp_path / "s", step=1)
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("s", "empty", "dangling"):
        with pytest.raises(SnapshotError, match="exists: choose another name, or delete it"):
            save(tmp_path / name, step=2)
    assert Snapshot.open(tmp_path / "s").manifest == before


WRONG: list[list[Chunk]] = [
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
]


def test_wrong_chunks_and_an_error_while_rows_are_read_leave_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Chunk]:
        yield 0, make_rows(6, 10, bucket=0)
        raise ValueError("the tier failed")

    save(tmp_path / "before")
    for chunks in WRONG:
        with pytest.raises(SnapshotError, match=r"bucket"):
            write_snapshot(tmp_path / "s", description(), chunks)
    with pytest.raises(ValueError, match="the tier failed"):
        write_snapshot(tmp_path / "s", description(), failing())
    assert [entry.name for entry in tmp_path.iterdir()] == ["before"]
    save(tmp_path / "s")


def test_description_that_could_not_be_read_back_is_refused(tmp_path: Path) -> None:
    plain = "cannot be stored", "that JSON cannot"
    for field, value, *said in (
        ("width", 0, "width"),
        ("state_widths", ["3"], "state_widths"),
        ("hyper", [1], "hyper"),
        *(("tables", [value], *plain) for value in (np.float32(1), {1: 2}, 2**64)),
    ):
        with pytest.raises(SnapshotError, match="|".join(said)):
            write_snapshot(tmp_path / "s", description() | {field: value}, [])
    assert list(tmp_path.iterdir()) == []


def test_order_is_that_of_saving_and_survives_deletion_and_clock(tmp_path: Path) -> None:
    assert latest_snapshot(tmp_path) is None
    assert latest_snapshot(tmp_path / "not there") is None
    names = ["größe", "-rf", "2024-01-01T00:00 " + "x" * 180]
    for name in names:
        with pytest.raises(
            SnapshotError, match=r"no snapshot .*existing ones: " + ("none" if name == names[0] else "'")
        ):
            Snapshot.open(tmp_path / name)
        save(tmp_path / name)
    assert [s.name for s in list_snapshots(tmp_path).snapshots] == names
    os.utime(tmp_path / names[0])
    shutil.rmtree(tmp_path / names[1])
    save(tmp_path / names[1])
    (tmp_path / "notes.txt").touch()
    listing, latest = list_snapshots(tmp_path), latest_snapshot(tmp_path)
    assert ([s.name for s in listing.snapshots], listing.damaged) == ([names[0], names[2], names[1]], {})
    assert latest is not None
    assert latest.name == names[1]


def test_leftovers_of_killed_processes_are_not_listed_and_removed_by_who_holds_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots"
    save(folder / "a")
    save(tmp_path / "elsewhere")
    (folder / ".tmp-b").symlink_to(tmp_path / "elsewhere")
    shutil.copytree(folder / "a", folder / ".tmp-c")
    assert [s.name for s in list_snapshots(folder).snapshots] == ["a"]
    save(folder / "b")
    assert not (folder / "b").is_symlink()
    assert sorted(entry.name for entry in folder.iterdir()) == [".tmp-c", "a", "b"], "it may be of another writer"
    with StoreFolder(tmp_path):
        assert sorted(entry.name for entry in folder.iterdir()) == ["a", "b"]
    Snapshot.open(tmp_path / "elsewhere").verify()


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
