"""The README's example and its shell commands do what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_example_runs_and_its_snapshot_is_seen_from_the_shell(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    (tmp_path / "example.py").write_text(example)
    run = subprocess.run([sys.executable, "example.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 10
    commands = re.findall(r"^    tierbed (snapshot .*?)(?:  +#.*)?$", README, re.M)
    assert {command.split()[1] for command in commands} == {"list", "verify", "inspect", "save", "load"}
    for command in commands:
        tool = [Path(sys.executable).with_name("tierbed"), *command.split()]
        done = subprocess.run(tool, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, (command, done.stderr)
        assert done.stdout


def test_importing_the_engine_does_not_import_cupy() -> None:
    code = "import sys, tierbed.engine, tierbed.graph; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
