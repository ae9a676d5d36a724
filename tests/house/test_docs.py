"""What the pages of docs show runs, and the checkpoint of docs/training.md survives what the page says."""

from __future__ import annotations

import re
import signal
import subprocess
import tomllib
from pathlib import Path

import pytest

from support.places import DOCS, ROOT
from support.scripts import run_script

ENDS = """
import os

shown = batch

def batch(step):
    global AT
    if step == AT:
        AT = None
        os.kill(os.getpid(), SIGNAL)
    return shown(step)

train(Path("ended"), 30)
"""
RESUMES = """
assert stop and Path("ended/step-00000029").exists()
stop.clear()
ended_rows, ended_mlp = train(Path("ended"), 30)
assert all(torch.equal(mlp[key], ended_mlp[key]) for key in mlp)
assert [row[:2] for row in rows] == [row[:2] for row in ended_rows]
assert all(torch.equal(row[2], ended[2]) for row, ended in zip(rows, ended_rows, strict=True))
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.M | re.S)


def run(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "script.py").write_text(script)
    return run_script(cwd / "script.py", cwd=cwd, warnings="error", whole=True)


def test_the_embedding_page_runs(tmp_path: Path) -> None:
    done = run("\n".join(blocks("embedding.md")), tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_training_page_runs_and_brings_a_killed_and_terminated_run_back_to_the_bit(tmp_path: Path) -> None:
    page = blocks("training.md")
    killed = "AT, SIGNAL = 25, signal.SIGKILL" + ENDS
    assert run(page[0] + killed, tmp_path).returncode == -signal.SIGKILL
    snapshots = tmp_path / "ended" / "items" / "snapshots"
    saved = sorted(folder.name.rpartition("-")[0] for folder in snapshots.iterdir())
    assert saved == ["step-00000010", "step-00000020"]
    terminated = "AT, SIGNAL = 29, signal.SIGTERM" + ENDS
    done = run("\n".join(page) + terminated + RESUMES, tmp_path)
    assert done.returncode == 0, done.stderr


PAGES = ["from_nn_embedding", "lifecycle", "metrics", "tiers", "planning", "oneflow", "torchrec", "plain_loop"]


@pytest.mark.parametrize("page", [f"{name}.md" for name in PAGES])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    done = run("\n".join(blocks(page)), tmp_path)
    assert done.returncode == 0, done.stderr


EXTRAS = {
    "prometheus_client": "metrics",
    "torch.utils.tensorboard": "metrics",
    "matplotlib": "plot",
    "pyarrow": "parquet",
}


def test_a_block_that_needs_an_extra_says_which() -> None:
    needed = []
    for page in DOCS.glob("*.md"):
        for block in blocks(page.name):
            for module in re.findall(r"^(?:from|import) ([\w.]+)", block, re.M):
                extra = next((EXTRAS[name] for name in EXTRAS if f"{module}.".startswith(f"{name}.")), None)
                if extra is not None:
                    needed.append((page.name, module))
                    assert f"pip install 'tierbed[{extra}]'" in block, needed[-1]
    assert ("metrics.md", "prometheus_client") in needed
    (plot,) = (block for block in blocks("planning.md") if ".plot(" in block)
    assert "pip install 'tierbed[plot]'" in plot
    for page, extra in (("planning.md", "plot"), ("metrics.md", "metrics")):
        assert f"tierbed[{extra}]" in (DOCS / page).read_text().partition("```python")[0].replace("\n", " ")


def test_the_graph_page_runs_and_what_it_looks_at_is_there(tmp_path: Path) -> None:
    page = (DOCS / "graph.md").read_text()
    done = run("\n".join(blocks("graph.md")), tmp_path)
    assert done.returncode == 0, done.stderr
    reason = "step 1: argument ids: shape (100, 4), was (256, 4); argument labels: shape (100,), was (256,)"
    assert f"`{reason}`" in page
    assert f"['{reason}']" in done.stdout
    assert f"compiled {reason}" in done.stderr
    line = "gather = pin.gather(0)  # float32 [256, 4, 8], items in cached_host_mem"
    assert line in page
    assert line in done.stdout
    assert {file.name for file in tmp_path.iterdir()} >= {"step.mmd", "trace.json"}


def test_the_table_of_extras_has_all() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`tierbed\[.*?) \|", (DOCS / "install.md").read_text(), re.M)
    assert sorted(re.findall(r"\[(\w+)\]", " ".join(rows))) == sorted(extras)
