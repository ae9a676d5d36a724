"""A disk that answers with errors: the call says so, rows that are not on it stay readable, and it goes on after."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path

import torch

from support.forked import in_process
from support.twins import Twins
from support.warm import SHIMMED


class FailingIo:
    """Every read, write or sync of a file of rows fails with an errno while the block runs."""

    def __init__(self, operation: str, number: int) -> None:
        self._shim = ctypes.CDLL(None)
        self._shim.io_failures.restype = ctypes.c_long
        self._errors = [number * (operation == each) for each in ("read", "write", "sync")]

    def __enter__(self) -> None:
        self._before = self._shim.io_failures()
        self._shim.fail_io(b".sst", *self._errors)

    def __exit__(self, *error: object) -> None:
        self._shim.fail_io(b".sst", 0, 0, 0)
        assert self._shim.io_failures() > self._before, "nothing was asked of the disk"


def fail_while_training(path: Path, store: str, operation: str, number: int) -> None:
    twins = Twins(path, store)
    for _ in range(20):
        assert twins.train() is None
    with FailingIo(operation, number):
        twins.train_until_it_fails(3)
        twins.fails(twins.tested.close)  # rows that are not marked clean must not be
        twins.reads_as_before()
    for _ in range(20):
        twins.train()
    assert twins.train() is None
    twins.same()
    twins.close_and_compare()


def fail_while_reading(path: Path, store: str) -> None:
    twins = Twins(path, store)
    for _ in range(20):
        twins.train()
    twins.close_and_compare()
    twins.tested = twins.reopened()
    some = torch.arange(0, 20_000, 37)
    assert twins.train() is None  # fetches rows, which stay resident
    here = (torch.arange(400) * 7 + 150 * (twins.step - 1))[-8:]
    expected = twins.plain.get(here)
    with FailingIo("read", errno.EIO):
        twins.fails(lambda: twins.tested.get(some))
        assert torch.equal(twins.tested.get(here), expected)
    twins.reads_as_before()
    twins.close_and_compare()


def all_faults(path: Path) -> None:
    fail_while_reading(path / "read", "ssd_host")
    fail_while_training(path / "write", "ssd_host", "write", errno.EIO)
    fail_while_training(path / "read-only", "ssd", "write", errno.EROFS)
    fail_while_training(path / "sync", "ssd", "sync", errno.EIO)


def test_errors_of_the_disk_fail_calls_and_lose_no_row(tmp_path: Path) -> None:
    in_process(all_faults, tmp_path, server=SHIMMED)
