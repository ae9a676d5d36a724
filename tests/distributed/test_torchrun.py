"""Jobs of torchrun: the report of a lost rank, and a job that is restarted."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from support.places import TESTS, environment
from support.ranked import assert_equal
from support.ranks import run_ranks
from support.restarted import EVERY, KILLED, train

SCRIPT = """
import os, signal
import torch
import torch.distributed as dist
from tierbed import GroupError, World

world = World.from_env(timeout=30)
world.sum(torch.ones(2))
if world.rank == 1:
    {end}
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends this rank: it comes to its own end first
try:
    world.sum(torch.ones(2))
except GroupError:
    {caught}
"""


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *map(str, arguments)]
    variables = environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def scripted(folder: Path, end: str, caught: str) -> subprocess.CompletedProcess[str]:
    (script := folder / "script.py").write_text(SCRIPT.format(end=end, caught=caught))
    return torchrun("--standalone", script)


@pytest.mark.slow
def test_a_killed_rank_is_named_on_stderr_and_in_the_report_of_torchrun(tmp_path: Path) -> None:
    ran = scripted(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)", "os._exit(3)")  # as a rank that is killed as well
    assert ran.returncode != 0
    at_once, report = ran.stderr.split("FAILED", 1)
    assert at_once.count("GroupError on rank 0: ") == 1
    assert "rank 1" in at_once[at_once.index("GroupError on rank 0: ") :]
    assert "GroupError: sum: rank 1 did not answer (its process ended)" in report


@pytest.mark.slow
def test_a_rank_whose_script_ends_before_the_others_is_no_loss_to_report(tmp_path: Path) -> None:
    ran = scripted(tmp_path, "raise SystemExit", "raise SystemExit")
    assert ran.returncode == 0, ran.stderr
    assert "was lost" not in ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_restarted_job_goes_on_to_the_same_bits(tmp_path: Path, killed: int) -> None:
    where = ("--max-restarts", 1, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    ran = torchrun(*where, TESTS / "support" / "restarted.py", tmp_path, killed)
    assert ran.returncode == 0, ran.stderr
    (alone := tmp_path / "alone").mkdir()
    for rank, (losses, state) in enumerate(run_ranks(2, train, alone, None)):
        restarts, losses_after, found = pickle.loads((tmp_path / f"found-{rank}").read_bytes())
        assert restarts == 1
        assert losses_after == losses[KILLED // EVERY * EVERY :]
        assert_equal(found, state)
