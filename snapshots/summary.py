"""Figures that take a pass over a snapshot's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .reader import Snapshot


def summarise(snapshot: Snapshot, progress: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Rows by table id; least, lower median and largest `updates` (None without rows). Raises SnapshotError."""
    tables: Counter[int] = Counter()
    updates: Counter[int] = Counter()
    for _, rows in snapshot.chunks():
        _count(tables, rows["table"])
        _count(updates, rows["updates"])
        if progress is not None:
            progress(len(rows))
    return {"rows_by_table": dict(sorted(tables.items())), "updates": _spread(updates)}


def _count(counter: Counter[int], values: NDArray[np.uint32]) -> None:
    for value, count in zip(*np.unique(values, return_counts=True), strict=True):
        counter[int(value)] += int(count)


def _spread(counter: Counter[int]) -> dict[str, int] | None:
    if not counter:
        return None
    values = sorted(counter)
    half = (counter.total() + 1) // 2
    median = next(v for v, below in zip(values, accumulate(counter[v] for v in values), strict=True) if below >= half)
    return {"min": values[0], "median": median, "max": values[-1]}
