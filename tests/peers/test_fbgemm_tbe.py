"""Batches of a table-batched embedding, with any settings, depart from FBGEMM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode as Pooling
from fbgemm_gpu.split_table_batched_embeddings_ops_training import OptimType as Kind
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode as Decay
from torch import Tensor

from support import tbe_settings
from support.fbgemm import theirs
from support.tbe import MAP, TABLES, Batch, batch, fill, ours
from support.tbe_settings import ON_CPU, cells_of, made_with
from tierbed.jagged import OptimType, PoolingMode, TableBatchedEmbeddingBags, WeightDecayMode

BATCH = 6


def filled(mine: TableBatchedEmbeddingBags, peer: Any) -> tuple[TableBatchedEmbeddingBags, Any]:
    """Both with the same rows."""
    torch.manual_seed(0)
    peer.init_embedding_weights_uniform(-0.5, 0.5)
    fill(mine, peer.split_embedding_weights())
    return mine, peer


def pair(optimizer: OptimType, pooling_mode: PoolingMode = PoolingMode.SUM) -> tuple[TableBatchedEmbeddingBags, Any]:
    mine = ours(TABLES, MAP, optimizer=optimizer, pooling_mode=pooling_mode, learning_rate=0.1)
    peer = theirs(
        TABLES, MAP, optimizer=Kind(optimizer.value), pooling_mode=Pooling(pooling_mode.value), learning_rate=0.1
    )
    return filled(mine, peer)


def close(got: Any, wanted: Any, case: object = None) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5, msg=lambda said: f"{case}: {said}")


def step(tbe: Any, made: Batch, grad: Tensor | None = None, **more: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output, its gradient, and that of the weights."""
    weights = None if made.weights is None else made.weights.clone().requires_grad_()
    output = tbe(made.indices, made.offsets, weights, **more)
    grad = torch.randn_like(output) if grad is None else grad
    output.backward(grad)
    return output.detach(), grad, None if weights is None else weights.grad


def step_both(mine: TableBatchedEmbeddingBags, peer: Any, made: Batch, case: object = None, **more: Any) -> None:
    output, grad, of_weights = step(mine, made, **more)
    wanted, _, wanted_of_weights = step(peer, made, grad, **more)
    close([output, of_weights], [wanted, wanted_of_weights], case)


def compare(mine: TableBatchedEmbeddingBags, peer: Any, case: object = None) -> None:
    close([one.clone() for one in mine.split_embedding_weights()], list(peer.split_embedding_weights()), case)
    for states, wanted in zip(mine.split_optimizer_states(), peer.split_optimizer_states(), strict=True):
        close([one.clone() for one in states], list(wanted), case)


def is_right_in_fbgemm(cell: dict[str, Any]) -> bool:
    """Not where the wheel for CPUs departs from FBGEMM's documentation; then the formula in float64 is the measure."""
    is_mean, decays = cell["pooling_mode"] is PoolingMode.MEAN, cell["weight_decay_mode"] is not WeightDecayMode.NONE
    forgets_decay = decays and cell["weight_decay"] and cell["pooling_mode"] is not PoolingMode.NONE
    return not (is_mean and cell["weighted"]) and not cell["max_norm"] and not forgets_decay


@pytest.mark.parametrize("optimizer", ON_CPU)
def test_rows_are_fbgemms_with_any_settings(optimizer: OptimType) -> None:
    tables, features = tbe_settings.TABLES, tbe_settings.MAP
    for cell in filter(is_right_in_fbgemm, cells_of(optimizer, 50)):
        enums = {"pooling_mode": Pooling(cell["pooling_mode"]), "weight_decay_mode": Decay(cell["weight_decay_mode"])}
        mine, peer = filled(made_with(ours, optimizer, cell), made_with(theirs, Kind(optimizer.value), cell | enums))
        for _ in range(tbe_settings.STEPS):
            step_both(mine, peer, batch(tables, features, [4] * len(features), weighted=cell["weighted"]), cell)
        compare(mine, peer, cell)
        mine.close()


@pytest.mark.parametrize("optimizer", ON_CPU)
@pytest.mark.parametrize(
    ("pooling", "weighted"), [(PoolingMode.SUM, True), (PoolingMode.SUM, False), (PoolingMode.MEAN, False)]
)
def test_many_batches_over_tables_of_mixed_dims(optimizer: OptimType, pooling: PoolingMode, weighted: bool) -> None:
    mine, peer = pair(optimizer, pooling)
    for _ in range(30):
        step_both(mine, peer, batch(TABLES, MAP, [BATCH] * len(MAP), weighted=weighted))
    compare(mine, peer)


@pytest.mark.parametrize("optimizer", ON_CPU)
def test_features_of_a_table_need_not_be_neighbours(optimizer: OptimType) -> None:
    """FBGEMM's update of such features is another on the CPU, so it gets them side by side."""
    tables = [(11, 8), (7, 4)]
    mine, peer = filled(
        ours(tables, [0, 1, 0], optimizer=optimizer, learning_rate=0.1),
        theirs(tables, [0, 0, 1], optimizer=Kind(optimizer.value), learning_rate=0.1),
    )
    for _ in range(20):
        first, second, third = (batch([tables[t]], [0], [BATCH]) for t in (0, 1, 0))
        output, grad, _ = step(mine, side_by_side(first, second, third))
        theirs_grad = torch.cat([grad[:, :8], grad[:, 12:], grad[:, 8:12]], 1)
        wanted, _, _ = step(peer, side_by_side(first, third, second), theirs_grad)
        close(output, torch.cat([wanted[:, :8], wanted[:, 16:], wanted[:, 8:16]], 1))
    compare(mine, peer)


def side_by_side(*batches: Batch) -> Batch:
    lengths = torch.cat([made.offsets.diff() for made in batches])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return Batch(torch.cat([made.indices for made in batches]), offsets, None)


@pytest.mark.parametrize("optimizer", [OptimType.EXACT_SGD, OptimType.EXACT_ROWWISE_ADAGRAD])
@pytest.mark.parametrize("ranks", [1, 3])
def test_variable_batch_sizes(optimizer: OptimType, ranks: int) -> None:
    mine, peer = pair(optimizer)
    for number in range(15):
        sizes = [[int(size) for size in torch.randint(0 if number else 1, 4, (ranks,))] for _ in MAP]
        made = batch(TABLES, MAP, [sum(of_ranks) for of_ranks in sizes])
        step_both(mine, peer, made, batch_size_per_feature_per_rank=sizes)
    compare(mine, peer)
