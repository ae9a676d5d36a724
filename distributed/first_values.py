"""Parameters and buffers begin as those of rank 0, so that ranks which draw their own train one model.

A buffer that has begun is its rank's own, whichever graph meets it next.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
from torch import Tensor, nn

from ..engine.errors import GraphError
from .agreement import agree, attempt
from .sendable import bytes_of, check_sendable
from .world import World

_PIECE = 16 << 20  # bytes that rank 0 sends to each other rank at once


def share_first_values(world: World, op: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Give these parameters the values that they have on rank 0, and those buffers that have not begun. Collective.

    tensors: names and tensors, in an order of their own. GraphError on all ranks, before anything is written, where
    ranks have others or in another order. InputError for one whose bytes are not its values, as of a quantized buffer.
    """
    begun = world.begun
    tensors = [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter) or tensor not in begun]
    names = "\n".join(described(tensors)).encode()
    every = [data.decode().split("\n") for data in world.all_bytes(f"names of {op}", names)]
    for rank, other in enumerate(every):
        if other != every[0]:
            pairs = zip_longest(every[0], other, fillvalue="nothing more")
            first, differs = next((one, two) for one, two in pairs if one != two)
            world.told = GraphError(
                f"{op}: ranks differ, rank 0: {len(every[0])} tensors, {first}; rank {rank}: {len(other)} tensors, "
                f"{differs}; make the graph on every rank by the same code"
            )
            raise world.told
    _, error = attempt(lambda: [check_sendable(f"{op}: {name}", tensor) for name, tensor in tensors])
    with world.whole(op):
        agree(world, op, error)
        for _, tensor in tensors:
            _copy_of_first(world, op, tensor)
            begun[tensor] = True


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
