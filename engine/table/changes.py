"""The rows that changed since a snapshot: noted by name, and read when an incremental snapshot is saved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import _core
from ..row_format import BUCKETS, Change, Keys, Tables, keys_of
from ..store.contract import Store, Tracker
from .scanned import line_addresses

CHUNK_BYTES = 1 << 23  # bytes of rows that are read at once


class Changes:
    """The names of rows that changed since the snapshot with the id `since`. All callers hold the table's lock.

    While a snapshot is being saved the names are in two sets, since changes of that time are not in the snapshot.
    """

    def __init__(self, since: str, tracker: Tracker[Any] | None) -> None:
        """tracker: of the top of the stack; None where the names are noted here."""
        self.since = since
        self._tracker = tracker
        self._saving: _core.ChangedRows | None = None  # names up to the last `cut`
        self._later = _core.ChangedRows()

    def note(self, batch: Any) -> None:
        """Note the rows of a batch that is written."""
        (self._tracker or self._later).note(batch)

    def note_rows(self, tables: Tables, keys: Keys) -> None:
        """Note rows that are erased."""
        self._later.note_rows(tables, keys)

    def cut(self) -> None:
        """Begin to save what changed until now. If the save fails, the next save has these changes as well."""
        if self._tracker is not None:
            self._later.note_rows(*self._tracker.names())
            self._tracker.forget()
        later = _core.ChangedRows(room=self._later.size)  # about as many will change again
        if self._saving is None:
            self._saving = self._later
        else:
            self._saving.merge(self._later)
        self._later = later

    def saved(self, since: str) -> None:
        """Note that what changed until the last `cut` is in the snapshot with the id `since`."""
        self.since, self._saving = since, None

    def rows(self, top: Store[Any], dtype: np.dtype[np.void]) -> Iterator[Change]:
        """What changed until the last `cut`, as `top` has it now, in chunks of rows of `dtype`.

        Buckets ascend. Within a bucket the rows ascend by (table, key), and so do the keys of rows that are gone. Some
        of these keys may be of rows that came after the snapshot and went again.
        """
        changed = self._saving
        assert changed is not None
        most = max(1, CHUNK_BYTES // dtype.itemsize)
        for bucket in range(BUCKETS):
            tables, keys = changed.rows(bucket)
            for begin in range(0, len(keys), most):
                rows = np.empty(len(keys[begin : begin + most]), dtype)
                rows["table"], rows["key"] = tables[begin : begin + most], keys[begin : begin + most]
                found = top.read(tables[begin : begin + most], keys[begin : begin + most], line_addresses(rows), False)
                yield bucket, rows if found.all() else rows[found], keys_of(rows[~found])
