"""A setting of FBGEMM's changes what it should not, or changes nothing where FBGEMM's changes rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.tbe import batch, fill, ours
from support.tbe_settings import BATCH, MAP, OPTIMIZERS, STEPS, TABLES, Float64, cells_of, made_with
from tierbed.jagged import OptimType


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
    for cell in cells_of(optimizer, 25):
        try:
            compare(optimizer, cell)
        except Exception as error:
            raise AssertionError(f"{cell}") from error
