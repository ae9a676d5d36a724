"""Bags padded to one length."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ...engine.errors import InputError


def is_value(offsets: Tensor, length: int) -> Tensor:
    """Which places of bags padded to `length` hold values: bool [bags, length]."""
    return torch.arange(length, device=offsets.device) < offsets.diff().unsqueeze(1)


def padded(values: Tensor, offsets: Tensor, length: int, padding_value: float = 0.0) -> Tensor:
    """The first `length` of each bag's values, then padding_value: [bags, length, ...]. Reads no value. InputError."""
    if not values.is_floating_point() and padding_value != int(padding_value):
        raise InputError(f"padding_value={padding_value}: values are of {values.dtype}; give a whole number")
    padding = values.new_full((1, *values.shape[1:]), padding_value)
    places = offsets[:-1].unsqueeze(1) + torch.arange(1, length + 1, device=offsets.device)
    rows = torch.cat([padding, values])
    # an embedding's backward leaves the row of padding_idx out, and adds each other one once
    taken = F.embedding(places * is_value(offsets, length), rows.flatten(1) if rows.dim() > 1 else rows[:, None], 0)
    return taken.view(*places.shape, *values.shape[1:])
