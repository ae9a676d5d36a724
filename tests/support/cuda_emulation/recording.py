"""Records kernels and torch ops as a CUDA graph does: they run at each replay, on the memory that they were given.

While recording nothing runs but views and empty memory: results hold bytes that mean nothing, and what waits for the
device is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
REFUSED = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
INDEXED = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_)
EMPTY = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}


class Recording(TorchDispatchMode):
    """`with recording:` records; `replay` runs it, any number of times."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[Callable[[], None]] = []
        self._memory: list[Tensor] = []  # kernels have its addresses alone
        self._fakes = FakeTensorMode()

    def add(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def replay(self) -> None:
        for call in self._calls:
            call()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in REFUSED or (func.overloadpacket in INDEXED and _has_mask(args[1])):
            raise refused(str(func))
        if definition := OPDEFS.get(func._schema.name):  # written in Python: its body runs while it is recorded
            with self:
                return definition._init_fn(*args, **kwargs)
        if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
            with self:
                return func.decompose(*args, **kwargs)
        if func.is_view or func in EMPTY:
            made = func(*args, **kwargs)
            if func in EMPTY:
                made.untyped_storage().fill_(0xA5)
                self._memory.append(made)
            return made
        results, fresh = self._results(func, args, kwargs)

        def run() -> None:
            for target, result in zip(results, pytree.tree_leaves(func(*args, **kwargs)), strict=True):
                if any(target is one for one in fresh):
                    target.copy_(result)

        self.add(run)
        returns = func._schema.returns
        if len(returns) != 1:
            return tuple(results) or None
        return results if isinstance(returns[0].type, torch.ListType) else results[0]

    def _results(self, func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
        """What a call returns, without running it: arguments that it writes, and fresh memory, which is named again."""
        with self._fakes as mode:
            given = pytree.tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
            fakes = func(*given[0], **given[1])
        changed = {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                changed.update(dict.fromkeys(argument.alias_info.before_set, value))
        results, fresh = [], []
        leaves, returns = pytree.tree_leaves(fakes), func._schema.returns
        for i, fake in enumerate(leaves):
            alias = returns[i].alias_info if len(returns) == len(leaves) else None
            if alias is None:
                fresh.append(torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype))
                fresh[-1].untyped_storage().fill_(0xA5)
            results.append(fresh[-1] if alias is None else next(changed[name] for name in alias.before_set))
        return results, fresh


class NoHost(TorchFunctionMode):
    """Refuses what reads device memory from Python: here it is the memory of the host, and would just be read."""

    READS = (Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__int__, Tensor.__float__, Tensor.__bool__)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.READS:
            raise refused(func.__name__)
        return func(*args, **(kwargs or {}))


def refused(what: str) -> RuntimeError:
    """As CUDA says it."""
    return RuntimeError(f"{what}: operation not permitted when stream is capturing")


def _has_mask(indices: Any) -> bool:
    """A mask as an index is turned into numbers, whose count the host waits for."""
    return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in indices)
