"""What the disk under a folder does by itself: the peer of every figure of snapshots."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import TypeVar

T = TypeVar("T")
MB = 10**6
_BLOCK = 1 << 20


def timed(work: Callable[[], T]) -> tuple[float, T]:
    """Seconds, and what it returned."""
    begin = perf_counter()
    result = work()
    return perf_counter() - begin, result


def write_seconds(folder: Path, size: int) -> float:
    """Of `dd` that writes so many bytes of zeros and syncs them."""
    path = folder / "dd"
    blocks = -(-size // _BLOCK)
    command = ["dd", "if=/dev/zero", f"of={path}", f"bs={_BLOCK}", f"count={blocks}", "conv=fsync"]
    seconds, _ = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    path.unlink()
    return seconds * size / (blocks * _BLOCK)


def read_seconds(files: list[Path]) -> float:
    """Of reading files that are not in memory, one after the other, in blocks."""
    for path in files:
        forget(path)
    buffer = bytearray(_BLOCK)

    def read() -> None:
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return timed(read)[0]


def forget(path: Path) -> None:
    """Take a file out of the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def peak_bytes(work: Callable[[], object]) -> int:
    """By how much the resident memory of this process was above what it was before, at most, while `work` ran."""
    ctypes.CDLL(None).malloc_trim(0)  # what an earlier run left to the allocator would hide what this one takes
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    work()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
