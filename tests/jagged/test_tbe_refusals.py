"""A table-batched embedding takes a number, a dtype or a name that is wrong, or refuses it without the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.refusals import Refusal, check_refusal
from support.tbe import ours
from tierbed.engine.errors import InputError, OptionError
from tierbed.jagged import OptimType, PoolingMode, TableBatchedEmbeddingBags, WeightDecayMode

ADAM, ADAGRAD, ROWWISE = OptimType.ADAM, OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD
LAMB, LARS, L2, BF16 = OptimType.LAMB, OptimType.LARS_SGD, WeightDecayMode.L2, torch.bfloat16
IDS, OFFSETS = torch.arange(3), torch.tensor([0, 1, 3])
MOMENTA, STATES = "give dtypes by the names momentum1, momentum2", "optimizer_state_dtypes"


def one(**options: Any) -> TableBatchedEmbeddingBags:
    return ours([(10, 8)], [0], **options)


def tbe_of(**options: Any) -> Callable[[], TableBatchedEmbeddingBags]:
    return lambda: one(**options)


def states(optimizer: OptimType, dtypes: Any) -> Callable[[], TableBatchedEmbeddingBags]:
    return tbe_of(optimizer=optimizer, optimizer_state_dtypes=dtypes)


def change(optimizer: OptimType = OptimType.EXACT_SGD, **numbers: Any) -> Callable[[], None]:
    return lambda: one(optimizer=optimizer).update_hyper_parameters(numbers)


@pytest.mark.parametrize(
    "refusal",
    [
        (tbe_of(max_norm=-1.0), OptionError, "max_norm=", "-1.0", "give a positive number"),
        (tbe_of(max_norm="x"), OptionError, "max_norm=", "'x'", "give a positive number"),
        (tbe_of(optimizer=LARS, eta=-0.5), OptionError, "LARS_SGD: param group: eta=", "-0.5", ""),
        (tbe_of(optimizer=LAMB, beta1=1.0), OptionError, "LAMB: param group: betas=", "(1.0, 0.999)", ""),
        (tbe_of(optimizer=LAMB, weight_decay_mode=L2), OptionError, "weight_decay_mode=", "L2", "LAMB has WeightDecay"),
        (tbe_of(weights_precision="int8"), OptionError, "weights_precision=", "'int8'", "give torch.float32"),
        (states(ADAM, {"momentum1": BF16}), OptionError, STATES, "bfloat16", "give each the same"),
        (states(ADAM, {"momentum3": BF16}), OptionError, STATES, "momentum3", MOMENTA),
        (states(ADAM, BF16), OptionError, STATES, "torch.bfloat16", MOMENTA),
        (states(ADAM, {"momentum1": torch.int8}), OptionError, f"{STATES}['momentum1']=", "int8", "give torch.float32"),
        (states(ROWWISE, {"momentum1": BF16}), OptionError, STATES, "one number per row", "leave it out"),
        (states(OptimType.EXACT_SGD, {"momentum1": BF16}), OptionError, STATES, "momentum1", "give none"),
        (states(ADAGRAD, {"momentum1": torch.float16}), OptionError, "state_dtype=", "float16", "give torch.bfloat16"),
        (change(lr=0.1, lower_bound=1.0), OptionError, "lower_bound=", "1.0", "it has lr"),
        (change(eps=0.1), OptionError, "eps=", "0.1", "it has lr"),
        (change(lr=-1), OptionError, "lr=", "-1", "give a number >= 0"),
        (change(lr=None), OptionError, "lr=", "None", "give a number >= 0"),
        (change(ROWWISE, weight_decay=0.5), OptionError, "weight_decay=", "0.5", "give WeightDecayMode.L2"),
        (lambda: one().set_optimizer_step(-1), OptionError, "step=", "-1", "a whole number from 0"),
        (lambda: one().init_embedding_weights_uniform(1, 0), OptionError, "low=", "1.0", "high=0.0"),
        (lambda: one().embedding_of("user"), InputError, "table of 'tbe'", "'user'", "0 to 0, or by name 'table-0'"),
        (
            lambda: one(pooling_mode=PoolingMode.NONE)(IDS, OFFSETS, batch_size_per_feature_per_rank=[[2]]),
            InputError, "batch_size_per_feature_per_rank:", "PoolingMode.NONE", "leave it out",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(refusal: Refusal) -> None:
    check_refusal(refusal)


def test_no_number_is_set_if_one_is_refused() -> None:
    tbe = one(learning_rate=0.5)
    with pytest.raises(OptionError):
        tbe.update_hyper_parameters({"lr": 0.1, "lower_bound": 1.0})
    assert tbe.get_learning_rate() == 0.5
