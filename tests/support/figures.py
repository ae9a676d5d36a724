"""What a benchmark with sections prints and writes when it runs in a few seconds."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np

from support.scripts import run_script


def check_quick_run(benchmark: ModuleType, folder: Path) -> None:
    """Run the benchmark as a script: each section has figures, which are finite and stand in the table it prints."""
    assert benchmark.__file__ is not None
    figures = folder / "figures.json"
    done = run_script(Path(benchmark.__file__), "--quick", "--folder", folder, "--json", figures)
    assert done.returncode == 0, done.stderr
    shown = json.loads(figures.read_text())["figures"]
    assert {figure["section"] for figure in shown} == set(benchmark.SECTIONS)
    for figure in shown:
        assert np.isfinite(figure["value"])
        assert f"| {figure['section']} | {figure['what']} |" in done.stdout
