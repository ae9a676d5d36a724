"""The steps that a graph has compiled, by the calls that they accept.

Calls that differ in sizes alone get a few static-shape steps first, then one dynamic-shape step.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..trace.signature import Call, Dims, without_sizes
from ..trace.trace import ShapeGuard
from .compiled_step import CompiledStep

MAX_DYNAMIC_TRIES = 2  # of a dynamic-shape step, if none accepts other sizes
MAX_STATIC_SHAPES = 8  # of the same arguments, and the most dynamic-shape steps of these
MAX_FAMILIES = 64

log = logging.getLogger("tierbed")

Shapes = tuple[tuple[int, ...], ...]
S = TypeVar("S")  # a compiled step
# dynamic dimensions, None for a static-shape step -> the step
Compile = Callable[[Dims | None], CompiledStep]


@dataclass
class _ShapeFamily(Generic[S]):
    """What is known of calls that differ in the sizes of tensors alone."""

    static_shapes: list[Shapes] = field(default_factory=list)  # sizes that have static-shape steps
    general: list[tuple[ShapeGuard, S]] = field(default_factory=list)
    tried: int = 0  # dynamic-shape steps that accepted none of the other sizes
    failed: bool = False  # whether there was a dynamic-shape step that torch could not run
    has_warned: bool = False  # whether the log said that each further size is compiled


class DynamicShapes(Generic[S]):
    """The families of a graph's calls. key: a signature without sizes. inputs: the tensor arguments of a call."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _ShapeFamily[S]] = {}

    def clear(self) -> None:
        self._families.clear()

    def steps(self) -> list[S]:
        """The dynamic-shape steps."""
        return [step for family in self._families.values() for _, step in family.general]

    def find(self, key: Hashable, inputs: Sequence[Tensor]) -> S | None:
        """A dynamic-shape step that accepts these inputs."""
        family = self._families.get(key)
        return next((step for guard, step in family.general if guard(inputs)), None) if family else None

    def dynamic_dims(self, key: Hashable, inputs: Sequence[Tensor], from_start: Dims) -> Dims | None:
        """The dynamic dimensions of a new step; None if it should be a static-shape step.

        from_start: the dimensions that containers make dynamic.
        """
        family = self._families.get(key)
        if (
            family is None
            or len(family.static_shapes) < MAX_STATIC_SHAPES
            or family.tried == MAX_DYNAMIC_TRIES
            or family.failed
        ):
            return None
        if not all(tensor.is_contiguous() for tensor in inputs):
            return None
        shapes = _shapes(inputs)
        dims = frozenset(
            (i, d)
            for i, shape in enumerate(shapes)
            for d, size in enumerate(shape)
            if any(earlier[i][d] != size for earlier in family.static_shapes)
        )
        if any(shapes[i][d] < 2 for i, d in dims - from_start):
            return None  # torch takes sizes 0 and 1 for static
        return dims | from_start

    def note_compiled(self, name: str, key: Hashable, inputs: Sequence[Tensor], from_start: Dims) -> None:
        """Note a static-shape step for these sizes; those of `from_start` may be dynamic in it."""
        family = self._families.setdefault(key, _ShapeFamily())
        if family.tried == MAX_DYNAMIC_TRIES and not family.general and not family.has_warned:
            family.has_warned = True
            log.warning(
                "%s was compiled for more than %d sizes of its arguments and is compiled again for each further one, "
                "since no dynamic-shape step accepts them (a size is taken for a number, or torch cannot trace it as "
                "dynamic): pad inputs to few sizes, such as powers of two",
                name,
                MAX_STATIC_SHAPES,
            )
        family.tried += self.dynamic_dims(key, inputs, from_start) is not None
        shapes = _shapes(inputs)
        if len(family.static_shapes) < MAX_STATIC_SHAPES and shapes not in family.static_shapes:
            family.static_shapes.append(shapes)
        if len(self._families) > MAX_FAMILIES:
            self._families.pop(next(iter(self._families)))

    def add(self, name: str, key: Hashable, guard: ShapeGuard, step: S, inputs: Sequence[Tensor]) -> bool:
        """Keep a dynamic-shape step. False if it accepts no earlier sizes, like a static-shape step."""
        family = self._families[key]
        others = (
            [torch.empty(shape, dtype=t.dtype, device="meta") for shape, t in zip(shapes, inputs, strict=True)]
            for shapes in family.static_shapes
        )
        if len(family.general) == MAX_STATIC_SHAPES or not any(map(guard, others)):
            return False
        if not family.general:
            log.warning(
                "%s was compiled for %d sizes of its arguments; further ones share a dynamic-shape step, which is "
                "slower: pad inputs to few sizes, such as powers of two",
                name,
                len(family.static_shapes),
            )
        family.general.append((guard, step))
        return True

    def drop(self, step: S) -> None:
        """Drop a dynamic-shape step, if it is one. Further sizes get static-shape steps."""
        for family in self._families.values():
            if any(general is step for _, general in family.general):
                family.general = [(guard, general) for guard, general in family.general if general is not step]
                family.failed = True


