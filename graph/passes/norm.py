"""The squares of gradients, added in one order, so that the sum has the same bits on every processor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_LANES = 1 << 18  # how many sums run side by side


@torch.no_grad()
def sum_of_squares(tensors: Sequence[Tensor]) -> float:
    """The sum of the squares of all elements, in float64: torch's norm is another for other threads or processors.

    Each element is squared and added by ops that work on elements, which IEEE leaves one result.
    """
    return sum((_of_one(tensor) for tensor in tensors), 0.0)


def _of_one(tensor: Tensor) -> float:
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    lanes = flat.new_zeros(min(len(flat), _LANES), dtype=torch.float64)
    for piece in flat.split(_LANES):
        wide = piece.double()
        lanes[: len(piece)] += wide * wide
    while len(lanes) > 1:
        half = len(lanes) // 2
        rest, lanes = lanes[2 * half :], lanes[:half] + lanes[half : 2 * half]
        lanes[: len(rest)] += rest
    return float(lanes.sum())  # of one element, or none
