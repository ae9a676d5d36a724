"""examples/killed.py shows what it says, and draws it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.places import EXAMPLES
from support.scripts import run_script


@pytest.mark.slow
def test_losses_of_killed_processes_are_those_of_one_that_was_not(tmp_path: Path) -> None:
    plot = tmp_path / "killed.svg"
    run = run_script(EXAMPLES / "killed.py", "--steps", 150, "--plot", plot, whole=True)
    assert run.returncode == 0, run.stderr
    *processes, last = run.stdout.splitlines()
    assert last.endswith(f"losses of {len(processes)} processes equal those of a run never killed")
    assert [line.split()[0] for line in processes[:4]] == ["ssd", "host", "cached_host", "device"]
    assert sum("killed" in line for line in processes) == len(processes) - 1
    assert plot.read_text().startswith("<?xml")
