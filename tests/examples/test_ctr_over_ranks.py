"""examples/ctr.py under torchrun repeats bit for bit, and a narrow wire leaves its AUC where it was."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.places import EXAMPLES, environment


def printed(folder: Path, *arguments: str) -> list[str]:
    """What 2 ranks print of losses and AUC."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = [str(EXAMPLES / "ctr.py"), "--out", str(folder), *arguments]
    done = subprocess.run([*command, *script], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stdout.splitlines() if "AUC" in line]


@pytest.mark.slow
def test_two_ranks_repeat_to_the_bit_on_any_store(tmp_path: Path) -> None:
    few = ["--rows", "6000", "--epochs", "1"]
    first = printed(tmp_path / "device", *few)
    assert first[-1].startswith("test AUC 0.")
    assert printed(tmp_path / "device", *few) == first
    assert printed(tmp_path / "ssd", *few, "--store", "ssd", "--cache-mb", "0.25") == first


@pytest.mark.slow
def test_a_wire_of_16_bits_moves_the_auc_by_less_than_a_thousandth(tmp_path: Path) -> None:
    wide, narrow = (float(printed(tmp_path, "--wire", bits)[-1].split()[-1]) for bits in ("32", "16"))
    assert wide > 0.8
    assert 0 < abs(wide - narrow) < 0.001
