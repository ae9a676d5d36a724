"""The arguments of a call of a table-batched embedding, checked, and what of them belongs to one embedding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engine.errors import InputError
from ...engine.numeric import whole


class Call(NamedTuple):
    """The bags of all features, one feature after another."""

    indices: Tensor  # int64 [n]
    offsets: Tensor  # int64 [bags + 1]
    weights: Tensor | None  # float32 [n]
    sizes: list[list[int]] | None  # how many bags each feature has for each rank; None: all features have as many
    batch: int  # bags of each feature, where sizes is None

    def bags(self, features: int) -> list[int]:
        """For each feature its first bag, and the end of the last."""
        if self.sizes is None:
            return [self.batch * feature for feature in range(features + 1)]
        return [0, *accumulate(sum(of_ranks) for of_ranks in self.sizes)]


def checked_call(
    name: str, features: int, indices: Any, offsets: Any, weights: Any, sizes: Any, device: torch.device
) -> Call:
    """The arguments of a call, with integers as int64 and weights as float32. InputError."""
    ids, bounds = _integers(name, "indices", indices, device), _integers(name, "offsets", offsets, device)
    if weights is not None:
        if not isinstance(weights, Tensor) or not weights.is_floating_point() or weights.shape != ids.shape:
            got = f"{weights.dtype} {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
            raise InputError(f"per_sample_weights of {name!r}: got {got}; give floats {tuple(ids.shape)}")
        weights = _on(name, "per_sample_weights", weights, device).float()
    bags = bounds.shape[0] - 1
    if sizes is None:
        if bags < 0 or bags % features:
            raise InputError(
                f"offsets of {name!r}: {bags + 1} of them; give features * batch + 1 for {features} features, or "
                "batch_size_per_feature_per_rank"
            )
        return Call(ids, bounds, weights, None, bags // features)
    return Call(ids, bounds, weights, _checked_sizes(name, features, sizes, bags), 0)


def _checked_sizes(name: str, features: int, sizes: Any, bags: int) -> list[list[int]]:
    where = f"batch_size_per_feature_per_rank of {name!r}"
    if not isinstance(sizes, (list, tuple)) or len(sizes) != features:
        got = type(sizes).__name__ if not isinstance(sizes, (list, tuple)) else f"{len(sizes)} lists"
        raise InputError(f"{where}: got {got}; give a list of batch sizes, one for each rank, for each of {features}")
    if any(not isinstance(one, (list, tuple)) or len(one) != len(sizes[0]) or not one for one in sizes):
        raise InputError(f"{where}: {sizes!r}; give each feature as many batch sizes as there are ranks")
    if any(whole(size, 0) is None for one in sizes for size in one):
        raise InputError(f"{where}: {sizes!r}; give whole numbers >= 0")
    given = [[int(size) for size in one] for one in sizes]
    if (total := sum(map(sum, given))) != bags:
        raise InputError(f"{where}: {total} bags, and offsets make {bags}; give offsets of {total + 1}")
    return given


def _integers(name: str, argument: str, given: Any, device: torch.device) -> Tensor:
    if not isinstance(given, Tensor) or given.dtype not in (torch.int32, torch.int64) or given.dim() != 1:
        got = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise InputError(f"{argument} of {name!r}: got {got}; give a 1-D torch.Tensor of int64 or int32")
    return _on(name, argument, given, device).to(torch.int64)


def _on(name: str, argument: str, given: Tensor, device: torch.device) -> Tensor:
    if given.device != device:
        raise InputError(
            f"{argument} of {name!r} are on {given.device} and the tables on {device}; give "
            f"{argument}.to({str(device)!r})"
        )
    return given


class Piece(NamedTuple):
    """The bags of some features alone."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    ids: list[int]  # how many ids each of the features has


def taken_out(name: str, call: Call, features: Sequence[int], bags: Sequence[int]) -> Piece:
    """The bags of `features`, ascending, one after another; bags: as `Call.bags`. Waits for a GPU. InputError."""
    bounds = call.offsets[torch.tensor(bags, device=call.offsets.device)].tolist()
    if bounds[0] != 0 or bounds[-1] != call.indices.shape[0] or bounds != sorted(bounds):
        raise InputError(
            f"offsets of {name!r}: {bounds} where features begin and end; give ascending offsets from 0 to "
            f"{call.indices.shape[0]}, the number of indices"
        )
    ids = [bounds[feature + 1] - bounds[feature] for feature in features]
    if len(features) == len(bags) - 1:
        return Piece(call.indices, call.offsets, call.weights, ids)

    def chosen(values: Tensor) -> Tensor:
        return torch.cat([values[bounds[feature] : bounds[feature + 1]] for feature in features])

    starts = [0, *accumulate(ids)]
    pieces = [
        call.offsets[bags[feature] : bags[feature + 1]] + (start - bounds[feature])
        for feature, start in zip(features, starts, strict=False)
    ]
    offsets = torch.cat([*pieces, call.offsets.new_tensor(starts[-1:])])
    weights = None if call.weights is None else chosen(call.weights)
    return Piece(chosen(call.indices), offsets, weights, ids)
