"""benchmarks/tiers.py at tiny sizes: every section runs and checks its stores, and its traces are what they say."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.figures import check_quick_run
from support.places import BENCHMARKS
from support.scripts import run_script

sys.path.insert(0, str(BENCHMARKS))
import tier_stores
import tiers
from tier_report import Figure, markdown
from traces import Cycles, ScanMixed, WrappedZipf, Zipf, ids


def points(svg: str, line: str) -> int:
    """How many points a line of a picture has."""
    found = re.search(rf'<g id="{line}">\s*<path d="([^"]*)"', svg)
    assert found is not None, f"no line {line}"
    return len(re.findall("[ML]", found[1]))


@pytest.mark.slow
def test_every_section_has_figures_for_stores_that_agree_and_a_curve_that_is_drawn(tmp_path: Path) -> None:
    check_quick_run(tiers, tmp_path)
    pytest.importorskip("matplotlib")
    pictures = []
    for name in ("once.svg", "again.svg"):
        done = run_script(BENCHMARKS / "disk" / "plot.py", tmp_path / "figures.json", tmp_path / name)
        assert done.returncode == 0, done.stderr
        pictures.append((tmp_path / name).read_text())
    assert (points(pictures[0], "measured"), points(pictures[0], "explained")) == (3, 2)
    assert pictures[0] == pictures[1]


def test_stores_that_differ_have_no_figure() -> None:
    one, other = tier_stores.Turn(results=[torch.zeros(2)]), tier_stores.Turn(results=[torch.tensor([0.0, 1.0])])
    with pytest.raises(tier_stores.Mismatch, match=r"results of step 0 differ by up to 1"):
        tier_stores.check_results("a turn", one, other)


def test_a_missed_bar_is_bold() -> None:
    table = markdown([Figure("s", "low", 0.5, "x", 0.6), Figure("s", "high", 0.5, "x", 0.4, at_most=True)])
    assert "**0.5 x**" in table.splitlines()[2]
    assert "**0.5 x**" in table.splitlines()[3]
    assert "**" not in markdown([Figure("s", "met", 0.5, "x", 0.5)])


@pytest.mark.parametrize("kind", [Zipf, WrappedZipf, ScanMixed])
def test_a_batch_follows_from_its_number(kind: type[Zipf]) -> None:
    trace = kind(3, 100, 32)
    assert torch.equal(ids(trace, 5), ids(kind(3, 100, 32), 5))
    assert not torch.equal(ids(trace, 5), ids(trace, 6))
    assert 0 <= trace.numbers(7).min() <= trace.numbers(7).max() < 100


def test_zipf_draws_ranks_by_their_power() -> None:
    trace = Zipf(1, 50, 1 << 17)
    drawn = np.bincount(trace.ranks(np.random.default_rng(0), 0)[:, 0], minlength=50) / (1 << 17)
    wanted = np.arange(1, 51) ** -1.05
    np.testing.assert_allclose(drawn, wanted / wanted.sum(), atol=5e-3)


def test_a_scan_reads_the_colder_half_in_turn() -> None:
    trace = ScanMixed(2, 40, 32)
    random = np.random.default_rng(0)
    scanned = np.concatenate([trace.ranks(random, step)[-4:] for step in range(6)])
    wanted = 20 + np.arange(24) % 20
    np.testing.assert_array_equal(scanned, np.stack([wanted, wanted], axis=1))


def test_cycles_visit_their_rows_in_turn() -> None:
    trace = Cycles(100, 20)
    batches = [trace.numbers(step)[:, 0] for step in range(20)]
    assert all(len(np.unique(batch)) == 20 for batch in batches)
    small = [batch[:16] for batch in batches]
    assert len(np.unique(np.concatenate(small))) == 20
    rest = np.concatenate([batch[16:] for batch in batches])
    assert len(np.unique(rest)) == 80
    with pytest.raises(ValueError, match="rows twice"):
        Cycles(10, 20).numbers(0)
