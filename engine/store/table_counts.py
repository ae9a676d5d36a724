"""How many rows each table of an embedding has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..row_format import Chunks, TableIds

Counts = NDArray[np.int64]  # [tables]

FIELD = "table_rows"  # of the file MARK: how many rows each table has; files of earlier versions lack it


def counted(tables: TableIds, num_tables: int) -> Counts:
    """How many of the given rows belong to each table."""
    return np.bincount(tables, minlength=num_tables)


def counted_chunks(chunks: Chunks, num_tables: int) -> Counts:
    counts = np.zeros(num_tables, np.int64)
    for _, rows in chunks:
        counts += counted(rows["table"], num_tables)
    return counts


def counts_in(marker: Mapping[str, Any], num_tables: int) -> Counts | None:
    """The row counts in a clean marker, with zeros for tables that it does not have; None if it has no counts."""
    given = marker.get(FIELD)
    if type(given) is not list or len(given) > num_tables or not all(type(n) is int and n >= 0 for n in given):
        return None
    if sum(given) != marker.get("rows"):
        return None
    return np.array(given + [0] * (num_tables - len(given)), np.int64)


def by_label(labels: Sequence[str], **counts: Sequence[int] | Counts) -> dict[str, dict[str, int]]:
    """Counts, each [tables], by the label of the table."""
    columns = [np.asarray(values).tolist() for values in counts.values()]
    return {label: dict(zip(counts, row, strict=True)) for label, *row in zip(labels, *columns, strict=True)}
