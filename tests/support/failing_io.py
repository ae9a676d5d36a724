"""A library that is preloaded into a process and lets its reads, writes and syncs fail."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

OPERATIONS = ["read", "write", "sync"]


def failing_io(folder: Path) -> Path:
    """The library to preload, built in a folder."""
    library, source = folder / "failing_io.so", Path(__file__).with_name("failing_io.cpp")
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return library


class FailingIo:
    """Every `operation` on a file of rows fails with an errno while the block runs."""

    def __init__(self, operation: str, number: int) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.io_failures.restype = ctypes.c_long
        self._errors = [number if operation == each else 0 for each in OPERATIONS]

    def __enter__(self) -> FailingIo:
        self._before = self.count
        self._shim.fail_io(b".sst", *self._errors)
        return self

    def __exit__(self, *error: object) -> None:
        self._shim.fail_io(b".sst", 0, 0, 0)
        assert self.count > self._before, "nothing was asked of the disk"

    @property
    def count(self) -> int:
        return int(self._shim.io_failures())
