"""Caches the compiled steps of a graph, and finds a step that accepts a call.

A static-shape step accepts only the tensor sizes it was compiled for; a dynamic-shape step also accepts others. A new
signature normally gets a static-shape step. Calls that differ only in tensor sizes form a family: the first sizes of a
family get static-shape steps, and after that one dynamic-shape step serves all further sizes. Containers such as
`JaggedTensor` declare dimensions that are dynamic from the first call on.
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

from ..trace.signature import Call, Dims, drop_sizes
from .compiled_step import CompiledStep

MAX_DYNAMIC_TRIES = 2  # after this many failed dynamic-shape steps, a family gets only static-shape steps
MAX_STATIC_SHAPES = 8  # a family of calls has at most this many static-shape steps, and as many dynamic-shape steps
MAX_FAMILIES = 64

log = logging.getLogger("tierbed")

Shapes = tuple[tuple[int, ...], ...]
# compiles a step with these dynamic dimensions, or with static shapes if None
CompileCall = Callable[[Dims | None], CompiledStep]


@dataclass
class _ShapeFamily:
    """The steps of calls that differ only in the sizes of tensors."""

    static_shapes: list[Shapes] = field(default_factory=list)  # sizes that have a static-shape step
    dynamic_steps: list[CompiledStep] = field(default_factory=list)
    num_failed_tries: int = 0  # number of tries that gave no useful dynamic-shape step
    has_failed: bool = False  # True if torch could not run a dynamic-shape step
    has_warned: bool = False  # True after the warning that each further size is compiled

    def choose_dynamic_dims(self, call: Call) -> Dims | None:
        """Return the dynamic dimensions for a new step; None if the step should have static shapes."""
        if len(self.static_shapes) < MAX_STATIC_SHAPES or self.num_failed_tries == MAX_DYNAMIC_TRIES or self.has_failed:
            return None
        if not all(tensor.is_contiguous() for tensor in call.inputs):
            return None
        shapes = _read_shapes(call.inputs)
        dims = frozenset(
            (i, d)
            for i, shape in enumerate(shapes)
            for d, size in enumerate(shape)
            if any(earlier[i][d] != size for earlier in self.static_shapes)
        )
        if any(shapes[i][d] < 2 for i, d in dims - call.dynamic_dims):
            return None  # torch never treats sizes 0 and 1 as dynamic
        return dims | call.dynamic_dims

    def record_compiled(self, name: str, call: Call) -> None:
        """Record the sizes of a call for which a step was just compiled.

        Call this only if no dimension of the step is dynamic except dimensions that containers declare.
        """
        if self.num_failed_tries == MAX_DYNAMIC_TRIES and not self.dynamic_steps and not self.has_warned:
            self.has_warned = True
            log.warning(
                "%s was compiled for more than %d sizes of its arguments and is compiled again for each further size. "
                "No dynamic-shape step accepts other sizes: build uses a size as a number, or torch cannot trace the "
                "size as dynamic. To compile less often, pad inputs to few sizes, such as powers of two",
                name,
                MAX_STATIC_SHAPES,
            )
        self.num_failed_tries += self.choose_dynamic_dims(call) is not None
        shapes = _read_shapes(call.inputs)
        if len(self.static_shapes) < MAX_STATIC_SHAPES and shapes not in self.static_shapes:
            self.static_shapes.append(shapes)

    def add(self, name: str, step: CompiledStep, inputs: Sequence[Tensor]) -> bool:
        """Add a dynamic-shape step. Returns False if the step accepts none of the earlier sizes."""
        earlier_inputs = (
            [torch.empty(shape, dtype=t.dtype, device="meta") for shape, t in zip(shapes, inputs, strict=True)]
            for shapes in self.static_shapes
        )
        if len(self.dynamic_steps) == MAX_STATIC_SHAPES or not any(map(step.can_run, earlier_inputs)):
            return False
        if not self.dynamic_steps:
            log.warning(
                "%s was compiled for %d sizes of its arguments; further sizes share a slower dynamic-shape step. "
                "To avoid this step, pad inputs to few sizes, such as powers of two",
                name,
                len(self.static_shapes),
            )
        self.dynamic_steps.append(step)
        return True

    def drop(self, step: CompiledStep) -> None:
        """Drop a step that failed. After a failed dynamic-shape step, this family gets no new dynamic-shape steps."""
        other_steps = [cached_step for cached_step in self.dynamic_steps if cached_step is not step]
        self.has_failed = self.has_failed or len(other_steps) < len(self.dynamic_steps)
        self.dynamic_steps = other_steps


def _read_shapes(inputs: Sequence[Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in inputs)


class StepCache:
    """An LRU cache with one step per signature, plus the dynamic-shape steps.

    Signatures leave out the sizes of dimensions that containers declare as dynamic, so one step accepts all such sizes.
    If `build` reads such a size as a number, each size gets its own step.
    """

    def __init__(self, name: str, limit: int) -> None:
        """name: the graph's name. limit: the largest number of steps; dynamic-shape steps of families do not count."""
        self._name, self._limit = name, limit
        self._steps: OrderedDict[Hashable, CompiledStep] = OrderedDict()
        self._families: dict[Hashable, _ShapeFamily] = {}
        self._static_signatures: dict[Hashable, None] = {}  # recent signatures that need static-shape steps

    def list_steps(self) -> list[CompiledStep]:
        """Return all steps. The dynamic-shape steps of families come last."""
        return [*self._steps.values(), *(step for family in self._families.values() for step in family.dynamic_steps)]

    def find(self, signature: Any, call: Call, needs_static: bool) -> CompiledStep | None:
        """Return a step that accepts a call, or None. needs_static: ignore dynamic-shape steps."""
        static_key = _make_static_key(signature, call)
        for key in (static_key,) if needs_static or static_key is signature else (static_key, signature):
            step = self._steps.get(key)
            if step is not None and step.can_run(call.inputs):
                self._steps.move_to_end(key)
                return step
        family = None if needs_static else self._families.get(_make_family_key(signature, call))
        return next((step for step in family.dynamic_steps if step.can_run(call.inputs)), None) if family else None

    def make(self, signature: Any, call: Call, needs_static: bool, compile_call: CompileCall) -> CompiledStep:
        """Compile a step for a call that no step accepts."""
        key, inputs = _make_family_key(signature, call), call.inputs
        family = self._families.get(key)
        if family is not None and not needs_static and (dims := family.choose_dynamic_dims(call)) is not None:
            step = _try_to_compile(compile_call, dims)
            if step is not None and family.add(self._name, step, inputs):
                return step
        is_static = needs_static or signature in self._static_signatures or signature in self._steps
        may_be_dynamic = bool(call.dynamic_dims) and not is_static
        shared_step = _try_to_compile(compile_call, call.dynamic_dims) if may_be_dynamic else None
        if shared_step is not None and any(map(shared_step.can_run, _make_other_inputs(call))):
            self._steps[signature] = shared_step
        else:
            shared_step = None
        step = shared_step if shared_step is not None and shared_step.can_run(inputs) else compile_call(None)
        if step is not shared_step:
            self._steps[_make_static_key(signature, call)] = step
        if may_be_dynamic and shared_step is None:
            self._static_signatures[signature] = None  # only after a success, because an error says nothing about sizes
        if not needs_static:
            self._families.setdefault(key, _ShapeFamily()).record_compiled(self._name, call)
            if len(self._families) > MAX_FAMILIES:
                self._families.pop(next(iter(self._families)))
        return step

    def drop(self, step: CompiledStep, cause: BaseException | None) -> None:
        """Drop a dynamic-shape step that failed. From then on, each new size gets its own static-shape step."""
        for key in [key for key, cached_step in self._steps.items() if cached_step is step]:
            del self._steps[key]
            self._static_signatures[key] = None
        for family in self._families.values():
            family.drop(step)
        log.warning(
            "%s: the dynamic-shape step failed (%s: %s). Static-shape steps are used instead, one for each new size. "
            "To compile less often, pad inputs to few sizes, such as powers of two",
            self._name,
            type(cause).__name__,
            cause,
        )

    def evict_oldest(self) -> None:
        """Drop the least recently used steps if there are too many."""
        has_too_many = len(self._steps) > self._limit
        while len(self._steps) > self._limit:  # one call may compile two steps
            self._steps.popitem(last=False)
        while len(self._static_signatures) > self._limit:
            self._static_signatures.pop(next(iter(self._static_signatures)))
        if has_too_many:
            warnings.warn(
                f"{self._name} was compiled for more than {self._limit} signatures and drops the oldest step; pass "
                "numbers that change at each call as tensors, and pad inputs to few shapes",
                stacklevel=7,
            )


