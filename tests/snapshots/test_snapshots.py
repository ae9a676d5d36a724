"""Small snapshots: written, read, listed, and refused where a file is damaged or a manifest hostile."""

from __future__ import annotations

import io
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.examples import examples
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
from support.snapshot_parts import save_in_parts
from tierbed.engine.durable import seal
from tierbed.engine.errors import SnapshotError
from tierbed.engine.row_format import Chunks, RowFormat, row_dtype
from tierbed.snapshots import Snapshot, latest_snapshot, list_snapshots, write_snapshot
from tierbed.snapshots.files.format import make_npy_header
from tierbed.snapshots.files.writer import write_parts
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
    form = RowFormat(3, "bfloat16", [f"{'x' * 63}{n}" for n in range(9)], [3] * 9, ["bfloat16"] * 9)
    for dtype, length in ((row_dtype(1), 256), (row_dtype(1 << 20), 256), (form.dtype, 1792)):
        headers = [make_npy_header(dtype, rows) for rows in (1, (1 << 62) - 1)]
        assert {len(header) for header in headers} == {length}
        assert np.load(io.BytesIO(headers[0] + bytes(dtype.itemsize))).dtype == dtype


def test_strided_chunks_and_reused_scratch_are_written_right_and_empty_ones_not_at_all(tmp_path: Path) -> None:
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
    before = save(tmp_path / "s", step=13)
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


COUNTS = {0: 3, 5: 1, 63: 2}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[Types, bool], Path]:
    """A snapshot of each type, whole and in parts."""
    folders = {(types, parts): tmp_path_factory.mktemp("sound") / "s" for types in TYPES for parts in (False, True)}
    for (types, parts), folder in folders.items():
        if parts:
            save_in_parts(folder, description(2, types), chunked(make_buckets(2, COUNTS, types)), 2)
        else:
            save(folder, COUNTS, width=2, types=types)
    return folders


FILES = ["bucket-00.npy", "bucket-05.npy", "bucket-63.npy", MANIFEST]


WHOLE = TYPES[0], False


@examples(1.5)
@given(
    of=st.tuples(st.sampled_from(TYPES), st.booleans()),
    file=st.integers(0, 99),
    where=st.integers(0, 1 << 20),
    how=st.sampled_from(["flip", "truncate", "append", "remove"]),
)
@example(of=WHOLE, file=0, where=8 * 9, how="flip")
@example(of=WHOLE, file=0, where=8 * 255, how="flip")
@example(of=WHOLE, file=0, where=8 * 256, how="flip")
@example(of=WHOLE, file=0, where=256, how="truncate")
@example(of=WHOLE, file=3, where=0, how="truncate")
@example(of=(TYPES[1], False), file=0, where=8 * (256 + 14), how="flip")  # a number of padding
def test_any_flipped_bit_and_any_truncation_is_found(
    sounds: dict[tuple[Types, bool], Path], of: tuple[Types, bool], file: int, where: int, how: str
) -> None:
    sound = sounds[of]
    files = sorted(path.name for path in sound.iterdir())
    assert len(files) > 4 if of[1] else files == FILES
    name = files[file % len(files)]
    folder = sound.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound, folder)
    Snapshot.open(folder).verify()
    path = folder / name
    size = path.stat().st_size
    if how == "flip":
        flip_bit(path, where % (8 * size))
    elif how == "truncate":
        os.truncate(path, where % size)
    elif how == "append":
        path.write_bytes(path.read_bytes() + b"\0")
    else:
        path.unlink()
    for read in (lambda: Snapshot.open(folder).verify(), lambda: list(Snapshot.open(folder).chunks(1))):
        with pytest.raises(SnapshotError, match=name):
            read()


def test_a_missing_file_is_found_before_the_first_row_is_given_out_and_named_once(tmp_path: Path) -> None:
    save(tmp_path / "s", COUNTS)
    (tmp_path / "s" / "bucket-63.npy").unlink()
    for read in (Snapshot.open(tmp_path / "s").verify, lambda: next(Snapshot.open(tmp_path / "s").chunks())):
        with pytest.raises(SnapshotError) as raised:
            read()
        assert str(raised.value).count("bucket-63.npy") == 1


