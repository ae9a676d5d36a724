"""Which ids the tables of an embedding get from a snapshot: more than a table takes, or the first ones alone."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..options.table_spec import TableSpec
from ..row_format import Chunks


class LoadedIds:
    """Counts ids of tables that take a known number of them, while their rows are loaded."""

    def __init__(self, spec: TableSpec, last_ids: NDArray[np.uint64]) -> None:
        self._spec, self._last = spec, last_ids
        self._rows, self._beyond = np.zeros(spec.num_tables, np.int64), np.zeros(spec.num_tables, np.int64)
        self._largest = np.zeros(spec.num_tables, np.uint64)
        self._with_padding: set[int] = set()

    def stored(self, chunks: Chunks) -> Chunks:
        """The same chunks, of all that is stored: which tables have a row of padding, that no load takes."""
        for bucket, rows in chunks:
            if self._spec.padding_key is not None:
                self._with_padding.update(rows["table"][rows["key"] == np.uint64(self._spec.padding_key)].tolist())
            yield bucket, rows

    def counted(self, chunks: Chunks) -> Chunks:
        """The same chunks, counted as they pass."""
        for bucket, rows in chunks:
            tables, keys = rows["table"], rows["key"]
            self._rows += np.bincount(tables, minlength=len(self._rows))
            self._beyond += np.bincount(tables[keys > self._last[tables]], minlength=len(self._rows))
            np.maximum.at(self._largest, tables, keys)
            yield bucket, rows

    def remarks(self, what: str, of_dense: bool, stored_padding: int | None) -> list[str]:
        """What does not fit. of_dense: whether the rows may be those of a dense table, which has all ids from 0 on.

        stored_padding: the padding_idx of what is stored, whose row a dense table had and an import left out.
        """
        found = []
        for number, (label, options) in enumerate(zip(self._spec.labels, self._spec.tables, strict=True)):
            takes, rows, beyond = options.ids, int(self._rows[number]), int(self._beyond[number])
            if takes is None or not rows:
                continue
            ids = int(self._largest[number]) + 1
            if beyond:
                found.append(
                    f"{what} has {beyond} rows of table {label} with ids from {takes} on, which no lookup takes: give "
                    f"the table num_embeddings (or ids) of {ids}, or load without them by where="
                )
                continue
            padding = self._spec.padding_idx
            left_out = padding is not None and padding == stored_padding and 0 <= padding <= ids
            if padding is not None and (left_out or number in self._with_padding):
                rows, ids = rows + 1, max(ids, padding + 1)  # a row of the dense table that no load takes
            if of_dense and rows == ids < takes:
                found.append(
                    f"{what} has ids 0 to {ids - 1} of table {label}, which takes {takes}, so the others begin as new "
                    f"rows: if it has all of them, give the table num_embeddings (or ids) of {ids}"
                )
        return found
