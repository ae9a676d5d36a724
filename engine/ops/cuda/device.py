"""The device on which kernels run, and the number of their threads.

Memory is torch's, on both sides of a launch: its allocator, its current stream, no copies. CuPy compiles and launches.
"""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from struct import Struct
from threading import Lock, local
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ...errors import StoreError
from .program import Program, compiled

THREADS = 256  # of a block
Argument = Tensor | np.generic | np.ndarray | None  # memory, a number of the parameter's type, a struct by value
Event = Any  # a point in the order of a thread's launches
R = TypeVar("R")
_one_capture = Lock()  # a process captures one CUDA graph at a time


def launch(device: Device, program: Program, kernel: str, items: int, lanes: int, *arguments: Argument) -> None:
    """Run a kernel over `items` that `lanes` threads share each. No items, no launch."""
    if items:
        blocks = min(-(-items * lanes // THREADS), device.blocks)
        device.start(program, kernel, blocks, [_value(argument) for argument in arguments])


def struct_type(*fields: str | tuple[Any, ...]) -> np.dtype[Any]:
    """The type of a C++ struct. Each argument is a type and names, as "uint32 count size", or a field of NumPy's."""
    declared: list[tuple[Any, ...]] = []
    for field in fields:
        if isinstance(field, tuple):
            declared.append(field)
        else:
            kind, *names = field.split()
            declared += [(name, kind) for name in names]
    return np.dtype(declared, align=True)


def struct_of(dtype: np.dtype[Any], **fields: Any) -> np.ndarray:
    """A struct by value. Of a tensor, it has the address."""
    struct = np.zeros((), dtype)
    for name, field in fields.items():
        struct[name] = _value(field) if field is None or isinstance(field, Tensor) else field
    return struct


def _value(argument: Argument) -> np.generic | np.ndarray:
    if argument is None:
        return np.uint64(0)
    if isinstance(argument, (np.generic, np.ndarray)):
        return argument
    return np.uint64(argument.data_ptr())


class _Call:
    """A kernel, and memory of one thread for its arguments, which a launch copies."""

    def __init__(self, function: Any, arguments: Sequence[np.generic | np.ndarray]) -> None:
        self.function = function
        sizes = [-(-argument.nbytes // 8) * 8 for argument in arguments]  # each begins at a multiple of 8
        self._format = Struct("".join(f"{size}s" for size in sizes))
        values = np.empty(self._format.size, np.uint8)
        self._values = values.data
        begins = np.cumsum([0, *sizes[:-1]], dtype=np.uint64)
        self._addresses = begins + np.uint64(values.ctypes.data)
        self.address = self._addresses.ctypes.data  # where the addresses of the arguments are

    def write(self, arguments: Sequence[np.generic | np.ndarray]) -> None:
        self._format.pack_into(self._values, 0, *[argument.tobytes() for argument in arguments])


class _CallsOfThread(local):
    def __init__(self) -> None:
        self.by_kernel: dict[tuple[Program, str], _Call] = {}


class Device:
    """An NVIDIA GPU. Kernels of one thread run in the order in which the thread launches them.

    Programs are compiled at their first use. Tests have a device that runs kernels on a CPU.
    """

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._cupy = _cupy()
        properties = torch.cuda.get_device_properties(index)
        self.blocks = properties.multi_processor_count * 16  # the maximum of a launch; kernels stride over more items
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self._functions: dict[tuple[Program, str], Any] = {}
        self._calls = _CallsOfThread()
        self._second_stream = torch.cuda.Stream(self.torch_device)
        self._capture_stream = torch.cuda.Stream(self.torch_device, priority=-1)  # torch reuses others

    def free_memory(self) -> int:
        """Bytes of the device's memory that torch can still give out."""
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return free + kept  # kept by torch's allocator, for later tensors

    def host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """[size], page-locked host memory, which kernels access by its address. Raises MemoryError."""
        # not by torch's allocator, which rounds up to a power of two
        cuda, bytes_ = self._cupy.cuda, max(size, 1) * dtype.itemsize
        try:
            with cuda.Device(self.torch_device.index):
                memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(bytes_), 0)
        except cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{bytes_} bytes of page-locked host memory: {error}") from None
        return torch.frombuffer(memory, dtype=torch.uint8, count=bytes_).view(dtype)[:size]

    def start(self, program: Program, kernel: str, blocks: int, arguments: Sequence[np.generic | np.ndarray]) -> None:
        """Launch a kernel with THREADS threads a block."""
        cuda, index = self._cupy.cuda, self.torch_device.index
        with cuda.Device(index):
            # taken out, since a finalizer or a signal handler may launch the same kernel in the midst
            call = self._calls.by_kernel.pop((program, kernel), None)
            if call is None:
                call = _Call(self._function(program, kernel), arguments)
            call.write(arguments)
            stream = torch._C._cuda_getCurrentRawStream(index)
            cuda.driver.launchKernel(call.function.ptr, blocks, 1, 1, THREADS, 1, 1, 0, stream, call.address, 0)
            self._calls.by_kernel[program, kernel] = call

    def _function(self, program: Program, kernel: str) -> Any:
        if (program, kernel) not in self._functions:
            code = compiled(self._cupy.cuda.nvrtc, program, self._architecture)
            module = self._cupy.RawModule(path=os.fspath(code))
            for name in program.kernels():
                self._functions[program, name] = module.get_function(name).kernel
        return self._functions[program, kernel]

    def side_stream(self) -> AbstractContextManager[object]:
        """A context in which launches of this thread run concurrently with the steps of other threads."""
        return torch.cuda.stream(self._second_stream)

    def record_event(self) -> Event:
        """An event that is complete when all present launches of this thread are."""
        return self._stream.record_event()

    def wait_event(self, event: Event) -> None:
        """Let later launches of this thread begin when `event` is complete."""
        self._stream.wait_event(event)

    def record_stream(self, memory: Tensor) -> None:
        """Keep another thread's memory from the allocator until the present launches of this thread are complete."""
        memory.record_stream(self._stream)

    def wait(self) -> None:
        """Wait until the present launches of all threads are complete."""
        with _one_capture:  # waiting would break a capture
            torch.cuda.synchronize(self.torch_device)

    def capture(self, launches: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Capture the kernels and torch ops that `launches` launches. Returns (replay, the result of `launches`).

        Nothing runs now. Each call of `replay` runs all launches again, with the memory of the capture. Tensors of the
        result have their values after a replay. Raises RuntimeError if `launches` waits for the device.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # the outer stream, since torch does not restore it if the capture fails
        with _one_capture, _without_garbage(), _without_warning(), torch.cuda.stream(self._stream):
            try:
                with self._capturing(graph, pool):
                    result = launches()
            except BaseException:
                graph.reset()
                self._end_failed_capture(pool)
                raise
        return graph.replay, result

    def _capturing(self, graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[object]:
        # thread_local: other threads continue
        stream = self._capture_stream
        return torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")

    def _end_failed_capture(self, pool: Any) -> None:
        """End a failed capture in torch's allocator and, for 2.11, in its random numbers."""
        with suppress(RuntimeError):  # torch has ended it
            torch._C._cuda_endAllocateToPool(self.torch_device.index, pool)
        # a capture that succeeds; its failure would hide the first
        with suppress(RuntimeError), self._capturing(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()):
            torch.zeros(1, device=self.torch_device)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)


@contextmanager
def _without_garbage() -> Iterator[None]:
    """Collect no garbage in the block: collecting a table closes it, and closing waits for the device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _without_warning() -> Iterator[None]:
    """Let torch end an empty recording in silence: where warnings are errors, one would hide why `launches` failed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield


@cache
def cuda_device(index: int) -> Device:
    """The GPU number `index`. Raises StoreError if CuPy is not installed."""
    return Device(index)


def _cupy() -> Any:
    try:
        import cupy  # type: ignore[import-not-found]
    except ImportError as error:
        major = (torch.version.cuda or "12").split(".")[0]
        raise StoreError(
            f"tables on a GPU need CuPy, which cannot be imported ({error}): pip install 'tierbed[cuda{major}]'"
        ) from error
    return cupy
