"""The arguments of a call of a table-batched embedding: checked, split by embedding, or refused with the reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...engine.checks import as_int
from ...engine.errors import InputError, OptionError

_MEMORY = "a cache takes the rows that the coming batches need by itself, whatever is announced"
_EXPERT = "it is FBGEMM's own plumbing, and tierbed has none of it; leave it out"

# by name: FBGEMM's default, which is what tierbed does, and why there is nothing else
CONSTRUCTOR: dict[str, tuple[Any, str]] = {
    "cache_sets": (0, "sets of a cache follow from its memory; give cache_load_factor, or store_options"),
    "cache_reserved_memory": (0.0, "a cache takes no more than its budget; give cache_load_factor, or store_options"),
    "cache_precision": (None, "rows of a cache are those below it, of weights_precision; leave it out"),
    "enforce_hbm": (False, "give EmbeddingLocation.DEVICE for rows in the memory of the device"),
    "record_cache_metrics": (None, "each store counts hits and misses; read metrics()"),
    "gather_uvm_cache_stats": (False, "each store counts hits and misses; read metrics()"),
    "stochastic_rounding": (True, "rows of 16 bits are always rounded by chance in training; leave it out"),
    "ensemble_mode": (None, "it is of ENSEMBLE_ROWWISE_ADAGRAD, which is not built; leave it out"),
    "emainplace_mode": (None, "it is of EMAINPLACE_ROWWISE_ADAGRAD, which is not built; leave it out"),
    "counter_based_regularization": (
        None,
        "no optimizer weighs rows by a counter; give weight_decay_mode=WeightDecayMode.DECOUPLE",
    ),
    "cowclip_regularization": (
        None,
        "no optimizer clips by the norm of a row; give gradient_clipping=True with max_gradient",
    ),
    "uvm_non_rowwise_momentum": (False, "a row and its state are one line of memory, in every store; leave it out"),
    "use_experimental_tbe": (False, "there is one implementation; leave it out"),
    "prefetch_pipeline": (False, f"{_MEMORY}; call prefetch"),
    "stats_reporter_config": (None, "read metrics(), or give MetricsCollector the module's embeddings"),
    "multipass_prefetch_config": (None, f"{_MEMORY}; call prefetch"),
    "global_weight_decay": (
        None,
        "rows that no batch has do not decay; give weight_decay_mode=WeightDecayMode.DECOUPLE",
    ),
    "uvm_host_mapped": (False, "a GPU reads page-locked memory of the host; leave it out"),
    "extra_optimizer_config": (None, _EXPERT),
    "tbe_input_multiplexer_config": (None, _EXPERT),
    "embedding_table_index_type": (torch.int64, "indices of int32 and of int64 are taken in every call; leave it out"),
    "embedding_table_offset_type": (torch.int64, "offsets of int32 and of int64 are taken in every call; leave it out"),
    "embedding_shard_info": (None, "tables are whole, in one process; leave it out"),
    "enable_raw_embedding_streaming": (False, "save incremental snapshots of the changed rows (docs/snapshots.md)"),
    "res_params": (None, "save incremental snapshots of the changed rows (docs/snapshots.md)"),
    "is_qr_tbe": (False, _EXPERT),
    "preallocated_host_buffers": (None, _EXPERT),
}

CALL: dict[str, tuple[Any, str]] = {
    "feature_requires_grad": (
        None,
        "the gradient of weights is computed where they require it; detach those of the other features",
    ),
    "total_unique_indices": (None, "it is of OptimType.NONE, which is not built; leave it out"),
    "forward_stream": (None, "a table orders its own streams with those that it is used on; leave it out"),
    "hash_zch_identities": (None, _EXPERT),
    "hash_zch_runtime_meta": (None, _EXPERT),
    "vbe_output": (None, "the output is a new tensor; copy it where it is wanted"),
    "vbe_output_offsets": (None, "the output is a new tensor; copy it where it is wanted"),
}


def refuse(given: Mapping[str, Any], known: Mapping[str, tuple[Any, str]], others: Iterable[str]) -> None:
    """OptionError for an argument that has no meaning here, but at FBGEMM's default, and for an unknown one.

    others: the names of the arguments that there are.
    """
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, [*others, *known], 1)
            meant = f"did you mean {near[0]}?" if near else "leave it out"
            raise OptionError(f"{name}={value!r}: there is no such argument; {meant}")
        default, reason = known[name]
        plain = value.value if isinstance(value, Enum) else value
        if plain is not default and not (isinstance(plain, (int, float, str)) and plain == default):
            raise OptionError(f"{name}={value!r}: {reason}")


def refuse_call(given: Mapping[str, Any], others: Iterable[str]) -> None:
    """InputError for an argument of a call that has no meaning here."""
    try:
        refuse(given, CALL, others)
    except OptionError as error:
        raise InputError(str(error)) from None


class TBECall(NamedTuple):
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
) -> TBECall:
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
        return TBECall(ids, bounds, weights, None, bags // features)
    return TBECall(ids, bounds, weights, _checked_sizes(name, features, sizes, bags), 0)


def _checked_sizes(name: str, features: int, sizes: Any, bags: int) -> list[list[int]]:
    where = f"batch_size_per_feature_per_rank of {name!r}"
    if not isinstance(sizes, (list, tuple)) or len(sizes) != features:
        got = type(sizes).__name__ if not isinstance(sizes, (list, tuple)) else f"{len(sizes)} lists"
        raise InputError(f"{where}: got {got}; give a list of batch sizes, one for each rank, for each of {features}")
    if any(not isinstance(one, (list, tuple)) or len(one) != len(sizes[0]) or not one for one in sizes):
        raise InputError(f"{where}: {sizes!r}; give each feature as many batch sizes as there are ranks")
    if any(as_int(size, 0) is None for one in sizes for size in one):
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


class FeatureSlice(NamedTuple):
    """The bags of some features alone."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None
    ids: list[int]  # how many ids each of the features has


def taken_out(name: str, call: TBECall, features: Sequence[int], bags: Sequence[int]) -> FeatureSlice:
    """The bags of `features`, ascending, one after another; bags: as `TBECall.bags`. Waits for a GPU. InputError."""
    bounds = call.offsets[torch.tensor(bags, device=call.offsets.device)].tolist()
    if bounds[0] != 0 or bounds[-1] != call.indices.shape[0] or bounds != sorted(bounds):
        raise InputError(
            f"offsets of {name!r}: {bounds} where features begin and end; give ascending offsets from 0 to "
            f"{call.indices.shape[0]}, the number of indices"
        )
    ids = [bounds[feature + 1] - bounds[feature] for feature in features]
    if len(features) == len(bags) - 1:
        return FeatureSlice(call.indices, call.offsets, call.weights, ids)

    def chosen(values: Tensor) -> Tensor:
        return torch.cat([values[bounds[feature] : bounds[feature + 1]] for feature in features])

    starts = [0, *accumulate(ids)]
    pieces = [
        call.offsets[bags[feature] : bags[feature + 1]] + (start - bounds[feature])
        for feature, start in zip(features, starts, strict=False)
    ]
    offsets = torch.cat([*pieces, call.offsets.new_tensor(starts[-1:])])
    weights = None if call.weights is None else chosen(call.weights)
    return FeatureSlice(chosen(call.indices), offsets, weights, ids)
