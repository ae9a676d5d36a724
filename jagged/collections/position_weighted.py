"""`PositionWeighted`: a learned weight for each position in a bag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.checks import as_int
from ...engine.errors import InputError, OptionError
from ..tensors.keyed_jagged_tensor import KeyedJagged, KeyedJaggedTensor
from ..tensors.validation import is_traced
from .embedding_collections import features_of
from .tables import numbers_of


class PositionWeighted(nn.Module):
    """Gives each id of a feature the weight of its position in the bag. All weights begin at 1.

    max_feature_lengths: {feature: the maximum number of ids in a bag}. Other features of a batch have weights of 1.
    `position_weight` [sum of lengths] is one parameter for all features, in their order. Raises OptionError.

    A longer bag raises InputError. A graph on a GPU does not read lengths: ids beyond the last position have its
    weight.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int]) -> None:
        super().__init__()
        if not isinstance(max_feature_lengths, Mapping) or not max_feature_lengths:
            raise OptionError(f"max_feature_lengths={max_feature_lengths!r}: give {{feature: maximum ids of a bag}}")
        for feature, length in max_feature_lengths.items():
            if as_int(length, 1) is None:
                raise OptionError(f"max_feature_lengths[{feature!r}]={length!r}: give the maximum ids of a bag, from 1")
        self.max_feature_lengths = {feature: int(length) for feature, length in max_feature_lengths.items()}
        self.position_weight = nn.Parameter(torch.ones(sum(self.max_feature_lengths.values())))

    def weights_of(self, feature: str) -> Tensor:
        """The weights of one feature's positions, a view [its length]. KeyError."""
        parts = self.position_weight.split([*self.max_feature_lengths.values()])
        return dict(zip(self.max_feature_lengths, parts, strict=True))[feature]

    def forward(self, features: Any) -> KeyedJagged:
        """The same features with weights, for a collection with is_weighted=True. KeyError, InputError.

        features: a KeyedJaggedTensor without weights, or TorchRec's, with one bag for each sample.
        """
        batch = features_of(features)
        if batch.variable_stride_per_key() or batch.weights_or_none() is not None:
            raise InputError(
                "features: give a KeyedJaggedTensor with one bag for each sample and without weights, which this adds"
            )
        batch.check_bags()
        keys, offsets, device = batch.keys(), batch.offsets(), batch.values().device
        numbers_of(self.max_feature_lengths, keys)  # raises for a missing feature
        # a key without weights of its own takes the 1 behind all weights
        limits, end = self.max_feature_lengths, len(self.position_weight)
        spans = dict(zip(limits, pairwise(accumulate(limits.values(), initial=0)), strict=True))
        bounds = [spans.get(key, (end, end + 1)) for key in keys]
        index = torch.arange(batch.values().shape[0], device=device)
        bag = torch.searchsorted(offsets, index, right=True) - 1
        key = bag // max(batch.stride(), 1)
        first = torch.tensor([begin for begin, _ in bounds], device=device)[key]
        limit = torch.tensor([end - begin for begin, end in bounds], device=device)[key]
        limited = torch.tensor([name in spans for name in keys], device=device)[key]
        position = index - offsets[bag]
        if is_traced():
            position = _checked_positions(position, limit, limited, key, "\n".join(keys))
        else:
            _check(position, limit, limited, key, keys)
        all_weights = torch.cat([self.position_weight, self.position_weight.new_ones(1)])
        weights = all_weights[first + torch.minimum(position, limit - 1)]
        return KeyedJaggedTensor(keys, batch.values(), weights, offsets=offsets)


def _check(position: Tensor, limit: Tensor, limited: Tensor, key: Tensor, keys: Sequence[str]) -> None:
    """InputError for an id whose position [n] is its key's `limit` or more, if the key is limited."""
    beyond = limited & (position >= limit)
    if beyond.any():
        first = int(beyond.nonzero()[0])
        name, length = keys[int(key[first])], int(limit[first])
        raise InputError(
            f"feature {name!r}: a bag of more than {length} ids; shorten bags, or give max_feature_lengths[{name!r}] "
            "as many as the longest has"
        )


@torch.library.custom_op("tierbed::checked_positions", mutates_args=())
def _checked_positions(position: Tensor, limit: Tensor, limited: Tensor, key: Tensor, keys: str) -> Tensor:
    """Positions, checked by a graph's step on a CPU alone: a GPU would wait for the check. keys: a name a line."""
    if position.device.type == "cpu":
        _check(position, limit, limited, key, keys.split("\n"))
    return position.clone()


@_checked_positions.register_fake
def _(position: Tensor, limit: Tensor, limited: Tensor, key: Tensor, keys: str) -> Tensor:
    return torch.empty_like(position)
