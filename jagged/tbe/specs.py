"""Checks a table-batched embedding's tables, features and stores, and handles indices out of bounds."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...embedding.modules.embedding import MultiTableEmbedding
from ...engine._core import WAYS
from ...engine.cache.memory_split import MB
from ...engine.checks import as_int, as_number
from ...engine.errors import OptionError
from ...engine.options.initializers import AnyTableOptions, make_constant_initializer, make_table_options
from ...engine.options.store_options import (
    StoreOptions,
    make_cached_host_mem_store_options,
    make_device_mem_store_options,
    make_host_mem_store_options,
)
from ...engine.options.table_names import check_distinct, check_table_name
from ..collections.configs import EmbeddingConfig
from ..collections.store_split import MAX_STATES, EmbeddingSize, assign_stores, row_bytes
from ..collections.tables import collect_embedding_sizes
from .enums import BoundsCheckMode, CacheAlgorithm, ComputeDevice, EmbeddingLocation, OptimType, parse_enum
from .settings import DEFAULT_LOAD_FACTOR

log = logging.getLogger("tierbed")

_BAD_IDS_BY_MODE = {"FATAL": "raise", "WARNING": "drop", "IGNORE": "drop"}
ZERO_INITIALIZER = make_constant_initializer(0.0)  # new rows are zeros, as in FBGEMM
# {optimizer: state elements per row element}; other optimizers have 1
STATES_PER_ELEMENT = {OptimType.EXACT_SGD: 0, OptimType.EXACT_ROWWISE_ADAGRAD: 0, OptimType.ADAM: 2, OptimType.LAMB: 2}


class BoundsCheck:
    """A bounds check mode, with its table options and its warning."""

    def __init__(self, mode: BoundsCheckMode, name: str) -> None:
        self._name = name
        self._mode = mode.name.removeprefix("V2_")
        self.should_warn = self._mode == "WARNING"
        self._num_calls = 0

    def table_options(self, num_rows: int) -> dict[str, Any]:
        """Return keyword arguments of `make_table_options` for a table of `num_rows` rows."""
        return {} if self._mode == "NONE" else {"ids": num_rows, "bad_ids": _BAD_IDS_BY_MODE[self._mode]}

    def warn_about_dropped(self, embeddings: Iterable[MultiTableEmbedding]) -> None:
        """Log once which tables dropped indices.

        Counts on a GPU are read only at calls 1, 2, 4, 8, ..., because the host waits for each read.
        """
        if not self.should_warn:
            return
        self._num_calls += 1
        for embedding in embeddings:
            if embedding.device.type != "cpu" and self._num_calls & (self._num_calls - 1):
                continue
            dropped_counts = embedding.table_handle().open_table.processor.dropped_counts
            if tables := [name for name, count in zip(embedding.spec.labels, dropped_counts, strict=True) if count]:
                self.should_warn = False
                log.warning(
                    "TableBatchedEmbeddingBags %r: indices of table %s were negative or beyond its rows, and were "
                    "dropped; metrics() counts them, and there is no further warning",
                    self._name, ", ".join(map(repr, tables)),
                )  # fmt: skip


@dataclass(kw_only=True)
class EmbeddingSpec(EmbeddingConfig):
    """One checked entry of `embedding_specs`."""

    num_embeddings: int = field(kw_only=False)
    location: EmbeddingLocation
    compute_device: ComputeDevice
    bounds_check: BoundsCheck

    def table_options(self, initializer: Mapping[str, Any] = ZERO_INITIALIZER) -> AnyTableOptions:
        return make_table_options(initializer, self.name, **self.bounds_check.table_options(self.num_embeddings))


def parse_specs(
    embedding_specs: Any, table_names: Any, dtype: torch.dtype, bounds_check: BoundsCheck, has_locations: bool
) -> list[EmbeddingSpec]:
    """Convert `embedding_specs`, a list of (rows, dim, location, compute device). Raises OptionError."""
    if not isinstance(embedding_specs, (list, tuple)) or not embedding_specs:
        raise OptionError(f"embedding_specs={embedding_specs!r}: give a list of (rows, dim, location, compute device)")
    names = [f"table-{i}" for i in range(len(embedding_specs))] if table_names is None else table_names
    if not isinstance(names, (list, tuple)) or len(names) != len(embedding_specs):
        raise OptionError(f"table_names={table_names!r}: give a name for each of {len(embedding_specs)} tables")
    if None in [check_table_name(name) for name in names]:
        remedy = "give a name for each table, or None for table-0, table-1 and so on"
        raise OptionError(f"table_names={table_names!r}: {remedy}")
    check_distinct(names)
    tables = []
    for index, (name, spec) in enumerate(zip(names, embedding_specs, strict=True)):
        subject = f"embedding_specs[{index}]"
        if not isinstance(spec, (list, tuple)) or len(spec) != 4:
            raise OptionError(f"{subject}={spec!r}: give (rows, dim, location, compute device)")
        rows, dim = as_int(spec[0], 1, (1 << 63) - 1), as_int(spec[1], 1, 1 << 16)
        if rows is None or dim is None:
            raise OptionError(f"{subject}={spec!r}: give a whole number of rows > 0, and a dim from 1 to 65536")
        location = parse_enum(EmbeddingLocation, spec[2], f"{subject}: location")
        device = parse_enum(ComputeDevice, spec[3], f"{subject}: compute device")
        if EmbeddingLocation.MTIA is location or ComputeDevice.MTIA is device:
            raise OptionError(f"{subject}: tierbed does not support MTIA; give another location and compute device")
        group = location.name.lower() if has_locations else ""  # so that each location gets its own embedding
        fields: dict[str, Any] = {"location": location, "compute_device": device, "bounds_check": bounds_check}
        tables.append(EmbeddingSpec(rows, dim, name, dtype, group=group, **fields))
        if device is not (first := tables[0].compute_device):
            problem = f"embedding_specs[0] has ComputeDevice.{first.name}, but {subject} has {device.name}"
            raise OptionError(f"{problem}; give all tables one ComputeDevice, or make one module per ComputeDevice")
    return tables


def parse_features(feature_table_map: Any, num_tables: int) -> list[int]:
    """Return each feature's table number. Raises OptionError."""
    if feature_table_map is None:
        return list(range(num_tables))
    entries = feature_table_map if isinstance(feature_table_map, (list, tuple)) else [None]
    table_indices = [table for entry in entries if (table := as_int(entry, 0, num_tables - 1)) is not None]
    subject = f"feature_table_map={feature_table_map!r}"
    if not table_indices or len(table_indices) != len(entries):
        raise OptionError(f"{subject}: give a table number from 0 to {num_tables - 1} for each feature")
    if unused := set(range(num_tables)).difference(table_indices):
        raise OptionError(f"{subject}: no feature looks up table {min(unused)}; leave that table out")
    return table_indices


