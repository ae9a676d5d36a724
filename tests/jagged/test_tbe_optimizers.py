"""A table-batched embedding's rows, with any settings of FBGEMM's, depart from its formulas, or its states do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from support.tbe import batch, fill, ours
from support.tbe_settings import BATCH, MAP, OPTIMIZERS, STEPS, TABLES, Float64, cells_of, made_with
from tierbed.engine.errors import OptionError
from tierbed.engine.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB
from tierbed.jagged import OptimType, TableBatchedEmbeddingBags

IDS, OFFSETS = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 3, 4])
ROWS, DIM = 4, 3


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), rtol=2e-5, atol=2e-5)


def compare(optimizer: OptimType, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    tables = [torch.rand(rows, dim) - 0.5 for rows, dim in TABLES]
    mine, wanted = made_with(ours, optimizer, settings), Float64(optimizer, settings, tables)
    fill(mine, tables)
    for _ in range(STEPS):
        made = batch(TABLES, MAP, [BATCH] * len(MAP), weighted=settings["weighted"])
        weights = None if made.weights is None else made.weights.clone().requires_grad_()
        output = mine(made.indices, made.offsets, weights)
        grad = torch.randn_like(output)
        output.backward(grad)
        exact, of_weights = wanted.step(made, grad)
        close(output, exact)
        if weights is not None:
            close(weights.grad, of_weights)
    for rows, exact in zip(mine.split_embedding_weights(), wanted.tables, strict=True):
        close(rows, exact)
    mine.close()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_are_those_of_the_formula_with_any_settings(optimizer: OptimType) -> None:
    """Settings that the optimizer lacks are not in the formula: they must change nothing."""
    for cell in cells_of(optimizer, 16):
        try:
            compare(optimizer, cell)
        except Exception as error:
            raise AssertionError(f"{cell}") from error


def one(**options: Any) -> TableBatchedEmbeddingBags:
    tbe = ours([(ROWS, DIM)], [0], **options)
    fill(tbe, [rows()])
    return tbe


def rows() -> Tensor:
    return torch.arange(1.0, ROWS * DIM + 1).reshape(ROWS, DIM) / 10


ADAM = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
THEIRS = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
LARS = {"momentum": 0.5, "eta": 0.3, "weight_decay": 0.1}
CASES: list[tuple[OptimType, dict[str, float], Callable[[Any], torch.optim.Optimizer], list[tuple[int, ...]]]] = [
    (OptimType.ADAM, THEIRS, lambda p: torch.optim.AdamW(p, 0.1, **ADAM), [(ROWS, DIM)] * 2),
    (OptimType.PARTIAL_ROWWISE_ADAM, THEIRS, lambda p: PartialRowWiseAdam(p, 0.1, **ADAM), [(ROWS, DIM), (ROWS,)]),
    (OptimType.LAMB, THEIRS, lambda p: LAMB(p, 0.1, **ADAM), [(ROWS, DIM)] * 2),
    (OptimType.PARTIAL_ROWWISE_LAMB, THEIRS, lambda p: PartialRowWiseLAMB(p, 0.1, **ADAM), [(ROWS, DIM), (ROWS,)]),
    (OptimType.LARS_SGD, LARS, lambda p: LarsSGD(p, 0.1, **LARS), [(ROWS, DIM)]),
]


@pytest.mark.parametrize(("optimizer", "numbers", "make", "shapes"), CASES, ids=[case[0].name for case in CASES])
def test_rows_and_states_are_those_of_the_dense_step(
    optimizer: OptimType, numbers: dict[str, float], make: Any, shapes: Any
) -> None:
    tbe = one(optimizer=optimizer, learning_rate=0.1, **numbers)
    dense = torch.nn.Parameter(rows()[:3])
    theirs = make([dense])
    for step in range(3):
        grad = torch.sin(torch.arange(9.0).reshape(3, 3) + step)
        tbe(IDS, OFFSETS).backward(grad)
        dense.grad = grad * torch.tensor([[1.0], [2.0], [1.0]])  # row 1 is twice in its bag
        theirs.step()
        theirs.param_groups[0]["lr"] = 0.2
        tbe.set_learning_rate(0.2)
    assert tbe.get_learning_rate() == 0.2
    torch.testing.assert_close(tbe.split_embedding_weights()[0][:3], dense.detach())
    [states] = tbe.split_optimizer_states()
    assert [tuple(state.shape) for state in states] == shapes
    kept = [value for name, value in theirs.state[dense].items() if name != "step"]
    for state, value in zip(states, kept, strict=True):
        torch.testing.assert_close(state[:3], value.view_as(state[:3]))


@pytest.mark.parametrize("used", [False, True])
def test_uniform_rows_beyond_the_largest_number_are_refused(used: bool) -> None:
    tbe = one(weights_precision="fp16")
    before = tbe(IDS, OFFSETS) if used else None
    with pytest.raises(OptionError, match=r"values up to 1e\+06 overflow dtype=torch.float16"):
        tbe.init_embedding_weights_uniform(-1e6, 1e6)
    assert tbe(IDS, OFFSETS).isfinite().all()
    assert before is None or torch.equal(tbe(IDS, OFFSETS), before)


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_rows_of_16_bits_are_trained_by_chance_and_copied_exactly(precision: Any, dtype: torch.dtype) -> None:
    tbe = one(learning_rate=0.1, weights_precision=precision)
    assert list(tbe.embeddings) == [f"tbe-d{DIM}-{str(dtype).removeprefix('torch.')}-host"]
    [before] = tbe.split_embedding_weights()
    assert before.dtype == dtype
    assert torch.equal(before, rows().to(dtype))
    wanted = before.float() - torch.tensor([[0.1], [0.2], [0.1], [0.0]])
    tbe(IDS, OFFSETS).sum().backward()
    [after] = tbe.split_embedding_weights()
    torch.testing.assert_close(after.float(), wanted, rtol=0, atol=float(torch.finfo(dtype).eps))
