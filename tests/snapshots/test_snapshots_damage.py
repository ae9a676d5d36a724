from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from support.examples import examples
from support.small_snapshots import TYPES, chunked, description, flip_bit, make_buckets, save
from support.snapshot_parts import save_in_parts
from tierbed.engine.durable import seal
from tierbed.engine.errors import SnapshotError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.store.selection import Types

MANIFEST = "manifest.msgpack"
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
    entry = {"rows": 1, "bytes": 256 + 44, "crc32": 0}
    return {
        "format": 2,
        "kind": "full",
        "id": "0" * 32,
        "parent": None,
        "description": description(),
        "rows": 1,
        "deleted": 0,
        "files": {"bucket-00.npy": entry},
        "rocksdb": None,
        "created": 1,
        "sequence": 1,
    } | changes


def _files(name: Any = "bucket-00.npy", **changes: Any) -> dict[str, Any]:
    return {"files": {name: {"rows": 1, "bytes": 256 + 44, "crc32": 0} | changes}}


PARENT = {"name": "s", "id": "0" * 32}
ROCKSDB = {"shards": 1, "files": {"shard-0/CURRENT": {"bytes": 16, "crc32c": 0}}}


def _rocksdb(name: str, **changes: Any) -> dict[str, Any]:
    file = ROCKSDB["files"]["shard-0/CURRENT"] | changes
    return {"kind": "checkpoint", "files": {}, "rocksdb": {"shards": 1, "files": {name: file}}}


HOSTILE = {
    "traversal": _files("../bucket-00.npy"),
    "absolute": _files("/etc/passwd"),
    "bucket 64": _files("bucket-64.npy"),
    "other digits": _files("bucket-\u0660\u0660.npy"),
    "bytes name": _files(b"bucket-00.npy"),
    "no rows": {"rows": 0} | _files(rows=0, bytes=256),
    "negative rows": {"rows": -1} | _files(rows=-1, bytes=256 - 44),
    "other size": _files(bytes=257),
    "float": _files(crc32=0.0),
    "more fields": _files(path="x"),
    "sum": {"rows": 2},
    "huge sequence": {"sequence": 2**63},
    "huge clock": {"created": 2**64 - 1},
    "huge width": {"description": description(width=2**40)},
    "nil": {"files": None},
    "description": {"description": []},
    "hyper of another rule": {"description": description(hyper=[0.1])},
    "state of another rule": {"description": description(states=["momentum_buffer"])},
    "state as wide as another rule's": {"description": description(columns=[5], state_widths=[1])},
    "foreign": {"extra": 1},
    "format": {"format": 1},
    "kind": {"kind": "half"},
    "short id": {"id": "0" * 31},
    "full with a parent": {"parent": PARENT},
    "incremental without a parent": {"kind": "incremental"},
    "parent elsewhere": {"kind": "incremental", "parent": PARENT | {"name": "../s"}},
    "parent without id": {"kind": "incremental", "parent": {"name": "s"}},
    "full that deletes": {"deleted": 1} | _files("deleted-00.npy", bytes=256 + 12),
    "deleted sum": {"kind": "incremental", "parent": PARENT, "deleted": 1},
    "rows in a file of keys": {"kind": "incremental", "parent": PARENT, "deleted": 1} | _files("deleted-00.npy"),
    "full of RocksDB": {"rocksdb": ROCKSDB},
    "checkpoint of nothing": {"kind": "checkpoint", "files": {}},
    "checkpoint of rows": {"kind": "checkpoint", "rocksdb": ROCKSDB},
    "RocksDB elsewhere": _rocksdb("../shard-0/CURRENT"),
    "RocksDB's log": _rocksdb("shard-0/LOG"),
    "shard 1 of 1": _rocksdb("shard-1/CURRENT"),
    "no shards": {"kind": "checkpoint", "files": {}, "rocksdb": {"shards": 0, "files": {}}},
    "too many shards": {"kind": "checkpoint", "files": {}, "rocksdb": {"shards": 1 << 40, "files": {}}},
    "negative bytes": _rocksdb("shard-0/CURRENT", bytes=-1),
    "no format": {"format": None},
    "parts of format 2": {"parts": 1},
    "a file of a part in format 2": _files("bucket-00-0000.npy"),
    "format 3 without parts": {"format": 3},
}


