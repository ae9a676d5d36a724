"""Rows with the encoding int8 have the bytes of FBGEMM's inference tables, so that either can read the other's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tierbed.serving.row_file import encode

DIM = 12


@pytest.mark.parametrize("spread", [1e-7, 1e-3, 1.0, 1000.0])
def test_int8_rows_are_fbgemms(spread: float) -> None:
    import fbgemm_gpu  # noqa: F401

    values = np.random.default_rng(0).normal(0, spread, (500, DIM)).astype(np.float32)
    values[:250] += np.linspace(-50, 50, 250, dtype=np.float32)[:, None]
    values[100:200] = values[100:200, :1]
    fused = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(torch.from_numpy(values), 8).numpy()
    theirs = np.concatenate([fused[:, DIM:], fused[:, :DIM]], axis=1)  # scale and offset come first in their tables
    assert encode(values, "int8", 0, np.arange(500)).tolist() == theirs.tolist()
