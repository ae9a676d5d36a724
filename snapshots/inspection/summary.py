"""Figures of a snapshot that take a pass over its rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.row_format import EMBEDDING, RowForm
from ..files.reader import Snapshot

NORM_EDGES = np.concatenate([[0.0], np.logspace(-20, 20, 80_001)])  # each edge 0.12 % over the one before


@dataclass
class Summary:
    """Figures of rows.

    `tables`, `updates`: how many rows have each value. `norms` [80,001]: how many rows have a Euclidean norm of the
    embedding between two of `NORM_EDGES`. `not_finite`: how many have NaN or an infinity in the embedding, and no norm.
    `first`: the first rows, of the snapshot's `RowForm.dtype`.
    """

    tables: Counter[int] = field(default_factory=Counter)
    updates: Counter[int] = field(default_factory=Counter)
    norms: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(NORM_EDGES) - 1, np.int64))
    not_finite: int = 0
    first: list[Any] = field(default_factory=list)
    _norm_sum: float = 0.0
    _norm_min: float = np.inf
    _norm_max: float = 0.0

    @property
    def figures(self) -> dict[str, Any]:
        """Plain values: rows by table id; least, lower median and largest `updates`; norms; `not_finite`.

        A figure that needs rows is None without them.
        """
        finite = int(self.norms.sum())
        norm = {"min": self._norm_min, "mean": self._norm_sum / finite, "max": self._norm_max} if finite else None
        return {
            "rows_by_table": dict(sorted(self.tables.items())),
            "updates": _spread(self.updates),
            "norm": norm,
            "not_finite": self.not_finite,
        }

    def add(self, rows: NDArray[np.void], form: RowForm) -> None:
        """Count rows of a form."""
        _count(self.tables, rows["table"])
        _count(self.updates, rows["updates"])
        embedding = form.numbers(rows, EMBEDDING)
        finite = np.isfinite(embedding).all(axis=1)
        self.not_finite += len(rows) - int(finite.sum())
        norms = np.sqrt(np.square(embedding[finite].astype(np.float64)).sum(axis=1))
        if len(norms):
            self.norms += np.histogram(np.minimum(norms, NORM_EDGES[-1]), NORM_EDGES)[0]
            self._norm_sum += float(norms.sum())
            self._norm_min = min(self._norm_min, float(norms.min()))
            self._norm_max = max(self._norm_max, float(norms.max()))


def summarise(snapshot: Snapshot, progress: Callable[[int], None] | None = None, first: int = 0) -> Summary:
    """The summary of all rows of a snapshot, with the `first` rows. Raises SnapshotError."""
    summary = Summary()
    form = snapshot.manifest.form
    for _, rows in snapshot.chunks():
        summary.add(rows, form)
        summary.first.extend(rows[: first - len(summary.first)].copy())
        if progress is not None:
            progress(len(rows))
    return summary


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
