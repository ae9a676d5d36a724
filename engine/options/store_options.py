"""Store options: a class for each store, options from a dict or a TOML file, and the options of RocksDB."""

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
    auto_budget_option,
    budget_option,
    check_arguments,
    check_flags,
    checked_arguments,
    choice_option,
    expanded,
    int_option,
    nearest,
)
from ..errors import OptionError, StoreError
from ..row_format import BUCKETS
from .rocksdb_options import options_text

CACHE_POLICIES = ("lru", "lfu")
MAX_OVERFLOW_MB = {"cached_host_mem": 64, "cached_ssd": 192}  # of the default
BACKGROUND_THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))  # the other cores are for the dense part of a step
OPEN_MODES = ("resume", "fresh", "error", "mixed", "pretrained")
EVICTIONS = ("none", "lru", "lfu", "ttl", "distance_lfu")
MAX_ADMISSION_COUNT = 255  # of lookups of a row
Budget = float | Literal["auto"]  # MiB; engine/cache/memory_split.py computes "auto"
ROCKSDB_CACHE_MB = 32  # of blocks
READ_MODES = ("buffered", "mmap", "direct")
Path_ = str | os.PathLike[str]


_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def options_class(cls: _Class) -> _Class:
    """Make a frozen dataclass of a subclass of `PlainDict`, whose constructor is a public `make_*` function.

    An unknown keyword or a missing argument is an OptionError, which names `cls.maker` and the nearest argument.
    """
    made: Any = dataclass(frozen=True, repr=False, eq=False)(cls)
    initialise, signature = made.__init__, inspect.signature(made.__init__)

    @wraps(initialise)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        check_arguments(self.maker, signature, (self, *args), kwargs)
        initialise(self, *args, **kwargs)

    made.__init__ = checked
    return cls


@options_class
class PlainDict(Mapping[str, Any]):
    """The base of option classes: `options["capacity"]`, `dict(options)` and `options == {...}` work as for a dict."""

    maker: ClassVar = "options"  # the public name of the constructor, such as "make_host_mem_store_options"

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
        """Make the option an int, as `int_option`, if it is not None."""
        value = getattr(self, name)
        if value is not None:
            self._set(name, int_option(name, value, f"{expected}, or None", minimum, maximum))

    def _wrong(self, name: str, problem: str) -> OptionError:
        return OptionError(f"{name}={getattr(self, name)!r}: {problem}")

    def as_dict(self) -> dict[str, Any]:
        """Nested plain dicts and lists, which msgpack and JSON accept."""
        return {name: _plain(value) for name, value in self.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, PlainDict):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


# The arguments of a store's options are the fields of its bases, from the last base in the method resolution order on.


@options_class
class _Store(PlainDict):
    store: str = field(init=False)


@options_class
class _Cached(_Store):
    cache_budget_mb: Budget


@options_class
class _Stored(_Store):
    persistent_path: Path_ | None = None
    capacity: int | None = None
    size_factor: int | None = None
    storage_dim: int | None = None
    physical_block_size: int = 4096


@options_class
class _HostCached(_Stored):
    host_cache_budget_mb: Budget = 0


