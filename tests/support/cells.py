"""Which cells of a parametrised test `make test` runs; `make test-slow` runs the others.

Of a parameter `store` it runs two values, which ones differs from test to test; `@all_stores` keeps all. `@pairs` keeps
that many cells that each value of a parameter meets each value of each other one. `@rotated(name)` keeps one value of
that parameter for each cell of the others, in turn.
"""

from __future__ import annotations

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

all_stores = pytest.mark.all_stores
pairs = pytest.mark.pairs
rotated = pytest.mark.rotated

EVERY_TIER = {"device", "host", "cached_host", "ssd"}

Cell = dict[str, int]  # by parameter, a number that tells apart its values
Others = tuple[tuple[str, int], ...]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out as slow, and what `make check` runs by its parameters."""
    tests: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.parent, item.originalname].append(item)
    for cells in tests.values():
        _mark_subject(cells)
        _mark_slow([item for item in cells if not {"slow", "gpu"} & {marker.name for marker in item.iter_markers()}])


def _mark_subject(cells: Sequence[pytest.Function]) -> None:
    names = cells[0].callspec.params
    every_tier = "store" in names and {str(item.callspec.params["store"]) for item in cells} >= EVERY_TIER
    for item in cells:
        if {"optimizer", "rule"} & set(names):
            item.add_marker(pytest.mark.optimizer)
        if every_tier:
            item.add_marker(pytest.mark.tier)


def _mark_slow(cells: Sequence[pytest.Function]) -> None:
    marker = {name: cells[0].get_closest_marker(name) if cells else None for name in ("rotated", "pairs", "all_stores")}
    turning, pairwise = marker["rotated"], marker["pairs"]
    if marker["all_stores"] is None and (turning is None or turning.args[0] != "store"):
        cells = _of_two_stores(cells)
    if turning is None and pairwise is None:
        return
    values = [{name: id(value) for name, value in item.callspec.params.items()} for item in cells]
    kept = chosen(values, turning.args[0] if turning else None, pairwise is not None)
    for number, item in enumerate(cells):
        if number not in kept:
            item.add_marker(pytest.mark.slow)


def _of_two_stores(cells: Sequence[pytest.Function]) -> Sequence[pytest.Function]:
    """Mark the cells of other stores as slow."""
    stores = list(dict.fromkeys(str(item.callspec.params.get("store")) for item in cells))
    if len(stores) <= 2:
        return cells
    first = zlib.crc32(cells[0].originalname.encode())
    kept = {stores[(first + step) % len(stores)] for step in (0, len(stores) // 2)}
    for item in cells:
        if str(item.callspec.params["store"]) not in kept:
            item.add_marker(pytest.mark.slow)
    return [item for item in cells if str(item.callspec.params["store"]) in kept]


def chosen(cells: Sequence[Cell], turning: str | None, pairwise: bool) -> set[int]:
    """Numbers of the cells to keep. turning: the parameter of which a cell of the others keeps one value."""
    groups: dict[Others, list[int]] = defaultdict(list)
    for number, cell in enumerate(cells):
        groups[tuple((name, value) for name, value in cell.items() if name != turning)].append(number)
    others = _covering(groups) if pairwise else list(groups)
    if turning is None:
        return {number for other in others for number in groups[other]}
    kept: set[int] = set()
    met: Counter[object] = Counter()  # how often a value, or one beside another, was chosen
    for turn in range(max(len(others), len({cell[turning] for cell in cells}))):
        other = others[turn % len(others)]
        left = [number for number in groups[other] if number not in kept]
        best = min(left, key=lambda n: (sum(met[part, cells[n][turning]] for part in other), met[cells[n][turning]]))
        kept.add(best)
        met.update([cells[best][turning], *((part, cells[best][turning]) for part in other)])
    return kept


def _covering(groups: Iterable[Others]) -> list[Others]:
    """Those that show each value, and each pair of values, that any shows."""
    shown = {other: {shows for size in (0, 1, 2) for shows in combinations(other, size)} for other in groups}
    missing = set().union(*shown.values())
    found = []
    while missing:
        found.append(max(shown, key=lambda other: len(shown[other] & missing)))
        missing -= shown[found[-1]]
    return found