def warn_failed(name: str, cause: BaseException | None) -> None:
    """Log that a dynamic-shape step failed."""
    log.warning(
        "%s: the dynamic-shape step failed (%s: %s), and a static-shape step ran instead; further sizes get "
        "static-shape steps: pad inputs to few sizes, such as powers of two",
        name,
        type(cause).__name__,
        cause,
    )


def warn_uncompiled(name: str) -> None:
    """Log that `compile_dense` compiles nothing of a dynamic-shape step."""
    log.warning(
        "%s: compile_dense compiles ops of static shapes, and the dynamic-shape step of further sizes runs without it: "
        "pad inputs to few sizes, such as powers of two",
        name,
    )


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
        self._sizes = DynamicShapes[CompiledStep]()
        self._not_dynamic: dict[Hashable, None] = {}  # the latest signatures whose dynamic sizes have to be static

    def clear(self) -> None:
        """Drop all steps."""
        self._steps.clear()
        self._sizes.clear()
        self._not_dynamic.clear()

    def all(self) -> list[CompiledStep]:
        """The steps for one signature each, then the dynamic-shape steps."""
        return [*self._steps.values(), *self._sizes.steps()]

    def find(self, signature: Any, call: Call, static_only: bool) -> CompiledStep | None:
        """A step that accepts a call. static_only: whether it has to be a static-shape step."""
        own = _own(signature, call)
        for key in (own,) if static_only or own is signature else (own, signature):
            step = self._steps.get(key)
            if step is not None and step.accepts(call.inputs):
                self._steps.move_to_end(key)
                return step
        return None if static_only else self._sizes.find(_family(signature, call), call.inputs)

    def make(self, name: str, signature: Any, call: Call, static_only: bool, compiled: Compile) -> CompiledStep:
        """Compile a step for a call that no step accepts. name: that of the graph. Raises what `compiled` raises."""
        family, inputs = _family(signature, call), call.inputs
        step = None if static_only else self._dynamic_step(name, family, call, compiled)
        if step is not None:
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
            self._sizes.note_compiled(name, family, inputs, call.dynamic_dims)
        return step

    def drop(self, name: str, step: CompiledStep, cause: BaseException | None) -> None:
        """Drop a dynamic-shape step that failed where a static-shape step did not. Further sizes get their own."""
        for key in [key for key, cached in self._steps.items() if cached is step]:
            del self._steps[key]
            self._not_dynamic[key] = None
        self._sizes.drop(step)
        warn_failed(name, cause)

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

    def _dynamic_step(self, name: str, family: Hashable, call: Call, compiled: Compile) -> CompiledStep | None:
        dynamic = self._sizes.dynamic_dims(family, call.inputs, call.dynamic_dims)
        step = None if dynamic is None else _try_to_compile(compiled, dynamic)
        return step if step is not None and self._sizes.add(name, family, step.accepts, step, call.inputs) else None


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