def _manifest(**changes: Any) -> dict[str, Any]:
    plain = {"format": 3, "parts": None, "kind": "full", "id": "0" * 32, "parent": None, "description": description()}
    return plain | {"rows": 1, "deleted": 0, "rocksdb": None, "created": 1, "sequence": 1} | _files() | changes


def _files(name: Any = "bucket-00.npy", **changes: Any) -> dict[str, Any]:
    return {"files": {name: {"rows": 1, "bytes": 256 + 44, "crc32": 0} | changes}}


def _rocksdb(name: str = "shard-0/CURRENT", shards: int = 1, **changes: Any) -> dict[str, Any]:
    files = {name: {"bytes": 16, "crc32c": 0} | changes}
    return {"kind": "checkpoint", "files": {}, "rocksdb": {"shards": shards, "files": files}}


def _parts(parts: Any, name: Any = "bucket-00-0000.npy", **changes: Any) -> dict[str, Any]:
    return {"parts": parts} | _files(name, **changes)


def _narrow(**changes: Any) -> dict[str, Any]:
    """Of one row of `NARROW`, with changes in its description."""
    return {"description": NARROW | changes} | _files(bytes=256 + 36)


def _over(**changes: Any) -> dict[str, Any]:
    return {"kind": "incremental", "parent": {"name": "s", "id": "0" * 32}} | changes


