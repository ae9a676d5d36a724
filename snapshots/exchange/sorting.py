"""Sorts rows into the order that snapshots use, in bounded memory."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.durable import make_folder
from ...engine.errors import SnapshotError
from ...engine.row_format import BUCKETS, Chunks
from .columns import compute_chunk_rows

_BUFFER_BYTES = 1 << 16


class RowSorter:
    """Accepts rows [n] of `dtype` in any order, and yields the rows in the order that `write_snapshot` needs.

    If several rows share (table, key), only the row added last is yielded. Rows wait in temporary files, one per
    bucket, in `folder`. The folder is created if missing, and needs disk space for all rows. The files are nameless, so
    the kernel removes them when the process ends. Sorting a bucket, 1/64 of all rows, needs a few times its memory.
    """

    def __init__(self, folder: Path, dtype: np.dtype[np.void]) -> None:
        self._folder, self._dtype = folder, dtype
        self._limit = compute_chunk_rows(dtype.itemsize)
        self._files: dict[int, IO[bytes]] = {}

    def add(self, rows: NDArray[np.void]) -> None:
        """Add rows. Raises SnapshotError if the temporary files cannot be written."""
        buckets = _core.buckets(rows["table"].copy(), rows["key"].copy())
        order = np.argsort(buckets, kind="stable")
        ordered = rows[order]
        bounds = np.searchsorted(buckets[order], np.arange(BUCKETS + 1))
        with self._convert_errors():
            for bucket in np.flatnonzero(np.diff(bounds)).tolist():
                if bucket not in self._files:
                    make_folder(self._folder)
                    self._files[bucket] = tempfile.TemporaryFile(buffering=_BUFFER_BYTES, dir=self._folder)  # noqa: SIM115
                self._files[bucket].write(ordered[bounds[bucket] : bounds[bucket + 1]].view(np.uint8).data)

    def chunks(self) -> Chunks:
        """Yields all rows as pairs (bucket, rows), sorted by bucket, and by (table, key) within a bucket."""
        for bucket in sorted(self._files):
            with self._convert_errors(), self._files.pop(bucket) as file:
                file.flush()
                rows = np.empty(os.fstat(file.fileno()).st_size // self._dtype.itemsize, self._dtype)
                file.seek(0)
                file.readinto(rows.view(np.uint8).data)  # type: ignore[attr-defined]
            order = np.lexsort((rows["key"], rows["table"]))  # a stable sort: rows with the same key stay in order
            tables, keys = rows["table"][order], rows["key"][order]
            is_last = np.ones(len(order), np.bool_)
            is_last[:-1] = (tables[1:] != tables[:-1]) | (keys[1:] != keys[:-1])
            order = order[is_last]
            for begin in range(0, len(order), self._limit):
                yield bucket, rows[order[begin : begin + self._limit]]

    def close(self) -> None:
        """Remove the temporary files, if there are any."""
        files, self._files = self._files, {}
        for file in files.values():
            with contextlib.suppress(OSError):  # the sorter's rows are no longer needed
                file.close()

    @contextlib.contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SnapshotError(
                f"rows cannot be sorted in {str(self._folder)!r}: {error}. The disk needs space for two copies of "
                "all rows: one for sorting, and one for the snapshot"
            ) from error
