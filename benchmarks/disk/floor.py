"""Measure a disk's limit: random direct 4 KiB reads of given files, at the best queue depth."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from native import compile_library

DEPTHS = (16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Floor:
    """The highest rate of reads, the queue depth that gives it, and the rate with one read at a time."""

    reads_per_second: float
    depth: int
    single_rate: float

    def __str__(self) -> str:
        return f"{self.reads_per_second:,.0f} reads/s at queue depth {self.depth}, {self.single_rate:,.0f} at 1"


def measure(files: Sequence[Path], seconds: float) -> Floor:
    """Measure the disk that has `files`, for `seconds` at each depth.

    Raises OSError if the files cannot be opened for direct reads.
    """
    rates = {depth: _measure_rate(files, depth, seconds) for depth in (1, *DEPTHS)}
    best = max(DEPTHS, key=lambda depth: rates[depth])
    return Floor(rates[best], best, rates[1])


def evict_file(path: Path) -> None:
    """Remove a file from the page cache."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(file)


def _measure_rate(files: Sequence[Path], depth: int, seconds: float) -> float:
    paths = (ctypes.c_char_p * len(files))(*(os.fsencode(file) for file in files))
    disk_floor = compile_library(Path(__file__).with_suffix(".cpp")).disk_floor
    disk_floor.restype = ctypes.c_double
    disk_floor.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_double, ctypes.c_uint64]
    rate: float = disk_floor(paths, len(files), depth, seconds, depth)
    if rate < 0:
        raise OSError(int(-rate), f"{os.strerror(int(-rate))}: random direct reads of {len(files)} files")
    return rate
