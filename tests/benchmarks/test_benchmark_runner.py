"""benchmarks/run.py: what it refuses and reports, and that each group has figures at tiny sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from support.places import BENCHMARKS
from support.scripts import run_script

sys.path.insert(0, str(BENCHMARKS))
import run
from report import Figure, markdown
from workload import WORKLOADS, Mismatch, Workload

RUN = BENCHMARKS / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize("group", run.GROUPS)
def test_every_workload_has_figures_for_sides_that_agree(tmp_path: Path, group: str) -> None:
    figures, table = tmp_path / "figures.json", tmp_path / "figures.md"
    done = run_script(RUN, group, "--quick", "--folder", tmp_path, "--json", figures, "--markdown", table)
    assert done.returncode == 0, done.stderr
    shown = json.loads(figures.read_text())
    run.load_workloads()
    measured = {figure["section"] for figure in shown["figures"]} | set(shown["missing"])
    assert measured == {name for name in WORKLOADS if name.startswith(f"{group}/")}
    for figure in shown["figures"]:
        assert np.isfinite(figure["value"])
        assert f"| {figure['section']} | {figure['what']} |" in table.read_text()
    assert table.read_text() in done.stdout


def test_figures_of_sides_that_differ_are_missing_and_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differ(folder: Path) -> None:
        raise Mismatch("rows differ by up to 1")

    def lack(folder: Path) -> None:
        import no_such_peer  # noqa: F401

    run.load_workloads()
    for name, measure in {"differ": differ, "lack": lack}.items():
        monkeypatch.setitem(WORKLOADS, f"fake/{name}", Workload(f"fake/{name}", measure, {}, {}, True))
    assert run.main(["fake/differ", "--quick"]) == 1
    assert "fake/differ: no figure, Mismatch: rows differ by up to 1" in capsys.readouterr().out
    assert run.main(["fake/lack", "--quick"]) == 1
    assert "run `make peers` to install it" in capsys.readouterr().out


def test_a_missed_bar_is_bold_and_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    table = markdown([Figure("s", "low", 0.5, "x", 0.6), Figure("s", "high", 0.5, "x", 0.4, at_most=True)])
    assert "**0.5 x**" in table.splitlines()[2]
    assert "**0.5 x**" in table.splitlines()[3]
    assert "**" not in markdown([Figure("s", "met", 0.5, "x", 0.5)])
    run.load_workloads()
    work = Workload("fake/low", lambda folder: [Figure("", "low", 0.5, "x", 0.6)], {}, {}, True)
    monkeypatch.setitem(WORKLOADS, work.name, work)
    monkeypatch.setattr(run, "measure_in_child", lambda work, folder, settings: work.figures(tmp_path, settings))
    assert run.main(["fake/low"]) == 1
    assert run.main(["fake/low", "--quick"]) == 0
