"""Reads, writes and syncs that fail, by a library that the shimmed server of `warm` preloads."""

from __future__ import annotations

import ctypes

OPERATIONS = ["read", "write", "sync"]


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
