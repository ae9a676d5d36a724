"""The README's example does what it says, the first time and the second."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from support.places import ROOT, environment
from support.scripts import run_script
from tierbed.cli import app

README = (ROOT / "README.md").read_text()
EXAMPLE, TORCHREC, RANKS = re.findall(r"```python\n(.*?)```", README, re.S)


def test_the_example_runs_twice_and_learns_and_the_shell_sees_its_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "example.py").write_text(EXAMPLE)
    for _ in range(2):
        run = run_script(tmp_path / "example.py", cwd=tmp_path, whole=True)
        assert run.returncode == 0, run.stderr
        losses = [float(line.split()[1]) for line in run.stdout.splitlines()]
        assert losses[0] > 0.6
        assert losses[-1] < 0.3
    (command,) = re.findall(r"`tierbed (snapshot list .*?)`", README)
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(app, command.split())
    assert listed.exit_code == 0, listed.output
    assert "step-100" in listed.output
    assert "step-200" in listed.output


@pytest.mark.slow
def test_the_example_of_many_processes_learns_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    losses = [float(line) for line in run.stdout.splitlines()]
    assert len(losses) == 20  # rank 0 alone prints
    assert losses[-1] < losses[0] / 2
    assert (tmp_path / "shared" / "shared" / "snapshots" / "trained").is_dir()


def test_the_example_for_users_of_torchrec_learns(tmp_path: Path) -> None:
    run = run_script(TORCHREC, cwd=tmp_path, whole=True)
    assert run.returncode == 0, run.stderr
    losses = [float(loss) for loss in run.stdout.split()]
    assert losses[-1] < losses[0] / 2


def test_links_lead_to_files_and_headings() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target, heading in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", page.read_text()):
            other = page.parent / target
            assert other.is_file(), (page.name, target)
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            assert not heading or heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}
