"""Row counts per table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..row_format import Chunks, TableIds

Counts = NDArray[np.int64]  # [tables]

TABLE_ROWS = "table_rows"  # field in the file MARK


def count_by_table(tables: TableIds, num_tables: int) -> Counts:
    """Count the rows per table. `tables` lists each row's table."""
    return np.bincount(tables, minlength=num_tables)


def count_chunk_rows(chunks: Chunks, num_tables: int) -> Counts:
    counts = np.zeros(num_tables, np.int64)
    for _, rows in chunks:
        counts += count_by_table(rows["table"], num_tables)
    return counts


def read_counts(marker: Mapping[str, Any], num_tables: int) -> Counts | None:
    """Returns each table's row count from a clean marker (0 if not listed). Returns None if the counts are invalid."""
    counts = marker.get(TABLE_ROWS)
    if type(counts) is not list or len(counts) > num_tables or not all(type(n) is int and n >= 0 for n in counts):
        return None
    if sum(counts) != marker.get("rows"):
        return None
    return np.array(counts + [0] * (num_tables - len(counts)), np.int64)


def label_counts(labels: Sequence[str], **counts: Sequence[int] | Counts) -> dict[str, dict[str, int]]:
    """Return a dict from table label to that table's counts. Each argument in `counts` is an array [tables]."""
    columns = [np.asarray(values).tolist() for values in counts.values()]
    return {label: dict(zip(counts, row, strict=True)) for label, *row in zip(labels, *columns, strict=True)}
