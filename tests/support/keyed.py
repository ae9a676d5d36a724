"""An example of six features in three tensors, and the groups that they go to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tierbed.jagged import KeyedTensor

KEYS = [["f1", "f2"], ["f3", "f4", "f5"], ["f6"]]
LENGTHS = [[3, 4], [5, 6, 7], [8]]
GROUPS = [["f1", "f3"], ["f2"], ["f4", "f1", "f6"], ["f1", "f5"]]


def tensors(batch: int = 5, **options: Any) -> list[Tensor]:
    return [torch.randn(batch, sum(lengths), **options) for lengths in LENGTHS]


def features(values: list[Tensor]) -> dict[str, Tensor]:
    """Each feature of the example."""
    parts: dict[str, Tensor] = {}
    for keys, lengths, tensor in zip(KEYS, LENGTHS, values, strict=True):
        parts.update(zip(keys, tensor.split(lengths, 1), strict=True))
    return parts


def keyed(values: list[Tensor], kind: Any = KeyedTensor) -> list[Any]:
    return [kind(keys, lengths, tensor) for keys, lengths, tensor in zip(KEYS, LENGTHS, values, strict=True)]


def gradients(made: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    outside = [torch.randn(part.shape, generator=generator) for part in made]
    return list(torch.autograd.grad(made, values, outside, materialize_grads=True))