@options_class
class StoreOptions(_Stored):
    """The options that every store has. Raises OptionError for values that cannot work.

    persistent_path: the folder that holds a folder for each embedding, by name; None keeps nothing on disk. `~` and
    `${NAME}` in paths are replaced, and a variable that is not set is an error.
    snapshot_path: the folder that holds a folder for the snapshots of each embedding, by name; None is persistent_path.
    capacity: the maximum of written rows, over all tables; None is no limit.
    size_factor, storage_dim: row size in multiples of the dim, or in floats, optimizer state included. The engine knows
    the row size; a given one is checked.
    physical_block_size: bytes that the disk reads at once.
    open: what to do with a folder after an unclean shutdown: "resume" loads the recovery snapshot, or starts empty if
    there is none; "error" raises. "fresh" always starts empty; snapshots are kept. "mixed" is "resume", and accepts
    rows of different steps if embeddings that are trained together have no step in common. "pretrained" is "resume",
    and says that a new dense part is to train with these rows.
    eviction: which rows are deleted for new ones at `capacity`: "none" (an error), "lru", "lfu", "ttl", "distance_lfu".
    admission: which new rows training keeps. None: all; a whole number n: rows that n training steps looked up; a
    probability p: each row with p at every step.
    ttl_steps: rows that were not written for more than this number of steps are deleted; with eviction "ttl", only at
    `capacity`. None: never. docs/lifecycle.md says how eviction, admission and ttl_steps work.
    state_dict_snapshots: whether `state_dict()` saves a snapshot, which `load_state_dict()` loads; a number keeps that
    many of the latest, in addition to the one of the present rows. Without a persistent_path, `state_dict()` holds the
    rows.
    """

    open: str = "resume"
    snapshot_path: Path_ | None = field(default=None, kw_only=True)
    eviction: str = field(default="none", kw_only=True)
    admission: float | None = field(default=None, kw_only=True)
    ttl_steps: int | None = field(default=None, kw_only=True)
    state_dict_snapshots: bool | int = field(default=False, kw_only=True)

    @property
    def background_threads(self) -> int:
        """How many threads work while steps run, in addition to those of a step, if none waits for a disk."""
        return BACKGROUND_THREADS

    def __post_init__(self) -> None:
        for name in ("persistent_path", "snapshot_path"):
            path = getattr(self, name)
            if path is not None:
                if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                    raise OptionError(f"{name}={path!r}: give one folder as a str or Path, or None")
                self._set(name, expanded(name, os.fspath(path)))
        if self.snapshot_path is not None and self.persistent_path is None:
            raise self._wrong("snapshot_path", "snapshots are of a store on disk; give persistent_path too")
        if as_int(self.storage_dim) == -1:  # OneFlow's value for "not given"
            self._set("storage_dim", None)
        for name in ("capacity", "size_factor", "storage_dim", "ttl_steps"):
            self._set_int(name, "a whole number > 0 and < 2**63", 1, (1 << 63) - 1)
        size = as_int(self.physical_block_size, 512, 1 << 20)
        if size is None or size & (size - 1):
            remedy = "give a power of two from 512 to 1048576 bytes, as the disk's block"
            raise self._wrong("physical_block_size", remedy)
        self._set("physical_block_size", size)
        choice_option("open", self.open, OPEN_MODES)
        number = self.state_dict_snapshots
        if not isinstance(number, bool):
            expected = "True, False, or how many snapshots of the latest states to keep, from 1"
            self._set("state_dict_snapshots", int_option("state_dict_snapshots", number, expected, 1))
        if number and self.persistent_path is None:
            problem = "without a persistent_path, state_dict() holds the rows themselves"
            raise self._wrong("state_dict_snapshots", f"{problem}; leave it out, or give persistent_path")
        self._check_lifecycle()

    def _check_lifecycle(self) -> None:
        choice_option("eviction", self.eviction, EVICTIONS)
        if self.eviction != "none" and self.capacity is None:
            raise OptionError(
                f"eviction={self.eviction!r} makes room at the capacity, and capacity=None has none; give a capacity"
            )
        if self.eviction == "ttl" and self.ttl_steps is None:
            raise OptionError("eviction='ttl' evicts rows older than ttl_steps, and ttl_steps=None; give ttl_steps")
        if self.ttl_steps is not None and self.ttl_steps >= 1 << 32:
            raise self._wrong("ttl_steps", "steps are counted in 32 bits; give less than 2**32, or None")
        rule = as_number(self.admission)
        if rule is not None:
            self._set("admission", rule)
        if self.admission is not None and (rule is None or not (0 < rule < 1 or as_int(rule, 2, MAX_ADMISSION_COUNT))):
            remedy = f"give the steps that must look a row up, from 2 to {MAX_ADMISSION_COUNT}, or a probability > 0"
            raise self._wrong("admission", f"{remedy} and < 1, or None to keep every row")

    def check_row(self, dim: int, width: int) -> None:
        """Raises OptionError if a given row size is not the one of the optimizer: `width` floats for `dim` columns."""
        problem = f"with this optimizer a row takes {width} floats"
        if self.storage_dim is not None and self.storage_dim != width:
            raise self._wrong("storage_dim", f"{problem}; leave storage_dim out")
        if self.storage_dim is None and self.size_factor is not None and self.size_factor * dim != width:
            raise self._wrong("size_factor", f"{problem} for {dim} columns; leave size_factor out")


@options_class
class DeviceMemOptions(StoreOptions):
    """All rows in device memory (host memory if there is no device): the fastest store, bounded by that memory."""

    store: str = field(default="device_mem", init=False)


