"""Checks a table-batched embedding's arguments. Lists FBGEMM's arguments that are refused or ignored."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...engine.checks import as_int
from ...engine.errors import InputError, OptionError, TierbedError
from ..tensors.keyed_jagged_tensor import VariableBatchKeyedJaggedTensor

_PREFETCH_REMEDY = "a cache keeps the rows of announced batches by itself; call prefetch"
_DECAY_REMEDY = "give weight_decay_mode=WeightDecayMode.DECOUPLE"
_INTERNALS_REMEDY = "it configures FBGEMM's internals, which tierbed does not have; leave it out"
_STREAMING_REMEDY = "save incremental snapshots of the changed rows (docs/snapshots.md)"
_OUTPUT_REMEDY = "the output is a new tensor; copy it to where you need it"

# {argument: (FBGEMM's default, error text)}; any value other than the default raises an error with this text
REFUSED_ARGS: dict[str, tuple[Any, str]] = {
    "cache_sets": (0, "the memory of a cache decides its number of sets; give cache_load_factor, or store_options"),
    "cache_reserved_memory": (0.0, "a cache takes no more than its budget; give cache_load_factor, or store_options"),
    "cache_precision": (None, "a cache stores rows in weights_precision, like the tier below; leave it out"),
    "enforce_hbm": (False, "give EmbeddingLocation.DEVICE for rows in the memory of the device"),
    "record_cache_metrics": (None, "each store counts hits and misses; read metrics()"),
    "gather_uvm_cache_stats": (False, "each store counts hits and misses; read metrics()"),
    "stochastic_rounding": (True, "training always rounds rows of 16 bits stochastically; leave it out"),
    "ensemble_mode": (None, "it is for ENSEMBLE_ROWWISE_ADAGRAD, which is not supported; leave it out"),
    "emainplace_mode": (None, "it is for EMAINPLACE_ROWWISE_ADAGRAD, which is not supported; leave it out"),
    "counter_based_regularization": (None, f"decay does not depend on how often a row was used; {_DECAY_REMEDY}"),
    "cowclip_regularization": (None, "no optimizer clips by a row's norm; give gradient_clipping and max_gradient"),
    "uvm_non_rowwise_momentum": (False, "a row and its state are stored together; leave it out"),
    "stats_reporter_config": (None, "read metrics(), or give MetricsCollector the module's embeddings"),
    "multipass_prefetch_config": (None, _PREFETCH_REMEDY),
    "global_weight_decay": (None, f"only rows of a batch decay; {_DECAY_REMEDY}"),
    "uvm_host_mapped": (False, "a GPU reads page-locked memory of the host; leave it out"),
    "extra_optimizer_config": (None, _INTERNALS_REMEDY),
    "tbe_input_multiplexer_config": (None, _INTERNALS_REMEDY),
    "embedding_table_index_type": (torch.int64, "every call accepts int32 and int64 indices; leave it out"),
    "embedding_table_offset_type": (torch.int64, "every call accepts int32 and int64 offsets; leave it out"),
    "embedding_shard_info": (None, "rows are sharded across ranks by id hash; give world=, or leave it out"),
    "enable_raw_embedding_streaming": (False, _STREAMING_REMEDY),
    "res_params": (None, _STREAMING_REMEDY),
    "is_qr_tbe": (False, _INTERNALS_REMEDY),
    "preallocated_host_buffers": (None, _INTERNALS_REMEDY),
}

# positional arguments of FBGEMM's constructor, after embedding_specs and feature_table_map
POSITIONAL_ARGS = (
    "cache_algorithm", "cache_load_factor", "cache_sets", "cache_reserved_memory", "cache_precision",
    "weights_precision", "output_dtype", "enforce_hbm", "optimizer", "record_cache_metrics", "gather_uvm_cache_stats",
    "stochastic_rounding", "gradient_clipping", "max_gradient", "max_norm", "learning_rate", "eps", "momentum",
    "weight_decay", "weight_decay_mode", "eta", "beta1", "beta2", "ensemble_mode", "emainplace_mode",
    "counter_based_regularization", "cowclip_regularization", "pooling_mode", "device", "bounds_check_mode",
    "uvm_non_rowwise_momentum", "use_experimental_tbe", "prefetch_pipeline", "stats_reporter_config", "table_names",
    "optimizer_state_dtypes",
)  # fmt: skip

# arguments that change nothing, whatever their value: {name: (FBGEMM's default, reason)}
IGNORED_ARGS: dict[str, tuple[Any, str]] = {
    "use_experimental_tbe": (False, "tierbed has one implementation"),
    "prefetch_pipeline": (False, "a cache keeps the rows of announced batches by itself"),
}

IGNORED_CALL_ARGS = ("hash_zch_identities", "hash_zch_runtime_meta")  # arguments of forward that change nothing
REFUSED_CALL_ARGS: dict[str, tuple[Any, str]] = {
    "total_unique_indices": (None, "it is for OptimType.NONE; leave it out"),
    "forward_stream": (None, "a table synchronises its own streams with the caller's; leave it out"),
    "vbe_output": (None, _OUTPUT_REMEDY),
    "vbe_output_offsets": (None, _OUTPUT_REMEDY),
}


def pop_ignored_arguments(arguments: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """Remove the arguments that change nothing, and return "name: reason" for each. dtype: stored rows' dtype."""
    ignored = []
    for name, (default, reason) in IGNORED_ARGS.items():
        ignored += [f"{name}: {reason}"] * (arguments.pop(name, default) != default)
    if arguments.get("stochastic_rounding") is False and dtype == torch.float32:
        del arguments["stochastic_rounding"]
    if arguments.get("preallocated_host_buffers") == {}:
        del arguments["preallocated_host_buffers"]
    for name in ("extra_optimizer_config", "ensemble_mode", "emainplace_mode", "global_weight_decay"):
        value: Any = arguments.get(name)
        if is_dataclass(value) and value == type(value)():  # type: ignore[misc]  # a config with default values
            del arguments[name]
    if isinstance(counts := arguments.get("record_cache_metrics"), tuple) and not any(counts):
        del arguments["record_cache_metrics"]
    return ignored


