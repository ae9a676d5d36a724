"""Count the calls and bytecodes a step executes in the project's own files. Other load does not affect the counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from timing import disable_gc

import tierbed.embedding
import tierbed.engine
import tierbed.graph
import tierbed.snapshots

COUNTED_ON = (3, 11)  # bars on bytecodes hold for this CPython
GENERATED = "<eval_with_key>"  # FX's file name for the code of a compiled step
PARTS = (tierbed.embedding, tierbed.engine, tierbed.graph, tierbed.snapshots)
OWN = (*(f"{folder}/" for part in PARTS for folder in part.__path__), GENERATED)


@dataclass
class Counts:
    """calls: calls by the project's files or into them, Python or C. bytecodes: executed in these files."""

    calls: int = 0
    bytecodes: int = 0


def count_executed(step: Callable[[int], object], number: int) -> Counts:
    """Run step `number` twice: once to count calls, once to count bytecodes."""
    counts = Counts()

    def count_call(frame: FrameType, event: str, argument: Any) -> None:
        is_own = _is_own(frame.f_code)
        if event == "call":
            counts.calls += is_own or (frame.f_back is not None and _is_own(frame.f_back.f_code))
        elif event == "c_call":
            counts.calls += is_own

    def trace_own(frame: FrameType, event: str, argument: Any) -> Any:
        if not _is_own(frame.f_code):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return count_bytecode

    def count_bytecode(frame: FrameType, event: str, argument: Any) -> Any:
        counts.bytecodes += event == "opcode"
        return count_bytecode

    with disable_gc():  # finalizers of older objects would be counted
        for set_hook, hook in ((sys.setprofile, count_call), (sys.settrace, trace_own)):
            set_hook(hook)
            try:
                step(number)
            finally:
                set_hook(None)
    return counts


def _is_own(code: CodeType) -> bool:
    return code.co_filename.startswith(OWN)