def _parts(parts: Any, name: Any = "bucket-00-0000.npy", **changes: Any) -> dict[str, Any]:
    return {"format": 3, "parts": parts} | _files(name, **changes)


HOSTILE |= {
    "no parts": _parts(0),
    "nil parts": _parts(None),
    "too many parts": _parts(1025),
    "a part too many": _parts(2, "bucket-00-0002.npy"),
    "no part": _parts(2, "bucket-00.npy"),
    "a shorter part": _parts(2, "bucket-00-0.npy"),
    "other digits of a part": _parts(2, "bucket-00-\u0660\u0660\u0660\u0660.npy"),
    "traversal of a part": _parts(2, "bucket-00-0000/../x.npy"),
    "sum over parts": _parts(2) | {"rows": 2},
    "a checkpoint in parts": {"format": 3, "parts": 2, "kind": "checkpoint", "files": {}, "rocksdb": ROCKSDB},
    "full in parts that deletes": _parts(2, "deleted-00-0000.npy", bytes=256 + 12) | {"deleted": 1},
    "format 4": _parts(2) | {"format": 4},
}


NARROW = description(6, TYPES[2])  # 8 bytes of embedding, and of state


def _narrow(**changes: Any) -> dict[str, Any]:
    """Of one row of `NARROW`, with changes in its description."""
    return {"format": 3, "parts": None, "description": NARROW | changes} | _files(bytes=256 + 36)


def _without(field: str) -> dict[str, Any]:
    return {"description": {name: value for name, value in NARROW.items() if name != field}}


HOSTILE |= {
    "narrow in format 2": {"format": 2, "description": NARROW} | _files(bytes=256 + 36),
    "narrow rows as wide as others": _narrow() | _files(),
    "a width of numbers": _narrow(width=6),
    "no types of states": _narrow() | _without("state_dtypes"),
    "nil types of states": _narrow(state_dtypes=None),
    "a type too many": _narrow(state_dtypes=["bfloat16"] * 2),
    "states of float16": _narrow(state_dtypes=["float16"]),
    "int8": _narrow(dtype="int8"),
    "a list for a type": _narrow(dtype=["bfloat16"]),
    "types of float32 alone": _narrow(dtype="float32", state_dtypes=["float32"], width=6) | _files(),
    "nil types of float32": {"description": description(state_dtypes=None)},
    "types of float32 in format 2": {"description": description(state_dtypes=["float32"])},
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
    "a narrow checkpoint of rows": _narrow() | {"kind": "checkpoint", "rocksdb": ROCKSDB},
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_manifest_with_a_right_checksum_is_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / MANIFEST).write_bytes(seal(_manifest()))
    Snapshot.open(tmp_path / "s")
    (tmp_path / "s" / MANIFEST).write_bytes(seal(_manifest(**HOSTILE[case])))
    with pytest.raises(SnapshotError, match=MANIFEST):
        Snapshot.open(tmp_path / "s")


def test_manifests_of_the_other_kinds_are_read(tmp_path: Path) -> None:
    good = [
        {"kind": "incremental", "parent": PARENT},
        _rocksdb("shard-0/000012.sst"),
        {"kind": "incremental", "parent": PARENT, "deleted": 1} | _parts(1024, "deleted-00-1023.npy", bytes=256 + 12),
        {"kind": "full"} | _parts(1),
        {"kind": "full"} | _narrow(),
        {"kind": "full"} | _parts(1, bytes=256 + 36) | {"description": NARROW},
        {"kind": "incremental", "parent": PARENT} | _narrow(),
        _narrow() | _rocksdb("shard-0/000012.sst"),
    ]
    for number, changes in enumerate(good):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / MANIFEST).write_bytes(seal(_manifest(**changes)))
        assert Snapshot.open(tmp_path / str(number)).kind == changes["kind"]


@pytest.mark.parametrize("number", [0, 7])
def test_another_format_is_refused_for_its_number_and_not_as_damaged(tmp_path: Path, number: int) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / MANIFEST).write_bytes(seal({"format": number, "of": "another time"}))
    with pytest.raises(SnapshotError, match=f"format is {number}, but this tierbed reads 2 to 4: use the one that"):
        Snapshot.open(tmp_path / "s")
