"""`PositionWeighted`: a learned weight for each place of a bag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.checks import as_int
from ...engine.errors import InputError, OptionError
from ..tensors.keyed_jagged_tensor import KeyedJagged, KeyedJaggedTensor
from ..tensors.validation import is_traced
from .embedding_collections import features_of


class PositionWeighted(nn.Module):
    """Gives each id of a feature the weight of its place in the bag; all begin at 1.

    max_feature_lengths: {feature: the most ids of a bag}. Other features of a batch have weights of 1.
    `position_weight` [sum of lengths] is one parameter for all features, in their order. Raises OptionError.

    A longer bag raises InputError. A graph on a GPU does not read lengths: ids beyond the last place have its weight.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int]) -> None:
        super().__init__()
        if not isinstance(max_feature_lengths, Mapping) or not max_feature_lengths:
            raise OptionError(f"max_feature_lengths={max_feature_lengths!r}: give {{feature: most ids of a bag}}")
        for feature, length in max_feature_lengths.items():
            if as_int(length, 1) is None:
                raise OptionError(f"max_feature_lengths[{feature!r}]={length!r}: give the most ids of a bag, 1 or more")
        self.max_feature_lengths = {feature: int(length) for feature, length in max_feature_lengths.items()}
        self.position_weight = nn.Parameter(torch.ones(sum(self.max_feature_lengths.values())))

    def weights_of(self, feature: str) -> Tensor:
        """The weights of one feature's places, a view [its length]. KeyError."""
        parts = self.position_weight.split([*self.max_feature_lengths.values()])
        return dict(zip(self.max_feature_lengths, parts, strict=True))[feature]

    def forward(self, features: Any) -> KeyedJagged:
        """The same features with weights, for a collection with is_weighted=True. KeyError, InputError.

        features: a KeyedJaggedTensor without weights, or TorchRec's, with one bag for each sample.
        """
        batch = features_of(features)
        if batch.variable_stride_per_key() or batch.weights_or_none() is not None:
            raise InputError(
                "features: give a KeyedJaggedTensor with one bag for each sample, without weights: they are made here"
            )
        batch.check_bags()
        keys, offsets, device = batch.keys(), batch.offsets(), batch.values().device
        if missing := [feature for feature in self.max_feature_lengths if feature not in keys]:
            raise KeyError(f"feature {missing[0]!r} is not in the batch, whose keys are {', '.join(keys)}")
        # of each key: its first weight, and how many it has; those without take the 1 at the end
        firsts, lengths = self._places(keys)
        position = torch.arange(batch.values().shape[0], device=device)
        bag = torch.searchsorted(offsets, position, right=True) - 1
        key = bag // max(batch.stride(), 1)
        place, most = position - offsets[bag], torch.tensor(lengths, device=device)[key]
        limited = torch.tensor([name in self.max_feature_lengths for name in keys], device=device)[key]
        if is_traced():
            place = _checked_places(place, most, limited, key, "\n".join(keys))
        else:
            _check(place, most, limited, key, keys)
        index = torch.tensor(firsts, device=device)[key] + torch.minimum(place, most - 1)
        weights = torch.cat([self.position_weight, self.position_weight.new_ones(1)])[index]
        return KeyedJaggedTensor(keys, batch.values(), weights, offsets=offsets)

    def _places(self, keys: list[str]) -> tuple[list[int], list[int]]:
        first = 0
        places: dict[str, tuple[int, int]] = {}
        for feature, length in self.max_feature_lengths.items():
            places[feature] = first, length
            first += length
        found = [places.get(key, (first, 1)) for key in keys]
        return [begin for begin, _ in found], [length for _, length in found]


def _check(place: Tensor, most: Tensor, limited: Tensor, key: Tensor, keys: Sequence[str]) -> None:
    """InputError for an id at a place [n] of `most` or more, where its key has so many weights."""
    beyond = limited & (place >= most)
    if beyond.any():
        first = int(beyond.nonzero()[0])
        name, length = keys[int(key[first])], int(most[first])
        raise InputError(
            f"feature {name!r}: a bag of more than {length} ids; shorten bags, or give max_feature_lengths[{name!r}] "
            "as many as the longest has"
        )


@torch.library.custom_op("tierbed::checked_places", mutates_args=())
def _checked_places(place: Tensor, most: Tensor, limited: Tensor, key: Tensor, keys: str) -> Tensor:
    """Places, which a step of a graph checks on a CPU alone: a GPU would wait for it. keys: a name a line."""
    if place.device.type == "cpu":
        _check(place, most, limited, key, keys.split("\n"))
    return place.clone()


@_checked_places.register_fake
def _(place: Tensor, most: Tensor, limited: Tensor, key: Tensor, keys: str) -> Tensor:
    return torch.empty_like(place)
