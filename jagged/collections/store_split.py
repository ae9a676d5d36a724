"""Divides one store's options between a module's embeddings, or gives each embedding its own options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...engine import _core
from ...engine.cache.memory_split import LINE_OVERHEAD_BYTES
from ...engine.errors import OptionError
from ...engine.options.store_options import (
    CachedHostMemOptions,
    CachedSsdOptions,
    StoreOptions,
    store_options_from_dict,
)
from ...engine.store.rocksdb import SHARDS, WRITE_BUFFER_BYTES

MB = 1 << 20
NUM_MEMTABLES, MIN_MEMTABLE_BYTES = 12, 64 << 10  # memtables per RocksDB database; minimum bytes per memtable
MAX_STATES = 2  # optimizers keep at most this many state elements per row element
BUDGETS = ("cache_budget_mb", "host_cache_budget_mb", "overflow_mb", "rocksdb_cache_mb")
_OPTIONS_DICT = "a dict {embedding name: its own store_options}"


class EmbeddingSize(NamedTuple):
    """An embedding's row count and row format; they determine its share of the memory."""

    dim: int
    rows: int | None = None  # rows in all tables together; None if unknown
    itemsize: int = 4  # bytes per element


def assign_stores(store_options: Mapping[str, Any], embeddings: Mapping[str, EmbeddingSize]) -> dict[str, StoreOptions]:
    """Return {embedding name: its store options}. Raises OptionError.

    store_options: one store's options, which `divide_store` divides, or a mapping from embedding name to options.
    """
    is_by_name = isinstance(store_options, Mapping) and not isinstance(store_options, StoreOptions)
    if not is_by_name or isinstance(store_options.get("store"), str):
        return divide_store(store_options_from_dict(store_options), embeddings)
    by_name = {str(name): options for name, options in store_options.items()}
    names = ", ".join(map(repr, embeddings))
    if unknown := [name for name in by_name if name not in embeddings]:
        matches = difflib.get_close_matches(unknown[0], embeddings, 1)
        remedy = f"did you mean {matches[0]!r}? " if matches else ""
        raise OptionError(f"store_options[{unknown[0]!r}]: no such embedding exists; {remedy}give options for {names}")
    if missing := [name for name in embeddings if name not in by_name]:
        remedy = f"give options for each of {names}, or one store for all, which is divided"
        raise OptionError(f"store_options has none for embedding {', '.join(map(repr, missing))}; {remedy}")
    return {name: store_options_from_dict(by_name[name], f"store_options[{name!r}]") for name in embeddings}


def divide_store(options: StoreOptions, embeddings: Mapping[str, EmbeddingSize]) -> dict[str, StoreOptions]:
    """Divide one store's options between embeddings. The parts never add up to more than the whole.

    Memory is divided in proportion to row bytes, and `capacity` in proportion to row counts. If any row count is
    unknown, all parts are equal. Budgets of 0 stay 0. RocksDB's write buffers are divided too, down to a minimum size.
    If `rocksdb_options` sets their size, they are not divided. A single embedding gets everything. Raises OptionError
    if there is too little to divide, or if a budget is "auto" and there are several embeddings.
    """
    if len(embeddings) == 1:
        return dict.fromkeys(embeddings, options)
    is_known = all(size.rows is not None for size in embeddings.values())
    rows = [size.rows or 0 if is_known else 1 for size in embeddings.values()]
    sizes = [size.rows * row_bytes(size) if is_known and size.rows else 1 for size in embeddings.values()]
    parts: dict[str, Sequence[Any]] = {}  # {option: its value for each embedding}
    if isinstance(options, CachedHostMemOptions):
        parts |= {name: _divide_budget(name, options, embeddings, sizes) for name in BUDGETS if options.get(name)}
    if options.capacity is not None:
        capacities = _divide(options.capacity, rows, [1] * len(rows))
        if capacities is None:
            raise OptionError(
                f"capacity={options.capacity} is too small for {len(embeddings)} embeddings ({', '.join(embeddings)}); "
                f"give at least {len(embeddings)}, or {_OPTIONS_DICT}"
            )
        parts["capacity"] = capacities
    if isinstance(options, CachedSsdOptions) and (rocksdb_options := _divide_write_buffers(options, sizes)):
        parts["rocksdb_options"] = rocksdb_options
    return {
        name: replace(options, **{option: values[i] for option, values in parts.items()})
        for i, name in enumerate(embeddings)
    }


