"""An argument of FBGEMM's table-batched embedding is unknown, or has another default, enum or definition here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
from fbgemm_gpu.split_table_batched_embeddings_ops_common import RecordCacheMetrics
from fbgemm_gpu.tbe.config.optimizer_config import (
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    UserEnabledConfigDefinition,
)

from support.fbgemm import SplitTableBatchedEmbeddingBagsCodegen as Theirs
from support.refusals import check_refusal
from support.tbe import ours
from tierbed.engine.errors import OptionError
from tierbed.jagged import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    TableBatchedEmbeddingBags,
    WeightDecayMode,
)
from tierbed.jagged.tbe.call_arguments import IGNORED_ARGS, IGNORED_CALL_ARGS, REFUSED_ARGS, REFUSED_CALL_ARGS
from tierbed.jagged.tbe.enums import parse_dtype, parse_enum

ENUMS = [BoundsCheckMode, CacheAlgorithm, ComputeDevice, EmbeddingLocation, OptimType, PoolingMode, WeightDecayMode]
OWN = {"store_options", "name", "seed", "unsupported", "world"}


def parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {name: one for name, one in inspect.signature(function).parameters.items() if name != "self"}


@pytest.mark.parametrize("kind", ENUMS)
def test_enums_have_fbgemms_names_and_values_and_take_its_members(kind: type[Enum]) -> None:
    theirs = getattr(training, kind.__name__)
    assert {one.name: one.value for one in kind} == {one.name: one.value for one in theirs}
    for member in kind:
        assert parse_enum(kind, theirs(member.value), "it") is parse_enum(kind, member.value, "it") is member


def test_every_argument_of_fbgemm_is_here_or_refused_and_has_its_default() -> None:
    peer, mine = parameters(Theirs.__init__), parameters(TableBatchedEmbeddingBags)
    assert set(peer) == set(REFUSED_ARGS) | set(IGNORED_ARGS) | set(mine) - OWN
    for call in ("forward", "prefetch"):
        own = parameters(getattr(TableBatchedEmbeddingBags, call))
        assert set(parameters(getattr(Theirs, call))) <= {*REFUSED_CALL_ARGS, *IGNORED_CALL_ARGS, *own}
    defaults = {name: one.default for name, one in mine.items()}
    defaults |= {name: was for name, (was, _) in (REFUSED_ARGS | IGNORED_ARGS).items()}
    for name, one in peer.items():
        if name == "weights_precision":
            assert parse_dtype(one.default) == defaults[name]
        elif name != "output_dtype":
            plain = [value.value if isinstance(value, Enum) else value for value in (defaults[name], one.default)]
            assert plain[0] == plain[1], name


DEFINITIONS: dict[str, tuple[Any, Any]] = {  # each with what a change of its defaults is
    "extra_optimizer_config": (UserEnabledConfigDefinition, {"use_rowwise_bias_correction": True}),
    "ensemble_mode": (EnsembleModeDefinition, {"step_ema": 1}),
    "emainplace_mode": (EmainplaceModeDefinition, {"step_start": 1}),
    "global_weight_decay": (GlobalWeightDecayDefinition, {"start_iter": 1}),
    "record_cache_metrics": (lambda first=False: RecordCacheMetrics(first, False), {"first": True}),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_definition_of_defaults_alone_is_taken(name: str) -> None:
    kind, change = DEFINITIONS[name]
    ours([(10, 4)], [0], **{name: kind()})
    check_refusal((lambda: ours([(10, 4)], [0], **{name: kind(**change)}), OptionError, f"{name}="))
