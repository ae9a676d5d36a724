"""Builds the tiers that the options ask for, slowest first."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from .. import _core
from ..cache.cached import CachedStore
from ..options import CachedHostMemOptions, CachedSsdOptions, DeviceMemOptions, StoreOptions
from .contract import Store, Tier
from .full import FullTable
from .rocksdb import RocksDB


class Stack(NamedTuple):
    """`top` serves steps; `bottom` is the tier that every row reaches in time, the one to load rows into."""

    top: Store
    bottom: Tier


def build_stack(options: StoreOptions, layout: _core.Layout, folder: Path | None, shards: int | None) -> Stack:
    """`folder`: where RocksDB lives, with the `shards` that it has or None for a new one. OptionError, StoreError."""
    if isinstance(options, CachedSsdOptions):
        assert folder is not None
        rocksdb = RocksDB(folder, layout.width, shards, options.physical_block_size)
        try:
            below: Tier = rocksdb
            if options.host_cache_budget_mb:
                below = CachedStore(layout, below, options.host_cache_budget_mb, "host", "host_cache_budget_mb")
            return Stack(CachedStore(layout, below, options.cache_budget_mb, "device", "cache_budget_mb"), rocksdb)
        except BaseException:
            rocksdb.close()
            raise
    if isinstance(options, CachedHostMemOptions):
        host = FullTable(layout, "host")
        return Stack(CachedStore(layout, host, options.cache_budget_mb, "device", "cache_budget_mb"), host)
    table = FullTable(layout, "device" if isinstance(options, DeviceMemOptions) else "host")
    return Stack(table, table)
