"""Which cells of a parametrised test `make test` runs; `make test-slow` runs the others.

A cell is a test with one value of each parameter. For a parameter `store`, `make test` runs two values; which two
differs between tests. `@all_stores` runs all of them. `@pairs` runs so few cells that each pair of values of two
parameters occurs at least once. `@rotated(name)` runs one value of the parameter `name` for each cell of the other
parameters, in turn, and each value at least once.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations

import pytest

all_stores = pytest.mark.all_stores
pairs = pytest.mark.pairs
rotated = pytest.mark.rotated

EVERY_TIER = {"device", "host", "cached_host", "ssd"}

Values = tuple[tuple[str, int], ...]  # the names of parameters, each with a number that tells apart its values


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out as slow, and what `make check` runs by its parameters."""
    tests: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tests[item.parent, item.originalname].append(item)
    for cells in tests.values():
        names = cells[0].callspec.params
        every_tier = "store" in names and {str(item.callspec.params["store"]) for item in cells} >= EVERY_TIER
        for item in cells:
            if {"optimizer", "rule"} & set(names):
                item.add_marker(pytest.mark.optimizer)
            if every_tier:
                item.add_marker(pytest.mark.tier)
        cells = [item for item in cells if not {"slow", "gpu"} & {marker.name for marker in item.iter_markers()}]
        for item in set(cells) - set(_kept(cells) if cells else ()):
            item.add_marker(pytest.mark.slow)


def _kept(cells: Sequence[pytest.Function]) -> list[pytest.Function]:
    marker = {name: cells[0].get_closest_marker(name) for name in ("rotated", "pairs", "all_stores")}
    turning = marker["rotated"].args[0] if marker["rotated"] else None
    if marker["all_stores"] is None and turning != "store":
        cells = _of_two_stores(cells)
    groups: dict[Values, list[pytest.Function]] = defaultdict(list)  # by the values of the parameters that do not turn
    for item in cells:
        groups[tuple((name, id(value)) for name, value in item.callspec.params.items() if name != turning)].append(item)
    kept = _covering(groups) if marker["pairs"] else list(groups)
    if turning is None:
        return [item for values in kept for item in groups[values]]
    values = len({id(item.callspec.params[turning]) for item in cells})
    turns = ((turn + turn // values, groups[kept[turn % len(kept)]]) for turn in range(max(len(kept), values)))
    return [group[number % len(group)] for number, group in turns]


def _of_two_stores(cells: Sequence[pytest.Function]) -> Sequence[pytest.Function]:
    stores = list(dict.fromkeys(str(item.callspec.params.get("store")) for item in cells))
    first = zlib.crc32(cells[0].originalname.encode())
    kept = {stores[(first + step) % len(stores)] for step in (0, len(stores) // 2)} if len(stores) > 2 else stores
    return [item for item in cells if str(item.callspec.params.get("store")) in kept]


def _covering(groups: dict[Values, list[pytest.Function]]) -> list[Values]:
    """Those that show each value, and each pair of values, that any shows."""
    shown = {values: {shows for size in (0, 1, 2) for shows in combinations(values, size)} for values in groups}
    missing = set().union(*shown.values())
    found = []
    while missing:
        found.append(max(shown, key=lambda values: len(shown[values] & missing)))
        missing -= shown[found[-1]]
    return found
