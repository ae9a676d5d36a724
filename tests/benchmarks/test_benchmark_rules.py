"""benchmarks/rules.py at tiny sizes: it runs, and rows that are not those of their dense step have no figure."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from support.places import BENCHMARKS
from support.scripts import run_script

sys.path.insert(0, str(BENCHMARKS))
import rules
from contenders import RowsOf
from tier_stores import Mismatch
from workloads import Workload, make_batches


@pytest.mark.slow
def test_every_optimizer_has_a_figure(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run_script(Path(rules.__file__), "--quick", "--repeats", "2", "--json", figures)
    assert done.returncode == 0, done.stderr
    shown = json.loads(figures.read_text())["figures"]
    assert [figure["what"] for figure in shown] == list(rules.OPTIMIZERS)
    assert all(np.isfinite(figure["value"]) for figure in shown)


def test_rows_of_another_rule_have_no_figure() -> None:
    work = Workload("rules_test", 2, 100, 8, 16, 1, None, "adam", "", 0)
    rows = RowsOf(work, make_batches(work), rules.OPTIMIZERS["Adam"][0])
    rules.check("Adam", rules.OPTIMIZERS["Adam"][0], rows)
    rows = RowsOf(work, make_batches(work), lambda p: torch.optim.Adam(p, lr=0.02))
    with pytest.raises(Mismatch, match="LAMB: rows are"):
        rules.check("LAMB", rules.OPTIMIZERS["LAMB"][0], rows)
