"""Which cells of a parametrised test `make test` runs; `make test-slow` runs the others.

`@pairs` keeps so many cells that each value of a parameter meets each value of each other one. `@rotated(name)` keeps
one value of that parameter for each cell of the others, in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import combinations

import pytest

pairs = pytest.mark.pairs
rotated = pytest.mark.rotated

Cell = dict[str, int]  # by parameter, a number that tells its values apart
Others = tuple[tuple[str, int], ...]


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test` leaves out as slow."""
    tests: dict[object, list[pytest.Function]] = defaultdict(list)
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if isinstance(item, pytest.Function) and marks & {"pairs", "rotated"} and not marks & {"slow", "gpu"}:
            tests[item.parent, item.originalname].append(item)
    for test in tests.values():
        turning = test[0].get_closest_marker("rotated")
        cells = [{name: id(value) for name, value in item.callspec.params.items()} for item in test]
        pairwise = test[0].get_closest_marker("pairs") is not None
        kept = chosen(cells, turning.args[0] if turning else None, pairwise)
        for number, item in enumerate(test):
            if number not in kept:
                item.add_marker(pytest.mark.slow)


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
