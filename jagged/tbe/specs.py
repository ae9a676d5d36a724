"""What a table-batched embedding is made of: its tables, features and embeddings, and what it does with bad indices."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from ...embedding.embedding import MultiTableEmbedding
from ...engine._core import WAYS
from ...engine.cache.memory_split import LINE_OVERHEAD_BYTES, MB
from ...engine.checks import as_int, as_number
from ...engine.errors import OptionError
from ...engine.options.store_options import (
    StoreOptions,
    make_cached_host_mem_store_options,
    make_device_mem_store_options,
    make_host_mem_store_options,
)
from ...engine.options.table_names import check_distinct, check_table_name
from ...engine.options.table_spec import check_name
from ..collections.configs import suffix_of
from ..collections.other_types import warn_of_other_types
from ..collections.store_split import StoreRequest, stores_of
from .enums import BoundsCheckMode, CacheAlgorithm, ComputeDevice, EmbeddingLocation, taken

log = logging.getLogger("tierbed")

_BAD_IDS = {"FATAL": "raise", "WARNING": "drop", "IGNORE": "drop"}
LOAD_FACTOR = 0.2  # FBGEMM's default


class Bounds:
    """A bounds check mode: the options of a table that follow from it, and its warning."""

    def __init__(self, mode: BoundsCheckMode, name: str) -> None:
        self._name = name
        self._mode = mode.name.removeprefix("V2_")
        self._warns = self._mode == "WARNING"
        self._calls = 0

    def options(self, rows: int) -> dict[str, Any]:
        """Of a table of so many rows, what `make_table_options` takes."""
        return {} if self._mode == "NONE" else {"ids": rows, "bad_ids": _BAD_IDS[self._mode]}

    def warn(self, embeddings: Sequence[MultiTableEmbedding]) -> None:
        """Log, once, which tables dropped indices. A GPU tells at calls 1, 2, 4, 8 and so on, as each has to wait."""
        if not self._warns:
            return
        self._calls += 1
        for embedding in embeddings:
            if embedding.device.type != "cpu" and self._calls & (self._calls - 1):
                continue
            dropped = embedding.opened().own_table.processor.dropped
            tables = [name for name, count in zip(embedding.spec.labels, dropped, strict=True) if count]
            if tables:
                self._warns = False
                log.warning(
                    "TableBatchedEmbeddingBags %r: indices of table %s were negative or beyond its rows, and were "
                    "dropped; metrics() counts them from here on without a warning",
                    self._name,
                    ", ".join(map(repr, tables)),
                )


class EmbeddingSpec(NamedTuple):
    """One of `embedding_specs`, checked."""

    rows: int
    dim: int
    location: EmbeddingLocation
    compute: ComputeDevice
    name: str


class EmbeddingGroup(NamedTuple):
    """The tables and the features of one embedding."""

    name: str
    tables: list[int]  # by their places in embedding_specs
    features: list[int]  # that look these tables up, ascending
    table_of: list[int]  # for each of the features, its table's number in the embedding


@dataclass(frozen=True)
class Caching:
    """The cache of tables in MANAGED_CACHING, by FBGEMM's arguments."""

    algorithm: CacheAlgorithm
    load_factor: float

    def __post_init__(self) -> None:
        factor = as_number(self.load_factor)
        if factor is None or not 0 < factor <= 1:
            raise OptionError(f"cache_load_factor={self.load_factor!r}: give a number > 0 and <= 1")

    def refuse(self, why: str) -> None:
        """OptionError where an argument was given, and there is no cache that it could be of."""
        if self.algorithm is not CacheAlgorithm.LRU:
            raise OptionError(f"cache_algorithm=CacheAlgorithm.{self.algorithm.name}: {why}")
        if self.load_factor != LOAD_FACTOR:
            raise OptionError(f"cache_load_factor={self.load_factor!r}: {why}")

    def budget_mb(self, rows: int, words: int) -> float:
        """MiB of a cache for the load factor's share of rows of so many words, state included."""
        row_bytes = (4 * words + 8 + 15) // 16 * 16 + LINE_OVERHEAD_BYTES
        sets = -int(-self.load_factor * rows // WAYS)
        return max(sets, 1) * WAYS * row_bytes / MB


def checked_tables(embedding_specs: Any, table_names: Any) -> list[EmbeddingSpec]:
    """The tables of `embedding_specs`: (rows, dim, location, compute device) each. OptionError."""
    if not isinstance(embedding_specs, (list, tuple)) or not embedding_specs:
        raise OptionError(f"embedding_specs={embedding_specs!r}: give a list of (rows, dim, location, compute device)")
    names = [f"table-{i}" for i in range(len(embedding_specs))] if table_names is None else table_names
    if not isinstance(names, (list, tuple)) or len(names) != len(embedding_specs):
        raise OptionError(f"table_names={table_names!r}: give a name for each of {len(embedding_specs)} tables")
    if None in [check_table_name(name) for name in names]:
        raise OptionError(f"table_names={table_names!r}: give a name for each table, or None for table-0, table-1, ...")
    check_distinct(names)
    tables = [_table(f"embedding_specs[{i}]", spec, names[i]) for i, spec in enumerate(embedding_specs)]
    for i, table in enumerate(tables):
        if table.compute is not tables[0].compute:
            raise OptionError(
                f"embedding_specs[0] is looked up by {tables[0].compute.name} and embedding_specs[{i}] by "
                f"{table.compute.name}; give all tables one ComputeDevice, or make a module for each"
            )
    return tables


def _table(where: str, spec: Any, name: str) -> EmbeddingSpec:
    if not isinstance(spec, (list, tuple)) or len(spec) != 4:
        raise OptionError(f"{where}={spec!r}: give (rows, dim, location, compute device)")
    rows, dim = as_int(spec[0], 1, (1 << 63) - 1), as_int(spec[1], 1, 1 << 16)
    if rows is None or dim is None:
        raise OptionError(f"{where}={spec!r}: give a whole number of rows > 0, and a dim from 1 to 65536")
    location = taken(EmbeddingLocation, spec[2], f"{where}: location")
    compute = taken(ComputeDevice, spec[3], f"{where}: compute device")
    if EmbeddingLocation.MTIA is location or ComputeDevice.MTIA is compute:
        raise OptionError(f"{where}: tables live on CPUs and CUDA devices, and not on MTIA; give another place")
    return EmbeddingSpec(rows, dim, location, compute, name)


def checked_features(feature_table_map: Any, tables: int) -> list[int]:
    """For each feature the table that it looks up. OptionError."""
    if feature_table_map is None:
        return list(range(tables))
    given = feature_table_map if isinstance(feature_table_map, (list, tuple)) else [None]
    features = [number for one in given if (number := as_int(one, 0, tables - 1)) is not None]
    if not features or len(features) != len(given):
        raise OptionError(f"feature_table_map={feature_table_map!r}: give a table from 0 to {tables - 1} a feature")
    unused = sorted(set(range(tables)) - set(features))
    if unused:
        raise OptionError(
            f"feature_table_map={feature_table_map!r}: no feature looks up table {unused[0]}; leave that table out"
        )
    return features


def embedding_name(name: str, table: EmbeddingSpec, by_location: bool, dtype: torch.dtype) -> str:
    """What the embedding of a table is called, if its rows are of `dtype`."""
    place = f"-{table.location.name.lower()}" if by_location else ""
    return f"{name}-d{table.dim}{suffix_of(dtype)}{place}"


def parts_of(
    name: Any, tables: Sequence[EmbeddingSpec], features: Sequence[int], by_location: bool, dtype: torch.dtype
) -> list[EmbeddingGroup]:
    """The embeddings of rows of `dtype`: one for each dim, and with `by_location` for each location. OptionError."""
    if "." in check_name(name):
        raise OptionError(f"name={name!r}: it names modules; use no dots")
    parts: dict[str, EmbeddingGroup] = {}
    for number, table in enumerate(tables):
        own = embedding_name(name, table, by_location, dtype)
        parts.setdefault(own, EmbeddingGroup(own, [], [], [])).tables.append(number)
    for part in parts.values():
        for feature, number in enumerate(features):
            if number in part.tables:
                part.features.append(feature)
                part.table_of.append(part.tables.index(number))
    return list(parts.values())


def stores_for(
    name: str,
    parts: Sequence[EmbeddingGroup],
    tables: Sequence[EmbeddingSpec],
    store_options: Mapping[str, Any] | None,
    caching: Caching,
    words: Mapping[int, int],
    dtype: torch.dtype,
) -> dict[str, StoreOptions]:
    """The store of each embedding, by its name: what its location means, or its part of `store_options`.

    words: by dim, those of a row, state included. dtype: of its embedding.
    """
    cached = [table for table in tables if table.location is EmbeddingLocation.MANAGED_CACHING]
    if store_options is not None:
        caching.refuse("store_options stands in the place of all locations; give it cache_policy and a budget there")
        rows = {part.name: sum(tables[number].rows for number in part.tables) for part in parts}
        needs = {part.name: StoreRequest(tables[part.tables[0]].dim, rows[part.name], dtype.itemsize) for part in parts}
        stores = stores_of(store_options, needs)
        for part in parts:
            named = partial(embedding_name, name, tables[part.tables[0]], False)
            warn_of_other_types(named, dtype, stores[part.name])
        return stores
    if not cached:
        caching.refuse("no table is in EmbeddingLocation.MANAGED_CACHING, and the others have no cache; leave it out")
    stores = {}
    for part in parts:
        table = tables[part.tables[0]]
        if table.location is EmbeddingLocation.DEVICE:
            stores[part.name] = make_device_mem_store_options()
        elif table.location is EmbeddingLocation.MANAGED_CACHING:
            rows_here = sum(tables[number].rows for number in part.tables)
            budget = caching.budget_mb(rows_here, words[table.dim])
            policy = caching.algorithm.name.lower()
            stores[part.name] = make_cached_host_mem_store_options(budget, cache_policy=policy)
        else:
            stores[part.name] = make_host_mem_store_options()
    return stores


def device_of(compute: ComputeDevice, device: Any) -> torch.device:
    """Where lookups take place. Without a GPU those of ComputeDevice.CUDA do on the CPU, to the same bits.

    Raises OptionError for a device of another kind than the compute device.
    """
    kind = compute.name.lower()
    if device is not None:
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise OptionError(f"device={device!r}: {error}; give a torch.device, or leave it out") from None
        if found.type != kind:
            raise OptionError(
                f"device={device!r}: embedding_specs say ComputeDevice.{compute.name}; give such a device"
            )
        return found
    if kind == "cpu" or torch.cuda.is_available():
        return torch.device(kind)
    log.warning("ComputeDevice.CUDA: torch sees no GPU, so tables are looked up on the CPU, to the same bits")
    return torch.device("cpu")
