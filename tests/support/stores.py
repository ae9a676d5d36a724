"""Every store by a short name, and its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tierbed

STORES = ["device", "host", "cached_host", "ssd", "ssd_host"]
OVERFLOW_MB = 0.02  # before RocksDB: some hundred rows
SMALL_BUFFERS = {"write_buffer_size": 1 << 16}  # a flush writes more than 4 KiB of a shard's rows to a file
ONE_SET_MB = 0.01  # less than two sets of 64 rows, whatever the optimizer


def options(store: str, path: Path | None = None, budget_mb: float = ONE_SET_MB, **more: Any) -> Any:
    """Store options by the short name of a store.

    By default a cache has one set, so that rows are soon evicted to the tier below, and RocksDB has two shards, which
    open in half the time.
    """
    if store == "device":
        return tierbed.make_device_mem_store_options(path, **more)
    if store == "host":
        return tierbed.make_host_mem_store_options(path, **more)
    if store == "cached_host":
        return tierbed.make_cached_host_mem_store_options(budget_mb, path, **more)
    assert path is not None
    host = 2 * budget_mb if store == "ssd_host" else 0
    more = {"shards": 2, "overflow_mb": OVERFLOW_MB, "rocksdb_options": SMALL_BUFFERS, **more}
    return tierbed.make_cached_ssd_store_options(budget_mb, path, host_cache_budget_mb=host, **more)
