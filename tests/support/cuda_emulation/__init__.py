"""Runs the kernels of a GPU on a CPU: a Device whose launches go to a library that g++ makes of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from threading import local
from typing import TypeVar

import numpy as np
import torch

from tierbed.engine.ops.cuda.device import THREADS, Device
from tierbed.engine.ops.cuda.program import Program

from .building import library
from .recording import NoHost, Recording

R = TypeVar("R")


class _Recording(local):
    current: Recording | None = None  # of a thread, as CUDA has it of a stream


class EmulatedDevice(Device):
    """`seed` other than 0 starts blocks and lets lanes run in a random order."""

    torch_device = torch.device("cpu")
    blocks = 3  # few, so that kernels stride
    memory = 1 << 30  # bytes, none of which are counted

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._recording = _Recording()

    def read_free_memory(self) -> int:
        return self.memory

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype)

    def start(self, program: Program, kernel: str, blocks: int, arguments: Sequence[np.generic | np.ndarray]) -> None:
        values = [np.ascontiguousarray(argument) for argument in arguments]
        run = partial(self._run, program, kernel, blocks, values)
        if self._recording.current is None:
            run()
        else:
            self._recording.current.add(run)

    def capture(self, launches: Callable[[], R]) -> tuple[Callable[[], None], R]:
        self._recording.current = recording = Recording()
        try:
            with recording, NoHost():
                result = launches()
        finally:
            self._recording.current = None
        return recording.replay, result

    def _run(self, program: Program, kernel: str, blocks: int, values: list[np.ndarray]) -> None:
        addresses = (ctypes.c_void_p * len(values))(*(value.ctypes.data for value in values))
        launch = getattr(_library(program), f"launch_{kernel}")
        if not launch(blocks, THREADS, ctypes.c_uint64(self._seed), addresses):
            raise AssertionError(f"{kernel}: a lane waits in a collective that can never complete")

    def enter_side_stream(self) -> AbstractContextManager[None]:
        return nullcontext()  # a thread of its own is all that there is

    def record_event(self) -> None:
        return None  # what was launched is done

    def wait_event(self, event: None) -> None:
        pass

    def wait(self) -> None:
        pass

    def record_stream(self, memory: torch.Tensor) -> None:
        pass


@cache
def _library(program: Program) -> ctypes.CDLL:
    exports = "".join(f"TIERBED_EXPORT({kernel})\n" for kernel in program.list_kernels())
    return library(program.read_source() + exports)