@options_class
class HostMemOptions(StoreOptions):
    """All rows in host memory."""

    store: str = field(default="host_mem", init=False)


@options_class
class CachedHostMemOptions(StoreOptions, _Cached):
    """All rows in host memory, the hot ones cached in `cache_budget_mb` MiB of device memory.

    cache_budget_mb: "auto" divides the memory that is free when the table opens, and prints the division to stderr. The
    cache gets an eighth of memory that holds the table as well, and half of a GPU's memory.
    cache_policy: which row of a full set is evicted if no announced step decides: "lru", the row unused for longest, or
    "lfu", the row that fewest steps used.
    overflow_mb: MiB of the overflow area, in addition to the cache: for rows that do not fit their set and, above
    RocksDB, for rows waiting for write-back, which keep half of it while nothing else needs it. Prefetch and evictions
    wait at this bound; a step takes what its own batch needs. None: as much as the cache, up to 64 MiB or above RocksDB
    192, and at least two batches.
    """

    store: str = field(default="cached_host_mem", init=False)
    cache_policy: str = field(default="lru", kw_only=True)
    overflow_mb: float | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("cache_budget_mb", auto_budget_option("cache_budget_mb", self.cache_budget_mb, zero=False))
        if self.overflow_mb is not None:
            self._set("overflow_mb", budget_option("overflow_mb", self.overflow_mb, zero=False))
        choice_option("cache_policy", self.cache_policy, CACHE_POLICIES)

    @property
    def memory_mb(self) -> float | None:
        """MiB of each cache and its overflow area together, before these follow the batches; None if one is "auto"."""
        caches = [mb for mb in (self.cache_budget_mb, getattr(self, "host_cache_budget_mb", 0)) if mb]
        return None if "auto" in caches else sum(mib(mb) + self.overflow_for(mib(mb)) for mb in caches)

    def overflow_for(self, cache_mb: float) -> float:
        """MiB of the overflow area of a cache of `cache_mb`, before it follows the batches."""
        return default_overflow_mb(self.store, cache_mb) if self.overflow_mb is None else self.overflow_mb


