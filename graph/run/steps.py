"""The steps that a graph has compiled, by the calls that they serve."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ..trace.arguments import Call, Dims
from ..trace.signature import without_sizes
from ..trace.sizes import Sizes, tell_failed
from .compiled import CompiledStep

# dimensions to leave open, None for a step of one call's sizes alone -> that step
Compile = Callable[[Dims | None], CompiledStep]


class Steps:
    """Steps for one signature, and steps that many sizes share; of the former, those used last.

    A signature leaves out the sizes that containers leave open. One step serves all of these sizes, from the first
    call on. Where a `build` wants to know such a size, each size has a step of its own.
    """

    def __init__(self, most: int) -> None:
        """most: how many steps for one signature there may be."""
        self._most = most
        self._kept: OrderedDict[Hashable, CompiledStep] = OrderedDict()
        self._sizes = Sizes[CompiledStep]()
        self._closed: dict[Hashable, None] = {}  # the latest signatures whose open sizes cannot stay open

    def clear(self) -> None:
        """Forget all steps."""
        self._kept.clear()
        self._sizes.clear()
        self._closed.clear()

    def all(self) -> list[CompiledStep]:
        """The steps for one signature, then those that many share."""
        return [*self._kept.values(), *self._sizes.steps()]

    def find(self, signature: Any, call: Call, alone: bool) -> CompiledStep | None:
        """A step that serves a call. alone: whether it is to be one for these sizes alone."""
        own = _own(signature, call)
        for key in (own,) if alone or own is signature else (own, signature):
            step = self._kept.get(key)
            if step is not None and step.serves(call.inputs):
                self._kept.move_to_end(key)
                return step
        return None if alone else self._sizes.find(_family(signature, call), call.inputs)

    def make(self, name: str, signature: Any, call: Call, alone: bool, compiled: Compile) -> CompiledStep:
        """Compile a step for a call that no step serves. name: that of the graph. Raises what `compiled` raises."""
        family, inputs = _family(signature, call), call.inputs
        step = None if alone else self._for_many(name, family, call, compiled)
        if step is not None:
            return step
        opens = bool(call.open) and not alone and signature not in self._closed and signature not in self._kept
        shared = _tried(compiled, call.open) if opens else None
        if shared is not None and any(map(shared.serves, _others(call))):
            self._kept[signature] = shared
        else:
            shared = None
        step = shared if shared is not None and shared.serves(inputs) else compiled(None)
        if step is not shared:
            self._kept[_own(signature, call)] = step
        if opens and shared is None:
            self._closed[signature] = None  # only now: a call that was wrong says nothing of sizes
        if not alone:
            self._sizes.saw(name, family, inputs, call.open)
        return step

    def drop(self, name: str, step: CompiledStep, cause: BaseException | None) -> None:
        """Drop a step for many sizes that failed where a step for one size did not. Further sizes get their own."""
        for key in [key for key, kept in self._kept.items() if kept is step]:
            del self._kept[key]
            self._closed[key] = None
        self._sizes.drop(step)
        tell_failed(name, cause)

    def bound(self, name: str) -> None:
        """Drop the steps that were not used for longest where there are too many. name: that of the graph, to warn."""
        too_many = len(self._kept) > self._most
        while len(self._kept) > self._most:  # a call may have made two
            self._kept.popitem(last=False)
        while len(self._closed) > self._most:
            self._closed.pop(next(iter(self._closed)))
        if too_many:
            warnings.warn(
                f"{name} was compiled for more than {self._most} signatures and drops the oldest; pass numbers that "
                "change at each call as tensors, and pad inputs to few shapes",
                stacklevel=7,
            )

    def _for_many(self, name: str, family: Hashable, call: Call, compiled: Compile) -> CompiledStep | None:
        changing = self._sizes.changing(family, call.inputs, call.open)
        step = None if changing is None else _tried(compiled, changing)
        return step if step is not None and self._sizes.add(name, family, step.serves, step, call.inputs) else None


def _own(signature: Any, call: Call) -> Hashable:
    """The key of a step for the sizes of this call alone."""
    return (signature, tuple(tensor.shape for tensor in call.inputs)) if call.open else signature


def _family(signature: Any, call: Call) -> Hashable:
    """The key that calls share which differ in sizes alone."""
    spec, arguments, *rest = signature
    return spec, without_sizes(arguments, call.leaves), *rest


def _tried(compiled: Compile, changing: Dims) -> CompiledStep | None:
    try:
        return compiled(changing)
    except Exception:  # build looks at a size; any other mistake, a step for these sizes raises as well
        return None


def _others(call: Call) -> list[list[Tensor]]:
    """The inputs of calls that differ in open sizes, without values."""
    inputs = call.inputs
    return [
        [
            torch.empty_strided((len(t) + more, *t.shape[1:]), t.stride(), device="meta") if (i, 0) in call.open else t
            for i, t in enumerate(inputs)
        ]
        for more in (2, 3, 4)
    ]
