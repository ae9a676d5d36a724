"""The stores of a collection's embeddings: one that they share, divided between them, or one for each by name."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...engine._core import WAYS, parse_rocksdb_options
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
MEMTABLES, LEAST_MEMTABLE = 12, 64 << 10  # of a shard of RocksDB, and bytes of one, as rocksdb_options.cpp has them
MOST_STATES = 2  # floats of an optimizer's state for each float of a row, at most
BUDGETS = ("cache_budget_mb", "host_cache_budget_mb", "overflow_mb", "rocksdb_cache_mb")


class StoreRequest(NamedTuple):
    """What an embedding asks of a store: the dim of its rows, and how many its tables have, None where unknown.

    `itemsize`: bytes of a number of the embedding.
    """

    dim: int
    rows: int | None = None
    itemsize: int = 4


def stores_of(store_options: Mapping[str, Any], needs: Mapping[str, StoreRequest]) -> dict[str, StoreOptions]:
    """The store options of each embedding, by its name.

    store_options: of a store, from a `make_*_store_options`; it is divided by `divided`. Or a mapping of such options
    by the name of an embedding, which are taken as they are. OptionError.
    """
    if isinstance(store_options, StoreOptions) or not isinstance(store_options, Mapping):
        return divided(store_options_from_dict(store_options), needs)
    if isinstance(store_options.get("store"), str):
        return divided(store_options_from_dict(store_options), needs)
    given = {str(name): options for name, options in store_options.items()}
    names = ", ".join(map(repr, needs))
    for name in given:
        if name not in needs:
            near = difflib.get_close_matches(name, needs, 1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise OptionError(f"store_options[{name!r}]: there is no such embedding; {meant}give options for {names}")
    missing = [name for name in needs if name not in given]
    if missing:
        raise OptionError(
            f"store_options has none for embedding {', '.join(map(repr, missing))}; give options for each of {names}, "
            "or one store for all, which is divided"
        )
    return {name: store_options_from_dict(given[name], f"store_options[{name!r}]") for name in needs}


def divided(options: StoreOptions, needs: Mapping[str, StoreRequest]) -> dict[str, StoreOptions]:
    """One store's options divided between embeddings, whose parts never add up to more than the whole.

    Memory goes by the bytes of their rows, `capacity` by their number; where the number of one is unknown, all get
    equal parts. Budgets of 0 stay 0. RocksDB's write buffers are divided too, down to their least size, unless
    `rocksdb_options` names one. An embedding alone has all of it. Raises OptionError where the whole is too small, and
    for "auto", which one embedding can have.
    """
    if len(needs) == 1:
        return dict.fromkeys(needs, options)
    known = all(need.rows is not None for need in needs.values())
    rows = [need.rows or 0 if known else 1 for need in needs.values()]
    sizes = [need.rows * _row_bytes(need) if known and need.rows else 1 for need in needs.values()]
    parts: list[dict[str, Any]] = [{} for _ in needs]
    if isinstance(options, CachedHostMemOptions):
        for budget in BUDGETS:
            _divide_budget(budget, options, needs, sizes, parts)
    if options.capacity is not None:
        shares = _shares(options.capacity, rows, [1] * len(rows))
        if shares is None:
            raise OptionError(
                f"capacity={options.capacity} is divided between {len(needs)} embeddings, {', '.join(needs)}; give at "
                f"least {len(needs)}, or store_options for each by its name"
            )
        for part, share in zip(parts, shares, strict=True):
            part["capacity"] = share
    if isinstance(options, CachedSsdOptions):
        _divide_write_buffers(options, sizes, parts)
    return {name: replace(options, **part) for name, part in zip(needs, parts, strict=True)}


def stores_text(stores: Mapping[str, StoreOptions]) -> str:
    """The division as a table, a line for each embedding and the sum of each column that all of them have."""
    from rich import box  # imported late, since it takes a while
    from rich.console import Console
    from rich.table import Table

    columns = [name for name in (*BUDGETS, "capacity") if any(options.get(name) for options in stores.values())]
    table = Table("embedding", "store", box=box.SIMPLE_HEAD, show_footer=len(stores) > 1)
    for name in columns:
        values = [options.get(name) for options in stores.values()]
        whole = all(isinstance(value, (int, float)) for value in values)
        table.add_column(name, _shown(sum(values)) if whole else "", justify="right")
    for embedding, options in stores.items():
        table.add_row(embedding, options.store, *(_shown(options.get(name)) for name in columns))
    console = Console(width=10_000, color_system=None, emoji=False, markup=False)
    with console.capture() as capture:
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())


def _row_bytes(need: StoreRequest, states: int = 0) -> int:
    """Of a row in a cache, with so many float32 of state for each number of its own; its metadata included."""
    return (need.dim * (need.itemsize + 4 * states) + 8 + 15) // 16 * 16 + LINE_OVERHEAD_BYTES


def _divide_budget(
    budget: str,
    options: StoreOptions,
    needs: Mapping[str, StoreRequest],
    sizes: Sequence[int],
    parts: list[dict[str, Any]],
) -> None:
    whole = options.get(budget)
    if not whole:
        return
    if whole == "auto":
        raise OptionError(
            f"{budget}='auto' is for one embedding, and {len(needs)} share the store: {', '.join(needs)}; give a "
            "number of MiB, which is divided, or store_options for each by its name"
        )
    a_set = WAYS if budget in BUDGETS[:2] else 0  # a cache has at least one
    least = [max(a_set * _row_bytes(need, MOST_STATES), 1) for need in needs.values()]
    shares = _shares(int(whole * MB), sizes, least)
    if shares is None:
        raise OptionError(
            f"{budget}={whole} is divided between {len(needs)} embeddings, {', '.join(needs)}, which need "
            f"{sum(least) / MB:.3g} MiB at least; give more, or store_options for each by its name"
        )
    for part, share in zip(parts, shares, strict=True):
        part[budget] = share / MB


def _divide_write_buffers(options: CachedSsdOptions, sizes: Sequence[int], parts: list[dict[str, Any]]) -> None:
    text = str(options.rocksdb_options or "")
    if any(name in ("write_buffer_size", "db_write_buffer_size") for name, _ in parse_rocksdb_options(text)):
        return
    memtables = MEMTABLES * (options.shards or SHARDS)
    least = [memtables * LEAST_MEMTABLE] * len(sizes)
    shares = _shares(max(WRITE_BUFFER_BYTES, sum(least)), sizes, least)
    assert shares is not None
    for part, share in zip(parts, shares, strict=True):
        part["rocksdb_options"] = f"write_buffer_size={share // memtables};{text}".rstrip(";")


def _shares(whole: int, weights: Sequence[int], least: Sequence[int]) -> list[int] | None:
    """The whole in proportion to the weights, none below its least; None where the whole is less than these."""
    if sum(least) > whole:
        return None
    raised: set[int] = set()  # those whose part would be below their least
    while True:
        left = whole - sum(least[i] for i in raised)
        total = sum(weight for i, weight in enumerate(weights) if i not in raised)
        shares = [
            least[i] if i in raised else left * weight // total if total else left // (len(weights) - len(raised))
            for i, weight in enumerate(weights)
        ]
        low = {i for i, share in enumerate(shares) if share < least[i]}
        if not low:
            return shares
        raised |= low


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