def choose_stores(
    table_groups: Mapping[str, Sequence[EmbeddingSpec]],
    store_options: Mapping[str, Any] | None,
    cache_algorithm: CacheAlgorithm,
    cache_load_factor: float,
    widths: Mapping[int, int],
    unused_args: list[str],
) -> dict[str, StoreOptions]:
    """Return {embedding name: store options}, from the tables' location or from `store_options`. Raises OptionError.

    table_groups: each embedding's tables.
    cache_algorithm, cache_load_factor: used for tables in MANAGED_CACHING.
    widths: {dim: size of a row and its state, in 4-byte words}.
    unused_args: output list; receives a message for each cache argument that changes nothing.
    """
    load_factor = as_number(cache_load_factor)
    if load_factor is None or not 0 < load_factor <= 1:
        raise OptionError(f"cache_load_factor={cache_load_factor!r}: give a number > 0 and <= 1")
    reason = ""
    if store_options is not None:
        reason = "store_options say what is cached, by cache_policy and a budget"
    elif all(tables[0].location is not EmbeddingLocation.MANAGED_CACHING for tables in table_groups.values()):
        reason = "no table is in EmbeddingLocation.MANAGED_CACHING, and others have no cache"
    if reason:
        unused_args += [f"cache_algorithm: {reason}"] * (cache_algorithm is not CacheAlgorithm.LRU)
        unused_args += [f"cache_load_factor: {reason}"] * (load_factor != DEFAULT_LOAD_FACTOR)
    if store_options is not None:
        return assign_stores(store_options, collect_embedding_sizes(table_groups))

    def choose_store(tables: Sequence[EmbeddingSpec]) -> StoreOptions:
        if tables[0].location is EmbeddingLocation.DEVICE:
            return make_device_mem_store_options()
        if tables[0].location is not EmbeddingLocation.MANAGED_CACHING:
            return make_host_mem_store_options()
        num_sets = max(-int(-load_factor * sum(table.num_embeddings for table in tables) // WAYS), 1)
        cache_mb = num_sets * WAYS * row_bytes(EmbeddingSize(widths[tables[0].embedding_dim])) / MB
        return make_cached_host_mem_store_options(cache_mb, cache_policy=cache_algorithm.name.lower())

    return {name: choose_store(tables) for name, tables in table_groups.items()}


def compute_cache_mb(embedding_specs: Any, cache_sets: Any, optimizer: OptimType) -> float:
    """Convert FBGEMM's cache_sets to MiB. The size is enough for `WAYS` rows of each dim. Raises OptionError."""
    specs = embedding_specs if isinstance(embedding_specs, (list, tuple)) else ()
    pairs = [spec if isinstance(spec, (list, tuple)) and len(spec) == 2 else (0, 0) for spec in specs]
    dims = {as_int(dim, 1, 1 << 16) or 0 for _, dim in pairs}
    if not dims or 0 in dims:
        raise OptionError(f"embedding_specs={embedding_specs!r}: give a list of (rows, dim)")
    if as_int(cache_sets, 1) is None:
        raise OptionError(f"cache_sets={cache_sets!r}: give a whole number > 0")
    size = cache_sets * 32 * max(row_bytes(EmbeddingSize(dim), STATES_PER_ELEMENT.get(optimizer, 1)) for dim in dims)
    return max(size, sum(WAYS * row_bytes(EmbeddingSize(dim), MAX_STATES) for dim in dims)) / MB


def choose_device(compute_device: ComputeDevice, device: Any) -> torch.device:
    """Return the lookup device. Without a GPU, the CPU computes bit-identical results. Raises OptionError."""
    device_type = compute_device.name.lower()
    if device is not None:
        try:
            lookup_device = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise OptionError(f"device={device!r}: {error}; give a torch.device, or leave it out") from None
        if lookup_device.type != device_type:
            device_type = f"ComputeDevice.{compute_device.name}"
            raise OptionError(f"device={device!r}: embedding_specs have {device_type}; give a device of this type")
        return lookup_device
    if device_type == "cpu" or torch.cuda.is_available():
        return torch.device(device_type)
    log.warning("ComputeDevice.CUDA: torch sees no GPU, so tables are looked up on the CPU, with the same results")
    return torch.device("cpu")
