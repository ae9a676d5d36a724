"""TorchRec's position-weighted modules: a learned weight for each position in a bag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ...engine.checks import check_int
from ...engine.errors import InputError, OptionError
from ...engine.ops.embedding_base import Unscriptable
from ..tensors.jagged_tensor import JaggedBase, JaggedTensor
from ..tensors.keyed_jagged_tensor import KeyedJaggedTensor, VariableBatchKeyedJaggedTensor
from ..tensors.validation import is_tracing
from .embedding_collections import as_features, as_jagged
from .tables import find_key_indices

_EXPECTED_LENGTH = "the maximum ids of a bag, from 1"


class PositionWeightedModule(Unscriptable, nn.Module):
    """Weights each id of one feature by its position in the bag. Weights start at 1.

    The parameter `position_weight` holds one weight per position. Its shape is [max_feature_length].

    Args:
        max_feature_length: Maximum bag length. Longer bags are handled as in
            PositionWeightedModuleCollection.
        device: Parameter device.
    """

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        length = check_int("max_feature_length", max_feature_length, _EXPECTED_LENGTH, 1)
        self.position_weight = nn.Parameter(torch.ones(length, device=device))

    def reset_parameters(self) -> None:
        """Reset all weights to 1."""
        nn.init.ones_(self.position_weight)

    def forward(self, features: Any) -> JaggedTensor:
        """Return the JaggedTensor with weights. Raises InputError."""
        jagged = as_jagged(features)
        weights = _gather_weights({"feature": self.position_weight}, ["feature"], jagged)
        return JaggedTensor(jagged.values(), weights, offsets=jagged.offsets())


class PositionWeightedModuleCollection(Unscriptable, nn.Module):
    """Weights each id by its position in the bag. Weights start at 1.

    `position_weights[feature]` is a parameter, with one weight per position. A longer bag raises InputError. A graph on
    a GPU does not check lengths: ids beyond the last position get the last position's weight.

    Args:
        max_feature_lengths: {feature: maximum bag length}. Features that are not listed get weight 1.
        device: Parameter device.
    """

    def __init__(self, max_feature_lengths: Mapping[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        features = max_feature_lengths if isinstance(max_feature_lengths, Mapping) else ()
        if not features or not all(isinstance(name, str) for name in features):
            raise OptionError(f"max_feature_lengths={max_feature_lengths!r}: give {{feature: maximum ids of a bag}}")
        self.max_feature_lengths: dict[str, int] = {}
        self.position_weights = nn.ParameterDict()
        for feature, max_length in max_feature_lengths.items():  # one by one, since ParameterDict sorts a dict
            length = check_int(f"max_feature_lengths[{feature!r}]", max_length, _EXPECTED_LENGTH, 1)
            if "." in feature:
                raise OptionError(f"max_feature_lengths: {feature!r} becomes a parameter's name; use no dots")
            self.max_feature_lengths[feature] = length
            self.position_weights[feature] = nn.Parameter(torch.ones(length, device=device))

    def reset_parameters(self) -> None:
        """Reset all weights to 1."""
        for weights in self.position_weights.values():
            nn.init.ones_(weights)

    def forward(self, features: Any) -> KeyedJaggedTensor:
        """Return the features with weights, for a collection with is_weighted=True.

        Args:
            features: A KeyedJaggedTensor without weights (tierbed's or TorchRec's). Without keys, it does not change.

        Raises:
            KeyError: If a feature of `max_feature_lengths` is missing.
            InputError: If the features already have weights, or a bag is too long.
        """
        batch = as_features(features)
        if not (keys := batch.keys()):
            return batch
        if batch.weights_or_none() is not None:
            raise InputError("features: give a KeyedJaggedTensor without weights; this module adds them")
        find_key_indices(self.max_feature_lengths, keys)  # raises KeyError if a feature is missing
        weights = _gather_weights(self.position_weights_dict, keys, batch)
        offsets, inverse = batch.offsets(), batch.inverse_indices_or_none()
        strides = batch.stride_per_key_per_rank() or None
        return KeyedJaggedTensor(
            keys, batch.values(), weights, offsets=offsets, stride_per_key_per_rank=strides, inverse_indices=inverse
        )

    @property
    def position_weights_dict(self) -> dict[str, nn.Parameter]:
        """The parameters by feature, as a dict."""
        return dict(self.position_weights.items())


GroupedPositionWeightedModule = PositionWeightedModuleCollection  # the name in TorchRec's sharded collections


class PositionWeightedProcessor(PositionWeightedModuleCollection):
    """A PositionWeightedModuleCollection that returns only the features in `max_feature_lengths`."""

    def forward(self, features: Any) -> KeyedJaggedTensor:
        """Return the features of `max_feature_lengths`, in batch order, with weights. Raises KeyError, InputError."""
        weighted_batch = super().forward(features)
        own_indices = [index for index, key in enumerate(weighted_batch.keys()) if key in self.max_feature_lengths]
        return weighted_batch if len(own_indices) == len(weighted_batch.keys()) else weighted_batch.permute(own_indices)


def _gather_weights(parameters: Mapping[str, Tensor], keys: Sequence[str], batch: JaggedBase) -> Tensor:
    """Return a weight for each value, [n]. Bags are ordered by `keys`; keys without a parameter get weight 1."""
    batch.check_bags()
    offsets, device = batch.offsets(), batch.values().device
    # the constant 1 follows the last parameter's weights; it is the weight of each key without a parameter
    ends = [0, *accumulate(len(weights) for weights in parameters.values())]
    spans = dict(zip(parameters, pairwise(ends), strict=True))
    bounds = [spans.get(key, (ends[-1], ends[-1] + 1)) for key in keys]
    value_index = torch.arange(batch.values().shape[0], device=device)
    bag = torch.searchsorted(offsets, value_index, right=True) - 1
    if isinstance(batch, VariableBatchKeyedJaggedTensor):
        key = torch.searchsorted(batch.strides().cumsum(0), bag, right=True)
    else:
        key = bag // max((offsets.shape[0] - 1) // max(len(keys), 1), 1)
    first = torch.tensor([begin for begin, _ in bounds], device=device)[key]
    limit = torch.tensor([end - begin for begin, end in bounds], device=device)[key]
    has_limit = torch.tensor([name in spans for name in keys], device=device)[key]
    position = value_index - offsets[bag]
    if is_tracing():
        position = _check_positions_op(position, limit, has_limit, key, "\n".join(keys))
    elif device.type != "meta":
        _check_positions(position, limit, has_limit, key, keys)
    all_weights = torch.cat([*parameters.values(), next(iter(parameters.values())).new_ones(1)])
    return all_weights[first + torch.minimum(position, limit - 1)]


def _check_positions(position: Tensor, limit: Tensor, has_limit: Tensor, key: Tensor, keys: Sequence[str]) -> None:
    """Raise InputError if an id's position in its bag reaches `limit`, unless its key is unlimited. Tensors are [n]."""
    is_beyond = has_limit & (position >= limit)
    if is_beyond.any():
        first = int(is_beyond.nonzero()[0])
        name = repr(keys[int(key[first])])
        remedy = f"shorten bags, or raise max_feature_lengths[{name}] to the longest bag's length"
        raise InputError(f"feature {name}: a bag of more than {int(limit[first])} ids; {remedy}")


@torch.library.custom_op("tierbed::checked_positions", mutates_args=())
def _check_positions_op(position: Tensor, limit: Tensor, has_limit: Tensor, key: Tensor, keys: str) -> Tensor:
    """`_check_positions` as an op for graphs. On a GPU it checks nothing: the host would wait. keys: one per line."""
    if position.device.type == "cpu":
        _check_positions(position, limit, has_limit, key, keys.split("\n"))
    return position.clone()


@_check_positions_op.register_fake
def _(position: Tensor, limit: Tensor, has_limit: Tensor, key: Tensor, keys: str) -> Tensor:
    return torch.empty_like(position)