def _make_static_key(signature: Any, call: Call) -> Hashable:
    return (signature, tuple(tensor.shape for tensor in call.inputs)) if call.dynamic_dims else signature


def _make_family_key(signature: Any, call: Call) -> Hashable:
    """Return the key shared by calls that differ only in sizes."""
    spec, arguments, *state = signature
    return spec, drop_sizes(arguments, call.leaves), *state


def _try_to_compile(compile_call: CompileCall, dynamic_dims: Dims) -> CompiledStep | None:
    try:
        return compile_call(dynamic_dims)
    except Exception:  # ignore errors: the caller compiles a static-shape step next, and real errors are raised there
        return None


def _make_other_inputs(call: Call) -> Iterator[list[Tensor]]:
    """Yield example inputs with other dynamic sizes. First, all sizes change; later, only one size changes."""
    inputs, indices = call.inputs, {i for i, _ in call.dynamic_dims}
    # some tensors may have to keep equal sizes, for example two features with one id per sample
    groups = [{i for i in indices if len(inputs[i]) == size} for size in sorted({len(inputs[i]) for i in indices})]
    for growth, grown in ((2, indices), (3, indices), (4, indices), *((2, group) for group in groups)):
        yield [
            torch.empty_strided((len(t) + growth, *t.shape[1:]), t.stride(), device="meta") if i in grown else t
            for i, t in enumerate(inputs)
        ]
