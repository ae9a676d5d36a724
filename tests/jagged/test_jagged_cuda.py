"""Jagged tensors do not reach a GPU from page-locked memory, or have other bags there."""

from __future__ import annotations

import pytest
import torch

from support.cuda_tables import NO_GPU
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_a_batch_goes_to_a_gpu_by_another_stream() -> None:
    made = KeyedJaggedTensor(["a", "b"], torch.arange(6), torch.rand(6), lengths=torch.tensor([2, 1, 0, 3]))
    for batch in (made, made["b"], KeyedTensor(["a"], [2], torch.rand(3, 2))):
        pinned = batch.pin_memory()
        assert pinned.values().is_pinned()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            moved = pinned.to("cuda", non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        moved.record_stream(torch.cuda.current_stream())
        assert torch.equal(moved.values().cpu(), batch.values())
        if isinstance(batch, KeyedTensor):
            continue
        assert isinstance(moved, KeyedJaggedTensor | JaggedTensor)
        assert moved.offsets().tolist() == batch.offsets().tolist()
        assert torch.equal(moved.weights().cpu(), batch.weights())
    on_gpu = made.to("cuda")
    assert on_gpu["b"].to_padded_dense(2, -1).tolist() == [[-1, -1], [3, 4]]
    assert on_gpu.permute([1, 0]).values().tolist() == [3, 4, 5, 0, 1, 2]