@options_class
class CachedSsdOptions(CachedHostMemOptions, _HostCached):
    """All rows in RocksDB under `persistent_path`, the hot ones cached in device memory and, by option, in host memory.

    cache_budget_mb: MiB of the cache in device memory. host_cache_budget_mb: MiB of a cache in host memory below it; 0
    is none. "auto" divides the memory that is free when the table opens, and prints the division to stderr. The cache
    gets half of it, and `overflow_mb` is at most an eighth. If both are "auto" and there is no GPU, there is no host
    cache.
    shards: RocksDB databases that a new folder is split into, by hash; 1 to 64, by default 4. An existing folder keeps
    its number.
    read_mode: "buffered" reads files through the page cache. "mmap" maps files; it is faster if they are in memory, and
    a failed read of the disk ends the process. "direct" bypasses the page cache.
    io_threads: the maximum of threads that read rows at once, that fetch rows ahead of their step, and that write rows
    back. None: as many readers as the disk can serve, up to 64, and half of the cores for the others.
    async_io: whether to read by io_uring, if the RocksDB of this build can.
    rocksdb_cache_mb: MiB of RocksDB's own cache of blocks, by default 32, for "direct" reads alone; other reads have
    the page cache.
    rocksdb_options: a dict or RocksDB's options string, which overrides tierbed's own settings; it is stored as the
    string. docs/tiers.md, "RocksDB", lists the names and their values. Options of a file's format go into
    {"block_based_table_factory": {...}}.
    """

    store: str = field(default="cached_ssd", init=False)
    persistent_path: Path_ = field()
    shards: int | None = field(default=None, kw_only=True)
    read_mode: str = field(default="buffered", kw_only=True)
    io_threads: int | None = field(default=None, kw_only=True)
    async_io: bool = field(default=True, kw_only=True)
    rocksdb_cache_mb: float | None = field(default=None, kw_only=True)
    rocksdb_options: str | Mapping[str, Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        require_rocksdb()
        super().__post_init__()
        host_budget = auto_budget_option("host_cache_budget_mb", self.host_cache_budget_mb, zero=True)
        self._set("host_cache_budget_mb", host_budget)
        self._set_int("shards", f"a whole number from 1 to {BUCKETS}", 1, BUCKETS)
        choice_option("read_mode", self.read_mode, READ_MODES)
        if self.read_mode == "direct":
            cache_mb = ROCKSDB_CACHE_MB if self.rocksdb_cache_mb is None else self.rocksdb_cache_mb
            self._set("rocksdb_cache_mb", budget_option("rocksdb_cache_mb", cache_mb, zero=True))
        elif self.rocksdb_cache_mb is not None:
            problem = f"with read_mode={self.read_mode!r} the page cache has the blocks"
            raise self._wrong("rocksdb_cache_mb", f"{problem}; give read_mode='direct', or leave it out")
        self._set_int("io_threads", "1 to 64", 1, 64)
        check_flags(OptionError, async_io=self.async_io)
        if self.rocksdb_options is not None:
            self._set("rocksdb_options", options_text(self.rocksdb_options))
        if self.persistent_path is None:
            raise OptionError("persistent_path=None: cached_ssd keeps rows on disk; give a folder on the SSD")

    @property
    def background_threads(self) -> int:
        return self.io_threads or BACKGROUND_THREADS


def default_overflow_mb(store: str, cache_mb: float) -> float:
    return min(cache_mb, MAX_OVERFLOW_MB[store])


def mib(budget: Budget) -> float:
    """A budget of options whose "auto" budgets were replaced by numbers."""
    assert budget != "auto"
    return budget


def require_rocksdb() -> None:
    """Raises StoreError if the package was built without RocksDB."""
    if not _core.has_rocksdb:
        raise StoreError(
            "cached_ssd: this build of tierbed has no RocksDB; install it (apt install librocksdb-dev) and build "
            "tierbed again (pip install --force-reinstall --no-deps . in its source folder)"
        )


make_device_mem_store_options = DeviceMemOptions
make_host_mem_store_options = HostMemOptions
make_cached_host_mem_store_options = CachedHostMemOptions
make_cached_ssd_store_options = CachedSsdOptions

STORES: dict[str, type[StoreOptions]] = {
    one.store: one for one in (DeviceMemOptions, HostMemOptions, CachedHostMemOptions, CachedSsdOptions)
}
for _name, _class in STORES.items():
    _class.maker = f"make_{_name}_store_options"


def store_options_from_dict(options: Mapping[str, Any], where: str = "store_options") -> StoreOptions:
    """Store options from their printed form, `store` and the maker's arguments. Raises OptionError naming `where`."""
    if isinstance(options, StoreOptions):
        return options
    if not isinstance(options, Mapping):
        raise OptionError(f"{where}={options!r}: make one with make_device_mem_store_options or another maker")
    given = dict(options)
    store = given.pop("store", None)
    if not isinstance(store, str) or store not in STORES:
        raise OptionError(f"{where}: store={store!r}; give one of {', '.join(STORES)}")
    known = [f.name for f in fields(STORES[store]) if f.init]
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise OptionError(f"{where}: {store} has no option {', '.join(unknown)}; {nearest(unknown, known)}")
    try:
        return STORES[store](**given)
    except OptionError as error:
        raise OptionError(f"{where}: {store}: {error}") from None


@checked_arguments("path")
def load_store_options(path: Path_, name: str) -> StoreOptions:
    """The store options of embedding `name` from a TOML file: a table [name] with `store` and the maker's arguments.

    A relative persistent_path is relative to the working directory; `~` and `${NAME}` in it are replaced. `tierbed
    store options` shows what the options of a file become. Raises OptionError for a missing file or table, bad TOML,
    unknown options.
    """
    tables = read_store_options(path)
    if name in tables and not isinstance(tables[name], dict):
        raise OptionError(
            f"store options file {os.fspath(path)!r}: {name} is outside a table; put it under [name], the name of "
            "its embedding"
        )
    if name not in tables:
        raise OptionError(
            f"store options file {os.fspath(path)!r} has no table [{name}]; it has {', '.join(tables) or 'none'}"
        )
    return store_options_from_dict(tables[name], f"{os.fspath(path)} [{name}]")


def read_store_options(path: Path_) -> dict[str, Any]:
    """The unchecked contents of a TOML file of store options. Raises OptionError for a missing file or bad TOML."""
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(f"store options file {os.fspath(path)!r}: {error}") from None
