"""Launches kernels with CuPy, on torch's tensors (without copies) and torch's current stream."""

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
from .program import Program, compile_program

THREADS = 256  # per block
# A tensor (passed as its address), a number with the parameter's type, a struct by value, or a null pointer.
Argument = Tensor | np.generic | np.ndarray | None
Event = Any  # a point in the order of a thread's launches
R = TypeVar("R")
_capture_lock = Lock()  # a process captures one CUDA graph at a time


def launch(device: Device, program: Program, kernel: str, items: int, lanes: int, *arguments: Argument) -> None:
    """Launch a kernel over `items`, with `lanes` threads per item. Does nothing if there are no items."""
    if items:
        blocks = min(-(-items * lanes // THREADS), device.blocks)
        device.start(program, kernel, blocks, [_convert_argument(argument) for argument in arguments])


def make_struct_type(*fields: str | tuple[Any, ...]) -> np.dtype[Any]:
    """Return a C++ struct's dtype. A field is a NumPy field; "uint32 count size" makes two fields of type uint32."""
    numpy_fields: list[tuple[Any, ...]] = []
    for field in fields:
        if isinstance(field, tuple):
            numpy_fields.append(field)
        else:
            type_name, *names = field.split()
            numpy_fields += [(name, type_name) for name in names]
    return np.dtype(numpy_fields, align=True)


def make_struct(dtype: np.dtype[Any], **fields: Any) -> np.ndarray:
    """Make a struct from fields, to be passed by value. A tensor becomes its address, None a null pointer."""
    struct = np.zeros((), dtype)
    for name, field in fields.items():
        struct[name] = _convert_argument(field)
    return struct


def _convert_argument(argument: Argument) -> np.generic | np.ndarray:
    if isinstance(argument, Tensor):
        return np.uint64(argument.data_ptr())
    return np.uint64(0) if argument is None else argument


class _Call:
    """A kernel and a buffer for its arguments. Each thread has its own buffer. A launch copies the arguments."""

    def __init__(self, function: Any, arguments: Sequence[np.generic | np.ndarray]) -> None:
        self.function = function
        sizes = [-(-argument.nbytes // 8) * 8 for argument in arguments]  # arguments are aligned to 8 bytes
        self._format = Struct("".join(f"{size}s" for size in sizes))
        values = np.empty(self._format.size, np.uint8)
        self._values = values.data
        offsets = np.cumsum([0, *sizes[:-1]], dtype=np.uint64)
        self._addresses = offsets + np.uint64(values.ctypes.data)
        self.address = self._addresses.ctypes.data  # points to the array of argument addresses

    def write(self, arguments: Sequence[np.generic | np.ndarray]) -> None:
        self._format.pack_into(self._values, 0, *[argument.tobytes() for argument in arguments])


class _ThreadCalls(local):
    def __init__(self) -> None:
        self.by_kernel: dict[tuple[Program, str], _Call] = {}


class Device:
    """An NVIDIA GPU (in tests, the CPU). Runs each thread's kernels in launch order. Compiles programs at first use."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        self._cupy = _import_cupy()
        properties = torch.cuda.get_device_properties(index)
        self.blocks = properties.multi_processor_count * 16  # limit per launch; kernels stride over the remaining items
        self._architecture = f"sm_{properties.major}{properties.minor}"
        self._functions: dict[tuple[Program, str], Any] = {}
        self._calls = _ThreadCalls()
        self._second_stream = torch.cuda.Stream(self.torch_device)
        # torch may hand out a stream of default priority again, so this stream needs another priority
        self._capture_stream = torch.cuda.Stream(self.torch_device, priority=-1)

    def read_free_memory(self) -> int:
        """Return how many bytes torch can still allocate: free bytes, and bytes that its allocator keeps for reuse."""
        cached = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return torch.cuda.mem_get_info(self.torch_device)[0] + cached

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate a tensor [size] in page-locked host memory, which kernels can access. Raises MemoryError."""
        # torch's allocator would round up to a power of two
        cuda, bytes_ = self._cupy.cuda, max(size, 1) * dtype.itemsize
        try:
            with cuda.Device(self.torch_device.index):
                memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(bytes_), 0)
        except cuda.runtime.CUDARuntimeError as error:
            raise MemoryError(f"{bytes_} bytes of page-locked host memory: {error}") from None
        return torch.frombuffer(memory, dtype=torch.uint8, count=bytes_).view(dtype)[:size]

    def start(self, program: Program, kernel: str, blocks: int, arguments: Sequence[np.generic | np.ndarray]) -> None:
        """Launch a kernel with THREADS threads per block."""
        cuda, index = self._cupy.cuda, self.torch_device.index
        with cuda.Device(index):
            # Taken out of the cache while in use: a finalizer or signal handler may launch the same kernel meanwhile.
            call = self._calls.by_kernel.pop((program, kernel), None)
            if call is None:
                call = _Call(self._load_function(program, kernel), arguments)
            call.write(arguments)
            stream = torch._C._cuda_getCurrentRawStream(index)
            cuda.driver.launchKernel(call.function.ptr, blocks, 1, 1, THREADS, 1, 1, 0, stream, call.address, 0)
            self._calls.by_kernel[program, kernel] = call

    def _load_function(self, program: Program, kernel: str) -> Any:
        if (program, kernel) not in self._functions:
            code = compile_program(self._cupy.cuda.nvrtc, program, self._architecture)
            module = self._cupy.RawModule(path=os.fspath(code))
            for name in program.list_kernels():
                self._functions[program, name] = module.get_function(name).kernel
        return self._functions[program, kernel]

    def enter_side_stream(self) -> AbstractContextManager[object]:
        """Return a context in which this thread's launches run concurrently with other threads' steps."""
        return torch.cuda.stream(self._second_stream)

    def record_event(self) -> Event:
        """Return an event that completes when all launches of this thread so far are complete."""
        return self._stream.record_event()

    def wait_event(self, event: Event) -> None:
        """Delay this thread's later launches until `event` is complete."""
        self._stream.wait_event(event)

    def record_stream(self, memory: Tensor) -> None:
        """Keep torch from reusing another thread's memory until this thread's launches so far are complete."""
        memory.record_stream(self._stream)

    def wait(self) -> None:
        """Wait until all threads' launches so far are complete."""
        with _capture_lock:  # waiting would make a capture fail
            torch.cuda.synchronize(self.torch_device)

    def capture(self, launches: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Call `launches`, and capture its kernels and torch ops. Returns (replay, the result of `launches`).

        Each call of `replay` runs the captured work on the same memory. It fills the tensors that `launches` returned.
        Raises RuntimeError if `launches` waits for the device.
        """
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        # The current stream is set again, since torch does not restore it if the capture fails.
        with _capture_lock, _pause_garbage_collection(), _ignore_warning(), torch.cuda.stream(self._stream):
            try:
                with self._enter_capture(graph, pool):
                    result = launches()
            except BaseException:
                graph.reset()
                self._end_failed_capture(pool)
                raise
        return graph.replay, result

    def _enter_capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> AbstractContextManager[object]:
        mode = "thread_local"  # other threads may launch and allocate during the capture
        return torch.cuda.graph(graph, pool=pool, stream=self._capture_stream, capture_error_mode=mode)

    def _end_failed_capture(self, pool: Any) -> None:
        """End a failed capture in torch's allocator and, for torch 2.11, in its random number generator."""
        with suppress(RuntimeError):  # raised if torch has already ended the capture
            torch._C._cuda_endAllocateToPool(self.torch_device.index, pool)
        # A successful capture resets the generator. If this capture fails too, the first error matters more.
        with suppress(RuntimeError), self._enter_capture(torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()):
            torch.zeros(1, device=self.torch_device)

    @property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.torch_device)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: collecting a table closes it, and closing waits for the device."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _ignore_warning() -> Iterator[None]:
    """Ignore torch's empty-capture warning. If warnings are errors, this warning would hide the error in `launches`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        yield


@cache
def cuda_device(index: int) -> Device:
    """Return GPU `index`. Raises StoreError if CuPy is not installed."""
    return Device(index)


def _import_cupy() -> Any:
    try:
        import cupy  # type: ignore[import-not-found]
    except ImportError as error:
        major = (torch.version.cuda or "12").split(".")[0]
        raise StoreError(
            f"tables on a GPU need CuPy, which cannot be imported ({error}): pip install 'tierbed[cuda{major}]'"
        ) from error
    return cupy
