"""A setting means to FBGEMM on the CPU something else than here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode as Pooling
from fbgemm_gpu.split_table_batched_embeddings_ops_training import OptimType as Kind
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode as Decay
from torch import Tensor

from support.fbgemm import theirs
from support.tbe import batch, fill, ours
from support.tbe_settings import BATCH, MAP, ON_CPU, STEPS, TABLES, cells_of, made_with
from tierbed.jagged import OptimType, PoolingMode, WeightDecayMode


def is_right_in_fbgemm(optimizer: OptimType, cell: dict[str, Any]) -> bool:
    """Not where the wheel for CPUs departs from FBGEMM's documentation; then the formula in float64 is the measure."""
    is_mean, decays = cell["pooling_mode"] is PoolingMode.MEAN, cell["weight_decay_mode"] is not WeightDecayMode.NONE
    forgets_decay = decays and cell["weight_decay"] and cell["pooling_mode"] is not PoolingMode.NONE
    return not (is_mean and cell["weighted"]) and not cell["max_norm"] and not forgets_decay


def close(got: Tensor, wanted: Tensor, cell: dict[str, Any]) -> None:
    torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5, msg=lambda said: f"{cell}: {said}")


@pytest.mark.parametrize("optimizer", ON_CPU)
def test_rows_are_fbgemms_with_any_settings(optimizer: OptimType) -> None:
    for cell in (cell for cell in cells_of(optimizer, 100) if is_right_in_fbgemm(optimizer, cell)):
        torch.manual_seed(0)
        tables = [torch.rand(rows, dim) - 0.5 for rows, dim in TABLES]
        enums = {"pooling_mode": Pooling(cell["pooling_mode"]), "weight_decay_mode": Decay(cell["weight_decay_mode"])}
        mine = made_with(ours, optimizer, cell)
        peer = made_with(theirs, Kind(optimizer.value), cell | enums)
        fill(mine, tables)
        for rows, wanted in zip(peer.split_embedding_weights(), tables, strict=True):
            rows.copy_(wanted)
        for _ in range(STEPS):
            made = batch(TABLES, MAP, [BATCH] * len(MAP), weighted=cell["weighted"])
            outputs = [tbe(*made) for tbe in (mine, peer)]
            grad = torch.randn_like(outputs[0])
            for output in outputs:
                output.backward(grad)
            close(*outputs, cell)
        for rows, wanted in zip(mine.split_embedding_weights(), peer.split_embedding_weights(), strict=True):
            close(rows.clone(), wanted, cell)
        mine.close()
