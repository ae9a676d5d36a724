"""An emulated device on which each thread is a stream, and which reports what would race on two real ones.

Work runs at once, but is taken for ordered only where a real device has it so: within a thread, and by `mark` and
`follow`. Two uses of the same memory, one of which writes, must be ordered; a kernel writes what its parameters do not
call const. All memory is kept, so that an address means one piece of it.
"""

from __future__ import annotations

import re
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from threading import get_ident
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tierbed.engine.ops.cuda.program import Program

from . import EmulatedDevice

_OF_SHAPE = {torch.ops.aten.zeros_like, torch.ops.aten.ones_like, torch.ops.aten.empty_like, torch.ops.aten.full_like}
Clock = dict[int, int]  # of each thread, how much of its work comes before


@dataclass
class Memory:
    tensor: Tensor
    owner: int | None  # the thread that allocated it; None: not torch's, or it stays as long as its user
    constant: bool = False
    written: Clock = field(default_factory=dict)  # the last time, by which thread, and when
    read: Clock = field(default_factory=dict)  # since then
    kept: set[int] = field(default_factory=set)
    users: set[int] = field(default_factory=set)


class OrderedDevice(EmulatedDevice):
    """Use it within `watch`. `races` and `unkept` report what was wrong."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.races: list[str] = []
        self._clocks: dict[int, Clock] = defaultdict(dict)
        self._begins: list[int] = []
        self._memory: dict[int, Memory] = {}

    @contextmanager
    def watch(self) -> Iterator[None]:
        with _Watch(self):
            yield

    enter_side_stream = watch

    def unkept(self) -> list[str]:
        """Memory that one thread allocated and another used, without keeping it from being used again too early."""
        return [
            f"{memory.tensor.shape} of {memory.tensor.dtype}"
            for memory in self._memory.values()
            if memory.owner is not None and memory.users - {memory.owner} - memory.kept
        ]

    def opened(self, constants: Sequence[Tensor]) -> None:
        """All memory until now stays as long as its table; these of it do not change."""
        for memory in self._memory.values():
            memory.owner = None
        for tensor in constants:
            self.find(tensor).constant = True

    def allocate_host_memory(self, size: int, dtype: torch.dtype) -> Tensor:
        memory = super().allocate_host_memory(size, dtype)
        self.find(memory).owner = None
        return memory

    def start(self, program: Program, kernel: str, blocks: int, arguments: Sequence[np.generic | np.ndarray]) -> None:
        super().start(program, kernel, blocks, arguments)
        for argument, reads in zip(arguments, _const(program, kernel), strict=True):
            words = np.frombuffer(argument.tobytes().ljust(8, b"\0")[: max(8, argument.nbytes // 8 * 8)], np.uint64)
            for word in words.tolist():
                begin = self._begins[bisect_right(self._begins, word) - 1] if self._begins else word
                memory = self._memory.get(begin)
                if memory is not None and 0 <= word - begin < memory.tensor.untyped_storage().nbytes():
                    self.use(memory, kernel, not reads)

    def record_event(self) -> Clock:  # type: ignore[override]
        return dict(self._clocks[get_ident()])

    def wait_event(self, event: Clock) -> None:  # type: ignore[override]
        mine = self._clocks[get_ident()]
        for thread, time in event.items():
            mine[thread] = max(mine.get(thread, 0), time)

    def record_stream(self, memory: Tensor) -> None:
        self.find(memory).kept.add(get_ident())

    def find(self, tensor: Tensor) -> Memory:
        begin = tensor.untyped_storage().data_ptr()
        if begin not in self._memory:
            self._memory[begin] = Memory(tensor, get_ident() if tensor.untyped_storage().nbytes() else None)
            insort(self._begins, begin)  # last: another thread looks memory up by it
        return self._memory[begin]

    def use(self, memory: Memory, what: str, writes: bool) -> None:
        if memory.constant:
            return
        me = get_ident()
        mine = self._clocks[me]
        time = mine[me] = mine.get(me, 0) + 1
        memory.users.add(me)
        before = {**(memory.read if writes else {}), **memory.written}
        if any(thread != me and mine.get(thread, 0) < at for thread, at in before.items()):
            self.races.append(f"{what}: {memory.tensor.shape} of {memory.tensor.dtype}")
        if writes:
            memory.written, memory.read = {me: time}, {}
        else:
            memory.read[me] = time


@cache
def _const(program: Program, kernel: str) -> list[bool]:
    found = re.search(rf" {kernel}\(([^)]*)\)", program.read_source())
    assert found is not None
    return [parameter.strip().startswith("const ") for parameter in found[1].split(",")]


class _Watch(TorchDispatchMode):
    def __init__(self, device: OrderedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        if func.overloadpacket in _OF_SHAPE:
            args = ()
        for argument, value in zip(func._schema.arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            self._use(func, value, writes)
        for value in (kwargs or {}).values():
            self._use(func, value, writes=False)
        self._use(func, result, writes=True)
        return result

    def _use(self, func: Any, value: Any, writes: bool) -> None:
        for tensor in pytree.tree_leaves(value):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                self._device.use(self._device.find(tensor), str(func), writes)
