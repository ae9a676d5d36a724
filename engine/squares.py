"""The squares of gradients, added in one order, so that the sum has the same bits on every processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LANES = 1 << 16  # how many sums run side by side


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements, in float64: torch's norm is another for other threads or processors.

    Each element is squared and added by ops that work on elements, which IEEE leaves one result.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
        by_device.setdefault(tensor.device, []).append(flat)
    return sum((_of_device(flats) for flats in by_device.values()), 0.0)


def _of_device(flats: list[Tensor]) -> float:
    """The sum over tensors [n] of one device, which is waited for once."""
    small = [flat for flat in flats if len(flat) < _LANES]  # as one: each op costs more than its elements
    flats = [torch.cat(small), *(flat for flat in flats if len(flat) >= _LANES)] if small else flats
    lanes = flats[0].new_zeros(min(max(map(len, flats)), _LANES), dtype=torch.float64)
    memory = torch.empty_like(lanes)
    for flat in flats:
        for piece in flat.split(_LANES):
            wide = memory[: len(piece)].copy_(piece)
            lanes[: len(piece)] += wide.mul_(wide)
    while len(lanes) > 1:
        half = len(lanes) // 2
        rest, lanes = lanes[2 * half :], lanes[:half] + lanes[half : 2 * half]
        lanes[: len(rest)] += rest
    return float(lanes.sum())  # of one element, or none
