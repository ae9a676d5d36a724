"""What docs/embedding.md and docs/training.md show runs, and their checkpoint survives what it says."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"

ENDED = """
import os, sys
from pathlib import Path

shown, stopped = batch, []
def batch(step):
    if step == 17 and sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 23 and not stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        stopped.append(step)
    return shown(step)

def contents(folder):
    rows, mlp = train(Path(folder), 30)
    return {row[:2]: row[2].tolist() for row in rows}, {name: value.tolist() for name, value in mlp.items()}

contents("ended")
assert stop and (Path("ended") / "step-00000023.pt").exists()
stop.clear()
assert contents("ended") == contents("straight")
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def run(script: str, cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    (cwd / "script.py").write_text(script)
    command = [sys.executable, "-W", "error", "script.py", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("page", ["embedding.md", "training.md"])
def test_the_blocks_of_a_page_run_as_one_script(tmp_path: Path, page: str) -> None:
    done = run("\n".join(blocks(page)), tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_checkpoint_brings_a_killed_and_a_terminated_run_back_to_the_bit(tmp_path: Path) -> None:
    recipe, handler = (next(b for b in blocks("training.md") if word in b) for word in ("def train(", "signal.SIGTERM"))
    script = recipe + handler + ENDED
    assert run(script, tmp_path, "kill").returncode == -signal.SIGKILL
    snapshots = tmp_path / "ended" / "items" / "snapshots"
    assert sorted(folder.name for folder in snapshots.iterdir()) == ["step-00000010"]
    done = run(script, tmp_path, "resume")
    assert done.returncode == 0, done.stderr
