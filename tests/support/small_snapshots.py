"""Small snapshots without a table: their descriptions, rows as a tier scans them, and damage to their files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tierbed.engine import _core
from tierbed.engine.row_format import RowFormat
from tierbed.snapshots import Manifest, Snapshot, write_snapshot
from tierbed.snapshots.store.selection import Types, convert_description

Chunk = tuple[int, NDArray[np.void]]

TYPES: list[Types] = [  # of rows, and of their state
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("float16", "bfloat16"),
    ("float32", "bfloat16"),
]
NARROW = TYPES[1:]
UNIFORM = {"type": "uniform", "low": -0.1, "high": 0.1}
STEP = 12  # of the table


def whole(snapshot: Snapshot) -> NDArray[np.void]:
    empty = np.empty(0, snapshot.manifest.row_format.dtype)
    return np.concatenate([empty, *(rows for _, rows in snapshot.chunks())])


def description(width: int = 6, types: Types = TYPES[0], **changes: Any) -> dict[str, Any]:
    """Of an Adagrad table whose columns are half of the width, or of one without state where it is odd.

    width: numbers of a row.
    """
    states = ["sum"] if width % 2 == 0 else []
    plain = {
        "name": "users",
        "key_type": "int64",
        "dtype": "float32",
        "columns": [width // (1 + len(states))],
        "width": width,
        "optimizer": "adagrad" if states else "sgd",
        "states": states,
        "state_widths": [width // 2] * len(states),
        "hyper": [0.1, 0.0, 0.0, *([1e-10] * len(states)), 0.0, 0.0, 0.0],
        "initial": [0.0] * len(states),
        "seed": 7,
        "tables": [UNIFORM, {"type": "constant", "value": 0.0}, UNIFORM],
        "padding_idx": None,
        "step": STEP,
    }
    return (plain if types == TYPES[0] else convert_description(plain, types)) | changes


def form_of(width: int = 6, types: Types = TYPES[0]) -> RowFormat:
    return RowFormat.from_description(description(width, types))


def keys_in(bucket: int, tables: NDArray[np.uint32], numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The keys of tables whose hash begins with the bucket and ends with numbers below 2**58: each another."""
    x = np.uint64(bucket << 58) | numbers
    for shift, factor in ((31, 0x319642B2D24D8EC3), (27, 0x96DE1B173F119089), (30, 1)):
        x = (x ^ x >> shift ^ x >> 2 * shift) * factor
    keys: NDArray[np.uint64] = x ^ (tables.astype(np.uint64) + 1) * 0x9E3779B97F4A7C15
    return keys


def key_in(bucket: int, table: int, number: int) -> int:
    return int(keys_in(bucket, np.array([table], np.uint32), np.array([number], np.uint64))[0])


def least_keys(bucket: int, count: int, table: int = 0) -> NDArray[np.uint64]:
    """The least keys of a bucket, ascending: [count]."""
    keys = np.arange(70 * count + 10_000, dtype=np.uint64)
    found: NDArray[np.uint64] = keys[_core.buckets(np.full(len(keys), table, np.uint32), keys) == bucket][:count]
    assert len(found) == count
    return found


def keys_of_few_files(count: int, table: int = 0) -> torch.Tensor:
    """Keys whose rows are in 4 of a snapshot's 64 files, each of which costs as much as hundreds of rows: [count]."""
    keys = np.concatenate([least_keys(bucket, count // 4, table) for bucket in range(4)])
    return torch.from_numpy(np.sort(keys).astype(np.int64))


def make_rows(
    width: int, count: int, seed: int = 0, bucket: int | None = None, types: Types = TYPES[0]
) -> NDArray[np.void]:
    """Rows in order of (table, key), of one bucket or of all, with NaN, infinities and subnormals among them.

    Those of all buckets have the extreme keys.
    """
    random = np.random.default_rng(seed)
    form = form_of(width, types)
    rows = np.zeros(count, form.dtype)
    rows["table"] = random.integers(0, 3, count)
    rows["key"] = np.unique(random.integers(0, 2**64, 2 * count + 2, np.uint64))[:count]
    rows["key"][:2] = [0, 2**64 - 1][:count]
    if bucket is not None:
        rows["key"] = keys_in(bucket, rows["table"], rows["key"] >> 6)
    for name in ("values",) if not form.has_16bit_floats else form.counts:
        field, count_of = form.dtype[name].base, form.dtype[name].shape
        bits = random.integers(0, 2 ** (8 * field.itemsize), (count, *count_of), f"u{field.itemsize}")
        rows[name] = bits.view(field)
    rows["updates"] = 1 + random.integers(0, 9, count)
    rows["step"] = random.integers(0, STEP + 1, count, np.uint32)
    return rows[np.lexsort((rows["key"], rows["table"]))]


def make_buckets(width: int, counts: dict[int, int], types: Types = TYPES[0]) -> dict[int, NDArray[np.void]]:
    return {bucket: make_rows(width, count, bucket, bucket, types) for bucket, count in sorted(counts.items())}


def chunked(buckets: dict[int, NDArray[np.void]], size: int = 7) -> Iterator[Chunk]:
    for bucket, rows in buckets.items():
        for begin in range(0, len(rows), size):
            yield bucket, rows[begin : begin + size]


def joined(chunks: Iterable[Chunk]) -> dict[int, bytes]:
    result: dict[int, bytes] = {}
    for bucket, rows in chunks:
        result[bucket] = result.get(bucket, b"") + rows.tobytes()
    return result


def save(
    folder: Path, counts: dict[int, int] | None = None, width: int = 6, types: Types = TYPES[0], **changes: Any
) -> Manifest:
    described = description(width, types, **changes)
    buckets = make_buckets(width, {0: 20, 5: 1, 63: 9} if counts is None else counts, types)
    for rows in buckets.values():
        rows["step"] = np.minimum(rows["step"], described["step"])
    return write_snapshot(folder, described, chunked(buckets))


def flip_bit(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def files(path: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of every file under a folder."""
    found = {}
    for file in path.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # RocksDB removes files in the background
            stat = file.stat()
            found[str(file)] = stat.st_size, stat.st_mtime_ns
    return found
