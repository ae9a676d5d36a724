"""Steps for sizes that keep changing: first a few steps for one size each, then one step that serves many sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .arguments import Dims

TRIES = 2  # of a step for many sizes, where none serves other sizes
OWN = 8  # how many sizes of the same arguments get a step of their own, and the most steps for many sizes
FAMILIES = 64

log = logging.getLogger("tierbed")

Fits = Callable[[Sequence[Tensor]], bool]
Shapes = tuple[tuple[int, ...], ...]
S = TypeVar("S")  # a compiled step


@dataclass
class _Family(Generic[S]):
    """What is known of calls that differ in the sizes of tensors alone."""

    seen: list[Shapes] = field(default_factory=list)  # sizes that have steps of their own
    general: list[tuple[Fits, S]] = field(default_factory=list)
    tried: int = 0  # steps for many sizes that served none of the others
    failed: bool = False  # whether such a step was made, and torch could not run it
    told: bool = False  # whether the log said that each further size is compiled anew


class Sizes(Generic[S]):
    """The families of a graph's calls. key: a signature without sizes. inputs: the tensor arguments of a call."""

    def __init__(self) -> None:
        self._families: dict[Hashable, _Family[S]] = {}

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
        if family is None or len(family.seen) < OWN or family.tried == TRIES or family.failed:
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
        family = self._families.setdefault(key, _Family())
        if family.tried == TRIES and not family.general and not family.told:
            family.told = True
            log.warning(
                "%s was compiled for more than %d sizes of its arguments and is compiled anew for further ones, since "
                "no step serves many of them (a size is taken for a number, or torch cannot trace it left open): pad "
                "inputs to few sizes, such as powers of two",
                name,
                OWN,
            )
        family.tried += self.changing(key, inputs, opened) is not None
        if len(family.seen) < OWN:
            family.seen.append(_shapes(inputs))
        if len(self._families) > FAMILIES:
            self._families.pop(next(iter(self._families)))

    def add(self, name: str, key: Hashable, fits: Fits, step: S, inputs: Sequence[Tensor]) -> bool:
        """Keep a step for many sizes. False where it fits no sizes seen before: then it is for its own sizes alone."""
        family = self._families[key]
        others = (
            [torch.empty(shape, dtype=t.dtype, device="meta") for shape, t in zip(shapes, inputs, strict=True)]
            for shapes in family.seen
        )
        if len(family.general) == OWN or not any(map(fits, others)):
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
