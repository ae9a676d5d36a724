"""Builds the tiers that the options ask for, slowest first."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cache.cached import CachedStore
from ..spec.options import CachedHostMemOptions, CachedSsdOptions, DeviceMemOptions, StoreOptions
from ..spec.rocksdb_options import options_text
from ..store.contract import Store, Table, Tier
from ..store.rocksdb import SHARDS, RocksDB

if TYPE_CHECKING:
    from ..processors.processor import Processor


log = logging.getLogger("tierbed")


class Stack(NamedTuple):
    """`top` serves steps; `bottom` is the tier that every row reaches in time, the one to load rows into."""

    top: Store[Any]
    bottom: RocksDB | Table

    def compact(self) -> None:
        """`RocksDB.compact`, where RocksDB is the bottom."""
        if isinstance(self.bottom, RocksDB):
            self.bottom.compact()


def build_stack(options: StoreOptions, processor: Processor[Any], folder: Path | None, shards: int | None) -> Stack:
    """The top is of the processor, what is below a cache of the host.

    `folder`: where RocksDB lives, with the `shards` that it has or None for a new one. OptionError, StoreError.
    """
    layout = processor.layout
    if isinstance(options, CachedSsdOptions):
        assert folder is not None
        if shards is not None and options.shards not in (None, shards):
            log.warning("shards=%d: %s was made with shards=%d and keeps them", options.shards, folder, shards)
        rocksdb = RocksDB(
            folder,
            layout.width,
            shards,
            new_shards=options.shards or SHARDS,
            block_bytes=options.physical_block_size,
            cache_mb=options.rocksdb_cache_mb or 0,
            read_mode=options.read_mode,
            async_io=options.async_io,
            options=options_text(options.rocksdb_options),
        )
        try:
            below: Tier = rocksdb
            if options.host_cache_budget_mb:
                budget_mb = options.host_cache_budget_mb
                below = CachedStore(layout, below, options, budget_mb, "host", "host_cache_budget_mb")
            return Stack(processor.cache(below, options), rocksdb)
        except BaseException:
            rocksdb.close()
            raise
    if isinstance(options, CachedHostMemOptions):
        return Stack(*processor.cached_table(options))
    table = processor.full_table("device" if isinstance(options, DeviceMemOptions) else "host")
    return Stack(table, table)
