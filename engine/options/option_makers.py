"""Store options from a maker for each store, from a dict, or from a TOML file for each deployment."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..errors import OptionError
from .options import Budget, CachedHostMemOptions, CachedSsdOptions, DeviceMemOptions, HostMemOptions, StoreOptions

Path_ = str | os.PathLike[str]


def make_device_mem_store_options(
    persistent_path: Path_ | None = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    open: str = "resume",
    *,
    snapshot_path: Path_ | None = None,
    eviction: str = "none",
    admission: float | None = None,
    ttl_steps: int | None = None,
    state_dict_snapshots: bool | int = False,
) -> DeviceMemOptions:
    """All rows in device memory: the fastest store, bounded by that memory. Arguments: `StoreOptions`. OptionError."""

    return DeviceMemOptions(
        persistent_path,
        capacity,
        size_factor,
        storage_dim,
        physical_block_size,
        open,
        snapshot_path=snapshot_path,
        eviction=eviction,
        admission=admission,
        ttl_steps=ttl_steps,
        state_dict_snapshots=state_dict_snapshots,
    )


def make_host_mem_store_options(
    persistent_path: Path_ | None = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    open: str = "resume",
    *,
    snapshot_path: Path_ | None = None,
    eviction: str = "none",
    admission: float | None = None,
    ttl_steps: int | None = None,
    state_dict_snapshots: bool | int = False,
) -> HostMemOptions:
    """All rows in host memory. Arguments: `StoreOptions`. OptionError."""

    return HostMemOptions(
        persistent_path,
        capacity,
        size_factor,
        storage_dim,
        physical_block_size,
        open,
        snapshot_path=snapshot_path,
        eviction=eviction,
        admission=admission,
        ttl_steps=ttl_steps,
        state_dict_snapshots=state_dict_snapshots,
    )


def make_cached_host_mem_store_options(
    cache_budget_mb: Budget,
    persistent_path: Path_ | None = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    open: str = "resume",
    *,
    snapshot_path: Path_ | None = None,
    eviction: str = "none",
    admission: float | None = None,
    ttl_steps: int | None = None,
    state_dict_snapshots: bool | int = False,
    cache_policy: str = "lru",
    overflow_mb: float = 64,
) -> CachedHostMemOptions:
    """All rows in host memory, the hot ones cached in `cache_budget_mb` MiB of device memory. Raises OptionError."""
    return CachedHostMemOptions(
        persistent_path,
        capacity,
        size_factor,
        storage_dim,
        physical_block_size,
        open,
        snapshot_path=snapshot_path,
        eviction=eviction,
        admission=admission,
        ttl_steps=ttl_steps,
        state_dict_snapshots=state_dict_snapshots,
        cache_budget_mb=cache_budget_mb,
        cache_policy=cache_policy,
        overflow_mb=overflow_mb,
    )


def make_cached_ssd_store_options(
    cache_budget_mb: Budget,
    persistent_path: Path_,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    host_cache_budget_mb: Budget = 0,
    open: str = "resume",
    *,
    snapshot_path: Path_ | None = None,
    eviction: str = "none",
    admission: float | None = None,
    ttl_steps: int | None = None,
    state_dict_snapshots: bool | int = False,
    cache_policy: str = "lru",
    overflow_mb: float = 192,
    shards: int | None = None,
    read_mode: str = "buffered",
    io_threads: int | None = None,
    async_io: bool = True,
    rocksdb_cache_mb: float | None = None,
    rocksdb_options: str | Mapping[str, Any] | None = None,
) -> CachedSsdOptions:
    """All rows in RocksDB under `persistent_path`, the hot ones cached in device memory and, by option, in host memory.

    Raises OptionError; the arguments are those of `CachedSsdOptions`.
    """
    return CachedSsdOptions(
        persistent_path,
        capacity,
        size_factor,
        storage_dim,
        physical_block_size,
        open,
        snapshot_path=snapshot_path,
        eviction=eviction,
        admission=admission,
        ttl_steps=ttl_steps,
        state_dict_snapshots=state_dict_snapshots,
        cache_budget_mb=cache_budget_mb,
        cache_policy=cache_policy,
        overflow_mb=overflow_mb,
        host_cache_budget_mb=host_cache_budget_mb,
        shards=shards,
        read_mode=read_mode,
        io_threads=io_threads,
        async_io=async_io,
        rocksdb_cache_mb=rocksdb_cache_mb,
        rocksdb_options=rocksdb_options,
    )


MAKERS: dict[str, Callable[..., StoreOptions]] = {
    "device_mem": make_device_mem_store_options,
    "host_mem": make_host_mem_store_options,
    "cached_host_mem": make_cached_host_mem_store_options,
    "cached_ssd": make_cached_ssd_store_options,
}
KINDS: dict[str, type[StoreOptions]] = {
    "device_mem": DeviceMemOptions,
    "host_mem": HostMemOptions,
    "cached_host_mem": CachedHostMemOptions,
    "cached_ssd": CachedSsdOptions,
}


def store_options_from_dict(options: Mapping[str, Any], where: str = "store_options") -> StoreOptions:
    """Store options from their printed form, `store` and the maker's arguments. Raises OptionError naming `where`."""
    if isinstance(options, StoreOptions):
        return options
    if not isinstance(options, Mapping):
        raise OptionError(f"{where}={options!r}: make one by make_device_mem_store_options or its like")
    given = dict(options)
    store = given.pop("store", None)
    if not isinstance(store, str) or store not in MAKERS:
        raise OptionError(f"{where}: store={store!r}; give one of {', '.join(MAKERS)}")
    known = [f.name for f in fields(KINDS[store]) if f.init]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise OptionError(f"{where}: {store} has no option {', '.join(unknown)}; it has {', '.join(known)}")
    try:
        return MAKERS[store](**given)
    except (TypeError, OptionError) as error:
        raise OptionError(f"{where}: {store}: {error}") from None


def load_store_options(path: Path_, name: str) -> StoreOptions:
    """The store options of embedding `name` from a TOML file: a table [name] with `store` and the maker's arguments.

    A relative persistent_path is relative to the working directory; `~` and `${NAME}` in it are replaced. `tierbed
    store options` shows what the options of a file become. Raises OptionError for a missing file or table, bad TOML,
    unknown options.
    """
    tables = read_store_options(path)
    if name in tables and not isinstance(tables[name], dict):
        raise OptionError(
            f"store options file {os.fspath(path)!r}: {name} stands outside a table; put it under [name], the name of "
            "its embedding"
        )
    if name not in tables:
        raise OptionError(
            f"store options file {os.fspath(path)!r} has no table [{name}]; it has {', '.join(tables) or 'none'}"
        )
    return store_options_from_dict(tables[name], f"{os.fspath(path)} [{name}]")


def read_store_options(path: Path_) -> dict[str, Any]:
    """What a TOML file of store options holds, not checked. Raises OptionError for a missing file or bad TOML."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"store options file {os.fspath(path)!r}: {error}") from None
