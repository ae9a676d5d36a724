"""The stores of a module's embeddings: one store divided between them, or one for each by name."""

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
MEMTABLES, MIN_MEMTABLE = 12, 64 << 10  # memtables of one RocksDB database, and bytes of one, as rocksdb_options.cpp
MAX_STATES = 2  # floats of an optimizer's state for each float of a row
BUDGETS = ("cache_budget_mb", "host_cache_budget_mb", "overflow_mb", "rocksdb_cache_mb")


class StoreRequest(NamedTuple):
    """What an embedding stores."""

    dim: int
    rows: int | None = None  # of all its tables; None: unknown
    itemsize: int = 4  # bytes of a number of the embedding


def stores_of(store_options: Mapping[str, Any], requests: Mapping[str, StoreRequest]) -> dict[str, StoreOptions]:
    """The store options of each embedding, by its name.

    store_options: of one store, from a `make_*_store_options`, which `divided` divides; or a mapping of such options by
    the name of an embedding. OptionError.
    """
    are_named = isinstance(store_options, Mapping) and not isinstance(store_options, StoreOptions)
    if not are_named or isinstance(store_options.get("store"), str):
        return divided(store_options_from_dict(store_options), requests)
    given = {str(name): options for name, options in store_options.items()}
    names = ", ".join(map(repr, requests))
    for name in given:
        if name not in requests:
            near = difflib.get_close_matches(name, requests, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise OptionError(f"store_options[{name!r}]: there is no such embedding; {meant}give options for {names}")
    missing = [name for name in requests if name not in given]
    if missing:
        raise OptionError(
            f"store_options has none for embedding {', '.join(map(repr, missing))}; give options for each of {names}, "
            "or one store for all, which is divided"
        )
    return {name: store_options_from_dict(given[name], f"store_options[{name!r}]") for name in requests}


def divided(options: StoreOptions, requests: Mapping[str, StoreRequest]) -> dict[str, StoreOptions]:
    """One store's options divided between embeddings. The parts never add up to more than the whole.

    Memory is divided by the bytes of their rows, `capacity` by their number; if the number of one is unknown, all get
    equal parts. Budgets of 0 stay 0. RocksDB's write buffers are divided too, down to their minimum, unless
    `rocksdb_options` sets their size. A single embedding gets everything. Raises OptionError if the whole is too small,
    and for "auto" with several embeddings.
    """
    if len(requests) == 1:
        return dict.fromkeys(requests, options)
    known = all(request.rows is not None for request in requests.values())
    rows = [request.rows or 0 if known else 1 for request in requests.values()]
    sizes = [request.rows * row_bytes(request) if known and request.rows else 1 for request in requests.values()]
    parts: dict[str, Sequence[Any]] = {}  # by option, that of each embedding
    if isinstance(options, CachedHostMemOptions):
        parts |= {budget: _budgets(budget, options, requests, sizes) for budget in BUDGETS if options.get(budget)}
    if options.capacity is not None:
        shares = _shares(options.capacity, rows, [1] * len(rows))
        if shares is None:
            raise OptionError(
                f"capacity={options.capacity} is divided between {len(requests)} embeddings, {', '.join(requests)}; "
                f"give at least {len(requests)}, or store_options for each by its name"
            )
        parts["capacity"] = shares
    if isinstance(options, CachedSsdOptions) and (texts := _write_buffers(options, sizes)):
        parts["rocksdb_options"] = texts
    return {name: replace(options, **{of: each[at] for of, each in parts.items()}) for at, name in enumerate(requests)}


def stores_text(stores: Mapping[str, StoreOptions]) -> str:
    """The division as a table: one line for each embedding, and the sum of each column."""
    from rich import box  # slow to import
    from rich.console import Console
    from rich.table import Table

    columns = [name for name in (*BUDGETS, "capacity") if any(options.get(name) for options in stores.values())]
    table = Table("embedding", "store", box=box.SIMPLE_HEAD, show_footer=len(stores) > 1)
    for name in columns:
        values = [options.get(name) for options in stores.values()]
        has_sum = all(isinstance(value, (int, float)) for value in values)
        table.add_column(name, _cell(sum(values)) if has_sum else "", justify="right")
    for embedding, options in stores.items():
        table.add_row(embedding, options.store, *(_cell(options.get(name)) for name in columns))
    console = Console(width=10_000, color_system=None, emoji=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def row_bytes(request: StoreRequest, states: int = 0) -> int:
    """Bytes of a row in a cache, metadata included. states: floats of state for each number of the embedding."""
    return (request.dim * (request.itemsize + 4 * states) + 8 + 15) // 16 * 16 + LINE_OVERHEAD_BYTES


def _budgets(
    budget: str, options: StoreOptions, requests: Mapping[str, StoreRequest], sizes: Sequence[int]
) -> list[float]:
    whole: Any = options.get(budget)
    if whole == "auto":
        raise OptionError(
            f"{budget}='auto' is for one embedding, and {len(requests)} share the store: {', '.join(requests)}; give a "
            "number of MiB, which is divided, or store_options for each by its name"
        )
    rows = _core.WAYS if budget in BUDGETS[:2] else 0  # a cache has at least one set
    minimum = [max(rows * row_bytes(request, MAX_STATES), 1) for request in requests.values()]
    shares = _shares(int(whole * MB), sizes, minimum)
    if shares is None:
        raise OptionError(
            f"{budget}={whole} is divided between {len(requests)} embeddings, {', '.join(requests)}, which need "
            f"{sum(minimum) / MB:.3g} MiB at least; give more, or store_options for each by its name"
        )
    return [share / MB for share in shares]


def _write_buffers(options: CachedSsdOptions, sizes: Sequence[int]) -> list[str]:
    """The `rocksdb_options` of each embedding; none if they set the size of write buffers."""
    text = str(options.rocksdb_options or "")
    if any(name in ("write_buffer_size", "db_write_buffer_size") for name, _ in _core.parse_rocksdb_options(text)):
        return []
    memtables = MEMTABLES * (options.shards or SHARDS)
    minimum = [memtables * MIN_MEMTABLE] * len(sizes)
    shares = _shares(max(WRITE_BUFFER_BYTES, sum(minimum)), sizes, minimum)
    assert shares is not None
    return [f"write_buffer_size={share // memtables};{text}".rstrip(";") for share in shares]


def _shares(whole: int, weights: Sequence[int], minimum: Sequence[int]) -> list[int] | None:
    """The whole in proportion to the weights, each share at least its minimum; None if the whole has not enough."""
    if sum(minimum) > whole:
        return None
    raised: set[int] = set()  # the shares that would be below their minimum
    while True:
        left = whole - sum(minimum[i] for i in raised)
        total = sum(weight for i, weight in enumerate(weights) if i not in raised)
        shares = [
            minimum[i] if i in raised else left * weight // total if total else left // (len(weights) - len(raised))
            for i, weight in enumerate(weights)
        ]
        low = {i for i, share in enumerate(shares) if share < minimum[i]}
        if not low:
            return shares
        raised |= low


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
