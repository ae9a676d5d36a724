"""Arguments of a table-batched embedding and of its calls: FBGEMM's that are refused, and checks of the others."""

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

_PREFETCH = "a cache keeps the rows of announced batches by itself; call prefetch"
_INTERNAL = "it configures FBGEMM's internals, which tierbed does not have; leave it out"
_STREAMING = "save incremental snapshots of the changed rows (docs/snapshots.md)"
_OUTPUT = "the output is a new tensor; copy it to where you need it"

# by name: FBGEMM's default, which is what tierbed does, and why nothing else is taken
CONSTRUCTOR: dict[str, tuple[Any, str]] = {
    "cache_sets": (0, "the memory of a cache decides its number of sets; give cache_load_factor, or store_options"),
    "cache_reserved_memory": (0.0, "a cache takes no more than its budget; give cache_load_factor, or store_options"),
    "cache_precision": (None, "a cache has rows of weights_precision, as the tier below; leave it out"),
    "enforce_hbm": (False, "give EmbeddingLocation.DEVICE for rows in the memory of the device"),
    "record_cache_metrics": (None, "each store counts hits and misses; read metrics()"),
    "gather_uvm_cache_stats": (False, "each store counts hits and misses; read metrics()"),
    "stochastic_rounding": (True, "training always rounds rows of 16 bits stochastically; leave it out"),
    "ensemble_mode": (None, "it is of ENSEMBLE_ROWWISE_ADAGRAD, which is not supported; leave it out"),
    "emainplace_mode": (None, "it is of EMAINPLACE_ROWWISE_ADAGRAD, which is not supported; leave it out"),
    "counter_based_regularization": (
        None,
        "decay does not depend on how often a row was used; give weight_decay_mode=WeightDecayMode.DECOUPLE",
    ),
    "cowclip_regularization": (
        None,
        "no optimizer clips by the norm of a row; give gradient_clipping=True with max_gradient",
    ),
    "uvm_non_rowwise_momentum": (False, "a row and its state are stored together; leave it out"),
    "stats_reporter_config": (None, "read metrics(), or give MetricsCollector the module's embeddings"),
    "multipass_prefetch_config": (None, _PREFETCH),
    "global_weight_decay": (None, "only rows of a batch decay; give weight_decay_mode=WeightDecayMode.DECOUPLE"),
    "uvm_host_mapped": (False, "a GPU reads page-locked memory of the host; leave it out"),
    "extra_optimizer_config": (None, _INTERNAL),
    "tbe_input_multiplexer_config": (None, _INTERNAL),
    "embedding_table_index_type": (torch.int64, "indices of int32 and of int64 are taken in every call; leave it out"),
    "embedding_table_offset_type": (torch.int64, "offsets of int32 and of int64 are taken in every call; leave it out"),
    "embedding_shard_info": (None, "rows are spread over ranks by their hash; give world=, or leave it out"),
    "enable_raw_embedding_streaming": (False, _STREAMING),
    "res_params": (None, _STREAMING),
    "is_qr_tbe": (False, _INTERNAL),
    "preallocated_host_buffers": (None, _INTERNAL),
}

# FBGEMM's constructor by position, after the tables and their features
POSITIONS = (
    "cache_algorithm", "cache_load_factor", "cache_sets", "cache_reserved_memory", "cache_precision",
    "weights_precision", "output_dtype", "enforce_hbm", "optimizer", "record_cache_metrics", "gather_uvm_cache_stats",
    "stochastic_rounding", "gradient_clipping", "max_gradient", "max_norm", "learning_rate", "eps", "momentum",
    "weight_decay", "weight_decay_mode", "eta", "beta1", "beta2", "ensemble_mode", "emainplace_mode",
    "counter_based_regularization", "cowclip_regularization", "pooling_mode", "device", "bounds_check_mode",
    "uvm_non_rowwise_momentum", "use_experimental_tbe", "prefetch_pipeline", "stats_reporter_config", "table_names",
    "optimizer_state_dtypes",
)  # fmt: skip

# those of FBGEMM that are taken whatever they are, and why they change nothing
IDLE: dict[str, tuple[Any, str]] = {
    "use_experimental_tbe": (False, "tierbed has one implementation"),
    "prefetch_pipeline": (False, "a cache keeps the rows of announced batches by itself"),
}

IDLE_CALL = ("hash_zch_identities", "hash_zch_runtime_meta")  # of a call
CALL: dict[str, tuple[Any, str]] = {
    "total_unique_indices": (None, "it is of OptimType.NONE; leave it out"),
    "forward_stream": (None, "a table synchronises its own streams with the caller's; leave it out"),
    "vbe_output": (None, _OUTPUT),
    "vbe_output_offsets": (None, _OUTPUT),
}


