"""Random features of a batch, as jagged and keyed tensors are made of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

KEYS = ["user", "item", "shop", "query", "page"]
LENGTHS = [0, 0, 1, 1, 2, 3, 5, 64]


@dataclass(frozen=True)
class Features:
    """What constructors take: of each key `batch` lengths, one key after another."""

    keys: list[str]
    values: Tensor
    weights: Tensor | None
    lengths: Tensor
    batch: int

    def arguments(self) -> dict[str, Any]:
        """By the names that both TorchRec's constructors and ours have."""
        return {"keys": self.keys, "values": self.values, "weights": self.weights, "lengths": self.lengths}

    def bags(self) -> dict[str, list[list[int]]]:
        """The values of each sample of each key, as lists."""
        ends = [*accumulate(self.lengths.tolist(), initial=0)]
        bags = [self.values[begin:end].tolist() for begin, end in pairwise(ends)]
        return {key: bags[at * self.batch : (at + 1) * self.batch] for at, key in enumerate(self.keys)}


@st.composite
def features(
    draw: st.DrawFn,
    keys: Sequence[str] = KEYS,
    required: Sequence[str] = (),
    ids: int = 1000,
    weighted: bool | None = None,
    min_batch: int = 0,
    max_length: int = 64,
) -> Features:
    """Features of some of `keys`, `required` among them, in any order; of no sample, or without values, as well.

    ids: values are from 0 to ids - 1. weighted: None is either.
    """
    others = [key for key in keys if key not in required]
    chosen = draw(st.permutations([*required, *draw(st.sets(st.sampled_from(others)) if others else st.just(set()))]))
    chosen = chosen or [draw(st.sampled_from(others))]
    batch = draw(st.integers(min_batch, 6))
    few = st.lists(st.sampled_from([n for n in LENGTHS if n <= max_length]), min_size=batch, max_size=batch)
    lengths = [n for _ in chosen for n in draw(st.just([0] * batch) | few)]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    count = sum(lengths)
    values = torch.randint(ids, (count,), generator=generator)
    has_weights = draw(st.booleans() if weighted is None else st.just(weighted))
    weights = torch.randn(count, generator=generator) if has_weights else None
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return Features(list(chosen), values, weights, torch.tensor(lengths, dtype=dtype), batch)


def check_same_parts(one: Any, other: Any) -> None:
    """Equal values, weights and bags of two jagged tensors; one is ours."""
    assert torch.equal(one.values(), other.values())
    assert (one.weights_or_none() is None) == (other.weights_or_none() is None)
    if one.weights_or_none() is not None:
        assert torch.equal(one.weights(), other.weights())
    assert one.lengths().tolist() == other.lengths().tolist()
    assert one.offsets().dtype == torch.int64
    assert one.offsets().tolist() == (other.offsets().tolist() or [0])  # theirs of no bags may be empty


def check_same(one: Any, other: Any) -> None:
    check_same_parts(one, other)
    assert one.keys() == other.keys()
    assert one.length_per_key() == other.length_per_key()
    assert one.offset_per_key() == [0, *torch.tensor(other.length_per_key()).cumsum(0).tolist()]
    assert one.stride() == (other.stride() if other.keys() else 0)
