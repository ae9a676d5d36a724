"""The dense part over ranks: gradients summed in the order of the ranks, with the same bits on every rank.

Parameters and buffers begin as those of rank 0, so that ranks which draw their own train one model. A buffer that was
broadcast once is its rank's own, whichever graph uses it next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.errors import GraphError
from .rank_group import PendingAllToAll
from .sendable import bytes_of, check_sendable
from .world import World, catch

_PRESENT, _FINITE = 1, 2  # bits of the number that each rank sends
_PIECE = 16 << 20  # bytes that rank 0 sends to each other rank at once


class Vote(NamedTuple):
    """What ranks decided together at the end of a step.

    sums: of the gradients, on the devices of those given. present: how many ranks gave some. finite: whether those of
    all ranks are.
    """

    sums: list[Tensor]
    present: int
    finite: bool


def all_reduce_in_order(
    world: World,
    op: str,
    tensors: Sequence[Tensor],
    error: BaseException | None = None,
    *,
    present: bool = True,
    finite: bool = True,
    same: Mapping[str, Any] | None = None,
) -> Vote:
    """The sums over ranks of tensors that have the same shapes and dtypes on each. Collective.

    Ranks are added in their order, each sum rounded to the dtype. present: whether this rank's tensors count; those of
    one rank must. same: what must be equal on all ranks, by name. Raises on all ranks what `handshake`
    raises for `error` of any rank; then nothing has been sent.
    """
    with world.collective_block(op):
        try:
            alike = {"graph": world.collectives, **(same or {})}
            notes = world.handshake(op, error, alike, note=present * _PRESENT + finite * _FINITE).notes
        finally:
            world.step_collectives += 1
        givers = [rank for rank, number in enumerate(notes) if number & _PRESENT]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        sums = list(tensors)
        running = [_OrderedAllReduce(world, op, [tensors[i] for i in places], givers) for places in by_dtype.values()]
        for each in running:
            each.add()
        for each, places in zip(running, by_dtype.values(), strict=True):
            for place, total in zip(places, each.sums(), strict=True):
                sums[place] = total
    return Vote(sums, len(givers), all(number & _FINITE for number in notes))


class _OrderedAllReduce:
    """The sum of tensors of one dtype, in flight: each rank adds up a slice, and sends it to all."""

    def __init__(self, world: World, op: str, tensors: list[Tensor], givers: list[int]) -> None:
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
        """Add up this rank's slice, and send it to all ranks."""
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

    def _start(self, out: Tensor, given: Tensor, out_sizes: list[int], given_sizes: list[int]) -> PendingAllToAll:
        """As bytes, since Gloo does not take every dtype."""
        width = self._dtype.itemsize
        return self._world.start(
            self._op,
            out.view(torch.uint8),
            given.view(torch.uint8),
            [size * width for size in out_sizes],
            [size * width for size in given_sizes],
        )


def broadcast_parameters(world: World, op: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Give these parameters the values that they have on rank 0, and buffers that were not broadcast yet. Collective.

    tensors: names and tensors, in one order on all ranks. GraphError on all ranks, before anything is written, if they
    differ. InputError for a tensor whose bytes are not its values, as of a quantized buffer.
    """
    synced = world.synced_tensors
    tensors = [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter) or tensor not in synced]
    names = "\n".join(described(tensors)).encode()
    every = [data.decode().split("\n") for data in world.all_bytes(f"names of {op}", names)]
    for rank, other in enumerate(every):
        if other != every[0]:
            pairs = zip_longest(every[0], other, fillvalue="nothing more")
            first, differs = next((one, two) for one, two in pairs if one != two)
            world.raise_shared(
                GraphError(
                    f"{op}: ranks differ, rank 0: {len(every[0])} tensors, {first}; rank {rank}: {len(other)} tensors, "
                    f"{differs}; make the graph on every rank by the same code"
                )
            )
    _, error = catch(lambda: [check_sendable(f"{op}: {name}", tensor) for name, tensor in tensors])
    with world.collective_block(op):
        world.handshake(op, error)
        for _, tensor in tensors:
            _copy_of_first(world, op, tensor)
            synced[tensor] = True


def described(tensors: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Name, dtype and shape of each tensor, for people."""
    return [f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors]


@torch.no_grad()
def _copy_of_first(world: World, op: str, tensor: Tensor) -> None:
    first = world.rank == 0
    values = bytes_of(tensor) if first else torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    for piece in values.split(_PIECE):
        size, none = len(piece), [0] * world.size
        given = piece.repeat(world.size) if first else piece[:0]
        out = torch.empty_like(piece)
        world.start(op, out, given, [size, *none[1:]], [size] * world.size if first else none).wait()
        if not first:
            piece.copy_(out)
    if not first:
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
