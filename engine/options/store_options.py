"""Store options: one class per store, and functions that read options from a dict or a TOML file."""

from __future__ import annotations

import inspect
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

from .. import _core
from ..checks import (
    as_int,
    as_number,
    bind_arguments,
    check_auto_budget,
    check_budget,
    check_choice,
    check_flags,
    check_int,
    expand_path,
    suggest_name,
    validate_arguments,
)
from ..errors import OptionError, StoreError
from ..row_format import BUCKETS
from .rocksdb_options import format_options

CACHE_POLICIES = ("lru", "lfu")
LOOK_AHEAD_MB = 64
MAX_OVERFLOW_MB = {"cached_host_mem": 64, "cached_ssd": 192}  # upper limits of overflow_mb's default
BACKGROUND_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))  # keep at least half of the cores for dense layers
OPEN_MODES = ("resume", "fresh", "error", "mixed", "pretrained")
EVICTIONS = ("none", "lru", "lfu", "ttl", "distance_lfu")
MAX_ADMISSION_COUNT = 255  # the ledger counts lookups in one byte
Budget = float | Literal["auto"]  # MiB, or "auto", which engine/cache/memory_split.py replaces by a number
ROCKSDB_CACHE_MB = 32  # default size of RocksDB's block cache
MIN_INDEX_MB = 1  # RocksDB's smallest cache is two shards of half a MiB
MAX_ROWS_PER_INDEX_MB = 40_000_000  # of more rows, the pinned top level of the indexes takes over half of the cache
READ_MODES = ("buffered", "mmap", "direct")
AnyPath = str | os.PathLike[str]
_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def options_class(cls: _Class) -> _Class:
    """Turn a subclass of `PlainDict` into a frozen dataclass whose constructor is a public `make_*` function."""
    decorated: Any = dataclass(frozen=True, repr=False, eq=False)(cls)
    original_init, signature = decorated.__init__, inspect.signature(decorated.__init__)

    @wraps(original_init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        bind_arguments(self.constructor_name, signature, (self, *args), kwargs)  # errors suggest the closest argument
        original_init(self, *args, **kwargs)

    decorated.__init__ = checked_init
    return cls


@options_class
class PlainDict(Mapping[str, Any]):
    """Base class for options. Options read like a dict: `options["capacity"]`, `dict(options)`, `options == {...}`."""

    constructor_name: ClassVar = "options"  # the constructor's public name, such as "make_host_mem_store_options"

    def __getitem__(self, name: str) -> Any:
        if name not in set(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _set_int(self, name: str, expected: str, minimum: int, maximum: int) -> None:
        """Check the option with `check_int` and store it as an int. None is left as it is."""
        value = getattr(self, name)
        if value is not None:
            self._set(name, check_int(name, value, f"{expected}, or None", minimum, maximum))

    def _make_error(self, name: str, problem: str) -> OptionError:
        return OptionError(f"{name}={getattr(self, name)!r}: {problem}")

    def as_dict(self) -> dict[str, Any]:
        """Return nested plain dicts and lists, ready for msgpack or JSON."""
        return {name: _convert_to_plain(value) for name, value in self.items()}


def _convert_to_plain(value: Any) -> Any:
    if isinstance(value, PlainDict):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return [_convert_to_plain(item) for item in value]
    return value


# The constructor's arguments are the fields of all base classes, in reverse method resolution order.


@options_class
class _StoreField(PlainDict):
    store: str = field(init=False)


@options_class
class _CacheFields(_StoreField):
    cache_budget_mb: Budget


@options_class
class _CommonFields(_StoreField):
    persistent_path: AnyPath | None = None
    capacity: int | None = None
    size_factor: int | None = None
    storage_dim: int | None = None
    physical_block_size: int = 4096


@options_class
class _HostCacheFields(_CommonFields):
    host_cache_budget_mb: Budget = 0


@options_class
class StoreOptions(_CommonFields):
    """The options that all stores share. docs/lifecycle.md explains row deletion; docs/glossary.md explains terms.

    Args:
        persistent_path: The folder for stored rows. Each embedding gets a subfolder with its name. None
            keeps nothing on disk. A leading `~` and variables `${NAME}` are replaced. An unset variable is an error.
        capacity: The maximum number of written rows in all tables together. None means no limit.
        size_factor: The row size, including optimizer state, as a multiple of the embedding's dimension. The engine
            computes the row size itself. A different value raises OptionError.
        storage_dim: The row size in floats. A value that differs from the computed size raises OptionError.
        physical_block_size: The disk's block size in bytes.
        open: How to open a folder after an unclean shutdown. "resume" loads the recovery snapshot, or starts empty if
            there is none; "error" raises. "mixed" is like "resume", but embeddings that are trained together (a
            training group) may differ in step. "pretrained" is like "resume", but does not warn if new dense layers
            train with the resumed rows. "fresh" starts empty, even after a clean shutdown, and keeps the snapshots.
        snapshot_path: The folder for snapshots. Each embedding gets a subfolder. Default: `persistent_path`.
        eviction: Which rows to delete when new rows exceed `capacity`: "lru", "lfu", "ttl" or "distance_lfu"; "none"
            raises `CapacityError` instead.
        admission: Which new rows training keeps. None keeps all rows. With a whole number n, a row is kept when the
            n-th training step looks up the row. A number below 1 is the probability that a step keeps a new row.
        ttl_steps: A row is deleted if its last write is more than this many steps ago. If `eviction="ttl"`, such rows
            are deleted only when new rows exceed `capacity`. None deletes no rows.
        state_dict_snapshots: If True, `state_dict()` saves a snapshot, and `load_state_dict()` loads it. A number n
            does the same, but keeps only the n latest snapshots. A snapshot of the current rows is always kept.
            Without a `persistent_path`, `state_dict()` contains the rows themselves.
        changed_keys_mb: The maximum size in MiB of the list of rows that changed since the last snapshot. An
            incremental snapshot reads only these rows. If more rows have changed, it compares all rows with its parent.

    Raises:
        OptionError: If a value is wrong, or options contradict each other.
    """

    open: str = "resume"
    snapshot_path: AnyPath | None = field(default=None, kw_only=True)
    eviction: str = field(default="none", kw_only=True)
    admission: float | None = field(default=None, kw_only=True)
    ttl_steps: int | None = field(default=None, kw_only=True)
    state_dict_snapshots: bool | int = field(default=False, kw_only=True)
    changed_keys_mb: float = field(default=256, kw_only=True)

    @property
    def background_threads(self) -> int:
        """The number of background threads that work while steps run, not counting threads that wait for a disk."""
        return BACKGROUND_THREADS

    def __post_init__(self) -> None:
        for name in ("persistent_path", "snapshot_path"):
            path = getattr(self, name)
            if path is not None:
                if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                    raise OptionError(f"{name}={path!r}: give one folder as a str or Path, or None")
                self._set(name, expand_path(name, os.fspath(path)))
        if self.snapshot_path is not None and self.persistent_path is None:
            raise self._make_error("snapshot_path", "only a store on disk has snapshots; give persistent_path too")
        if as_int(self.storage_dim) == -1:  # OneFlow's value for "not given"
            self._set("storage_dim", None)
        for name in ("capacity", "size_factor", "storage_dim", "ttl_steps"):
            self._set_int(name, "a whole number > 0 and < 2**63", 1, (1 << 63) - 1)
        size = as_int(self.physical_block_size, 512, 1 << 20)
        if size is None or size & (size - 1):
            remedy = "give the disk's block size: a power of two from 512 to 1048576"
            raise self._make_error("physical_block_size", remedy)
        self._set("physical_block_size", size)
        check_choice("open", self.open, OPEN_MODES)
        number = self.state_dict_snapshots
        if not isinstance(number, bool):
            expected = "True, False, or the number of snapshots to keep, from 1"
            self._set("state_dict_snapshots", check_int("state_dict_snapshots", number, expected, 1))
        if number and self.persistent_path is None:
            problem = "without a persistent_path, state_dict() holds the rows themselves"
            raise self._make_error("state_dict_snapshots", f"{problem}; leave it out, or give persistent_path")
        self._set("changed_keys_mb", check_budget("changed_keys_mb", self.changed_keys_mb, allows_zero=True))
        self._check_lifecycle()

    def _check_lifecycle(self) -> None:
        check_choice("eviction", self.eviction, EVICTIONS)
        if self.eviction != "none" and self.capacity is None:
            raise OptionError(f"eviction={self.eviction!r} needs a limit, but capacity=None; give a capacity")
        if self.eviction == "ttl" and self.ttl_steps is None:
            raise OptionError("eviction='ttl' evicts rows older than ttl_steps, but ttl_steps=None; give ttl_steps")
        if self.ttl_steps is not None and self.ttl_steps >= 1 << 32:
            raise self._make_error("ttl_steps", "steps are counted in 32 bits; give less than 2**32, or None")
        if self.admission is not None:
            number = as_number(self.admission)
            if number is None or not (0 < number < 1 or as_int(number, 2, MAX_ADMISSION_COUNT)):
                remedy = f"give the number of steps that must look a row up, from 2 to {MAX_ADMISSION_COUNT}"
                raise self._make_error("admission", f"{remedy}, a probability > 0 and < 1, or None to keep every row")
            self._set("admission", number)

    def check_row(self, dim: int, width: int) -> None:
        """Raise OptionError if size_factor or storage_dim does not fit rows of `width` floats, state included."""
        problem = f"with this optimizer a row takes {width} floats"
        if self.storage_dim is not None and self.storage_dim != width:
            raise self._make_error("storage_dim", f"{problem}; leave storage_dim out")
        if self.storage_dim is None and self.size_factor is not None and self.size_factor * dim != width:
            raise self._make_error("size_factor", f"{problem} for {dim} columns; leave size_factor out")


@options_class
class DeviceMemOptions(StoreOptions):
    """Stores all rows in device memory (host memory without a GPU). `StoreOptions` describes the arguments."""

    store: str = field(default="device_mem", init=False)


@options_class
class HostMemOptions(StoreOptions):
    """Stores all rows in host memory. `StoreOptions` describes the arguments."""

    store: str = field(default="host_mem", init=False)


@options_class
class CachedHostMemOptions(StoreOptions, _CacheFields):
    """Stores all rows in host memory, with a cache in device memory. `StoreOptions` describes the other arguments.

    Args:
        cache_budget_mb: The cache size in MiB. "auto" takes half of the GPU memory that is free when the table opens.
            Without a GPU, "auto" takes an eighth of the free host memory. "auto" prints the sizes to stderr.
        cache_policy: Which row to evict from a full cache set: "lru" (the least recently used row) or "lfu" (the row
            used in the fewest steps). A row that an announced step needs is not evicted.
        overflow_mb: The size in MiB of the overflow area, in addition to the cache. The area holds rows that do not fit
            into their set. In a cached_ssd store, up to half of it may hold rows waiting to be written to disk. When it
            is full, prefetch and eviction wait; a step may exceed the limit. Default: the cache size, but at most
            64 MiB (192 MiB for cached_ssd). The default grows to two batches if they need more.
    """

    store: str = field(default="cached_host_mem", init=False)
    cache_policy: str = field(default="lru", kw_only=True)
    overflow_mb: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("cache_budget_mb", check_auto_budget("cache_budget_mb", self.cache_budget_mb, allows_zero=False))
        if self.overflow_mb is not None:
            self._set("overflow_mb", check_budget("overflow_mb", self.overflow_mb, allows_zero=False))
        check_choice("cache_policy", self.cache_policy, CACHE_POLICIES)

    @property
    def memory_mb(self) -> float | None:
        """MiB of all caches and overflow areas; areas may grow with the batches. None if a budget is "auto"."""
        caches = [mb for mb in (self.cache_budget_mb, getattr(self, "host_cache_budget_mb", 0)) if mb]
        return None if "auto" in caches else sum(as_mb(mb) + self.compute_overflow_mb(as_mb(mb)) for mb in caches)

    def compute_overflow_mb(self, cache_mb: float) -> float:
        """Return the overflow area's MiB for a cache of `cache_mb` MiB. The area may grow with the batches."""
        return compute_default_overflow_mb(self.store, cache_mb) if self.overflow_mb is None else self.overflow_mb


@options_class
class CachedSsdOptions(CachedHostMemOptions, _HostCacheFields):
    """Stores all rows in RocksDB under `persistent_path`, and caches hot rows in device memory and host memory.

    `StoreOptions` and `CachedHostMemOptions` describe the other arguments.

    Args:
        cache_budget_mb: The size in MiB of the cache in device memory. "auto" gives the cache half of the memory that
            is free when the table opens, and the overflow area at most an eighth. "auto" prints the sizes to stderr.
        host_cache_budget_mb: The size in MiB of a second cache, in host memory; 0 for none, or "auto". If both budgets
            are "auto" and there is no GPU, there is no second cache.
        shards: The number of RocksDB databases in a new folder, 1 to 64. Rows are divided among the databases by hash.
            An existing folder keeps its number of databases. Default: 4.
        read_mode: "buffered" reads files through the page cache. "mmap" maps files, and is faster if files are in
            memory, but a disk read error kills the process. "direct" bypasses the page cache.
        io_threads: The maximum number of threads for each of three tasks: reading rows, prefetch, and write-back. By
            default, up to 64 threads read rows, depending on the disk. Prefetch and write-back use min(4, cores / 2).
        async_io: Read with io_uring, if this build's RocksDB supports it.
        rocksdb_cache_mb: The size in MiB of RocksDB's block cache, only for `read_mode="direct"`; the other modes use
            the page cache. Default: 32.
        index_mb: The size in MiB of a cache for the indexes and filters of RocksDB's files. Reads of rows then read
            missing parts from the disk. None keeps indexes and filters in memory, which takes 2 to 13 bytes for each
            row. Not with `read_mode="mmap"`, which keeps indexes in the page cache.
        rocksdb_options: RocksDB options that override tierbed's settings, as a dict or RocksDB's options string. File
            format options go into {"block_based_table_factory": {...}}. docs/tiers.md lists the legal options.
    """

    store: str = field(default="cached_ssd", init=False)
    persistent_path: AnyPath = field()
    shards: int | None = field(default=None, kw_only=True)
    read_mode: str = field(default="buffered", kw_only=True)
    io_threads: int | None = field(default=None, kw_only=True)
    async_io: bool = field(default=True, kw_only=True)
    rocksdb_cache_mb: float | None = field(default=None, kw_only=True)
    index_mb: float | None = field(default=None, kw_only=True)
    rocksdb_options: str | Mapping[str, Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_rocksdb()
        super().__post_init__()
        host_budget = check_auto_budget("host_cache_budget_mb", self.host_cache_budget_mb, allows_zero=True)
        self._set("host_cache_budget_mb", host_budget)
        self._set_int("shards", f"a whole number from 1 to {BUCKETS}", 1, BUCKETS)
        check_choice("read_mode", self.read_mode, READ_MODES)
        if self.read_mode == "direct":
            cache_mb = ROCKSDB_CACHE_MB if self.rocksdb_cache_mb is None else self.rocksdb_cache_mb
            self._set("rocksdb_cache_mb", check_budget("rocksdb_cache_mb", cache_mb, allows_zero=True))
        elif self.rocksdb_cache_mb is not None:
            problem = f"read_mode={self.read_mode!r} uses the page cache instead"
            raise self._make_error("rocksdb_cache_mb", f"{problem}; give read_mode='direct', or leave it out")
        if self.index_mb is not None:
            self._check_index_mb(self.index_mb)
        self._set_int("io_threads", "1 to 64", 1, 64)
        check_flags(OptionError, async_io=self.async_io)
        if self.rocksdb_options is not None:
            self._set("rocksdb_options", format_options(self.rocksdb_options))
        if self.persistent_path is None:
            raise OptionError("persistent_path=None: cached_ssd keeps rows on disk; give a folder on the SSD")

    def _check_index_mb(self, index_mb: float) -> None:
        self._set("index_mb", check_budget("index_mb", index_mb, allows_zero=False))
        if self.read_mode == "mmap":
            remedy = "leave it out, or give read_mode='buffered'"
            raise self._make_error("index_mb", f"read_mode='mmap' keeps indexes in the page cache; {remedy}")
        minimum = max(MIN_INDEX_MB, (self.capacity or 0) / MAX_ROWS_PER_INDEX_MB)
        if index_mb < minimum:
            rows = "" if self.capacity is None else f" for capacity={self.capacity} rows"
            problem = f"this is too small to keep any index{rows}; give at least {minimum:.3g}"
            raise self._make_error("index_mb", f"{problem}, or None for no limit")

    @property
    def background_threads(self) -> int:
        return self.io_threads or BACKGROUND_THREADS

    @property
    def look_ahead_mb(self) -> float:
        """MiB that `graph.run` may use for the ids of more than 8 announced batches."""
        return max(LOOK_AHEAD_MB, (self.memory_mb or 0) / 8)


def compute_default_overflow_mb(store: str, cache_mb: float) -> float:
    return min(cache_mb, MAX_OVERFLOW_MB[store])


def as_mb(budget: Budget) -> float:
    """Return a budget as a number. The caller has already replaced "auto"."""
    assert budget != "auto"
    return budget


def require_rocksdb() -> None:
    """Raise StoreError if the package was built without RocksDB."""
    if not _core.has_rocksdb:
        raise StoreError(
            "cached_ssd: this build of tierbed has no RocksDB; install it (apt install librocksdb-dev) and rebuild "
            "tierbed (pip install --force-reinstall --no-deps . in its source folder)"
        )


make_device_mem_store_options = DeviceMemOptions
make_host_mem_store_options = HostMemOptions
make_cached_host_mem_store_options = CachedHostMemOptions
make_cached_ssd_store_options = CachedSsdOptions

STORES: dict[str, type[StoreOptions]] = {
    cls.store: cls for cls in (DeviceMemOptions, HostMemOptions, CachedHostMemOptions, CachedSsdOptions)
}
for _name, _class in STORES.items():
    _class.constructor_name = f"make_{_name}_store_options"


def store_options_from_dict(options: Mapping[str, Any], where: str = "store_options") -> StoreOptions:
    """Make store options from a dict: `store` and its arguments. Raises OptionError; messages begin with `where`."""
    if isinstance(options, StoreOptions):
        return options
    if not isinstance(options, Mapping):
        example = "make_device_mem_store_options()"
        raise OptionError(f"{where}={options!r}: give the result of a make_*_store_options function, such as {example}")
    arguments = dict(options)
    store = arguments.pop("store", None)
    if not isinstance(store, str) or store not in STORES:
        raise OptionError(f"{where}: store={store!r}; give one of {', '.join(STORES)}")
    known = [f.name for f in fields(STORES[store]) if f.init]
    unknown = sorted(set(arguments) - set(known))
    if unknown:
        raise OptionError(f"{where}: {store} has no option {', '.join(unknown)}; {suggest_name(unknown, known)}")
    try:
        return STORES[store](**arguments)
    except OptionError as error:
        raise OptionError(f"{where}: {store}: {error}") from None


@validate_arguments("path")
def load_store_options(path: AnyPath, name: str) -> StoreOptions:
    """Read an embedding's store options from a TOML file.

    The file holds a TOML table [name]. Its key `store` names the kind of store, such as "cached_ssd". Other keys are
    arguments of the store's `make_*` function. A relative persistent_path starts at the working directory. To check a
    file, run `tierbed store options`.

    Args:
        path: The TOML file.
        name: The embedding's name.

    Raises:
        OptionError: If the file or the table is missing, the TOML is invalid, or an option is unknown or wrong.
    """
    tables, file = read_store_options(path), f"store options file {os.fspath(path)!r}"
    if name not in tables:
        raise OptionError(f"{file} has no table [{name}]; it has {', '.join(tables) or 'none'}")
    if not isinstance(tables[name], dict):
        raise OptionError(f"{file}: {name} is a value, not a TOML table; write options in a table [embedding name]")
    return store_options_from_dict(tables[name], f"{os.fspath(path)} [{name}]")


def read_store_options(path: AnyPath) -> dict[str, Any]:
    """Read a TOML file of store options without checking them. Raises OptionError for a missing file or bad TOML."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"store options file {os.fspath(path)!r}: {error}") from None
