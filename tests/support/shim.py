"""What `crash_io.cpp` does in a process of the warm server, which preloads it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

WHEN = ["before", "after", "torn"]


def watch(folder: Path, trace: int = -1) -> None:
    """Count calls that change files below a folder, and write them to a file, with what they take away kept aside."""
    ctypes.CDLL(None).watch_calls(os.fsencode(folder), os.fsencode(folder.with_name("aside")), trace)


def die_at(call: str, number: int, when: str = "before") -> None:
    """SIGKILL at the `number`th such call from here on: before it, after it, or with half of it done."""
    ctypes.CDLL(None).die_at(call.encode(), ctypes.c_long(number), WHEN.index(when))


def live_on() -> None:
    die_at("", 0)


def fill_disk(is_full: bool) -> None:
    ctypes.CDLL(None).fill_disk(is_full)
