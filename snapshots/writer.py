"""Writing a snapshot: streamed into a temporary folder, synced, renamed into place."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.errors import SnapshotError
from ..engine.store.contract import BUCKETS, row_dtype
from ..engine.store.durable import fsync_dir, make_folder, remove_folder
from .format import (
    HEADER_BYTES,
    MANIFEST,
    TEMPORARY,
    BucketFile,
    Manifest,
    bucket_file,
    check_description,
    check_name,
    npy_header,
)
from .reader import list_snapshots

Rows = NDArray[np.void]


def write_snapshot(
    folder: Path,
    description: dict[str, Any],
    chunks: Iterable[tuple[int, Rows]],
    progress: Callable[[int], None] | None = None,
) -> Manifest:
    """Write the snapshot `folder`, its last part the name; parents are created. One writer at a time in a parent.

    `chunks` are (bucket, rows [n] of `row_dtype(width)`): buckets ascending, within one (table, key) strictly
    ascending, as `Tier.scan` yields them; each is written before the next is asked for. `progress` is told how many
    rows each chunk added. When this returns, the snapshot is durable; when it raises, nothing of it is left.

    Raises SnapshotError if the name cannot be used or is taken, the description or a chunk is not valid, or the device
    fails; what `chunks` raises passes through.
    """
    folder = Path(folder)
    check_name(folder.name)
    if os.path.lexists(folder):
        raise SnapshotError(f"snapshot {str(folder)!r} exists: choose another name, or delete it first")
    temporary = folder.parent / f"{TEMPORARY}{folder.name}"
    try:
        check_description(description)
    except ValueError as error:
        raise SnapshotError(f"snapshot {folder.name!r} cannot be written: {error}") from error
    try:
        make_folder(folder.parent)
        for leftover in folder.parent.glob(f"{TEMPORARY}*/"):
            remove_folder(leftover)
        temporary.mkdir()
        files = _write_buckets(temporary, description["width"], chunks, progress)
        rows = sum(file.rows for file in files.values())
        sequence = 1 + max((s.manifest.sequence for s in list_snapshots(folder.parent).snapshots), default=0)
        manifest = Manifest(description, rows, files, time.time_ns(), sequence)
        _write_manifest(temporary / MANIFEST, manifest)
        fsync_dir(temporary)
        temporary.rename(folder)
        fsync_dir(folder.parent)
    except OSError as error:
        raise SnapshotError(f"snapshot {folder.name!r} was not written to {str(folder.parent)!r}: {error}") from error
    finally:
        remove_folder(temporary)  # gone already where the rename was reached
    return manifest


def _write_buckets(
    folder: Path, width: int, chunks: Iterable[tuple[int, Rows]], progress: Callable[[int], None] | None
) -> dict[str, BucketFile]:
    files: dict[str, BucketFile] = {}
    previous = -1
    for bucket, group in groupby(chunks, key=lambda chunk: int(chunk[0])):
        if not previous < bucket < BUCKETS:
            raise SnapshotError(f"bucket {bucket} came after {previous}: buckets must ascend and be below {BUCKETS}")
        previous = bucket
        file = _write_bucket(folder / bucket_file(bucket), width, _checked(bucket, width, group), progress)
        if file is not None:
            files[bucket_file(bucket)] = file
    return files


def _write_bucket(
    path: Path, width: int, chunks: Iterator[Rows], progress: Callable[[int], None] | None
) -> BucketFile | None:
    rows = next(chunks, None)
    if rows is None:
        return None
    count = checksum = 0
    with path.open("xb") as file:
        file.write(bytes(HEADER_BYTES))  # the header needs the count
        while rows is not None:
            data = rows.view(np.uint8).data
            file.write(data)
            checksum = zlib.crc32(data, checksum)
            count += len(rows)
            if progress is not None:
                progress(len(rows))
            rows = next(chunks, None)
        file.seek(0)
        file.write(npy_header(width, count))
        file.flush()
        os.fsync(file.fileno())
    return BucketFile(count, HEADER_BYTES + count * row_dtype(width).itemsize, checksum)


def _checked(bucket: int, width: int, group: Iterable[tuple[int, Rows]]) -> Iterator[Rows]:
    """The non-empty chunks of a bucket, contiguous, their order checked."""
    dtype = row_dtype(width)
    last: tuple[int, int] | None = None
    for _, rows in group:
        if rows.dtype != dtype or rows.ndim != 1:
            raise SnapshotError(f"bucket {bucket} came as {rows.dtype} {rows.shape}, not as rows of width {width}")
        if len(rows) == 0:
            continue
        tables, keys = rows["table"], rows["key"]
        ascending = (tables[1:] > tables[:-1]) | ((tables[1:] == tables[:-1]) & (keys[1:] > keys[:-1]))
        begin = (int(tables[0]), int(keys[0]))
        if not ascending.all() or (last is not None and begin <= last):
            raise SnapshotError(f"the rows of bucket {bucket} are not in strictly ascending order of (table, key)")
        last = (int(tables[-1]), int(keys[-1]))
        yield np.ascontiguousarray(rows)


def _write_manifest(path: Path, manifest: Manifest) -> None:
    try:
        data = manifest.encode()
    except ValueError as error:
        raise SnapshotError(f"the description cannot be stored: {error}") from error
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
