"""A small container of jagged features, registered with torch, and random ones of a given number of ids."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


class Jagged:
    """Ids of several features for a batch of samples: bags one after the other, and where each begins and ends."""

    open_leaves: ClassVar[frozenset[int]] = frozenset({0, 1})
    fields = ("values", "weights", "offsets")

    def __init__(self, keys: tuple[str, ...], values: Tensor, weights: Tensor | None, offsets: Tensor) -> None:
        assert isinstance(values, Tensor), "made of what is no tensor"
        self.keys, self.values, self.weights, self.offsets = keys, values, weights, offsets

    @property
    def stride(self) -> int:
        return (self.offsets.shape[0] - 1) // len(self.keys)

    def children(self) -> list[Tensor | None]:
        return [self.values, self.weights, self.offsets]

    def to(self, device: torch.device) -> Jagged:
        values, weights, offsets = (child if child is None else child.to(device) for child in self.children())
        assert values is not None
        assert offsets is not None
        return Jagged(self.keys, values, weights, offsets)


pytree.register_pytree_node(
    Jagged,
    lambda jagged: (jagged.children(), jagged.keys),
    lambda children, keys: Jagged(keys, *children),
    serialized_type_name="tests.Jagged",
    flatten_with_keys_fn=lambda jagged: (
        [(pytree.GetAttrKey(name), child) for name, child in zip(Jagged.fields, jagged.children(), strict=True)],
        jagged.keys,
    ),
)


def jagged(total: int, batch: int = 6, features: int = 3, weighted: bool = False, seed: int = 0) -> Jagged:
    """Random bags with that many ids in all, each below 100."""
    generator = torch.Generator().manual_seed(1000 * seed + total)
    ends = torch.sort(torch.randint(0, total + 1, (features * batch - 1,), generator=generator)).values
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends, torch.tensor([total])])
    values = torch.randint(0, 100, (total,), generator=generator)
    weights = torch.rand(total, generator=generator) if weighted else None
    return Jagged(tuple("abcdefgh"[:features]), values, weights, offsets)
