"""What `make test` leaves out of a product of parameters `make test-slow` runs; the rest shows each pair of values."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from pathlib import Path

import pytest

from support import cells
from support.forked import in_process

TEST = """
import pytest
from support.cells import all_stores, pairs, rotated

stores = pytest.mark.parametrize("store", ["device", "host", "cached_host", "ssd", "ssd_host"])
b, c = (pytest.mark.parametrize(name, range(3)) for name in "bc")

@stores
@b
def test_stores(store, b): pass

@pairs
@all_stores
@stores
@b
@c
def test_pairs(store, b, c): pass

@rotated("store")
@stores
@b
@c
def test_rotated(store, b, c): pass

@rotated("store")
@stores
def test_one_parameter(store): pass
"""


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


def test_both_commands_together_run_every_cell_and_one_alone_each_pair(tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(TEST)
    fast, slow, every = in_process(collected, tmp_path)
    assert not fast & slow
    assert fast | slow == every
    by_test = defaultdict(list)
    for name, values in (re.findall(r"test_\w+(?=\[)|(?<=\[).*(?=])", cell) for cell in fast):
        by_test[name].append(values.split("-"))
    counts = {name: len(cells) for name, cells in by_test.items()}
    assert counts == {
        "test_stores": 6,
        "test_pairs": pytest.approx(16, abs=1),
        "test_rotated": 9,
        "test_one_parameter": 5,
    }
    couples = itertools.combinations(range(3), 2)
    assert [len({(cell[a], cell[b]) for cell in by_test["test_pairs"]}) for a, b in couples] == [9, 15, 15]
    for other in (0, 1):  # no value of another parameter always has the same one
        assert len({(cell[other], cell[2]) for cell in by_test["test_rotated"]}) > 7
