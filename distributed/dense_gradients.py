"""Train a model's dense layers on several ranks. The gradient sums are bit-identical on every rank.

Gradients are added in rank order. Parameters and buffers start with the values of rank 0, so all ranks train one model
even if each rank initialized its own. Each buffer is broadcast only once per world, not again by later graphs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.errors import GraphError
from .sendable import check_sendable, to_bytes
from .world import World, try_call

_HAS_GRADS, _IS_FINITE = 1, 2  # bits of the payload in each rank's handshake header
_CHUNK_BYTES = 16 << 20  # bytes that rank 0 sends to each rank in one transfer


class AllReduceResult(NamedTuple):
    """The ranks' sums. num_contributors: how many ranks contributed. is_finite: True if all gradients were finite."""

    sums: list[Tensor]
    num_contributors: int
    is_finite: bool


def all_reduce_in_order(
    world: World,
    op: str,
    tensors: Sequence[Tensor],
    error: BaseException | None = None,
    *,
    contributes: bool = True,
    is_finite: bool = True,
    shared_values: Mapping[str, Any] | None = None,
) -> AllReduceResult:
    """Sum tensors across ranks. Shapes and dtypes must be equal on all ranks. This is a collective.

    Tensors are added in rank order, and each sum is rounded to the dtype. contributes: True if this rank's tensors are
    added; at least one rank must contribute. shared_values: values equal on all ranks. error: raised on all ranks.
    """
    with world.collective_block(op):
        try:
            shared_values = {"graph": world.collectives, **(shared_values or {})}
            payload = contributes * _HAS_GRADS + is_finite * _IS_FINITE
            payloads = world.handshake(op, error, shared_values, payload=payload).payloads
        finally:
            world.num_step_collectives += 1
        contributors = [rank for rank, payload in enumerate(payloads) if payload & _HAS_GRADS]
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        sums = list(tensors)
        for indices in by_dtype.values():
            totals = _sum_over_ranks(world, op, [tensors[index] for index in indices], contributors)
            for index, total in zip(indices, totals, strict=True):
                sums[index] = total
    return AllReduceResult(sums, len(contributors), all(payload & _IS_FINITE for payload in payloads))


def _sum_over_ranks(world: World, op: str, tensors: Sequence[Tensor], contributors: Sequence[int]) -> list[Tensor]:
    """Sum tensors of one dtype. Each rank adds up one slice of all ranks' numbers, and sends the sums to all ranks."""
    rank, dtype, sizes = world.rank, tensors[0].dtype, [tensor.numel() for tensor in tensors]
    bounds = [sum(sizes) * other // world.size for other in range(world.size + 1)]
    slices = [(end - begin) * dtype.itemsize for begin, end in pairwise(bounds)]  # bytes, as Gloo lacks some dtypes
    own_values = [tensor.detach().reshape(-1).cpu() for tensor in tensors]
    data = torch.cat(own_values) if rank in contributors else own_values[0][:0]
    sends = [size * (rank in contributors) for size in slices]
    receives = [slices[rank] * (other in contributors) for other in range(world.size)]
    blocks = world.start_all_to_all(op, data.view(torch.uint8), sends, receives).wait()
    totals, *other_blocks = blocks.view(dtype).view(len(contributors), -1)
    for other in other_blocks:
        totals += other
    copies = totals.repeat(world.size).view(torch.uint8)
    flat_sums = world.start_all_to_all(op, copies, [slices[rank]] * world.size, slices).wait().view(dtype)
    return [part.view(like.shape).to(like.device) for part, like in zip(flat_sums.split(sizes), tensors, strict=True)]


def broadcast_parameters(world: World, op: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copy parameters, and buffers that were not broadcast before, from rank 0 to all ranks. This is a collective.

    tensors: (name, tensor) pairs, in the same order on all ranks. If names, dtypes or shapes differ, raises GraphError
    on all ranks before writing anything. Raises InputError if a tensor cannot be sent, such as a quantized buffer.
    """
    synced = world.synced_tensors
    tensors = [(name, tensor) for name, tensor in tensors if isinstance(tensor, nn.Parameter) or tensor not in synced]
    all_names = world.all_gather_object(f"names of {op}", lambda: describe_tensors(tensors))
    for rank, names in enumerate(all_names):
        if names != all_names[0]:
            pairs = zip_longest(all_names[0], names, fillvalue="nothing more")
            expected, actual = next((left, right) for left, right in pairs if left != right)
            world.raise_shared_error(
                GraphError(
                    f"{op}: ranks differ, rank 0: {len(all_names[0])} tensors, {expected}; rank {rank}: {len(names)} "
                    f"tensors, {actual}; create the graph with the same code on every rank"
                )
            )
    _, error = try_call(lambda: [check_sendable(f"{op}: {name}", tensor) for name, tensor in tensors])
    with world.collective_block(op):
        world.handshake(op, error)
        for _, tensor in tensors:
            _copy_from_rank_0(world, op, tensor)
            synced[tensor] = True


def describe_tensors(tensors: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return name, dtype and shape of each tensor as text."""
    return [f"{name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for name, tensor in tensors]


@torch.no_grad()
def _copy_from_rank_0(world: World, op: str, tensor: Tensor) -> None:
    is_source = world.rank == 0
    values = to_bytes(tensor) if is_source else torch.empty(tensor.numel() * tensor.itemsize, dtype=torch.uint8)
    for chunk in values.split(_CHUNK_BYTES):
        sends, receives = [len(chunk) * is_source] * world.size, [len(chunk)] + [0] * (world.size - 1)
        sent = chunk.repeat(world.size) if is_source else chunk[:0]
        received = world.start_all_to_all(op, sent, sends, receives).wait()
        if not is_source:
            chunk.copy_(received)
    if not is_source:
        tensor.copy_(values.view(tensor.dtype).view(tensor.shape))
