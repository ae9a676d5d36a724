"""Choose how many batches a run draws ahead of its step, over caches above an SSD.

A deeper look-ahead usually misses fewer rows, because the caches know more of the future. But once the announced rows
crowd a cache, they push out rows that are needed again. So a run measures the miss rate at its depth and at the next
depth, and keeps the better one. After a change that gains nothing it pauses, then tries the other direction. Unlike a
time, a miss rate does not depend on the machine's other work. A miss costs a read, and later often a write.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.options.store_options import CachedSsdOptions
from ...engine.table.prefetch import MAX_WINDOW
from ..passes.lookups import KnownLookups

DEPTHS = (8, 15, MAX_WINDOW)
CHECK_STEPS = 8  # steps between two checks of the miss rate
SETTLE_CHECKS, MEASURE_CHECKS = 2, 3  # checks after a change: first the caches adapt, then misses are counted
PAUSE_CHECKS = 128
# Look ahead if caches miss at least this fraction of rows. This halves misses, or better (benchmarks/README.md), so a
# run stops only at half of the fraction, or at a quarter if it looks further ahead.
MIN_MISS_RATE = 1 / 8
MIN_GAIN = 0.01  # the fraction of its misses that a depth must save to be preferred to a smaller one
ID_BYTES = 100  # upper bound for an announced id: the id's copies, its row in the batch and in the cache's window
log = logging.getLogger("tierbed")


class LookAhead:
    """A run draws `depth` batches ahead. If `caches` is empty, or `is_adaptive` is False, the depth never changes."""

    def __init__(self, label: str, caches: Sequence[EmbeddingBase], depth: int, is_adaptive: bool) -> None:
        self._label, self._caches, self.depth, self._is_adaptive = label, caches, depth, is_adaptive
        self._base = self._target = depth  # the best depth so far, and the depth that is measured
        self._base_rate: float | None = None  # the miss rate of `_base`; None while it is not measured
        self._direction, self._num_checks = 1, 0  # checks since the target changed; negative in a pause
        self._counts, self._last_counts = [0, 0], list[int]()  # hits and misses since the caches adapted; at a check
        self._stopped_depth = 0  # where look-ahead last stopped; if caches then miss rows, it returns there for a while
        self._max_ids = 0  # the most ids in a batch
        options = [cache.store_options for cache in caches]
        self._max_bytes = sum(int(each.look_ahead_mb) << 20 for each in options if isinstance(each, CachedSsdOptions))

    def record_batch(self, known_lookups: KnownLookups | None) -> None:
        ids = sum(lookup.ids.numel() for lookups in dict(known_lookups or []).values() for lookup in lookups)
        self._max_ids = max(self._max_ids, ids)

    def begin_step(self, num_steps: int) -> None:
        """Change the depth if that pays. Called before each step; `num_steps` counts the steps before."""
        if self._caches and num_steps % CHECK_STEPS == 1:
            self._check()
        self.depth = min(self.depth + 1, self._target)  # rises slowly, so that no step waits for many batches

    def _check(self) -> None:
        last, counts = self._last_counts, [sum(x) for x in zip(*(c.hit_counts() for c in self._caches), strict=True)]
        self._last_counts = counts
        if not last or counts == last:  # the prefetch thread updates counts only now and then
            return
        hits, misses = counts[0] - last[0], counts[1] - last[1]
        rate = misses / max(hits + misses, 1)
        is_useful = rate > MIN_MISS_RATE / (4 if self._target > DEPTHS[0] else 2 if self._target else 1)
        text = f"caches have {100 * (1 - rate):.0f} % of the rows"
        if not self._is_adaptive:
            if self.depth and rate < MIN_MISS_RATE / 4:
                warning = "%s: ahead=%d makes steps slower, because %s; leave it out"
                log.warning(warning, self._label, self.depth, text)
                self._caches = []
        elif not self._target:
            self._settle((self._stopped_depth or DEPTHS[0]) * is_useful, text)
            self._num_checks -= PAUSE_CHECKS * (self._stopped_depth > 0)
        elif not is_useful and (self._num_checks >= 0 or not self._stopped_depth):
            self._stopped_depth = self._base
            self._settle(0, text)
        elif not self._fits(self._target):
            self._settle(max(filter(self._fits, DEPTHS)), f"the ids would take over {self._max_bytes >> 20} MiB")
        else:
            self._compare(hits, misses)

    def _compare(self, hits: int, misses: int) -> None:
        """Count a check's rows. Once enough are counted, keep the better depth, and try the next one or pause."""
        self._num_checks += 1
        if self._num_checks > SETTLE_CHECKS:
            self._counts = [self._counts[0] + hits, self._counts[1] + misses]
        if self._num_checks < SETTLE_CHECKS + MEASURE_CHECKS:
            return
        rate = self._counts[1] / max(sum(self._counts), 1)
        base_rate = rate if self._base_rate is None else self._base_rate
        is_better = self._base == self._target or rate < base_rate * (1 - MIN_GAIN * self._direction)
        if is_better:
            rates = f"{100 * rate:.1f} % of the rows instead of {100 * base_rate:.1f} % with {self._base}"
            self._settle(self._target, f"caches miss {rates}")
            self._base_rate = rate
        index = DEPTHS.index(self._base) + self._direction
        if is_better and 0 <= index < len(DEPTHS) and self._fits(DEPTHS[index]):
            self._measure(DEPTHS[index])
        else:
            self._measure(self._base)
            self._direction, self._num_checks = -self._direction, -PAUSE_CHECKS

    def _fits(self, depth: int) -> bool:
        return depth == DEPTHS[0] or depth * self._max_ids * ID_BYTES <= self._max_bytes

    def _settle(self, depth: int, reason: str) -> None:
        if depth != self._base:
            log.info("%s: looks %d batches ahead, because %s", self._label, depth, reason)
        self._base = depth
        for cache in self._caches:
            cache.look_ahead = depth  # the next run starts with this depth
        self._measure(depth)

    def _measure(self, depth: int) -> None:
        self._target, self._num_checks, self._counts = depth, 0, [0, 0]