def format_stores(stores: Mapping[str, StoreOptions]) -> str:
    """Format the stores' budgets as a text table: one line per embedding, and each column's sum."""
    from rich import box  # slow to import
    from rich.console import Console
    from rich.table import Table

    columns = [name for name in (*BUDGETS, "capacity") if any(options.get(name) for options in stores.values())]
    table = Table("embedding", "store", box=box.SIMPLE_HEAD, show_footer=len(stores) > 1)
    for name in columns:
        values = [options.get(name) for options in stores.values()]
        has_sum = all(isinstance(value, (int, float)) for value in values)
        table.add_column(name, _format_cell(sum(values)) if has_sum else "", justify="right")
    for embedding, options in stores.items():
        table.add_row(embedding, options.store, *(_format_cell(options.get(name)) for name in columns))
    console = Console(width=10_000, color_system=None, emoji=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def row_bytes(embedding: EmbeddingSize, num_states: int = 0) -> int:
    """Return a cached row's bytes, metadata included. num_states: floats of optimizer state per element."""
    return (embedding.dim * (embedding.itemsize + 4 * num_states) + 8 + 15) // 16 * 16 + LINE_OVERHEAD_BYTES


def _divide_budget(
    budget: str, options: StoreOptions, embeddings: Mapping[str, EmbeddingSize], sizes: Sequence[int]
) -> list[float]:
    total: Any = options.get(budget)
    if total == "auto":
        problem = f"works only for one embedding, but {len(embeddings)} share the store ({', '.join(embeddings)})"
        raise OptionError(f"{budget}='auto' {problem}; give a number of MiB to divide, or {_OPTIONS_DICT}")
    num_rows = _core.WAYS if budget in BUDGETS[:2] else 0  # a cache needs memory for at least one set
    minimums = [max(num_rows * row_bytes(size, MAX_STATES), 1) for size in embeddings.values()]
    parts = _divide(int(total * MB), sizes, minimums)
    if parts is None:
        raise OptionError(
            f"{budget}={total} is too small for {len(embeddings)} embeddings ({', '.join(embeddings)}); give at least "
            f"{sum(minimums) / MB:.3g} MiB, or {_OPTIONS_DICT}"
        )
    return [part / MB for part in parts]


def _divide_write_buffers(options: CachedSsdOptions, sizes: Sequence[int]) -> list[str]:
    """Return each embedding's `rocksdb_options`, or [] if the user's options already set the write buffer size."""
    text = str(options.rocksdb_options or "")
    if any(name in ("write_buffer_size", "db_write_buffer_size") for name, _ in _core.parse_rocksdb_options(text)):
        return []
    num_memtables = NUM_MEMTABLES * (options.shards or SHARDS)
    minimums = [num_memtables * MIN_MEMTABLE_BYTES] * len(sizes)
    parts = _divide(max(WRITE_BUFFER_BYTES, sum(minimums)), sizes, minimums)
    assert parts is not None
    return [f"write_buffer_size={part // num_memtables};{text}".rstrip(";") for part in parts]


def _divide(amount: int, weights: Sequence[int], minimums: Sequence[int]) -> list[int] | None:
    """Divide `amount` in proportion to weights, but part i is at least minimums[i]. None if this is impossible."""
    if sum(minimums) > amount:
        return None
    clamped: set[int] = set()  # indices of parts that get exactly their minimum
    while True:
        rest = amount - sum(minimums[i] for i in clamped)
        total = sum(weight for i, weight in enumerate(weights) if i not in clamped)
        parts = [
            minimums[i] if i in clamped else rest * weight // total if total else rest // (len(weights) - len(clamped))
            for i, weight in enumerate(weights)
        ]
        below_minimum = {i for i, part in enumerate(parts) if part < minimums[i]}
        if not below_minimum:
            return parts
        clamped |= below_minimum


def _format_cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
