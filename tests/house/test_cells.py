"""What `make test` leaves out of a product of parameters `make test-slow` runs; the rest shows each pair of values."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import cells
from support.cells import Cell, chosen
from support.forked import in_process

TEST = """
import pytest
from support.cells import all_stores, pairs, rotated

STORES = pytest.mark.parametrize("store", ["device", "host", "cached_host", "ssd", "ssd_host"])

@pytest.mark.parametrize("b", range(3))
@STORES
def test_stores(store, b): pass

@pairs
@STORES
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_pairs_on_stores(store, b, c): pass

@all_stores
@STORES
def test_all_stores(store): pass

@pairs
@pytest.mark.parametrize("a", range(4))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_pairs(a, b, c): pass

@rotated("a")
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(5))
def test_rotated(a, b): pass

@pairs
@rotated("a")
@pytest.mark.parametrize("a", [0, 1, pytest.param(2, marks=pytest.mark.gpu)])
def test_one_parameter(a): pass
"""


def shown(cells: list[Cell]) -> set[frozenset[tuple[str, int]]]:
    return {frozenset(two) for cell in cells for two in itertools.combinations(cell.items(), 2)}


sizes = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def product_of(counts: list[int]) -> list[Cell]:
    return [dict(zip("abcd", values, strict=False)) for values in itertools.product(*map(range, counts))]


@given(sizes)
def test_pairs_show_each_value_with_each_other(counts: list[int]) -> None:
    product = product_of(counts)
    kept = [product[number] for number in chosen(product, None, pairwise=True)]
    assert shown(kept) == shown(product)
    assert {part for cell in kept for part in cell.items()} == {part for cell in product for part in cell.items()}
    assert len(counts) < 3 or len(set(counts)) > 1 or 1 in counts or len(kept) < len(product)


@given(sizes, st.booleans())
def test_each_cell_of_the_others_has_one_value_and_all_values_are_there(counts: list[int], pairwise: bool) -> None:
    product = product_of(counts)
    kept = [product[number] for number in chosen(product, "a", pairwise)]
    assert {cell["a"] for cell in kept} == set(range(counts[0]))
    others = [tuple(value for name, value in cell.items() if name != "a") for cell in kept]
    assert pairwise or set(others) == set(itertools.product(*map(range, counts[1:])))
    assert len(kept) == max(len(set(others)), counts[0])


def test_no_value_of_another_parameter_always_has_the_same_one() -> None:
    product = product_of([3, 4, 2])
    kept = [product[number] for number in chosen(product, "a", pairwise=False)]
    for name, value in {part for cell in kept for part in cell.items() if part[0] != "a"}:
        assert len({cell["a"] for cell in kept if cell[name] == value}) > 1


def test_both_commands_together_run_every_cell(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TEST)
    fast, slow, every = in_process(collected, tmp_path)
    assert not fast & slow
    assert fast | slow == every
    counts = Counter(cell.partition("::")[2].partition("[")[0] for cell in fast)
    assert counts == {
        "test_stores": 6,
        "test_pairs_on_stores": 9,
        "test_all_stores": 5,
        "test_pairs": 12,
        "test_rotated": 5,
        "test_one_parameter": 3,
    }


class Collected:
    """A plugin that keeps which tests would run."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.tests = {item.nodeid for item in session.items}


def collected(folder: Path) -> list[set[str]]:
    """Cells of `make test`, of `make test-slow` and of both."""
    found = []
    for marks in ("not slow", "slow", ""):
        kept = Collected()
        pytest.main(["--collect-only", "-qq", "-m", marks, f"--rootdir={folder}", str(folder)], [cells, kept])
        found.append(kept.tests)
    return found