def check_arguments(
    arguments: Mapping[str, Any],
    refusals: Mapping[str, tuple[Any, str]],
    supported_names: Iterable[str],
    error: type[TierbedError] = OptionError,
) -> None:
    """Raise `error` for an unknown argument, or for one of `refusals` whose value is not FBGEMM's default."""
    for name, value in arguments.items():
        if name not in refusals:
            matches = difflib.get_close_matches(name, [*supported_names, *refusals], 1)
            suggestion = f"did you mean {matches[0]}?" if matches else "leave it out"
            raise error(f"{name}={value!r}: there is no such argument; {suggestion}")
        default, reason = refusals[name]
        raw_value = value.value if isinstance(value, Enum) else value
        if raw_value is not default and not (isinstance(raw_value, (int, float, str)) and raw_value == default):
            raise error(f"{name}={value!r}: {reason}")


@dataclass
class TBECall:
    """The checked arguments of a call: the bags of all features, one feature after another."""

    indices: Tensor  # int64 [n]
    offsets: Tensor  # int64 [bags + 1]
    weights: Tensor | None  # float32 [n]
    num_features: int
    bag_counts: list[list[int]] | None  # number of bags per feature and rank; None: equal for all features

    @cached_property
    def jagged(self) -> VariableBatchKeyedJaggedTensor:
        """The same bags as a jagged tensor. Its keys are the features' numbers."""
        names, batch_size = [*map(str, range(self.num_features))], (self.offsets.shape[0] - 1) // self.num_features
        strides = [batch_size] * self.num_features if self.bag_counts is None else [*map(sum, self.bag_counts)]
        return VariableBatchKeyedJaggedTensor(names, self.indices, self.weights, None, self.offsets, strides)

    def detach_frozen_weights(self, requires_grad: Any) -> TBECall:
        """Return the call with weights detached for each feature where `requires_grad` [features] is 0."""
        if not isinstance(requires_grad, Tensor) or requires_grad.shape != (self.num_features,):
            expected = f"a tensor of {self.num_features} integers, one per feature"
            raise InputError(f"feature_requires_grad={requires_grad!r}: give {expected}")
        if self.weights is None:
            return self
        counts = self.offsets[torch.tensor(self.jagged.lengths_offset_per_key(), device=self.offsets.device)].diff()
        id_requires_grad = requires_grad.to(self.offsets.device, torch.bool).repeat_interleave(counts)
        return replace(self, weights=torch.where(id_requires_grad, self.weights, self.weights.detach()))


