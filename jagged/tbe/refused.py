"""FBGEMM's arguments that have no meaning here: each is refused by its name, with the reason."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import torch

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
