"""Statistics about a snapshot's rows, computed in one pass over the rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import OptionError
from ...engine.options.table_names import Names, label_tables
from ...engine.row_format import EMBEDDING, RowFormat
from ..files.reader import Snapshot

NORM_EDGES = np.concatenate([[0.0], np.logspace(-20, 20, 80_001)])  # each edge is 0.12 % above the previous one
_BARS = 60


@dataclass
class Summary:
    """Statistics about rows. norms: a histogram [80,001] of embeddings' Euclidean norms, with edges `NORM_EDGES`."""

    tables: Counter[int] = field(default_factory=Counter)  # the number of rows by table id
    updates: Counter[int] = field(default_factory=Counter)  # the number of rows by update count
    norms: NDArray[np.int64] = field(default_factory=lambda: np.zeros(len(NORM_EDGES) - 1, np.int64))
    num_not_finite: int = 0  # the number of rows with NaN or infinities; `norms` does not count these rows
    first_rows: list[Any] = field(default_factory=list)  # the first rows, with the snapshot's `RowFormat.dtype`
    _norm_sum: float = 0.0
    _norm_min: float = np.inf
    _norm_max: float = 0.0

    @property
    def statistics(self) -> dict[str, Any]:
        """The statistics as a dict. `updates`: min, lower median, max; `norm`: min, mean, max; None without rows."""
        finite = int(self.norms.sum())
        norm = {"min": self._norm_min, "mean": self._norm_sum / finite, "max": self._norm_max} if finite else None
        return {
            "rows_by_table": dict(sorted(self.tables.items())),
            "updates": _summarise_counts(self.updates),
            "norm": norm,
            "not_finite": self.num_not_finite,
        }

    def add(self, rows: NDArray[np.void], row_format: RowFormat) -> None:
        _count(self.tables, rows["table"])
        _count(self.updates, rows["updates"])
        embedding = row_format.values(rows, EMBEDDING)
        finite = np.isfinite(embedding).all(axis=1)
        self.num_not_finite += len(rows) - int(finite.sum())
        norms = np.sqrt(np.square(embedding[finite].astype(np.float64)).sum(axis=1))
        if len(norms):
            self.norms += np.histogram(np.minimum(norms, NORM_EDGES[-1]), NORM_EDGES)[0]
            self._norm_sum += float(norms.sum())
            self._norm_min = min(self._norm_min, float(norms.min()))
            self._norm_max = max(self._norm_max, float(norms.max()))


def summarise(snapshot: Snapshot, progress: Callable[[int], None] | None = None, num_first_rows: int = 0) -> Summary:
    """Summarise a snapshot's rows, and keep the first `first` rows. Raises SnapshotError."""
    summary = Summary()
    for _, rows in snapshot.chunks():
        summary.add(rows, snapshot.manifest.row_format)
        summary.first_rows.extend(rows[: num_first_rows - len(summary.first_rows)].copy())
        if progress is not None:
            progress(len(rows))
    return summary


def _count(counter: Counter[int], values: NDArray[np.uint32]) -> None:
    for value, count in zip(*np.unique(values, return_counts=True), strict=True):
        counter[int(value)] += int(count)


def _summarise_counts(counter: Counter[int]) -> dict[str, int] | None:
    if not counter:
        return None
    values = sorted(counter)
    half = (counter.total() + 1) // 2
    median = next(v for v, below in zip(values, accumulate(counter[v] for v in values), strict=True) if below >= half)
    return {"min": values[0], "median": median, "max": values[-1]}


def check_plot(path: Path) -> None:
    """Raises OptionError if no picture can be written to `path`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OptionError(f"a plot needs matplotlib: pip install 'tierbed[plot]' ({error})") from None
    formats = sorted(Figure().canvas.get_supported_filetypes())
    if path.suffix[1:].lower() not in formats:
        raise OptionError(f"{str(path)!r} is not a picture: give a file that ends with .{', .'.join(formats)}")
    if not path.absolute().parent.is_dir():
        raise OptionError(f"{str(path)!r} is in a folder that does not exist: create the folder")


def draw(summary: Summary, title: str, path: Path, names: Names) -> None:
    """Draw row norms, update counts and each table's row count. Raises OptionError if `path` cannot be written."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    figure.suptitle(f"{title}: {summary.tables.total():,} rows")
    norms, updates, tables = figure.subplots(1, 3)
    _draw_norms(norms, summary)
    _draw_bars(updates, summary.updates, "updates of a row", "How often rows were updated")
    _draw_bars(tables, summary.tables, "table", "Rows of each table")
    if any(names) and len(names) <= _BARS:
        tables.set_xticks(range(len(names)), label_tables(names), rotation=45, ha="right")
    for axes in (norms, updates, tables):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter("{x:,.0f}")
    picture = BytesIO()
    figure.savefig(picture, format=path.suffix[1:].lower(), dpi=120)
    try:
        path.write_bytes(picture.getvalue())
    except OSError as error:
        with suppress(OSError):
            path.unlink()  # the file contains an incomplete picture
        raise OptionError(f"{str(path)!r} cannot be written: {error}") from error


def _draw_norms(axes: Any, summary: Summary) -> None:
    axes.set(xlabel="Euclidean norm of the embedding", ylabel="rows", title="Row norms")
    filled = np.flatnonzero(summary.norms)
    if len(filled) == 0:
        _draw_empty(axes)
        return
    middle = (NORM_EDGES[filled] + NORM_EDGES[filled + 1]) / 2
    low, high = 0.999 * middle[0], 1.001 * middle[-1]
    is_wide = high > 100 * low
    if is_wide:
        axes.set_xscale("log")
    axes.hist(middle, (np.geomspace if is_wide else np.linspace)(low, high, _BARS + 1), weights=summary.norms[filled])
    if summary.num_not_finite:
        axes.set_title(f"Row norms; {summary.num_not_finite:,} rows are not finite")


def _draw_bars(axes: Any, counter: Counter[int], label: str, title: str) -> None:
    """Draw a bar for each value, or for each range of values if there are many values."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel=label, title=title)
    if not counter:
        _draw_empty(axes)
        return
    low, high = min(counter), max(counter)
    bars = high - low + 1 if high - low < 2 * _BARS else _BARS
    edges = np.linspace(low - 0.5, high + 0.5, bars + 1)
    axes.hist([*counter], edges, weights=[*counter.values()], rwidth=0.8 if bars == high - low + 1 else None)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _draw_empty(axes: Any) -> None:
    axes.text(0.5, 0.5, "no rows", ha="center", va="center", transform=axes.transAxes)
