"""The dense part over ranks: gradients summed in the order of the ranks, with the same bits on every rank.

Parameters and buffers begin as those of rank 0, so that ranks which draw their own train one model. A buffer that was
broadcast once is its rank's own, whichever graph uses it next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.errors import GraphError
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
        for places in by_dtype.values():
            totals = _sums(world, op, [tensors[place] for place in places], givers)
            for place, total in zip(places, totals, strict=True):
                sums[place] = total
    return Vote(sums, len(givers), all(number & _FINITE for number in notes))


def _sums(world: World, op: str, tensors: Sequence[Tensor], givers: Sequence[int]) -> list[Tensor]:
    """The sums of tensors of one dtype: each rank adds up a slice, and sends it to all."""
    me, dtype, sizes = world.rank, tensors[0].dtype, [tensor.numel() for tensor in tensors]
    ends = [sum(sizes) * rank // world.size for rank in range(world.size + 1)]
    slices = [(end - begin) * dtype.itemsize for begin, end in pairwise(ends)]  # bytes: Gloo does not take every dtype
    own = [tensor.detach().reshape(-1).cpu() for tensor in tensors]
    given = torch.cat(own) if me in givers else own[0][:0]
    sends = [size * (me in givers) for size in slices]
    takes = [slices[me] * (rank in givers) for rank in range(world.size)]
    total, *others = world.start(op, given.view(torch.uint8), sends, takes).wait().view(dtype).view(len(givers), -1)
    for other in others:
        total += other
    copies = total.repeat(world.size).view(torch.uint8)
    flat = world.start(op, copies, [slices[me]] * world.size, slices).wait().view(dtype)
    return [part.view(like.shape).to(like.device) for part, like in zip(flat.split(sizes), tensors, strict=True)]


def broadcast_parameters(world: World, op: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Give these parameters the values that they have on rank 0, and buffers that were not broadcast yet. Collective.

    tensors: names and tensors, in one order on all ranks. GraphError on all ranks, before anything is written, if they
    differ. InputError for a tensor whose bytes are not its values, as of a quantized buffer.
    """
    synced = world.synced_tensors
    tensors = [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter) or tensor not in synced]
    every = world.all_gather_object(f"names of {op}", lambda: described(tensors))
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
        none = [0] * world.size
        sends = [len(piece)] * world.size if first else none
        takes = [len(piece), *none[1:]]
        received = world.start(op, piece.repeat(world.size) if first else piece[:0], sends, takes).wait()
        if not first:
            piece.copy_(received)
    if not first:
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
