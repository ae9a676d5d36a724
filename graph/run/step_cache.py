"""The steps that a graph has compiled, by the calls that they accept.

Calls that differ in sizes alone get a few static-shape steps first, then one dynamic-shape step.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..trace.signature import Call, Dims, without_sizes
from .compiled_step import CompiledStep

MAX_DYNAMIC_TRIES = 2  # of a dynamic-shape step, if none accepts other sizes
MAX_STATIC_SHAPES = 8  # of the same arguments, and the most dynamic-shape steps of these
MAX_FAMILIES = 64

log = logging.getLogger("tierbed")

Shapes = tuple[tuple[int, ...], ...]
# dynamic dimensions, None for a static-shape step -> the step
Compile = Callable[[Dims | None], CompiledStep]


@dataclass
class _ShapeFamily:
    """What is known of calls that differ in the sizes of tensors alone."""

    static_shapes: list[Shapes] = field(default_factory=list)  # sizes that have static-shape steps
    general: list[CompiledStep] = field(default_factory=list)  # dynamic-shape steps
    tried: int = 0  # dynamic-shape steps that accepted none of the other sizes
    failed: bool = False  # whether there was a dynamic-shape step that torch could not run
    has_warned: bool = False  # whether the log said that each further size is compiled

    def dynamic_dims(self, call: Call) -> Dims | None:
        """The dynamic dimensions of a new step for a call; None if it should be a static-shape step."""
        if len(self.static_shapes) < MAX_STATIC_SHAPES or self.tried == MAX_DYNAMIC_TRIES or self.failed:
            return None
        if not all(tensor.is_contiguous() for tensor in call.inputs):
            return None
        shapes = _shapes(call.inputs)
        dims = frozenset(
            (i, d)
            for i, shape in enumerate(shapes)
            for d, size in enumerate(shape)
            if any(earlier[i][d] != size for earlier in self.static_shapes)
        )
        if any(shapes[i][d] < 2 for i, d in dims - call.dynamic_dims):
            return None  # torch takes sizes 0 and 1 for static
        return dims | call.dynamic_dims

    def note_compiled(self, name: str, call: Call) -> None:
        """Note a static-shape step for the sizes of a call; its dynamic dimensions may be dynamic in the step."""
        if self.tried == MAX_DYNAMIC_TRIES and not self.general and not self.has_warned:
            self.has_warned = True
            log.warning(
                "%s was compiled for more than %d sizes of its arguments and is compiled again for each further one, "
                "since no dynamic-shape step accepts them (a size is taken for a number, or torch cannot trace it as "
                "dynamic): pad inputs to few sizes, such as powers of two",
                name,
                MAX_STATIC_SHAPES,
            )
        self.tried += self.dynamic_dims(call) is not None
        shapes = _shapes(call.inputs)
        if len(self.static_shapes) < MAX_STATIC_SHAPES and shapes not in self.static_shapes:
            self.static_shapes.append(shapes)

    def add(self, name: str, step: CompiledStep, inputs: Sequence[Tensor]) -> bool:
        """Keep a dynamic-shape step. False if it accepts no earlier sizes, like a static-shape step."""
        others = (
            [torch.empty(shape, dtype=t.dtype, device="meta") for shape, t in zip(shapes, inputs, strict=True)]
            for shapes in self.static_shapes
        )
        if len(self.general) == MAX_STATIC_SHAPES or not any(map(step.accepts, others)):
            return False
        if not self.general:
            log.warning(
                "%s was compiled for %d sizes of its arguments; further ones share a dynamic-shape step, which is "
                "slower: pad inputs to few sizes, such as powers of two",
                name,
                len(self.static_shapes),
            )
        self.general.append(step)
        return True

    def drop(self, step: CompiledStep) -> None:
        """Drop a step that failed, if it is one of the dynamic-shape steps here: there is no other try."""
        others = [one for one in self.general if one is not step]
        self.failed = self.failed or len(others) < len(self.general)
        self.general = others


def _shapes(inputs: Sequence[Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in inputs)


class StepCache:
    """An LRU cache of the steps for one signature each, and the dynamic-shape steps.

    A signature leaves out the sizes that containers make dynamic. One step accepts all of these sizes, from the first
    call on. If a `build` reads such a size, each size has its own step.
    """

    def __init__(self, most: int) -> None:
        """most: the most steps for one signature each."""
        self._most = most
        self._steps: OrderedDict[Hashable, CompiledStep] = OrderedDict()
        self._families: dict[Hashable, _ShapeFamily] = {}
        self._not_dynamic: dict[Hashable, None] = {}  # the latest signatures whose dynamic sizes have to be static

    def all(self) -> list[CompiledStep]:
        """The steps for one signature each, then the dynamic-shape steps."""
        return [*self._steps.values(), *(step for family in self._families.values() for step in family.general)]

    def find(self, signature: Any, call: Call, static_only: bool) -> CompiledStep | None:
        """A step that accepts a call. static_only: whether it has to be a static-shape step."""
        own = _own(signature, call)
        for key in (own,) if static_only or own is signature else (own, signature):
            step = self._steps.get(key)
            if step is not None and step.accepts(call.inputs):
                self._steps.move_to_end(key)
                return step
        family = None if static_only else self._families.get(_family(signature, call))
        return next((step for step in family.general if step.accepts(call.inputs)), None) if family else None

    def make(self, name: str, signature: Any, call: Call, static_only: bool, compiled: Compile) -> CompiledStep:
        """Compile a step for a call that no step accepts. name: that of the graph. Raises what `compiled` raises."""
        key, inputs = _family(signature, call), call.inputs
        family = self._families.get(key)
        if family is not None and not static_only and (dynamic := family.dynamic_dims(call)) is not None:
            step = _try_to_compile(compiled, dynamic)
            if step is not None and family.add(name, step, inputs):
                return step
        may_be_dynamic = (
            bool(call.dynamic_dims)
            and not static_only
            and signature not in self._not_dynamic
            and signature not in self._steps
        )
        shared = _try_to_compile(compiled, call.dynamic_dims) if may_be_dynamic else None
        if shared is not None and any(map(shared.accepts, _others(call))):
            self._steps[signature] = shared
        else:
            shared = None
        step = shared if shared is not None and shared.accepts(inputs) else compiled(None)
        if step is not shared:
            self._steps[_own(signature, call)] = step
        if may_be_dynamic and shared is None:
            self._not_dynamic[signature] = None  # only now: the sizes of a wrong call prove nothing
        if not static_only:
            self._families.setdefault(key, _ShapeFamily()).note_compiled(name, call)
            if len(self._families) > MAX_FAMILIES:
                self._families.pop(next(iter(self._families)))
        return step

    def drop(self, name: str, step: CompiledStep, cause: BaseException | None) -> None:
        """Drop a dynamic-shape step that failed where a static-shape step did not. Further sizes get their own."""
        for key in [key for key, cached in self._steps.items() if cached is step]:
            del self._steps[key]
            self._not_dynamic[key] = None
        for family in self._families.values():
            family.drop(step)
        log.warning(
            "%s: the dynamic-shape step failed (%s: %s), and a static-shape step ran instead; further sizes get "
            "static-shape steps: pad inputs to few sizes, such as powers of two",
            name,
            type(cause).__name__,
            cause,
        )

    def evict_oldest(self, name: str) -> None:
        """Drop the least recently used steps if there are too many. name: that of the graph, for the warning."""
        too_many = len(self._steps) > self._most
        while len(self._steps) > self._most:  # a call may have compiled two
            self._steps.popitem(last=False)
        while len(self._not_dynamic) > self._most:
            self._not_dynamic.pop(next(iter(self._not_dynamic)))
        if too_many:
            warnings.warn(
                f"{name} was compiled for more than {self._most} signatures and drops the oldest; pass numbers that "
                "change at each call as tensors, and pad inputs to few shapes",
                stacklevel=7,
            )


def _own(signature: Any, call: Call) -> Hashable:
    """The key of a static-shape step for this call."""
    return (signature, tuple(tensor.shape for tensor in call.inputs)) if call.dynamic_dims else signature


def _family(signature: Any, call: Call) -> Hashable:
    """The key that calls share if they differ in sizes alone."""
    spec, arguments, *rest = signature
    return spec, without_sizes(arguments, call.leaves), *rest


def _try_to_compile(compiled: Compile, dynamic: Dims) -> CompiledStep | None:
    try:
        return compiled(dynamic)
    except Exception:  # build reads a size; a static-shape step raises any other error as well
        return None


def _others(call: Call) -> Iterator[list[Tensor]]:
    """The inputs of calls that differ in dynamic sizes, without values: in all, then in those that are alike now.

    A size may have to be that of something else, as the ids of a feature with one for each sample.
    """
    inputs, dynamic = call.inputs, {i for i, _ in call.dynamic_dims}
    alike = [{i for i in dynamic if len(inputs[i]) == size} for size in sorted({len(inputs[i]) for i in dynamic})]
    for more, changed in ((2, dynamic), (3, dynamic), (4, dynamic), *((2, some) for some in alike)):
        yield [
            torch.empty_strided((len(t) + more, *t.shape[1:]), t.stride(), device="meta") if i in changed else t
            for i, t in enumerate(inputs)
        ]