def idle(given: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """Takes arguments out that change nothing, and returns them with the reason. dtype: of stored rows."""
    taken = []
    for name, (default, reason) in IDLE.items():
        taken += [f"{name}: {reason}"] * (given.pop(name, default) != default)
    if given.get("stochastic_rounding") is False and dtype == torch.float32:
        del given["stochastic_rounding"]
    if given.get("preallocated_host_buffers") == {}:
        del given["preallocated_host_buffers"]
    for name in ("extra_optimizer_config", "ensemble_mode", "emainplace_mode", "global_weight_decay"):
        value: Any = given.get(name)
        if is_dataclass(value) and value == type(value)():  # type: ignore[misc]  # of defaults alone
            del given[name]
    if isinstance(counts := given.get("record_cache_metrics"), tuple) and not any(counts):
        del given["record_cache_metrics"]
    return taken


def refuse(
    given: Mapping[str, Any],
    known: Mapping[str, tuple[Any, str]],
    others: Iterable[str],
    error: type[TierbedError] = OptionError,
) -> None:
    """An error for an argument that is refused, unless it has FBGEMM's default, and for an unknown one.

    others: the names of the supported arguments.
    """
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, [*others, *known], 1)
            meant = f"did you mean {near[0]}?" if near else "leave it out"
            raise error(f"{name}={value!r}: there is no such argument; {meant}")
        default, reason = known[name]
        plain = value.value if isinstance(value, Enum) else value
        if plain is not default and not (isinstance(plain, (int, float, str)) and plain == default):
            raise error(f"{name}={value!r}: {reason}")


@dataclass
class TBECall:
    """The bags of all features, one feature after another."""

    indices: Tensor  # int64 [n]
    offsets: Tensor  # int64 [bags + 1]
    weights: Tensor | None  # float32 [n]
    features: int
    sizes: list[list[int]] | None  # how many bags each feature has for each rank; None: all features have as many

    @cached_property
    def jagged(self) -> VariableBatchKeyedJaggedTensor:
        """The same bags, whose keys are the numbers of the features."""
        names, batch = [*map(str, range(self.features))], (self.offsets.shape[0] - 1) // self.features
        bags = [batch] * self.features if self.sizes is None else [*map(sum, self.sizes)]
        return VariableBatchKeyedJaggedTensor(names, self.indices, self.weights, None, self.offsets, bags)

    def with_gradients(self, wanted: Any) -> TBECall:
        """The same call, whose weights get a gradient for the features that `wanted` [features] has as true."""
        if not isinstance(wanted, Tensor) or wanted.shape != (self.features,):
            raise InputError(
                f"feature_requires_grad={wanted!r}: give a tensor of {self.features} integers, one a feature"
            )
        if self.weights is None:
            return self
        counts = self.offsets[torch.tensor(self.jagged.lengths_offset_per_key(), device=self.offsets.device)].diff()
        of_ids = wanted.to(self.offsets.device, torch.bool).repeat_interleave(counts)
        return replace(self, weights=torch.where(of_ids, self.weights, self.weights.detach()))


def checked_call(
    name: str, features: int, indices: Any, offsets: Any, weights: Any, sizes: Any, device: torch.device
) -> TBECall:
    """The checked arguments of a call, integers as int64 and weights as float32. InputError."""
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
                f"offsets of {name!r}: got {bags + 1}; give features * batch + 1 for {features} features, or "
                "batch_size_per_feature_per_rank"
            )
    else:
        sizes = _checked_sizes(name, features, sizes, bags)
    return TBECall(ids, bounds, weights, features, sizes)


def _checked_sizes(name: str, features: int, sizes: Any, bags: int) -> list[list[int]]:
    where = f"batch_size_per_feature_per_rank of {name!r}"
    if not isinstance(sizes, (list, tuple)) or len(sizes) != features:
        got = type(sizes).__name__ if not isinstance(sizes, (list, tuple)) else f"{len(sizes)} lists"
        raise InputError(
            f"{where}: got {got}; give {features} lists, one for each feature, of one batch size for each rank"
        )
    if any(not isinstance(one, (list, tuple)) or len(one) != len(sizes[0]) or not one for one in sizes):
        raise InputError(f"{where}: {sizes!r}; give each feature one batch size for each rank")
    if any(as_int(size, 0) is None for one in sizes for size in one):
        raise InputError(f"{where}: {sizes!r}; give whole numbers >= 0")
    given = [[int(size) for size in one] for one in sizes]
    if (total := sum(map(sum, given))) != bags:
        raise InputError(f"{where}: {total} bags, and offsets have {bags}; give {total + 1} offsets")
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
    if given.layout != torch.strided:
        raise InputError(f"{argument} of {name!r} are {given.layout}; give {argument}.to_dense()")
    return given
