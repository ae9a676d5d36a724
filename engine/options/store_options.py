"""Store options: a class and a maker for each store, from a dict or a TOML file, and the RocksDB options among them."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from .. import _core
from ..checks import as_int, as_number, auto_budget_option, budget_option, expanded, int_option
from ..errors import OptionError, StoreError
from ..row_format import BUCKETS

CACHE_POLICIES = ("lru", "lfu")
BESIDE = max(1, min(4, (os.cpu_count() or 1) // 2))  # threads; the other cores are for the dense part of a step
OPEN_MODES = ("resume", "fresh", "error", "mixed")
EVICTIONS = ("none", "lru", "lfu", "ttl", "distance_lfu")
MOST_SIGHTS = 255  # the most sightings of a row that are counted
Budget = float | Literal["auto"]  # MiB; "auto" is what engine/cache/memory_split.py gives a cache
CACHE_MB = 32  # of RocksDB's cache of blocks
READ_MODES = ("buffered", "mmap", "direct")
Path_ = str | os.PathLike[str]


@dataclass(frozen=True, repr=False, eq=False)
class PlainDict(Mapping[str, Any]):
    """The base of option classes: `options["capacity"]`, `dict(options)` and `options == {...}` work as for a dict.

    Decorate a subclass with `@dataclass(frozen=True, repr=False, eq=False)`, so that the methods here stand.
    """

    def __getitem__(self, name: str) -> Any:
        if name not in set(self):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return (field.name for field in fields(self))

    def __len__(self) -> int:
        return len(fields(self))

    def __repr__(self) -> str:
        return repr(dict(self))

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts and lists all the way down, as msgpack and JSON take them."""
        return {name: _plain(value) for name, value in self.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, PlainDict):
        return value.as_dict()
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


