"""What of Python a step executes in the project's own files: calls and bytecodes, which no load can move."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from timing import without_garbage_collection

import tierbed.embedding
import tierbed.engine
import tierbed.graph
import tierbed.snapshots

COUNTED_ON = (3, 11)  # the CPython whose bytecodes have bars: each has its own
GENERATED = "<eval_with_key>"  # the code of a compiled step, as FX names it
PARTS = (tierbed.embedding, tierbed.engine, tierbed.graph, tierbed.snapshots)
OWN = (*(f"{folder}/" for part in PARTS for folder in part.__path__), GENERATED)


@dataclass
class Executed:
    """calls: of functions of Python or C, by the project's files or of them; bytecodes: within these files."""

    calls: int = 0
    bytecodes: int = 0


def executed(step: Callable[[int], object], number: int) -> Executed:
    """What two runs of step `number` execute: one counts calls, the other bytecodes."""
    found = Executed()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        within = _is_own(frame.f_code)
        if event == "call":
            found.calls += within or (frame.f_back is not None and _is_own(frame.f_back.f_code))
        elif event == "c_call":
            found.calls += within

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_own(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return follow

    def follow(frame: FrameType, event: str, argument: Any) -> Any:
        found.bytecodes += event == "opcode"
        return follow

    with without_garbage_collection():  # which would call what others left behind
        for set_hook, hook in ((sys.setprofile, look), (sys.settrace, enter)):
            set_hook(hook)
            try:
                step(number)
            finally:
                set_hook(None)
    return found


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(OWN)
