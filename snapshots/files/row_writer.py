"""Writing the files of rows: each bucket's rows to its file, checked on their way, and synced."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ...engine import _core
from ...engine.errors import SnapshotError
from ...engine.row_format import BUCKETS, Change, RowForm, Rows
from .row_files import (
    Part,
    RowFile,
    bucket_file,
    deleted_file,
    dtype_of,
    file_bytes,
    header_bytes,
    npy_header,
    row_check,
)
from .threads import Behind

Progress = Callable[[int], None]


def write_rows(
    folder: Path,
    description: dict[str, Any],
    chunks: Iterable[tuple[int, Rows]],
    progress: Progress | None = None,
    part: Part | None = None,
) -> dict[str, RowFile]:
    """Write rows, as `write_snapshot` takes them, to files in `folder`, or those of one part. They are durable.

    Their names are not, until the folder is synced. Raises SnapshotError for rows that are not valid, OSError.
    """
    return _write_files(folder, bucket_file, description, chunks, progress, part)


def write_changes(
    folder: Path,
    description: dict[str, Any],
    changes: Iterable[Change],
    progress: Progress | None = None,
    part: Part | None = None,
) -> dict[str, RowFile]:
    """Write changes, as `write_incremental` takes them, in the way of `write_rows`."""
    deleted: dict[int, list[Rows]] = {}
    files = write_rows(folder, description, _without_deleted(changes, deleted), progress, part)
    keys = ((bucket, held) for bucket in sorted(deleted) for held in deleted[bucket])
    return files | _write_files(folder, deleted_file, description, keys, progress, part)


def _without_deleted(changes: Iterable[Change], deleted: dict[int, list[Rows]]) -> Iterator[tuple[int, Rows]]:
    for bucket, rows, keys in changes:
        if len(keys):
            deleted.setdefault(bucket, []).append(keys)
        if len(rows):
            yield bucket, rows


def _write_files(
    folder: Path,
    name_of: Callable[[int, int | None], str],
    description: dict[str, Any],
    chunks: Iterable[tuple[int, Rows]],
    progress: Progress | None,
    part: Part | None,
) -> dict[str, RowFile]:
    """Write each bucket's rows to its file. The next chunk is made while earlier ones are written and synced."""
    files: dict[str, _File] = {}
    previous, form = -1, RowForm.described(description)
    with ExitStack() as opened, Behind() as syncing, Behind() as writing:
        for bucket, group in groupby(chunks, key=lambda chunk: int(chunk[0])):
            if not previous < bucket < BUCKETS:
                raise SnapshotError(
                    f"bucket {bucket} came after {previous}: buckets must ascend and be below {BUCKETS}"
                )
            previous, name = bucket, name_of(bucket, None if part is None else part.number)
            file = None
            for rows in _checked(bucket, dtype_of(name, form), row_check(description, bucket, part), group):
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
        self._file.write(bytes(header_bytes(dtype)))  # room for the header, which needs the count
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
        return RowFile(self._count, file_bytes(self._dtype, self._count), self._checksum)


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