@dataclass(frozen=True, repr=False, eq=False)
class StoreOptions(PlainDict):
    """The options that every store has.

    persistent_path: the folder that holds a folder for each embedding, by name; None keeps nothing on disk. `~` and
    `${NAME}` in paths are replaced, and a variable that is not set is an error.
    snapshot_path: the folder that holds a folder for the snapshots of each embedding, by name; None is persistent_path.
    capacity: the most rows that may have been written, over all tables; None is no limit.
    size_factor, storage_dim: row size in multiples of the dim, or in floats, optimizer state included. The engine knows
    the row size; a given one is checked.
    physical_block_size: bytes that the disk reads at once.
    open: what to do with a folder whose last run did not close: "resume" restores the last snapshot, or starts empty
    where there is none; "error" raises. "fresh" starts empty in any case; snapshots are kept. "mixed" is "resume", and
    accepts rows of different steps where embeddings that are trained together have no step in common.
    eviction: which rows make room for new ones at `capacity`: "none" (an error), "lru", "lfu", "ttl", "distance_lfu".
    admission: which new rows training keeps. None: all; a whole number n: rows that n training steps looked up; a
    probability p: each row with p at every step.
    ttl_steps: rows that were not written for more than so many steps are dropped; with eviction "ttl", only where room
    is needed. None: never. docs/lifecycle.md says how eviction, admission and ttl_steps work.
    state_dict_snapshots: whether `state_dict()` saves a snapshot, which `load_state_dict()` loads; a number keeps that
    many of the latest, besides the one of the present rows. Without a persistent_path, `state_dict()` holds the rows.
    """

    store: str = field(init=False)
    persistent_path: str | os.PathLike[str] | None = None
    capacity: int | None = None
    size_factor: int | None = None
    storage_dim: int | None = None
    physical_block_size: int = 4096
    open: str = "resume"
    snapshot_path: str | os.PathLike[str] | None = field(default=None, kw_only=True)
    eviction: str = field(default="none", kw_only=True)
    admission: float | None = field(default=None, kw_only=True)
    ttl_steps: int | None = field(default=None, kw_only=True)
    state_dict_snapshots: bool | int = field(default=False, kw_only=True)

    @property
    def threads_beside(self) -> int:
        """How many threads work beside those of a step, where they do not wait for a disk."""
        return BESIDE

    def __post_init__(self) -> None:
        for name in ("persistent_path", "snapshot_path"):
            path = getattr(self, name)
            if path is not None:
                if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
                    raise OptionError(f"{name}={path!r}: give one folder as a str or Path, or None")
                self._set(name, expanded(name, os.fspath(path)))
        if self.snapshot_path is not None and self.persistent_path is None:
            raise OptionError(
                f"snapshot_path={self.snapshot_path!r}: snapshots are of a store on disk; give persistent_path too"
            )
        if as_int(self.storage_dim) == -1:  # OneFlow's word for "not given"
            self._set("storage_dim", None)
        for name in ("capacity", "size_factor", "storage_dim", "ttl_steps"):
            value = getattr(self, name)
            if value is not None:
                wanted = "a whole number > 0 and < 2**63, or None"
                self._set(name, int_option(name, value, wanted, 1, (1 << 63) - 1))
        size = as_int(self.physical_block_size, 512, 1 << 20)
        if size is None or size & (size - 1):
            raise OptionError(
                f"physical_block_size={self.physical_block_size!r}: give a power of two from 512 to 1048576 bytes, as "
                "the disk's block"
            )
        self._set("physical_block_size", size)
        if self.open not in OPEN_MODES:
            raise OptionError(f"open={self.open!r}: give one of {', '.join(map(repr, OPEN_MODES))}")
        kept = self.state_dict_snapshots
        if not isinstance(kept, bool):
            wanted = "True, False, or how many snapshots of the latest states to keep, from 1"
            self._set("state_dict_snapshots", int_option("state_dict_snapshots", kept, wanted, 1))
        if kept and self.persistent_path is None:
            raise OptionError(
                f"state_dict_snapshots={kept!r}: without a persistent_path, state_dict() holds the rows themselves; "
                "leave it out, or give persistent_path"
            )
        self._check_lifecycle()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _check_lifecycle(self) -> None:
        if self.eviction not in EVICTIONS:
            raise OptionError(f"eviction={self.eviction!r}: give one of {', '.join(map(repr, EVICTIONS))}")
        if self.eviction != "none" and self.capacity is None:
            raise OptionError(
                f"eviction={self.eviction!r} makes room at the capacity, and capacity=None has none; give a capacity"
            )
        if self.eviction == "ttl" and self.ttl_steps is None:
            raise OptionError("eviction='ttl' evicts rows older than ttl_steps, and ttl_steps=None; give ttl_steps")
        if self.ttl_steps is not None and self.ttl_steps >= 1 << 32:
            raise OptionError(
                f"ttl_steps={self.ttl_steps}: steps are counted in 32 bits; give less than 2**32, or None"
            )
        rule = as_number(self.admission)
        if rule is not None:
            self._set("admission", rule)
        if self.admission is not None and (rule is None or not (0 < rule < 1 or as_int(rule, 2, MOST_SIGHTS))):
            raise OptionError(
                f"admission={self.admission!r}: give the steps that must look a row up, from 2 to {MOST_SIGHTS}, or a "
                "probability > 0 and < 1, or None to keep every row"
            )

    def check_row(self, dim: int, width: int) -> None:
        """Raises OptionError where a given row size is not the one of the optimizer: `width` floats for `dim`."""
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
    """A device cache of `cache_budget_mb` MiB in front of a full table in host memory.

    cache_budget_mb: "auto" divides the memory that is free when the table opens, and prints the division to stderr. Of
    memory that holds the table as well the cache then gets an eighth, of a GPU's a half.
    cache_policy: which row of a full set gives way where no announced step decides: "lru", the row unused for longest,
    or "lfu", the row that fewest steps used.
    overflow_mb: MiB beside the cache for rows that no set has room for and, before RocksDB, for rows on their way down:
    half of it holds such rows for as long as nothing else needs the room. Prefetch and rows that give way wait at this
    bound; a step takes what its own batch needs.
    """

    store: str = field(default="cached_host_mem", init=False)
    cache_budget_mb: Budget = field(kw_only=True)
    cache_policy: str = field(default="lru", kw_only=True)
    overflow_mb: float = field(default=64, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set("cache_budget_mb", auto_budget_option("cache_budget_mb", self.cache_budget_mb, zero=False))
        self._set("overflow_mb", budget_option("overflow_mb", self.overflow_mb, zero=False))
        if self.cache_policy not in CACHE_POLICIES:
            raise OptionError(f"cache_policy={self.cache_policy!r}: give one of {', '.join(map(repr, CACHE_POLICIES))}")


@dataclass(frozen=True, repr=False, eq=False)
class CachedSsdOptions(CachedHostMemOptions):
    """A device cache, and a host cache if `host_cache_budget_mb` is not 0, before RocksDB in `persistent_path`.

    cache_budget_mb, host_cache_budget_mb: "auto" divides the memory that is free when the table opens, and prints the
    division to stderr. The cache gets half of it, and `overflow_mb` is at most an eighth. Where both are "auto" and
    there is no GPU, there is no host cache.
    shards: databases that a new folder is split into, by hash; 1 to 64, and 4 where None. An existing folder keeps its
    number.
    read_mode: "buffered" reads files through the page cache. "mmap" maps files; it is faster where they are in memory,
    and ends the process where the disk fails to read. "direct" bypasses the page cache.
    io_threads: the most threads that read rows at once, that bring rows up ahead of their step, and that write rows
    down. None: as many readers as the disk answers to, up to 64, and half of the cores for the others.
    async_io: read by io_uring where the RocksDB of this build does.
    rocksdb_cache_mb: MiB of RocksDB's own cache of blocks, for "direct" reads alone, 32 where None; other reads have
    the page cache.
    rocksdb_options: a dict or RocksDB's options string, over tierbed's own settings; it is kept as the string. Names
    are fields of RocksDB's DBOptions and ColumnFamilyOptions. Options of a file's format go into
    {"block_based_table_factory": {...}}.
    """

    store: str = field(default="cached_ssd", init=False)
    overflow_mb: float = field(default=192, kw_only=True)
    host_cache_budget_mb: Budget = 0
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
        if self.shards is not None:
            wanted = f"a whole number from 1 to {BUCKETS}, or None"
            self._set("shards", int_option("shards", self.shards, wanted, 1, BUCKETS))
        if self.read_mode not in READ_MODES:
            raise OptionError(f"read_mode={self.read_mode!r}: give one of {', '.join(map(repr, READ_MODES))}")
        if self.read_mode == "direct":
            cache_mb = CACHE_MB if self.rocksdb_cache_mb is None else self.rocksdb_cache_mb
            self._set("rocksdb_cache_mb", budget_option("rocksdb_cache_mb", cache_mb, zero=True))
        elif self.rocksdb_cache_mb is not None:
            raise OptionError(
                f"rocksdb_cache_mb={self.rocksdb_cache_mb!r}: with read_mode={self.read_mode!r} the page cache has the "
                "blocks; give read_mode='direct', or leave it out"
            )
        if self.io_threads is not None:
            self._set("io_threads", int_option("io_threads", self.io_threads, "1 to 64, or None", 1, 64))
        if not isinstance(self.async_io, bool):
            raise OptionError(f"async_io={self.async_io!r}: give True or False")
        if self.rocksdb_options is not None:
            self._set("rocksdb_options", options_text(self.rocksdb_options))
        if self.persistent_path is None:
            raise OptionError("persistent_path=None: cached_ssd keeps rows on disk; give a folder on the SSD")

    @property
    def threads_beside(self) -> int:
        return self.io_threads or BESIDE


def mib(budget: Budget) -> float:
    """A budget of options in which a number stands for each "auto"."""
    assert budget != "auto"
    return budget


def require_rocksdb() -> None:
    """Raises StoreError where the package was built without RocksDB."""
    if not _core.has_rocksdb:
        raise StoreError(
            "cached_ssd: this build of tierbed has no RocksDB; install it (apt install librocksdb-dev) and build "
            "tierbed again (pip install --force-reinstall --no-deps . in its source folder)"
        )


def options_text(options: Mapping[str, Any] | str | None) -> str:
    """RocksDB's options string, `name=value;name={name=value;...}`, from a dict or from such a string.

    Raises OptionError, which names the option, where RocksDB does not know the name or cannot read the value, and where
    the store would break a promise by it.
    """
    if options is None:
        return ""
    if isinstance(options, Mapping):
        text = ";".join(f"{name}={_value(name, value)}" for name, value in options.items())
    elif isinstance(options, str):
        text = options.strip()
    else:
        raise OptionError(f"rocksdb_options={options!r}: give a dict of RocksDB options or RocksDB's options string")
    try:
        _core.check_rocksdb_options(_core.parse_rocksdb_options(text))
    except ValueError as error:
        raise OptionError(f"rocksdb_options: {error}{_suggestion(str(error))}") from None
    return text


def _suggestion(error: str) -> str:
    if "no option of this name" not in error:
        return ""
    table, _, wrong = error.split("=")[0].rpartition(".")
    names, of_table = _core.rocksdb_option_names(), _core.rocksdb_table_field_names()
    near = difflib.get_close_matches(wrong, of_table if table else names + of_table, 1)
    if not near:
        return ""
    within = "" if table or near[0] in names else " in block_based_table_factory"
    return f"; did you mean {near[0]}{within}?"


def _value(name: object, value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ";".join(f"{inner}={_value(inner, of_inner)}" for inner, of_inner in value.items()) + "}"
    if isinstance(value, bool):
        return "true" if value else "false"
    given = value if isinstance(value, str) else as_number(value)
    if not isinstance(name, str) or given is None:
        raise OptionError(f"rocksdb_options: {name}={value!r}: give a name and a str, int, float, bool or dict")
    if not name.isidentifier() or (isinstance(value, str) and set(value) & set(";={}")):
        raise OptionError(
            f"rocksdb_options: {name}={value!r}: give one option a name, and a dict where an option has fields"
        )
    return str(given)


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
