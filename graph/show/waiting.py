"""How long threads of this process waited for a core, and the remedy where idle threads hold the cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import perf_counter_ns

import torch

_SHARE = 0.1  # the share of the time that passed, from which on there is advice


class Waiting:
    """The time that threads waited for a core during `watch`: `seconds` of all threads, of `passed` seconds.

    Both stay 0 where the system does not count, as on any but Linux.
    """

    def __init__(self) -> None:
        self.seconds = self.passed = 0.0

    @contextmanager
    def watch(self) -> Iterator[None]:
        before, begin = _waited(), perf_counter_ns()
        yield
        waited = sum(ns - before.get(thread, 0) for thread, ns in _waited().items())
        self.seconds, self.passed = waited / 1e9, (perf_counter_ns() - begin) / 1e9

    @property
    def advice(self) -> str:
        """A line of advice where spinning threads of torch may hold the cores; else an empty string."""
        spin = torch.get_num_threads() > 1 and os.environ.get("OMP_WAIT_POLICY", "").lower() != "passive"
        if not spin or self.seconds <= _SHARE * self.passed:
            return ""
        return (
            f"threads waited {self.seconds:.2f} s for a core, and those of torch hold theirs while they have no work: "
            "start the process with OMP_WAIT_POLICY=PASSIVE"
        )


def _waited() -> dict[str, int]:
    """By thread of this process, the nanoseconds that it could have run and had no core."""
    waited = {}
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError, IndexError):  # the thread has ended, or this system does not count
            waited[thread.name] = int((thread / "schedstat").read_text().split()[1])
    return waited
