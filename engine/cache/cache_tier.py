"""A write-back CPU cache above a slower tier. The slower tier can be another cache."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any

from .. import _core
from ..errors import OptionError
from ..options.store_options import CachedHostMemOptions
from ..row_format import Chunks
from ..store.full_tier import check_capacity
from ..store.interfaces import CapacityLimit, NativeTier, Tier, TopTier

MB = 1 << 20
MAX_FLUSH_PIECES = 1 << 10  # a piece has up to 48 MiB of rows; other threads wait while it is written

log = logging.getLogger("tierbed")


def make_budget_error(option: str, budget_mb: float, line_bytes: int, error: Exception) -> OptionError:
    """Return an OptionError: the budget is too small if the cache raised ValueError, otherwise too large."""
    problem = "too small for" if isinstance(error, ValueError) else "more than this machine has memory for, with"
    return OptionError(f"{option}={budget_mb} is {problem} rows of {line_bytes} bytes: {error}; give another budget")


class CpuCacheTier(NativeTier, TopTier[_core.Batch]):
    """A write-back cache. `tier` names it in metrics; `option` names its budget in errors. Budgets include metadata."""

    def __init__(
        self, layout: _core.Layout, lower: Tier, options: CachedHostMemOptions, budget_mb: float, tier: str, option: str
    ) -> None:
        self._layout, self._lower_tier, self._tier = layout, lower, tier
        try:
            self.native = _core.CacheTier(
                layout,
                lower.native,
                budget_bytes=int(budget_mb * MB),
                overflow_bytes=int(options.compute_overflow_mb(budget_mb) * MB),
                grows_with_batch=options.overflow_mb is None,
                policy=options.cache_policy,
                io_threads=options.background_threads,
            )
        except (ValueError, MemoryError) as error:
            raise make_budget_error(option, budget_mb, layout.line_bytes, error) from None
        self._budget = f"{option}={budget_mb}"
        self._capacity = int(self.native.metrics()["capacity"])  # the first batch with more rows logs a warning
        self._peek_counts = (0, 0, 0)

    def announce(self, batch: _core.Batch) -> None:
        self.native.announce(batch)

    def prefetch(self, batch: _core.Batch) -> bool:
        return self.native.prefetch(batch)

    def cancel_announced(self) -> None:
        self.native.cancel_announced()

    def pin(self, batch: _core.Batch, capacity_limit: CapacityLimit | None) -> None:
        self.native.pin(batch)
        try:
            if capacity_limit is not None:
                check_capacity(_core.count_new_rows(batch, self._layout), capacity_limit)
        except BaseException:
            self.native.unpin(batch)
            raise
        if batch.num_unique > self._capacity:
            self._warn_small_cache(batch.num_unique)

    def unpin(self, batch: _core.Batch, is_dirty: bool) -> None:
        """Release the pinned batch. Ignores `is_dirty`: each row's update counter shows if the row was written."""
        self.native.unpin(batch)

    def peek(self, batch: _core.Batch, is_training: bool = False) -> None:
        missing, unknown = self.native.peek(batch)
        if is_training:
            return
        hits, misses, unknowns = self._peek_counts
        self._peek_counts = (hits + batch.num_unique - missing, misses + missing - unknown, unknowns + unknown)

    def peek_counts(self) -> tuple[int, int, int]:
        return self._peek_counts

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        location = self.native.locate(table, key)
        entries = [] if location is None else [{"tier": self._tier, **location}]
        return [*entries, *self._lower_tier.locate(table, key)]

    def scan(self) -> Chunks:
        self.flush()
        yield from self._lower_tier.scan()

    def write_back(self) -> None:
        """Write dirty rows to the last tier. Unlike `flush`, this does not make the rows durable."""
        self.native.flush(will_flush=False)
        if isinstance(self._lower_tier, CpuCacheTier):
            self._lower_tier.write_back()

    def list_dirty(self, max_rows: int) -> _core.ChangedRows | None:
        """Return the sorted keys of all rows that differ from the last tier. None if there are more than `max_rows`."""
        tier: Tier = self
        keys = _core.ChangedRows()
        while isinstance(tier, CpuCacheTier):
            keys.add_keys(*tier.native.list_dirty())
            tier = tier._lower_tier
        if keys.size > max_rows:
            return None
        keys.list_keys(0)  # sorts the keys
        return keys

    def flush(self) -> None:
        self.native.flush()
        self._lower_tier.flush()

    def flush_pieces(self) -> Iterator[bool]:
        """Each `next` call writes back some dirty rows. At the end, few are left. Does not make the rows durable."""
        begin = 0
        for _ in range(MAX_FLUSH_PIECES):  # limited, because steps write more rows meanwhile
            begin = self.native.flush_piece(begin)
            yield True
            if begin == 0:
                break
        if isinstance(self._lower_tier, CpuCacheTier):
            yield from self._lower_tier.flush_pieces()

    def close(self) -> None:
        self.native.close()
        self._lower_tier.close()

    def metrics(self) -> dict[str, dict[str, float]]:
        return {self._tier: self.native.metrics(), **self._lower_tier.metrics()}

    def _warn_small_cache(self, rows: int) -> None:
        """Warn that a batch has more rows than the sets hold."""
        metrics = self.native.metrics()
        needed = math.ceil(rows * metrics["bytes"] / metrics["capacity"] / MB * 100) / 100
        capacity, self._capacity = self._capacity, 1 << 62
        log.warning(
            "%s has room for %d rows, but a batch has %d distinct rows. Now %d rows are in the overflow area, "
            "which uses memory beyond that budget. Give at least %s, or use smaller batches",
            self._budget, capacity, rows, metrics["overflow_rows"], needed,
        )  # fmt: skip
