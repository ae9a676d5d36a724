"""Scripts written for TorchRec and FBGEMM give the same numbers when their imports are changed, and nothing else."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import tierbed.jagged

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
PEERS = ("torchrec", "fbgemm_gpu")
RENAMED = {"EmbOptimType": "OptimType"}


def with_imports_changed(script: str) -> str:
    """A script that imports from tierbed.jagged what that has, and the rest from the peers."""
    tree = ast.parse(script)
    for at, node in enumerate(tree.body):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.partition(".")[0] in PEERS:
            names = {True: [], False: []}
            for one in node.names:
                name = RENAMED.get(one.name, one.name)
                own = name in tierbed.jagged.__all__
                names[own].append(ast.alias(name if own else one.name, one.asname))
            modules = {True: "tierbed.jagged", False: node.module}
            tree.body[at] = ast.If(
                ast.Constant(True), [ast.ImportFrom(modules[own], part, 0) for own, part in names.items() if part], []
            )
    return ast.unparse(ast.fix_missing_locations(tree))


def numbers_of(script: str) -> list[torch.Tensor]:
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script", "exec"), names)
    return [number.float() for number in names["numbers"]]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_gives_the_same_numbers(path: Path) -> None:
    script = path.read_text()
    changed = with_imports_changed(script)
    assert "tierbed.jagged" in changed
    theirs, ours = numbers_of(script), numbers_of(changed)
    assert len(theirs) == len(ours) > 3
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)


def losses_of(script: str, processes: int, folder: Path, may_abort: bool = False) -> list[float]:
    """may_abort: True for TorchRec, whose threads at times abort a process that has finished."""
    folder.mkdir()
    (folder / "script.py").write_text(script)
    run = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    ran = subprocess.run(
        [sys.executable, "-m", *run, str(folder / "script.py"), str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    aborted = may_abort and "terminate called without an active exception" in ran.stderr
    assert ran.returncode == 0 or aborted, ran.stderr[-3000:]
    found: list[float] = json.loads((folder / "losses.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_script_over_processes_has_the_same_losses(processes: int, tmp_path: Path) -> None:
    script = (Path(__file__).parent / "distributed_script.py").read_text()
    changed = with_imports_changed(script)
    names = ("DistributedModelParallel", "TrainPipelineSparseDist", "EmbeddingBagCollection")
    assert all(any(name in line for line in changed.splitlines() if "tierbed.jagged" in line) for name in names)
    theirs = losses_of(script, processes, tmp_path / "theirs", may_abort=True)
    ours = losses_of(changed, processes, tmp_path / "ours")
    assert len(ours) == 10
    assert ours == pytest.approx(theirs, rel=1e-5)
