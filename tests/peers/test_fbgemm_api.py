"""A call of the table-batched embedding returns another value, shape or dtype than FBGEMM's documentation says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen as Theirs
from torch import Tensor
from torch.utils import _pytree as pytree

from tierbed.jagged import SplitTableBatchedEmbeddingBagsCodegen as Ours

HOST = (EmbeddingLocation.HOST, ComputeDevice.CPU)
IDS, OFFSETS = torch.tensor([0, 1, 2, 3, 3]), torch.tensor([0, 1, 2, 4, 5])  # two bags of each of two features
ADAGRAD, ROWWISE = EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD
Case = tuple[dict[str, Any], Callable[[Any], Any]]


def made(kind: type, **options: Any) -> Any:
    """Of both libraries with the same rows."""
    tables = [(10, 4), (6, 4 if options.get("pooling_mode") is PoolingMode.NONE else 8)]
    tbe = kind([(*table, *HOST) for table in tables], [0, 1], **options)
    weights = [torch.linspace(-1, 1, rows * dim).view(rows, dim) for rows, dim in tables]
    if kind is Ours:
        tbe.load_dense(weights)
    else:
        for rows, wanted in zip(tbe.split_embedding_weights(), weights, strict=True):
            rows.copy_(wanted)
    return tbe


def trained(tbe: Any, *call: Any, **named: Any) -> list[Tensor]:
    """The output, and the rows and states after its backward."""
    output = tbe(*(call or (IDS, OFFSETS)), **named)
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    states = [state for of_table in tbe.split_optimizer_states() for state in of_table]
    return [output.detach(), *tbe.split_embedding_weights(), *states]


def set_rate(tbe: Any, rate: float) -> list[Any]:
    tbe.set_learning_rate(rate)
    return [tbe.get_learning_rate(), *trained(tbe)]


def set_numbers(tbe: Any, numbers: dict[str, float]) -> list[Any]:
    tbe.update_hyper_parameters(numbers)
    return [tbe.get_learning_rate(), *trained(tbe)]


def set_step(tbe: Any) -> list[Any]:
    tbe.set_optimizer_step(7)
    return [tbe.iter.clone(), *trained(tbe)]


def with_weights(tbe: Any, wanted: Any) -> list[Any]:
    weights = torch.tensor([0.5, 2.0, -1.0, 3.0, 0.0], requires_grad=True)
    return [*trained(tbe, IDS, OFFSETS, weights, wanted), weights.grad]


def evaluated(tbe: Any) -> Tensor:
    with torch.no_grad():
        rows: Tensor = tbe.eval()(IDS, OFFSETS)
    return rows


def rows_of(tbe: Any) -> list[Tensor]:
    return list(tbe.split_embedding_weights())


def uniform(tbe: Any) -> list[bool]:
    tbe.init_embedding_weights_uniform(-2.0, 3.0)
    rows = torch.cat([one.flatten() for one in tbe.split_embedding_weights()])
    return [bool(((rows >= -2) & (rows <= 3)).all()), bool(rows.std() > 1), bool((rows.diff() != 0).all())]


CASES: dict[str, Case] = {
    "one call": ({}, trained),
    "int32": ({}, lambda tbe: trained(tbe, IDS.int(), OFFSETS.int())),
    "int32 offsets": ({}, lambda tbe: trained(tbe, IDS, OFFSETS.int())),
    "a view": ({}, lambda tbe: trained(tbe, IDS.repeat_interleave(2)[::2], OFFSETS)),
    "no bags": ({}, lambda tbe: trained(tbe, IDS[:0], OFFSETS[:1])),
    "empty bags": ({"optimizer": ADAGRAD}, lambda tbe: trained(tbe, IDS[:0], torch.zeros_like(OFFSETS))),
    "weights of one feature": ({}, lambda tbe: with_weights(tbe, torch.tensor([0, 1]))),
    "weights of 16 bits": ({}, lambda tbe: trained(tbe, IDS, OFFSETS, torch.ones(5).half())),
    "weights of 64 bits": ({}, lambda tbe: trained(tbe, IDS, OFFSETS, torch.ones(5).double())),
    "rows of 16 bits": ({"weights_precision": SparseType.FP16}, lambda tbe: [evaluated(tbe), rows_of(tbe)]),
    "results of 16 bits": ({"output_dtype": SparseType.FP16}, trained),
    "default rate": ({}, lambda tbe: tbe.get_learning_rate()),
    "rate": ({"optimizer": ADAGRAD}, lambda tbe: set_rate(tbe, 0.5)),
    "numbers": ({"optimizer": ROWWISE}, lambda tbe: set_numbers(tbe, {"lr": 0.25, "eps": 0.125, "weight_decay": 0.0})),
    "step": ({"optimizer": ROWWISE}, set_step),
    **{f"states of {kind.name}": ({"optimizer": kind}, lambda tbe: [trained(tbe), tbe.get_optimizer_state()])
       for kind in (EmbOptimType.EXACT_SGD, ADAGRAD, ROWWISE)},
    "uniform": ({}, uniform),
    "evaluation": ({}, evaluated),
    "identities": ({}, lambda tbe: trained(tbe, hash_zch_identities=IDS, hash_zch_runtime_meta=IDS)),
    "attributes": ({}, lambda tbe: [tbe.embedding_specs, tbe.feature_table_map, tbe.pooling_mode]),
    "names": ({"table_names": ["a", "b"]}, trained),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_call_returns_what_fbgemms_returns(name: str) -> None:
    options, call = CASES[name]
    mine, theirs = (pytree.tree_flatten(call(made(kind, **options))) for kind in (Ours, Theirs))
    assert mine[1] == theirs[1]
    for one, other in zip(mine[0], theirs[0], strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one.clone(), other, rtol=1e-5, atol=1e-6)
        else:
            assert one == (pytest.approx(other, rel=1e-6) if isinstance(other, float) else other)
