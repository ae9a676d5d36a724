"""Dense gradients over ranks: their sums in the order of the ranks, with the same bits on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .agreement import agree
from .group import Exchange, Group

_PRESENT, _FINITE = 1, 2  # bits of the number that each rank tells


class Vote(NamedTuple):
    """What ranks decided together at the end of a step.

    sums: of the gradients, on the devices of those given. present: how many ranks gave some. finite: whether all ranks
    said that theirs are.
    """

    sums: list[Tensor]
    present: int
    finite: bool


def reduce(
    world: Group,
    op: str,
    tensors: Sequence[Tensor],
    error: BaseException | None = None,
    *,
    present: bool = True,
    finite: bool = True,
    same: Mapping[str, Any] | None = None,
) -> Vote:
    """The sums over ranks of tensors that have the same shapes and dtypes on each. Collective.

    Ranks are added in their order, each sum rounded to the dtype. present: whether this rank's tensors count; one of
    the ranks must say so. same: what must be equal on all ranks, by name. Raises on all ranks what `agree` raises for
    `error` of any rank; then nothing has been sent.
    """
    with world.whole(op):
        try:
            alike = {"graph": world.script, **(same or {})}
            told = agree(world, op, error, alike, note=present * _PRESENT + finite * _FINITE).notes
        finally:
            world.passed += 1
        givers = [rank for rank, number in enumerate(told) if number & _PRESENT]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        sums = list(tensors)
        running = [_Sum(world, op, [tensors[i] for i in places], givers) for places in by_dtype.values()]
        for each in running:
            each.add()
        for each, places in zip(running, by_dtype.values(), strict=True):
            for place, total in zip(places, each.sums(), strict=True):
                sums[place] = total
    return Vote(sums, len(givers), all(number & _FINITE for number in told))


class _Sum:
    """The sum of tensors of one dtype, on its way: each rank adds up a slice, and gives it to all."""

    def __init__(self, world: Group, op: str, tensors: list[Tensor], givers: list[int]) -> None:
        self._world, self._op, self._tensors, self._givers = world, op, tensors, givers
        gives = world.rank in givers
        self._dtype = tensors[0].dtype
        flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in tensors]) if gives else None
        size = sum(tensor.numel() for tensor in tensors)
        ends = [size * rank // world.size for rank in range(world.size + 1)]
        self._slices = [end - begin for begin, end in pairwise(ends)]
        self._own = self._slices[world.rank]
        self._parts = torch.empty(len(givers) * self._own, dtype=self._dtype)
        self._flat = torch.empty(size, dtype=self._dtype)
        given = self._parts[:0] if flat is None else flat
        self._exchange = self._start(
            self._parts,
            given,
            [self._own * (rank in givers) for rank in range(world.size)],
            [length * gives for length in self._slices],
        )

    def add(self) -> None:
        """Add up this rank's slice, and let it go to all ranks."""
        self._exchange.wait()
        first, *rest = self._parts.view(len(self._givers), self._own)
        for part in rest:
            first += part
        self._exchange = self._start(
            self._flat, first.repeat(self._world.size), self._slices, [self._own] * self._world.size
        )

    def sums(self) -> list[Tensor]:
        self._exchange.wait()
        ends = [0, *accumulate(tensor.numel() for tensor in self._tensors)]
        parts = (self._flat[begin:end] for begin, end in pairwise(ends))
        return [part.view(like.shape).to(like.device) for part, like in zip(parts, self._tensors, strict=True)]

    def _start(self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int]) -> Exchange:
        """As bytes, since Gloo does not take every dtype."""
        width = self._dtype.itemsize
        return self._world.start(
            self._op,
            out.view(torch.uint8),
            given.view(torch.uint8),
            [size * width for size in out_sizes],
            [size * width for size in given_sizes],
        )