NARROW = description(6, TYPES[2])  # 8 bytes of embedding, and of state
UNTYPED = {name: value for name, value in NARROW.items() if name != "state_dtypes"}
DIGITS = "\u0660\u0660"  # others than 0 to 9
HOSTILE = {
    **{f"a file {name!r}": _files(name) for name in ("../bucket-00.npy", "/etc/passwd", "bucket-64.npy")},
    **{f"a file {name!r}": _files(name) for name in (f"bucket-{DIGITS}.npy", b"bucket-00.npy", "bucket-00-0000.npy")},
    "no rows": {"rows": 0} | _files(rows=0, bytes=256),
    "negative rows": {"rows": -1} | _files(rows=-1, bytes=256 - 44),
    **{f"a file of {entry}": _files(**entry) for entry in ({"bytes": 257}, {"crc32": 0.0}, {"path": "x"})},
    "sum": {"rows": 2},
    "huge sequence": {"sequence": 2**63},
    "huge clock": {"created": 2**64 - 1},
    "nil": {"files": None},
    "description": {"description": []},
    "huge width": {"description": description(width=2**40)},
    "hyper of another rule": {"description": description(hyper=[0.1])},
    "state of another rule": {"description": description(states=["momentum_buffer"])},
    "state as wide as another rule's": {"description": description(columns=[5], state_widths=[1])},
    "foreign": {"extra": 1},
    "kind": {"kind": "half"},
    "short id": {"id": "0" * 31},
    "full with a parent": _over(kind="full"),
    "incremental without a parent": {"kind": "incremental"},
    "parent elsewhere": _over(parent={"name": "../s", "id": "0" * 32}),
    "parent without id": _over(parent={"name": "s"}),
    "full that deletes": {"deleted": 1} | _files("deleted-00.npy", bytes=256 + 12),
    "deleted sum": _over(deleted=1),
    "rows in a file of keys": _over(deleted=1) | _files("deleted-00.npy"),
    "full of RocksDB": _rocksdb() | {"kind": "full"} | _files(),
    "checkpoint of nothing": {"kind": "checkpoint", "files": {}},
    "checkpoint of rows": _rocksdb() | _files(),
    **{f"RocksDB's {name}": _rocksdb(name) for name in ("../shard-0/CURRENT", "shard-0/LOG", "shard-1/CURRENT")},
    **{f"{shards} shards": _rocksdb(shards=shards) for shards in (0, 1 << 40)},
    "negative bytes": _rocksdb(bytes=-1),
    **{f"format {number}": {"format": number} for number in (None, 2, 4)},
    **{f"{parts} parts": _parts(parts) for parts in (0, None, 1025)},
    **{f"part {end}": _parts(2, f"bucket-00{end}.npy") for end in ("-0002", "", "-0", f"-{2 * DIGITS}", "-0000/../x")},
    "sum over parts": _parts(2) | {"rows": 2},
    "a checkpoint in parts": _rocksdb() | {"parts": 2},
    "full in parts that deletes": _parts(2, "deleted-00-0000.npy", bytes=256 + 12) | {"deleted": 1},
    "narrow rows as wide as others": _narrow() | _files(),
    "no types of states": _narrow() | {"description": UNTYPED},
    **{f"narrow {change}": _narrow(**change) for change in (
        {"width": 6}, {"state_dtypes": None}, {"state_dtypes": ["bfloat16"] * 2}, {"state_dtypes": ["float16"]},
        {"dtype": "int8"}, {"dtype": ["bfloat16"]},
    )},
    "types of float32 alone": _narrow(dtype="float32", state_dtypes=["float32"], width=6) | _files(),
    "nil types of float32": {"description": description(state_dtypes=None)},
    "types of float32": {"description": description(state_dtypes=["float32"])},
    "one narrow number a row": _narrow(
        optimizer="of another", columns=[3], state_widths=[1], width=3, state_dtypes=["bfloat16"], hyper=[]
    ),
    "a narrow state behind a wide one": _narrow(
        optimizer="of another", states=["a", "b"], state_widths=[3, 3], initial=[0.0, 0.0], width=7, hyper=[],
        state_dtypes=["float32", "bfloat16"],
    ) | _files(bytes=256 + 48),
    "states of one rule, of two types": _narrow(
        optimizer="adam", states=["exp_avg", "exp_avg_sq"], state_widths=[3, 3], initial=[0.0, 0.0], width=7, hyper=[],
        state_dtypes=["bfloat16", "float32"],
    ) | _files(bytes=256 + 48),
    **{
        f"a state by the name {name[:20]!r}": _narrow(optimizer="of another", states=[name], hyper=[])
        for name in ("", "key", "updates", "values", "embedding", "embedding_padding", "a b", "ä", "a" * 65)
    },
    "too many states": _narrow(
        optimizer="of another", states=[f"s{n}" for n in range(17)], state_widths=[1] * 17, initial=[0.0] * 17,
        width=19, hyper=[], state_dtypes=["float32"] * 17,
    ) | _files(bytes=768 + 20 + 19 * 4),
    "a narrow checkpoint of rows": _rocksdb() | _narrow(),
}  # fmt: skip
GOOD = [
    {},
    _over(),
    _rocksdb("shard-0/000012.sst"),
    _over(deleted=1) | _parts(1024, "deleted-00-1023.npy", bytes=256 + 12),
    _parts(1),
    _narrow(),
    _parts(1, bytes=256 + 36) | {"description": NARROW},
    _over() | _narrow(),
    _narrow() | _rocksdb("shard-0/000012.sst"),
]


def test_manifests_of_each_kind_are_read_and_hostile_ones_with_a_right_checksum_refused(tmp_path: Path) -> None:
    def read(content: dict[str, Any]) -> Snapshot:
        (tmp_path / MANIFEST).write_bytes(seal(content))
        return Snapshot.open(tmp_path)

    for changes in GOOD:
        assert read(_manifest(**changes)).kind == changes.get("kind", "full")
    refused = []
    for case, changes in HOSTILE.items():
        try:
            read(_manifest(**changes))
        except SnapshotError as error:
            refused += [case] * (MANIFEST in str(error))
    assert refused == [*HOSTILE]


def test_a_part_that_fails_ends_the_parts_that_other_threads_write(tmp_path: Path) -> None:
    def fail() -> Chunks:
        raise OSError("as planned")
        yield

    endless = itertools.repeat((0, np.empty(0, form_of().dtype)))
    for parts in ([fail(), endless], [endless, fail()]):
        with pytest.raises(OSError, match="as planned"):
            write_parts(tmp_path, description(), parts)
