"""What torch's nested tensors give to jagged ones."""

from __future__ import annotations

import torch
from torch import Tensor

from ...engine.errors import InputError


def jagged_parts(name: str, nested: Tensor) -> tuple[Tensor, Tensor]:
    """The values [n, ...] and offsets [batch + 1] of a nested tensor of layout torch.jagged. InputError for others."""
    if not isinstance(nested, Tensor) or not nested.is_nested or nested.layout != torch.jagged:
        raise InputError(
            f"{name}: give a nested tensor of layout torch.jagged: torch.nested.as_nested_tensor(..., "
            "layout=torch.jagged)"
        )
    if not nested.is_contiguous():
        raise InputError(
            f"{name}: the nested tensor has gaps, or its second dimension is not the ragged one; give "
            f"{name}.contiguous()"
        )
    values, offsets = nested.values(), nested.offsets()  # type: ignore[attr-defined]
    return values, offsets
