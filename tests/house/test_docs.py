"""What README and the pages of docs show runs, survives what they say, and leads somewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tomllib
import warnings
from pathlib import Path

import pytest

from support.places import DOCS, ROOT
from support.ranks import run_ranks
from support.scripts import run_script
from support.shell import command
from tierbed import World

README = (ROOT / "README.md").read_text()
(EXAMPLE,) = (  # a third of the page's steps
    code.replace("1000", "300").replace("% 100", "% 50") for code in re.findall(r"```python\n(.*?)```", README, re.S)
)
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


def run(script: str, cwd: Path, code: int = 0, whole: bool = False) -> subprocess.CompletedProcess[str]:
    (cwd / "script.py").write_text(script)
    done = run_script(cwd / "script.py", cwd=cwd, warnings="error", whole=whole)
    assert done.returncode == code, done.stderr
    return done


PAGES = ["embedding", "from_nn_embedding", "lifecycle", "metrics", "tiers", "planning", "oneflow", "torchrec"]


@pytest.mark.parametrize("page", [*PAGES, "plain_loop"])
def test_a_page_runs(page: str, tmp_path: Path) -> None:
    run("\n".join(blocks(f"{page}.md")), tmp_path, whole=page == "embedding")


def test_the_graph_page_runs_and_what_it_looks_at_is_there(tmp_path: Path) -> None:
    page = (DOCS / "graph.md").read_text()
    done = run("\n".join(blocks("graph.md")), tmp_path)
    reason = "step 1: argument ids: shape (100, 4), was (256, 4); argument labels: shape (100,), was (256,)"
    assert f"`{reason}`" in page
    assert f"['{reason}']" in done.stdout
    assert f"compiled {reason}" in done.stderr
    line = "gather = pin.gather(0)  # float32 [256, 4, 8], items in cached_host_mem"
    assert line in page
    assert line in done.stdout
    assert {file.name for file in tmp_path.iterdir()} >= {"step.mmd", "trace.json"}


def run_page(_: World, page: str, folder: str) -> None:
    os.chdir(folder)
    warnings.simplefilter("error")
    exec(compile(page, "distributed.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_page_of_ranks_runs_on_one_and_on_two(ranks: int, tmp_path: Path) -> None:
    run_ranks(ranks, run_page, "\n".join(blocks("distributed.md")), str(tmp_path))
    assert (tmp_path / "store" / "items" / "ranks").is_dir() == (ranks > 1)


def test_the_training_page_brings_a_killed_and_terminated_run_back_to_the_bit(tmp_path: Path) -> None:
    page = blocks("training.md")
    run(f"{page[0]}AT, SIGNAL = 25, signal.SIGKILL{ENDS}", tmp_path, -signal.SIGKILL)
    snapshots = tmp_path / "ended" / "items" / "snapshots"
    saved = sorted(folder.name.rpartition("-")[0] for folder in snapshots.iterdir())
    assert saved == ["step-00000010", "step-00000020"]
    run("\n".join(page) + "AT, SIGNAL = 29, signal.SIGTERM" + ENDS + RESUMES, tmp_path)


def test_the_readmes_example_learns_and_one_that_was_killed_ends_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run(EXAMPLE, tmp_path / "whole", whole=True)
    printed = whole.stdout.splitlines()
    assert [line.split()[0] for line in printed] == ["50", "100", "150", "200", "250", "300"]
    assert float(printed[-1].split()[1]) < 0.1
    kill = "if step == 220:\n        os.kill(os.getpid(), 9)\n    ids = torch.randint"
    run("import os\n" + EXAMPLE.replace("ids = torch.randint", kill), tmp_path / "killed", -signal.SIGKILL)
    again = run(EXAMPLE, tmp_path / "killed")
    assert 0 < len(again.stdout.splitlines()) < 4
    assert whole.stdout.endswith(again.stdout)
    (shown,) = re.findall(r"`tierbed (checkpoint inspect .*?)`", README)
    monkeypatch.chdir(tmp_path / "killed")
    assert command(*shown.split()) == 0


def test_links_lead_to_files_and_headings() -> None:
    for page in (ROOT / "README.md", *DOCS.glob("*.md")):
        for target, heading in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", page.read_text()):
            other = page.parent / target
            assert other.is_file(), (page.name, target)
            headings = re.findall(r"^#+ (.*)$", other.read_text(), re.M)
            assert not heading or heading in {re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings}


EXTRAS = {
    "prometheus_client": "metrics",
    "torch.utils.tensorboard": "metrics",
    "matplotlib": "plot",
    "pyarrow": "parquet",
}


def test_a_block_that_needs_an_extra_says_which_and_the_table_of_extras_has_all() -> None:
    needed = [
        (page.name, module, f"pip install 'tierbed[{EXTRAS[name]}]'" in block)
        for page in DOCS.glob("*.md")
        for block in blocks(page.name)
        for module in re.findall(r"^(?:from|import) ([\w.]+)", block, re.M)
        for name in EXTRAS
        if f"{module}.".startswith(f"{name}.")
    ]
    assert ("metrics.md", "prometheus_client", True) in needed
    assert all(says for *_, says in needed), needed
    (plot,) = (block for block in blocks("planning.md") if ".plot(" in block)
    assert "pip install 'tierbed[plot]'" in plot
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`tierbed\[.*?) \|", (DOCS / "install.md").read_text(), re.M)
    assert sorted(re.findall(r"\[(\w+)\]", " ".join(rows))) == sorted(extras)
