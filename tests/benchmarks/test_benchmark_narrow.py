"""benchmarks/narrow.py at tiny sizes: it runs, and rows that are not near those of float32 have no figure."""

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
import narrow
from contenders import RowsOf
from tier_stores import Mismatch
from workloads import Workload, make_batches


@pytest.mark.slow
def test_every_type_of_rows_has_figures(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    done = run_script(Path(narrow.__file__), "--quick", "--repeats", "2", "--json", figures)
    assert done.returncode == 0, done.stderr
    shown = json.loads(figures.read_text())["figures"]
    assert {figure["section"] for figure in shown} == set(narrow.SECTIONS)
    assert all(np.isfinite(figure["value"]) for figure in shown)


@pytest.mark.parametrize("name", narrow.TYPES)
def test_rows_of_another_rate_have_no_figure(name: str) -> None:
    work = Workload("narrow_test", 2, 100, 8, 16, 1, None, "adagrad", "", 0)
    batches, make = make_batches(work), narrow.OPTIMIZERS["adagrad"]
    types = narrow.TYPES[name]
    narrow.check(name, types[0], RowsOf(work, batches, make, types), RowsOf(work, batches, make))
    slower = RowsOf(work, batches, lambda p: torch.optim.Adagrad(p, narrow.LR / 4), types)
    with pytest.raises(Mismatch, match=f"{name}: rows are"):
        narrow.check(name, types[0], slower, RowsOf(work, batches, make))
