"""A job of which torchrun restarts the processes goes on with the bits of one that nobody killed."""

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


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_restarted_job_goes_on_to_the_same_bits(tmp_path: Path, killed: int) -> None:
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *(TESTS / "support" / "restarted.py", tmp_path, str(killed)),
        ],
        env=environment() | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    (alone := tmp_path / "alone").mkdir()
    for rank, (losses, state) in enumerate(run_ranks(2, train, alone, None)):
        restarts, losses_after, found = pickle.loads((tmp_path / f"found-{rank}").read_bytes())
        assert restarts == 1
        assert losses_after == losses[KILLED // EVERY * EVERY :]
        assert_equal(found, state)
