"""Batches of a table-batched embedding, with any settings, depart from FBGEMM's, or a call returns something else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode as Pooling
from fbgemm_gpu.split_table_batched_embeddings_ops_training import OptimType as Kind
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode as Decay
from torch import Tensor
from torch.utils import _pytree as pytree

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


def pair(optimizer: OptimType, pooling: PoolingMode = PoolingMode.SUM) -> tuple[TableBatchedEmbeddingBags, Any]:
    enums = {"optimizer": Kind(optimizer.value), "pooling_mode": Pooling(pooling.value)}
    return filled(*(make(TABLES, MAP, learning_rate=0.1, **enums) for make in (ours, theirs)))


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
    for cell in filter(is_right_in_fbgemm, cells_of(optimizer, 40)):
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
    for _ in range(20):
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


IDS, OFFSETS = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([0, 1, 2, 4, 5])  # two bags of each of two features
ADAGRAD, ROWWISE = Kind.EXACT_ADAGRAD, Kind.EXACT_ROWWISE_ADAGRAD


def trained(tbe: Any, *call: Any, **named: Any) -> list[Tensor]:
    """The output, and the rows and states after its backward."""
    output = tbe(*(call or (IDS, OFFSETS)), **named)
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    states = [state for of_table in tbe.split_optimizer_states() for state in of_table]
    return [output.detach(), *tbe.split_embedding_weights(), *states]


def evaluated(tbe: Any) -> list[Tensor]:
    with torch.no_grad():
        return [tbe.eval()(IDS, OFFSETS), *tbe.split_embedding_weights()]


def uniform(tbe: Any) -> list[bool]:
    tbe.init_embedding_weights_uniform(-2.0, 3.0)
    rows = torch.cat([one.flatten() for one in tbe.split_embedding_weights()])
    return [bool(((rows >= -2) & (rows <= 3)).all()), bool(rows.std() > 1), bool((rows.diff() != 0).all())]


def weighted(tbe: Any) -> list[Any]:
    """With weights of which those of one feature alone want a gradient."""
    weights = torch.tensor([0.5, 2.0, -1.0, 3.0, 0.0], requires_grad=True)
    return [*trained(tbe, IDS, OFFSETS, weights, torch.tensor([0, 1])), weights.grad]


CASES: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "one call": ({}, trained),
    "int32": ({}, lambda tbe: trained(tbe, IDS.int(), OFFSETS.int())),
    "int32 offsets": ({}, lambda tbe: trained(tbe, IDS, OFFSETS.int())),
    "a view": ({}, lambda tbe: trained(tbe, IDS.repeat_interleave(2)[::2], OFFSETS)),
    "no bags": ({}, lambda tbe: trained(tbe, IDS[:0], OFFSETS[:1])),
    "empty bags": ({"optimizer": ADAGRAD}, lambda tbe: trained(tbe, IDS[:0], torch.zeros_like(OFFSETS))),
    "weights of one feature": ({}, weighted),
    "weights of 16 bits": ({}, lambda tbe: trained(tbe, IDS, OFFSETS, torch.ones(5).half())),
    "weights of 64 bits": ({}, lambda tbe: trained(tbe, IDS, OFFSETS, torch.ones(5).double())),
    "rows of 16 bits": ({"weights_precision": SparseType.FP16}, evaluated),
    "results of 16 bits": ({"output_dtype": SparseType.FP16}, trained),
    "default rate": ({}, lambda tbe: tbe.get_learning_rate()),
    "rate": ({"optimizer": ADAGRAD}, lambda tbe: [tbe.set_learning_rate(0.5), tbe.get_learning_rate(), trained(tbe)]),
    "numbers": (
        {"optimizer": ROWWISE},
        lambda tbe: [tbe.update_hyper_parameters({"lr": 0.25, "eps": 0.125, "weight_decay": 0.0}), trained(tbe)],
    ),
    "step": ({"optimizer": ROWWISE}, lambda tbe: [tbe.set_optimizer_step(7), tbe.iter.clone(), trained(tbe)]),
    **{f"states of {kind.name}": ({"optimizer": kind}, lambda tbe: [trained(tbe), tbe.get_optimizer_state()])
       for kind in (Kind.EXACT_SGD, ADAGRAD, ROWWISE)},
    "uniform": ({}, uniform),
    "evaluation": ({}, evaluated),
    "identities": ({}, lambda tbe: trained(tbe, hash_zch_identities=IDS, hash_zch_runtime_meta=IDS)),
    "attributes": ({}, lambda tbe: [tbe.embedding_specs, tbe.feature_table_map, tbe.pooling_mode]),
    "names": ({"table_names": ["a", "b"]}, trained),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_call_returns_what_fbgemms_returns(name: str) -> None:
    options, call = CASES[name]
    tables = [(10, 4), (6, 8)]
    mine, peer = (make(tables, [0, 1], **options) for make in (ours, theirs))
    weights = [torch.linspace(-1, 1, rows * dim).view(rows, dim) for rows, dim in tables]
    fill(mine, weights)
    for rows, wanted in zip(peer.split_embedding_weights(), weights, strict=True):
        rows.copy_(wanted)
    found, expected = (pytree.tree_flatten(call(tbe)) for tbe in (mine, peer))
    assert found[1] == expected[1]
    for one, other in zip(found[0], expected[0], strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one.clone(), other, rtol=1e-5, atol=1e-6)
        else:
            assert one == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other)
