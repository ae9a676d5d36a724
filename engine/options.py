"""Where rows live: the store options, from makers or from a TOML file for each deployment."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .errors import OptionError
from .plain import PlainDict
from .store.rocksdb import require_rocksdb

OPEN_MODES = ("resume", "fresh", "error")


@dataclass(frozen=True, repr=False, eq=False)
class StoreOptions(PlainDict):
    """What every store has.

    persistent_path: the folder that holds a folder for each embedding, by name; None keeps nothing on disk.
    capacity: the most rows that may have been written, over all tables; None is no limit.
    size_factor, storage_dim: row size in multiples of the dim, or in floats, optimizer state included. The engine knows
    it; what is given is checked.
    physical_block_size: bytes that the disk reads at once.
    open: what to do with a folder whose last run did not close: "resume" restores the last snapshot, or starts empty
    where there is none; "error" raises. "fresh" starts empty in any case; snapshots are kept.
    """

    store: str = field(init=False)
    persistent_path: str | os.PathLike[str] | None = None
    capacity: int | None = None
    size_factor: int | None = None
    storage_dim: int | None = None
    physical_block_size: int = 4096
    open: str = "resume"

    def __post_init__(self) -> None:
        if self.persistent_path is not None:
            if not isinstance(self.persistent_path, (str, os.PathLike)) or not os.fspath(self.persistent_path):
                raise OptionError(
                    f"persistent_path={self.persistent_path!r}: give one folder as a str or Path, or None"
                )
            object.__setattr__(self, "persistent_path", os.fspath(self.persistent_path))
        if self.storage_dim == -1:  # OneFlow's word for "not given"
            object.__setattr__(self, "storage_dim", None)
        for name in ("capacity", "size_factor", "storage_dim"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value <= 0):
                raise OptionError(f"{name}={value!r}: give a whole number > 0, or None")
        size = self.physical_block_size
        if not isinstance(size, int) or size < 512 or size > 1 << 20 or size & (size - 1):
            raise OptionError(
                f"physical_block_size={size!r}: give a power of two from 512 to 1048576 bytes, as the disk's block"
            )
        if self.open not in OPEN_MODES:
            raise OptionError(f"open={self.open!r}: give one of {', '.join(map(repr, OPEN_MODES))}")

    def check_row(self, dim: int, width: int) -> None:
        """Raises OptionError where a given row size is not what the optimizer needs: `width` floats for `dim`."""
        if self.storage_dim is not None and self.storage_dim != width:
            raise OptionError(
                f"storage_dim={self.storage_dim}: with this optimizer a row takes {width} floats; leave storage_dim out"
            )
        if self.storage_dim is None and self.size_factor is not None and self.size_factor * dim != width:
            raise OptionError(
                f"size_factor={self.size_factor}: with this optimizer a row takes {width} floats for {dim} columns; "
                "leave size_factor out"
            )


@dataclass(frozen=True, repr=False, eq=False)
class DeviceMemOptions(StoreOptions):
    """The full table in device memory (ordinary memory where there is no device)."""

    store: str = field(default="device_mem", init=False)


@dataclass(frozen=True, repr=False, eq=False)
class HostMemOptions(StoreOptions):
    """The full table in host memory."""

    store: str = field(default="host_mem", init=False)


@dataclass(frozen=True, repr=False, eq=False)
class CachedHostMemOptions(StoreOptions):
    """A device cache of `cache_budget_mb` MiB in front of a full table in host memory."""

    store: str = field(default="cached_host_mem", init=False)
    cache_budget_mb: float = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_budget("cache_budget_mb", self.cache_budget_mb, zero=False)


@dataclass(frozen=True, repr=False, eq=False)
class CachedSsdOptions(CachedHostMemOptions):
    """A device cache, and a host cache if `host_cache_budget_mb` is not 0, before RocksDB in `persistent_path`."""

    store: str = field(default="cached_ssd", init=False)
    host_cache_budget_mb: float = 0

    def __post_init__(self) -> None:
        require_rocksdb()
        super().__post_init__()
        _check_budget("host_cache_budget_mb", self.host_cache_budget_mb, zero=True)
        if self.persistent_path is None:
            raise OptionError("persistent_path=None: cached_ssd keeps rows on disk; give a folder on the SSD")


def _check_budget(name: str, value: Any, zero: bool) -> None:
    good = (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and (value > 0 or (zero and value == 0))
        and value < 1 << 40
    )
    if not good:
        raise OptionError(f"{name}={value!r}: give a number of MiB {'>=' if zero else '>'} 0")


Path_ = str | os.PathLike[str]


def make_device_mem_store_options(
    persistent_path: Path_ | None = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    open: str = "resume",
) -> DeviceMemOptions:
    """All rows in device memory: the fastest, bounded by it. Raises OptionError; the arguments are `StoreOptions`'."""

    return DeviceMemOptions(persistent_path, capacity, size_factor, storage_dim, physical_block_size, open)


def make_host_mem_store_options(
    persistent_path: Path_ | None = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    open: str = "resume",
) -> HostMemOptions:
    """All rows in host memory. Raises OptionError; the arguments are `StoreOptions`'."""

    return HostMemOptions(persistent_path, capacity, size_factor, storage_dim, physical_block_size, open)


def make_cached_host_mem_store_options(
    cache_budget_mb: float,
    persistent_path: Path_ | None = None,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    open: str = "resume",
) -> CachedHostMemOptions:
    """All rows in host memory, the hot ones cached in `cache_budget_mb` MiB of device memory. Raises OptionError."""
    return CachedHostMemOptions(
        persistent_path,
        capacity,
        size_factor,
        storage_dim,
        physical_block_size,
        open,
        cache_budget_mb=cache_budget_mb,
    )


def make_cached_ssd_store_options(
    cache_budget_mb: float,
    persistent_path: Path_,
    capacity: int | None = None,
    size_factor: int | None = None,
    storage_dim: int | None = None,
    physical_block_size: int = 4096,
    host_cache_budget_mb: float = 0,
    open: str = "resume",
) -> CachedSsdOptions:
    """All rows in RocksDB under `persistent_path`, the hot ones cached in device memory and, by option, in host memory.

    Raises OptionError.
    """
    return CachedSsdOptions(
        persistent_path,
        capacity,
        size_factor,
        storage_dim,
        physical_block_size,
        open,
        cache_budget_mb=cache_budget_mb,
        host_cache_budget_mb=host_cache_budget_mb,
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
    """Store options from what they print as: `store` and the maker's arguments. Raises OptionError naming `where`."""
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

    A relative persistent_path is relative to the working directory. Raises OptionError for a missing file or table,
    bad TOML, unknown options.
    """
    try:
        with Path(path).open("rb") as file:
            tables = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"store options file {os.fspath(path)!r}: {error}") from None
    if not isinstance(tables.get(name), dict):
        raise OptionError(
            f"store options file {os.fspath(path)!r} has no table [{name}]; it has {', '.join(tables) or 'none'}"
        )
    return store_options_from_dict(tables[name], f"{os.fspath(path)} [{name}]")
