"""The stack of tiers that the options ask for, built from the slowest tier up."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..cache.cached import CachedStore
from ..options.options import CachedHostMemOptions, CachedSsdOptions, DeviceMemOptions, StoreOptions, mib
from ..options.rocksdb_options import options_text
from ..store.contract import Store, Table, Tier
from ..store.rocksdb import READ_THREADS, SHARDS, RocksDB

if TYPE_CHECKING:
    from ..processors.processor import Processor


log = logging.getLogger("tierbed")


class Stack(NamedTuple):
    """The tiers of a table. `top` serves steps. Every row reaches `bottom` in time, and rows are loaded into it."""

    top: Store[Any]
    bottom: RocksDB | Table

    def compact(self) -> None:
        """Call `RocksDB.compact`, where RocksDB is the bottom."""
        if isinstance(self.bottom, RocksDB):
            self.bottom.compact()


def build_stack(options: StoreOptions, processor: Processor[Any], folder: Path | None, shards: int | None) -> Stack:
    """Build the tiers. The top is of the processor, and the tiers below a cache are of the host.

    options: with numbers for budgets, as `AutoBudgets` gives them. folder: where RocksDB lives. shards: how many it
    has, None for a new folder. Raises OptionError, StoreError.
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
            read_threads=options.io_threads or READ_THREADS,
            options=options_text(options.rocksdb_options),
        )
        try:
            below: Tier = rocksdb
            if options.host_cache_budget_mb:
                budget_mb = mib(options.host_cache_budget_mb)
                below = CachedStore(layout, below, options, budget_mb, "host", "host_cache_budget_mb")
            return Stack(processor.cache(below, options), rocksdb)
        except BaseException:
            rocksdb.close()
            raise
    if isinstance(options, CachedHostMemOptions):
        return Stack(*processor.cached_table(options))
    table = processor.full_table("device" if isinstance(options, DeviceMemOptions) else "host")
    return Stack(table, table)
