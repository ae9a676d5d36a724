"""The memory limit of benchmarks/disk: a process beyond it ends, and one within it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
from disk.memory_limit import may_limit, memory_limit


def _allocate(megabytes: int, limit: int | None) -> int:
    with memory_limit(limit) as enter:
        code = f"x = bytearray({megabytes} << 20); x[::4096] = b'1' * len(x[::4096])"
        return subprocess.run([sys.executable, "-c", code], preexec_fn=enter, check=False).returncode


def test_a_process_beyond_its_limit_ends() -> None:
    if reason := may_limit():
        pytest.skip(f"this user may make no memory cgroup: {reason}")
    assert _allocate(16, 128 << 20) == 0
    assert _allocate(256, 128 << 20) != 0


def test_no_limit_is_none() -> None:
    assert _allocate(256, None) == 0
