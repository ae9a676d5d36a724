"""Where torchrun ends a job because a rank was lost, the user reads which rank, and in which call."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

import pytest

from support.forked import in_process

# a process that torchrun starts has a warm one do its work, and ends as that one does
RANK = """
import os, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends this rank: it comes to its own end first
sys.path[:0] = {path}
from test_loss_reports import Child, rank
code = Child(rank, {is_killed}).wait()
os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""


def rank(is_killed: bool) -> None:
    """Rank 1 is lost, by a kill or by the end of its script; the other hears of it."""
    import torch  # not in the process that torchrun starts

    from tierbed import GroupError, World

    world = World.from_env(timeout=30)
    world.sum(torch.ones(2))
    if world.rank == 1:
        if is_killed:
            os.kill(os.getpid(), signal.SIGKILL)
        raise SystemExit
    try:
        world.sum(torch.ones(2))
    except GroupError:
        if is_killed:
            os._exit(3)  # as a rank that is killed as well
        raise SystemExit from None


def torchrun(folder: Path, is_killed: bool) -> tuple[bool, str]:
    """Whether a job of two ranks passes, and what is on stderr."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    (script := folder / "script.py").write_text(RANK.format(path=sys.path, is_killed=is_killed))
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    passes = True
    with (folder / "stderr").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    try:
        main(["--nproc-per-node", "2", "--standalone", str(script)])
    except ChildFailedError:
        passes = False
        traceback.print_exc()
    return passes, (folder / "stderr").read_text()


def test_a_killed_rank_is_named_on_stderr_and_in_the_report_of_torchrun(tmp_path: Path) -> None:
    passes, said = in_process(torchrun, tmp_path, True)
    assert not passes
    at_once, report = said.split("FAILED", 1)
    assert at_once.count("GroupError on rank 0: ") == 1
    assert "rank 1" in at_once[at_once.index("GroupError on rank 0: ") :]
    assert "GroupError: sum: rank 1 did not answer (its process ended)" in report


@pytest.mark.slow
def test_a_rank_whose_script_ends_before_the_others_is_no_loss_to_report(tmp_path: Path) -> None:
    passes, said = in_process(torchrun, tmp_path, False)
    assert passes, said
    assert "was lost" not in said
