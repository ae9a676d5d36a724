"""A write-back cache in front of a slower tier. It is the store of a step, and a tier itself, so caches stack.

A line comes up once, stays pinned for the step, and goes down once, when it gives way while dirty. Rows that no set
has room for are served from memory of the batch (the overflow) and go straight back down.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..errors import OptionError, StoreError
from ..store.contract import Chunks, Found, Keys, Lines, Room, Tables, Tier
from ..store.full import check_room

MB = 1 << 20
FLUSH_ROWS = 1 << 24  # rows a write of `flush`: a tier below need not take all at once


def wrong_budget(option: str, budget_mb: float, line_bytes: int, error: Exception) -> OptionError:
    """A ValueError of a cache is one that is too small; any other is a lack of memory."""
    problem = "too small for" if isinstance(error, ValueError) else "more than this machine has memory for, with"
    return OptionError(f"{option}={budget_mb} is {problem} rows of {line_bytes} bytes: {error}; give another budget")


def cache_metrics(cache: Any, reads: Mapping[str, int]) -> dict[str, int]:
    """Counters and sizes of a cache of any processor, with the hits and misses of what only read."""
    counts = cache.counts
    for name, count in reads.items():
        counts[name] += count
    counts["evictions"] = counts["evictions_clean"] + counts["evictions_dirty"]
    return {**counts, "capacity": cache.capacity, "resident_rows": cache.used, "bytes": cache.bytes}


class CachedStore:
    """`budget_mb` bounds lines and their metadata; `option` names it in errors, `tier` names the memory in metrics."""

    def __init__(self, layout: _core.Layout, below: Tier, budget_mb: float, tier: str, option: str) -> None:
        self._layout = layout
        self._below = below
        self._tier = tier
        try:
            self._cache = _core.Cache(layout, int(budget_mb * MB))
        except (ValueError, MemoryError) as error:
            raise wrong_budget(option, budget_mb, layout.line_bytes, error) from None
        self._pinned: tuple[_core.Batch, _core.Admission] | None = None
        self._reads = {"hits": 0, "misses": 0}  # that `peek` and `read` served

    def pin(self, batch: _core.Batch, room: Room | None) -> None:
        if self._pinned is not None:
            raise StoreError("a batch is still pinned; one step at a time")
        admission = self._make_room(batch.tables, batch.keys)
        try:
            lines = admission.lines.copy()
            overflow = lines == 0
            if overflow.any():
                lines[overflow] = batch.allocate(int(overflow.sum()), self._layout)
            self._fetch(batch.tables, batch.keys, lines, ~admission.hit)
            batch.lines[:] = lines
            if room is not None:
                check_room(_core.count_new(batch, self._layout), room)
        except BaseException:
            self._cache.cancel(admission, restore=False)
            raise
        self._pinned = batch, admission

    def unpin(self, batch: _core.Batch, dirty: bool) -> None:
        if self._pinned is None or self._pinned[0] is not batch:
            raise StoreError("unpin of a batch that is not pinned")
        admission = self._pinned[1]
        self._pinned = None
        self._cache.release(admission, dirty)
        overflow = admission.lines == 0
        if dirty and overflow.any():
            self._below.write(batch.tables[overflow], batch.keys[overflow], batch.lines[overflow])

    def peek(self, batch: _core.Batch) -> None:
        lines = np.empty_like(batch.lines)
        self._cache.find(batch.tables, batch.keys, lines)
        absent = lines == 0
        self._count(absent)
        if absent.any():
            lines[absent] = batch.allocate(int(absent.sum()), self._layout)
            self._fetch(batch.tables, batch.keys, lines, absent)
        batch.lines[:] = lines

    def read(self, tables: Tables, keys: Keys, lines: Lines) -> Found:
        """Serves the cache above: a row stays where it is, it is not admitted here on the way up."""
        here = np.empty_like(lines)
        self._cache.find(tables, keys, here)
        found = here != 0
        _core.copy_lines(self._layout, here[found], lines[found])
        absent = ~found
        self._count(absent)
        found[absent] = self._below.read(tables[absent], keys[absent], lines[absent])
        return found

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        admission = self._make_room(tables, keys)
        try:
            overflow = admission.lines == 0
            self._below.write(tables[overflow], keys[overflow], lines[overflow])
            _core.copy_lines(self._layout, lines[~overflow], admission.lines[~overflow])
        except BaseException:
            self._cache.cancel(admission, restore=False)
            raise
        self._cache.release(admission, dirty=True)

    def scan(self) -> Chunks:
        self.flush()
        yield from self._below.scan()

    def flush(self) -> None:
        tables, keys, lines = self._cache.dirty()
        for begin in range(0, len(keys), FLUSH_ROWS):
            part = slice(begin, begin + FLUSH_ROWS)
            self._below.write(tables[part], keys[part], lines[part])
        self._cache.mark_clean()
        self._below.flush()

    def close(self) -> None:
        self._below.close()

    def metrics(self) -> dict[str, dict[str, int]]:
        return {self._tier: cache_metrics(self._cache, self._reads), **self._below.metrics()}

    def _count(self, absent: NDArray[np.bool_]) -> None:
        missed = int(absent.sum())
        self._reads["hits"] += len(absent) - missed
        self._reads["misses"] += missed

    def _make_room(self, tables: Tables, keys: Keys) -> _core.Admission:
        """Admit the rows and write the dirty ones that gave way down, before anything takes their lines."""
        admission = self._cache.admit(tables, keys)
        try:
            self._below.write(admission.victim_tables, admission.victim_keys, admission.victim_lines)
        except BaseException:
            self._cache.cancel(admission, restore=True)
            raise
        return admission

    def _fetch(self, tables: Tables, keys: Keys, lines: Lines, absent: NDArray[np.bool_]) -> None:
        """Fill the absent lines from below, or with initial values where below does not hold them."""
        tables, keys, lines = tables[absent], keys[absent], lines[absent]
        unknown = ~self._below.read(tables, keys, lines)
        _core.initialise_lines(self._layout, tables[unknown], keys[unknown], lines[unknown])
