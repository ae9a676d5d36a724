"""A hundred batches of a table-batched embedding depart from FBGEMM's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.fbgemm import theirs
from support.tbe import MAP, TABLES, Batch, batch, fill, ours
from tierbed.jagged import OptimType, PoolingMode, TableBatchedEmbeddingBags, WeightDecayMode

STEPS, BATCH = 100, 6
OPTIMIZERS = [OptimType.EXACT_SGD, OptimType.EXACT_ADAGRAD, OptimType.EXACT_ROWWISE_ADAGRAD]


def pair(tables=TABLES, feature_table_map=MAP, **options: Any) -> tuple[TableBatchedEmbeddingBags, Any]:
    """Both with the same rows, from the same arguments by name and value."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode as Pooling
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import OptimType as Kind
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode as Decay

    kinds = {"optimizer": Kind, "pooling_mode": Pooling, "weight_decay_mode": Decay}
    options = {name: kinds[name](value.value) if name in kinds else value for name, value in options.items()}
    mine, peer = ours(tables, feature_table_map, **options), theirs(tables, feature_table_map, **options)
    torch.manual_seed(0)
    peer.init_embedding_weights_uniform(-1.0, 1.0)
    fill(mine, peer.split_embedding_weights())
    return mine, peer


def their_kind(optimizer: OptimType) -> Any:
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import OptimType as Kind

    return Kind(optimizer.value)


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert got.shape == wanted.shape
    most = max(float(wanted.abs().max()), 1e-3) if wanted.numel() else 1.0
    assert float((got - wanted).abs().max() if got.numel() else 0.0) <= tolerance * most


def step(tbe: Any, made: Batch, grad: Tensor | None, **more: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    weights = None if made.weights is None else made.weights.clone().requires_grad_()
    output = tbe(made.indices, made.offsets, weights, **more)
    grad = torch.randn_like(output) if grad is None else grad
    output.backward(grad)
    return output.detach(), grad, None if weights is None else weights.grad


def run(mine: TableBatchedEmbeddingBags, peer: Any, feature_table_map=MAP, tables=TABLES, weighted=False) -> None:
    for _ in range(STEPS):
        made = batch(tables, feature_table_map, [BATCH] * len(feature_table_map), weighted=weighted)
        output, grad, of_weights = step(mine, made, None)
        wanted, _, wanted_of_weights = step(peer, made, grad)
        close(output, wanted)
        if of_weights is not None:
            close(of_weights, wanted_of_weights)
    compare(mine, peer)


def compare(mine: TableBatchedEmbeddingBags, peer: Any) -> None:
    for rows, wanted in zip(mine.split_embedding_weights(), peer.split_embedding_weights(), strict=True):
        close(rows, wanted)
    states, wanted_states = mine.split_optimizer_states(), peer.split_optimizer_states()
    for of_table, of_their_table in zip(states, wanted_states, strict=True):
        for state, wanted in zip(of_table, of_their_table, strict=True):
            close(state, wanted)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
def test_mixed_dims_and_shared_tables(optimizer, pooling):
    run(*pair(optimizer=optimizer, pooling_mode=pooling, learning_rate=0.1))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_and_their_gradients(optimizer):
    run(*pair(optimizer=optimizer, learning_rate=0.05), weighted=True)


def test_gradients_are_clamped_before_they_are_summed():
    run(*pair(gradient_clipping=True, max_gradient=0.3, learning_rate=0.1), weighted=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_pooling(optimizer):
    tables = [(40, 8), (7, 8)]
    mine, peer = pair(tables, [0, 0, 1], optimizer=optimizer, pooling_mode=PoolingMode.NONE, learning_rate=0.1)
    run(mine, peer, [0, 0, 1], tables)


@pytest.mark.parametrize("mode", [WeightDecayMode.L2, WeightDecayMode.DECOUPLE])
def test_weight_decay_where_fbgemm_takes_it(mode):
    """Of the wheel for CPUs that is without pooling alone."""
    options = {"optimizer": OptimType.EXACT_ROWWISE_ADAGRAD, "weight_decay": 0.2, "weight_decay_mode": mode}
    mine, peer = pair([(40, 8)], [0], pooling_mode=PoolingMode.NONE, learning_rate=0.1, **options)
    run(mine, peer, [0], [(40, 8)])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_features_of_a_table_need_not_be_neighbours(optimizer):
    """FBGEMM's update of such features is another on the CPU, so it gets them side by side."""
    tables = [(11, 8), (7, 4)]
    mine = ours(tables, [0, 1, 0], optimizer=optimizer, learning_rate=0.1)
    peer = theirs(tables, [0, 0, 1], optimizer=their_kind(optimizer), learning_rate=0.1)
    torch.manual_seed(0)
    peer.init_embedding_weights_uniform(-1.0, 1.0)
    fill(mine, peer.split_embedding_weights())
    for _ in range(20):
        first, second, third = (batch([tables[t]], [0], [BATCH]) for t in (0, 1, 0))
        grad = torch.randn(BATCH, 20)
        output, _, _ = step(mine, side_by_side(first, second, third), grad)
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
def test_variable_batch_sizes(optimizer, ranks):
    mine, peer = pair(optimizer=optimizer, learning_rate=0.1)
    for number in range(30):
        sizes = [[int(size) for size in torch.randint(0 if number else 1, 4, (ranks,))] for _ in MAP]
        made = batch(TABLES, MAP, [sum(of_ranks) for of_ranks in sizes])
        output, grad, _ = step(mine, made, None, batch_size_per_feature_per_rank=sizes)
        wanted, _, _ = step(peer, made, grad, batch_size_per_feature_per_rank=sizes)
        close(output, wanted)
    compare(mine, peer)


def test_half_precision_of_outputs():
    from fbgemm_gpu.split_embedding_configs import SparseType

    mine, peer = pair(output_dtype=SparseType.FP16)
    made = batch(TABLES, MAP, [BATCH] * len(MAP))
    output, grad, _ = step(mine, made, None)
    wanted, _, _ = step(peer, made, grad)
    assert output.dtype == wanted.dtype == torch.float16
    close(output.float(), wanted.float(), 1e-2)
    for rows, their_rows in zip(mine.split_embedding_weights(), peer.split_embedding_weights(), strict=True):
        close(rows, their_rows, 1e-3)