def parse_call(
    name: str, num_features: int, indices: Any, offsets: Any, weights: Any, bag_counts: Any, device: torch.device
) -> TBECall:
    """Check a call's arguments, and convert integers to int64 and weights to float32. Raises InputError."""
    for argument, value in (("indices", indices), ("offsets", offsets)):
        is_valid = isinstance(value, Tensor) and value.dtype in (torch.int32, torch.int64) and value.dim() == 1
        _check_tensor(f"{argument} of {name!r}", value, is_valid, "a 1-D torch.Tensor of int64 or int32", device)
    if weights is not None:
        is_valid = isinstance(weights, Tensor) and weights.is_floating_point() and weights.shape == indices.shape
        _check_tensor(f"per_sample_weights of {name!r}", weights, is_valid, f"floats {tuple(indices.shape)}", device)
        weights = weights.float()
    num_bags = offsets.shape[0] - 1
    if bag_counts is not None:
        bag_counts = _check_bag_counts(name, num_features, bag_counts, num_bags)
    elif num_bags < 0 or num_bags % num_features:
        expected = f"features * batch + 1 for {num_features} features, or batch_size_per_feature_per_rank"
        raise InputError(f"offsets of {name!r}: got {num_bags + 1}; give {expected}")
    return TBECall(indices.to(torch.int64), offsets.to(torch.int64), weights, num_features, bag_counts)


def _check_bag_counts(name: str, num_features: int, bag_counts: Any, num_bags: int) -> list[list[int]]:
    subject = f"batch_size_per_feature_per_rank of {name!r}"
    if not isinstance(bag_counts, (list, tuple)) or len(bag_counts) != num_features:
        actual = f"{len(bag_counts)} lists" if isinstance(bag_counts, (list, tuple)) else type(bag_counts).__name__
        expected = f"{num_features} lists, one for each feature, of one batch size for each rank"
        raise InputError(f"{subject}: got {actual}; give {expected}")
    if any(not isinstance(row, (list, tuple)) or len(row) != len(bag_counts[0]) or not row for row in bag_counts):
        raise InputError(f"{subject}: {bag_counts!r}; give each feature one batch size for each rank")
    if any(as_int(count, 0) is None for row in bag_counts for count in row):
        raise InputError(f"{subject}: {bag_counts!r}; give whole numbers >= 0")
    counts = [[int(count) for count in row] for row in bag_counts]
    if (total := sum(map(sum, counts))) != num_bags:
        raise InputError(f"{subject}: the sizes sum to {total} bags; give {total + 1} offsets, not {num_bags + 1}")
    return counts


def _check_tensor(subject: str, value: Any, is_valid: bool, expected: str, device: torch.device) -> None:
    """Raise InputError unless an argument is valid, dense and on `device`. subject: f"{argument} of {module!r}"."""
    if not is_valid:
        actual = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InputError(f"{subject}: got {actual}; give {expected}")
    argument = subject.partition(" ")[0]
    if value.device != device:
        remedy = f"give {argument}.to({str(device)!r})"
        raise InputError(f"{subject} are on {value.device} and the tables on {device}; {remedy}")
    if value.layout != torch.strided:
        raise InputError(f"{subject} are {value.layout}; give {argument}.to_dense()")
