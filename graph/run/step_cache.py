"""The steps that a graph has compiled, by the calls that they serve.

For sizes that keep changing: first a few static-shape steps, then one dynamic-shape step.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..trace.signature import Call, Dims, without_sizes
from ..trace.trace import ShapeGuard
from .compiled_step import CompiledStep

MAX_DYNAMIC_TRIES = 2  # of a step for many sizes, where none serves other sizes
MAX_STATIC_SHAPES = 8  # how many sizes of the same arguments get a step of their own, and the most steps for many sizes
FAMILIES = 64

log = logging.getLogger("tierbed")

Shapes = tuple[tuple[int, ...], ...]
S = TypeVar("S")  # a compiled step
# dimensions to leave open, None for a step of one call's sizes alone -> that step
Compile = Callable[[Dims | None], CompiledStep]


@dataclass
class _ShapeFamily(Generic[S]):
    """What is known of calls that differ in the sizes of tensors alone."""

    seen: list[Shapes] = field(default_factory=list)  # sizes that have steps of their own
    general: list[tuple[ShapeGuard, S]] = field(default_factory=list)
    tried: int = 0  # steps for many sizes that served none of the others
    failed: bool = False  # whether such a step was made, and torch could not run it
    told: bool = False  # whether the log said that each further size is compiled anew


class DynamicShapes(Generic[S]):
    """The families of a graph's calls. key: a signature without sizes. inputs: the tensor arguments of a call."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _ShapeFamily[S]] = {}

    def clear(self) -> None:
        self._families.clear()

    def steps(self) -> list[S]:
        """The steps that serve many sizes."""
        return [step for family in self._families.values() for _, step in family.general]

    def find(self, key: Hashable, inputs: Sequence[Tensor]) -> S | None:
        """A step for many sizes that serves these inputs."""
        family = self._families.get(key)
        return next((step for fits, step in family.general if fits(inputs)), None) if family else None

    def changing(self, key: Hashable, inputs: Sequence[Tensor], opened: Dims) -> Dims | None:
        """The dimensions that a new step should leave open; None where sizes get steps of their own as yet.

        opened: those that containers leave open.
        """
        family = self._families.get(key)
        if family is None or len(family.seen) < MAX_STATIC_SHAPES or family.tried == MAX_DYNAMIC_TRIES or family.failed:
            return None
        if not all(tensor.is_contiguous() for tensor in inputs):
            return None
        shapes = _shapes(inputs)
        dims = frozenset(
            (i, d)
            for i, shape in enumerate(shapes)
            for d, size in enumerate(shape)
            if any(seen[i][d] != size for seen in family.seen)
        )
        if any(shapes[i][d] < 2 for i, d in dims - opened):
            return None  # torch cannot leave sizes 0 and 1 open
        return dims | opened

    def saw(self, name: str, key: Hashable, inputs: Sequence[Tensor], opened: Dims) -> None:
        """Note that a step was made for these sizes, but for opened ones: there was none for many, or none can be."""
        family = self._families.setdefault(key, _ShapeFamily())
        if family.tried == MAX_DYNAMIC_TRIES and not family.general and not family.told:
            family.told = True
            log.warning(
                "%s was compiled for more than %d sizes of its arguments and is compiled anew for further ones, since "
                "no step serves many of them (a size is taken for a number, or torch cannot trace it left open): pad "
                "inputs to few sizes, such as powers of two",
                name,
                MAX_STATIC_SHAPES,
            )
        family.tried += self.changing(key, inputs, opened) is not None
        if len(family.seen) < MAX_STATIC_SHAPES:
            family.seen.append(_shapes(inputs))
        if len(self._families) > FAMILIES:
            self._families.pop(next(iter(self._families)))

    def add(self, name: str, key: Hashable, fits: ShapeGuard, step: S, inputs: Sequence[Tensor]) -> bool:
        """Keep a step for many sizes. False where it fits no sizes seen before: then it is for its own sizes alone."""
        family = self._families[key]
        others = (
            [torch.empty(shape, dtype=t.dtype, device="meta") for shape, t in zip(shapes, inputs, strict=True)]
            for shapes in family.seen
        )
        if len(family.general) == MAX_STATIC_SHAPES or not any(map(fits, others)):
            return False
        if not family.general:
            log.warning(
                "%s was compiled for %d sizes of its arguments; further ones share a step that is slower than one of "
                "their own: pad inputs to few sizes, such as powers of two",
                name,
                len(family.seen),
            )
        family.general.append((fits, step))
        return True

    def drop(self, step: S) -> None:
        """Drop a step for many sizes, if it is one. Further sizes get their own."""
        for family in self._families.values():
            if any(general is step for _, general in family.general):
                family.general = [(fits, general) for fits, general in family.general if general is not step]
                family.failed = True


def tell_failed(name: str, cause: BaseException | None) -> None:
    """Log that a step for many sizes failed."""
    log.warning(
        "%s: the step that many sizes share failed (%s: %s), and one for the sizes of this call took its place; "
        "further sizes get steps of their own: pad inputs to few sizes, such as powers of two",
        name,
        type(cause).__name__,
        cause,
    )


def tell_uncompiled(name: str) -> None:
    """Log that `compile_dense` has no part in a step for many sizes."""
    log.warning(
        "%s: compile_dense compiles what has known sizes, and the step that further sizes share runs without it: pad "
        "inputs to few sizes, such as powers of two",
        name,
    )


def _shapes(inputs: Sequence[Tensor]) -> Shapes:
    return tuple(tuple(tensor.shape) for tensor in inputs)


class StepCache:
    """Steps for one signature, and steps that many sizes share; of the former, those used last.

    A signature leaves out the sizes that containers leave open. One step serves all of these sizes, from the first
    call on. Where a `build` wants to know such a size, each size has a step of its own.
    """

    def __init__(self, most: int) -> None:
        """most: how many steps for one signature there may be."""
        self._most = most
        self._kept: OrderedDict[Hashable, CompiledStep] = OrderedDict()
        self._sizes = DynamicShapes[CompiledStep]()
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
