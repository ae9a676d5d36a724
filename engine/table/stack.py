"""Builds the processor and the stack of tiers from an embedding's options, and finds caches that are too small."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..cache.cache_tier import CpuCacheTier
from ..errors import InputError, undo_on_error
from ..options.rocksdb_options import format_options
from ..options.store_options import CachedHostMemOptions, CachedSsdOptions, DeviceMemOptions, StoreOptions, as_mb
from ..processors.cpu import CpuProcessor
from ..processors.processor import Processor, ProcessorFactory
from ..store.interfaces import InMemoryTier, Tier, TopTier
from ..store.rocksdb import READ_THREADS, SHARDS, RocksDB

log = logging.getLogger("tierbed")
FIRST_CHECK_STEP = 64  # cache counters are first checked at this step, then whenever the number of steps has doubled
_BUDGET_OPTIONS = {"device": "cache_budget_mb", "host": "host_cache_budget_mb"}


def _make_cuda_factory(device: torch.device, options: StoreOptions) -> ProcessorFactory:
    from ..ops.cuda.device import cuda_device
    from ..processors.cuda import make_cuda_factory

    return make_cuda_factory(cuda_device(device.index), options)


PROCESSORS: dict[str, Callable[[torch.device, StoreOptions], ProcessorFactory]] = {
    "cpu": lambda device, options: CpuProcessor,
    "cuda": _make_cuda_factory,
}


def get_processor_factory(device: torch.device, options: StoreOptions) -> ProcessorFactory:
    """Returns the factory that makes processors for a torch device. Raises InputError, OptionError, StoreError."""
    if device.type not in PROCESSORS:
        raise InputError(
            f"the embedding was moved to {device}, but tables are on the CPU or a CUDA device; move it with .cpu() or "
            ".cuda()"
        )
    return PROCESSORS[device.type](device, options)


class SmallCacheDetector:
    """Detects an embedding's caches that are too small, and logs a warning for the first one."""

    def __init__(self, embedding: str) -> None:
        self._embedding, self._has_warned = embedding, False

    def check(self, tier_metrics: Mapping[str, dict[str, float]]) -> None:
        """Add `too_small` to each cache's metrics. `tier_metrics` holds the metrics of the whole stack, top first.

        A cache is too small if it misses more than half of the requested rows because it evicts rows that steps need
        again. Misses also come from a cache that is not full yet, from unwritten rows, and from ids that occur once. So
        the cache must also have evicted at least `capacity` rows. Evictions must be at least half of the misses. More
        than a quarter of the requested rows must have been in the tier below. All counts start at opening.
        """
        top = next(iter(tier_metrics.values()))
        num_requested = top["hits"] + top["misses"]
        for (tier, cache), (_, lower_tier) in pairwise(tier_metrics.items()):
            overflow = cache.get("overflow_evictions", 0)  # with prefetch, most evictions; GPU caches count none
            num_evicted = cache["evictions_clean"] + cache["evictions_dirty"] + overflow
            has_many_misses = num_requested < 2 * cache["misses"] and num_requested < 4 * lower_tier["hits"]
            is_small = has_many_misses and cache["misses"] <= 2 * num_evicted and num_evicted >= cache["capacity"]
            cache["too_small"] = int(is_small)
            if is_small and not self._has_warned:
                self._has_warned = True
                log.warning(
                    "embedding %r: %s is too small: only %.0f %% of %d looked-up rows were in the cache. The cache "
                    "evicted %d rows (%d of them dirty), and has room for %d rows. Choose a larger budget. "
                    "tierbed.plan(trace) predicts hit rates",
                    self._embedding, _BUDGET_OPTIONS[tier], 100 * (1 - cache["misses"] / num_requested), num_requested,
                    num_evicted, cache["evictions_dirty"], cache["capacity"],
                )  # fmt: skip


class Stack(NamedTuple):
    """A table's tiers. `top` serves steps. `bottom` receives loaded rows and all rows written back."""

    top: TopTier[Any]
    bottom: RocksDB | InMemoryTier

    def make_writable(self) -> None:
        """Prepare for writes; see `RocksDB.make_writable`."""
        if isinstance(self.bottom, RocksDB):
            self.bottom.make_writable()

    def compact(self) -> None:
        if isinstance(self.bottom, RocksDB):
            self.bottom.compact()


def build_stack(options: StoreOptions, processor: Processor[Any], folder: Path | None, shards: int | None) -> Stack:
    """Build the tiers. The top tier is in the processor's memory; tiers below a cache are on the host.

    `options` has numbers instead of "auto" (see `AutoBudgets`). `folder` is RocksDB's folder. `shards` is the number of
    databases in the folder, or None for a new folder. Raises OptionError, StoreError.
    """
    layout = processor.layout
    if isinstance(options, CachedSsdOptions):
        assert folder is not None
        if shards is not None and options.shards not in (None, shards):
            log.warning("shards=%d: %s was created with shards=%d, which it keeps", options.shards, folder, shards)
        rocksdb = RocksDB(
            folder,
            layout.width,
            shards,
            new_shards=options.shards or SHARDS,
            block_bytes=options.physical_block_size,
            cache_mb=options.rocksdb_cache_mb or 0,
            index_mb=options.index_mb,
            read_mode=options.read_mode,
            async_io=options.async_io,
            read_threads=options.io_threads or READ_THREADS,
            options=format_options(options.rocksdb_options),
        )
        with undo_on_error(rocksdb.close):
            lower_tier: Tier = rocksdb
            if options.host_cache_budget_mb:
                budget_mb = as_mb(options.host_cache_budget_mb)
                lower_tier = CpuCacheTier(layout, lower_tier, options, budget_mb, "host", "host_cache_budget_mb")
            return Stack(processor.make_cache(lower_tier, options), rocksdb)
    if isinstance(options, CachedHostMemOptions):
        return Stack(*processor.make_table_cache(options))
    table = processor.make_full_table("device" if isinstance(options, DeviceMemOptions) else "host")
    return Stack(table, table)
