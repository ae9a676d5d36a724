"""Writing a snapshot: streamed into a temporary folder, synced, renamed into place."""

from __future__ import annotations

import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.durable import UnsyncedError, made_aside, remove_leftovers
from ...engine.errors import SnapshotError
from ...engine.row_format import BUCKETS
from .format import (
    HEADER_BYTES,
    LAST_SEQUENCE,
    MANIFEST,
    Kind,
    Manifest,
    Parent,
    RocksDBFiles,
    RowFile,
    bucket_file,
    check_description,
    check_name,
    deleted_file,
    dtype_of,
    is_deleted,
    npy_header,
    row_check,
)
from .may_replace import check_replaceable
from .reader import Snapshot, list_snapshots
from .threads import Behind

Rows = NDArray[np.void]
Progress = Callable[[int], None]


def write_snapshot(
    folder: Path,
    description: dict[str, Any],
    chunks: Iterable[tuple[int, Rows]],
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write the full snapshot `folder`, its last part the name; parents are created. One writer at a time in a parent.

    `chunks` are (bucket, rows [n] of `row_dtype(width)`): buckets ascending, within one (table, key) strictly
    ascending, as `Tier.scan` yields them; a few are held while they are written. `progress` is told how many rows each
    chunk added. When this returns, the snapshot is durable; when it raises, nothing of it is left, or the error says
    that it is there and may not outlive a power loss. With `overwrite` it takes the place of a snapshot of that name,
    at one instant and when it is durable.

    Raises SnapshotError if the name cannot be used or is taken, or what has it cannot be replaced, the description or a
    chunk is not valid, or the device fails; what `chunks` raises passes through.
    """
    with new_snapshot(folder, description, overwrite) as place:
        files = _write_files(place, bucket_file, description, chunks, progress)
        rows = sum(file.rows for file in files.values())
        return finish(place, "full", description, rows, files=files)


def write_incremental(
    folder: Path,
    parent: Snapshot,
    description: dict[str, Any],
    rows: int,
    changes: Iterable[tuple[int, Rows, Rows]],
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write what changed since `parent`, which lies beside `folder`, as `write_snapshot`. rows: of the whole table.

    changes: (bucket, rows [n] as they are now, keys [m] of `KEY` of deleted rows). Rows and keys are each ordered as
    `chunks` of `write_snapshot`, and no row is in both.
    """
    folder = Path(folder)
    if description["width"] != parent.manifest.width:
        raise SnapshotError(
            f"snapshot {folder.name!r} cannot go over {parent.name!r}, whose rows have another width: its optimizer "
            'has another state. Save it with kind="full"'
        )
    if folder.name == parent.name:
        raise SnapshotError(
            f'snapshot {folder.name!r} cannot go over the one that it replaces: save it with kind="full", or choose '
            "another name"
        )
    with new_snapshot(folder, description, overwrite) as place:
        deleted: dict[int, list[Rows]] = {}
        chunks = _without_deleted(changes, deleted)
        files = _write_files(place, bucket_file, description, chunks, progress)
        keys = ((bucket, part) for bucket in sorted(deleted) for part in deleted[bucket])
        files |= _write_files(place, deleted_file, description, keys, progress)
        over = Parent(parent.name, parent.manifest.id)
        return finish(place, "incremental", description, rows, files=files, parent=over)


@contextmanager
def new_snapshot(folder: Path, description: dict[str, Any], overwrite: bool = False) -> Iterator[Path]:
    """`made_aside` for the snapshot `folder`; `finish` completes it. SnapshotError, also for an OSError in it."""
    folder = Path(folder)
    check_free(folder, overwrite)
    try:
        check_description(description)
    except ValueError as error:
        raise SnapshotError(f"snapshot {folder.name!r} cannot be written: {error}") from error
    try:
        with made_aside(folder, overwrite) as place:
            yield place
    except UnsyncedError as error:
        raise SnapshotError(f"snapshot {folder.name!r} was written to {str(folder.parent)!r}: {error}") from error
    except OSError as error:
        raise SnapshotError(f"snapshot {folder.name!r} was not written to {str(folder.parent)!r}: {error}") from error


def check_free(folder: Path, overwrite: bool | None = False) -> None:
    """Raises SnapshotError where a snapshot's name cannot be used, or is taken by one that is not to be replaced.

    overwrite: True raises as `check_replaceable`; None is for callers that cannot replace a snapshot.
    """
    check_name(folder.name)
    if not os.path.lexists(folder):
        return
    if not overwrite:
        replaceable = overwrite is not None and os.path.lexists(folder / MANIFEST)
        remedy = ", or save with overwrite=True (--overwrite in a shell)" if replaceable else ""
        raise SnapshotError(f"snapshot {str(folder)!r} exists: choose another name, or delete it first{remedy}")
    check_replaceable(folder)


def clear_leftovers(folder: Path) -> None:
    """Remove what killed or failed writers left in the folder of a store's snapshots. SnapshotError.

    The holder of the store calls this, while nothing is being written.
    """
    try:
        remove_leftovers(folder)
    except OSError as error:
        raise SnapshotError(f"{str(folder)!r} cannot be cleared of unfinished snapshots: {error}") from error


def finish(
    place: Path,
    kind: Kind,
    description: dict[str, Any],
    rows: int,
    *,
    files: dict[str, RowFile] | None = None,
    rocksdb: RocksDBFiles | None = None,
    parent: Parent | None = None,
) -> Manifest:
    """Write the manifest of the files in `place`, which are durable already. Raises OSError, SnapshotError."""
    files = files or {}
    deleted = sum(file.rows for name, file in files.items() if is_deleted(name))
    latest = max(list_snapshots(place.parent).snapshots, key=lambda s: s.manifest.sequence, default=None)
    sequence = 1 if latest is None else latest.manifest.sequence + 1
    if latest is not None and sequence > LAST_SEQUENCE:
        raise SnapshotError(
            f"snapshot {latest.name!r} has the last sequence that there is, {LAST_SEQUENCE}, so that none can come "
            f"after it: no save of tierbed made it. Move {str(latest.folder)!r} elsewhere, or remove it"
        )
    identity = secrets.token_hex(16)
    manifest = Manifest(kind, identity, parent, description, rows, deleted, files, rocksdb, time.time_ns(), sequence)
    try:
        data = manifest.encode()
    except ValueError as error:
        raise SnapshotError(f"the description cannot be stored: {error}") from error
    with (place / MANIFEST).open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return manifest


def _without_deleted(
    changes: Iterable[tuple[int, Rows, Rows]], deleted: dict[int, list[Rows]]
) -> Iterator[tuple[int, Rows]]:
    for bucket, rows, keys in changes:
        if len(keys):
            deleted.setdefault(bucket, []).append(keys)
        if len(rows):
            yield bucket, rows


def _write_files(
    folder: Path,
    name_of: Callable[[int], str],
    description: dict[str, Any],
    chunks: Iterable[tuple[int, Rows]],
    progress: Progress | None,
) -> dict[str, RowFile]:
    """Write each bucket's rows to its file. The next chunk is made while earlier ones are written and synced."""
    files: dict[str, _File] = {}
    previous, width = -1, description["width"]
    with ExitStack() as opened, Behind() as syncing, Behind() as writing:
        for bucket, group in groupby(chunks, key=lambda chunk: int(chunk[0])):
            if not previous < bucket < BUCKETS:
                raise SnapshotError(
                    f"bucket {bucket} came after {previous}: buckets must ascend and be below {BUCKETS}"
                )
            previous, name = bucket, name_of(bucket)
            file = None
            for rows in _checked(bucket, dtype_of(name, width), row_check(description, bucket), group):
                if file is None:
                    file = files[name] = opened.enter_context(closing(_File(folder / name, rows.dtype)))
                writing.do(partial(file.write, rows))
                if progress is not None:
                    progress(len(rows))
            if file is not None:
                writing.do(partial(file.finish, syncing))
    return {name: file.entry for name, file in files.items()}


class _File:
    """A file of rows that is being written: `write` each part, then `finish`."""

    def __init__(self, path: Path, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
        self._file = path.open("xb")
        self._file.write(bytes(HEADER_BYTES))  # room for the header, which needs the count
        self._count = self._checksum = 0

    def write(self, rows: Rows) -> None:
        data = rows.view(np.uint8).data
        self._file.write(data)
        self._checksum = zlib.crc32(data, self._checksum)
        self._count += len(rows)

    def finish(self, syncing: Behind) -> None:
        """Write the header, and let `syncing` make the file durable."""
        self._file.seek(0)
        self._file.write(npy_header(self._dtype, self._count))
        self._file.flush()
        syncing.do(self._sync)

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()

    @property
    def entry(self) -> RowFile:
        return RowFile(self._count, HEADER_BYTES + self._count * self._dtype.itemsize, self._checksum)


def _checked(
    bucket: int, dtype: np.dtype[np.void], check: _core.RowCheck, group: Iterable[tuple[int, Rows]]
) -> Iterator[Rows]:
    """The non-empty chunks of a bucket, contiguous, their rows checked."""
    for _, rows in group:
        if rows.dtype != dtype or rows.ndim != 1:
            raise SnapshotError(f"bucket {bucket} came as {rows.dtype} {rows.shape}, not as {dtype}")
        if len(rows) == 0:
            continue
        whole = np.ascontiguousarray(rows)
        if problem := check.problem(whole.view(np.uint8), dtype.itemsize):
            raise SnapshotError(f"bucket {bucket} cannot be written: {problem}")
        yield whole
