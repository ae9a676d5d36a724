"""Whether caches are too small for the rows that steps look up, by their counters: a metric, and one warning."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise

log = logging.getLogger("tierbed")

FIRST_STEP = 64  # counters are read at this step, and again each time the steps have doubled

_OPTION = {"device": "cache_budget_mb", "host": "host_cache_budget_mb"}


class SmallCaches:
    """Finds the caches of one embedding that are too small. Warns of the first that it finds, and of no other."""

    def __init__(self, embedding: str) -> None:
        self._embedding, self._has_warned = embedding, False

    def judge(self, tiers: Mapping[str, dict[str, float]]) -> None:
        """Add `too_small` to the metrics of each cache of `tiers`, which are those of the whole stack, from the top."""
        top = next(iter(tiers.values()))
        requested = top["hits"] + top["misses"]
        for (tier, cache), (_, below) in pairwise(tiers.items()):
            cache["too_small"] = int(is_too_small(cache, below, requested))
            if cache["too_small"]:
                self._warn(tier, cache, requested)

    def _warn(self, tier: str, cache: Mapping[str, float], requested: float) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "embedding %r: %s is too small: %.0f %% of %d looked-up rows hit, and %d rows (%d of them dirty) were "
            "evicted from a capacity of %d; give the budget whose hit rate tierbed.plan(trace) predicts as enough",
            self._embedding, _OPTION[tier], 100 * (1 - cache["misses"] / requested), requested, _evicted(cache),
            cache["evictions_dirty"], cache["capacity"],
        )  # fmt: skip


def is_too_small(cache: Mapping[str, float], below: Mapping[str, float], requested: float) -> bool:
    """Whether a cache misses more than half of the `requested` rows because it evicts rows that steps need again.

    Since the store was opened, at least every second miss evicted a row, at least `capacity` rows were evicted, and
    more than a quarter of the requested rows were in the tier below. So a cache that fills up, lookups of rows that
    were never written, and ids that come once are not taken for it.
    """
    evicted = _evicted(cache)
    misses = requested < 2 * cache["misses"] and requested < 4 * below["hits"]
    return misses and cache["misses"] <= 2 * evicted and evicted >= cache["capacity"]


def _evicted(cache: Mapping[str, float]) -> float:
    beside = cache.get("overflow_evictions", 0)  # with prefetch, most rows leave from there; a GPU's cache has none
    return cache["evictions_clean"] + cache["evictions_dirty"] + beside
