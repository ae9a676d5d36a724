"""The optimizers that FBGEMM has on GPUs alone, by its names: their states, their numbers, and the norm of rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from support.tbe import fill, ours
from tierbed.engine.errors import OptionError
from tierbed.engine.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB
from tierbed.jagged import OptimType, TableBatchedEmbeddingBags

IDS, OFFSETS = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 3, 4])
ROWS, DIM = 4, 3
ADAM = {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
THEIRS = {"beta1": 0.8, "beta2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
CASES = [
    (OptimType.PARTIAL_ROWWISE_ADAM, THEIRS, lambda p: PartialRowWiseAdam(p, 0.1, **ADAM), [(ROWS, DIM), (ROWS,)]),
    (OptimType.LAMB, THEIRS, lambda p: LAMB(p, 0.1, **ADAM), [(ROWS, DIM)] * 2),
    (OptimType.PARTIAL_ROWWISE_LAMB, THEIRS, lambda p: PartialRowWiseLAMB(p, 0.1, **ADAM), [(ROWS, DIM), (ROWS,)]),
    (
        OptimType.LARS_SGD,
        {"momentum": 0.5, "eta": 0.3, "weight_decay": 0.1},
        lambda p: LarsSGD(p, 0.1, 0.5, 0.1, 0.3),
        [(ROWS, DIM)],
    ),
]


def one(**options) -> TableBatchedEmbeddingBags:
    tbe = ours([(ROWS, DIM)], [0], **options)
    fill(tbe, [rows()])
    return tbe


def rows() -> Tensor:
    return torch.arange(1.0, ROWS * DIM + 1).reshape(ROWS, DIM) / 10


@pytest.mark.parametrize(("optimizer", "numbers", "make", "shapes"), CASES, ids=[case[0].name for case in CASES])
def test_rows_and_states_are_those_of_the_dense_step(optimizer, numbers, make, shapes):
    tbe = one(optimizer=optimizer, learning_rate=0.1, **numbers)
    dense = torch.nn.Parameter(rows()[:3])
    theirs = make([dense])
    for step in range(3):
        grad = torch.sin(torch.arange(9.0).reshape(3, 3) + step)
        tbe(IDS, OFFSETS).backward(grad)
        dense.grad = grad * torch.tensor([[1.0], [2.0], [1.0]])  # row 1 is twice in its bag
        theirs.step()
    torch.testing.assert_close(tbe.split_embedding_weights()[0][:3], dense.detach())
    [states] = tbe.split_optimizer_states()
    assert [tuple(state.shape) for state in states] == shapes
    kept = [value for name, value in theirs.state[dense].items() if name != "step"]
    for state, value in zip(states, kept, strict=True):
        torch.testing.assert_close(state[:3], value.view_as(state[:3]))


def test_a_row_is_scaled_to_the_largest_norm_that_it_may_have():
    free, limited = one(learning_rate=0.1), one(learning_rate=0.1, max_norm=0.5)
    for tbe in (free, limited):
        tbe(IDS, OFFSETS).sum().backward()
    moved = free.split_embedding_weights()[0]
    scale = (0.5 / moved.norm(dim=1, keepdim=True)).clamp(max=1.0)
    scale[3] = 1.0  # no step touched it
    torch.testing.assert_close(limited.split_embedding_weights()[0], moved * scale)
    assert (scale < 1).any()


@pytest.mark.parametrize("used", [False, True])
def test_uniform_rows_beyond_the_largest_number_are_refused(used):
    tbe = one(weights_precision="fp16")
    before = tbe(IDS, OFFSETS) if used else None
    with pytest.raises(OptionError, match=r"values up to 1e\+06 overflow dtype=torch.float16"):
        tbe.init_embedding_weights_uniform(-1e6, 1e6)
    assert tbe(IDS, OFFSETS).isfinite().all()
    assert before is None or torch.equal(tbe(IDS, OFFSETS), before)


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), (torch.bfloat16, torch.bfloat16)], ids=str)
def test_rows_of_16_bits_are_trained_by_chance_and_copied_exactly(precision, dtype):
    tbe = one(learning_rate=0.1, weights_precision=precision)
    assert list(tbe.embeddings) == [f"tbe-d{DIM}-{str(dtype).removeprefix('torch.')}-host"]
    [before] = tbe.split_embedding_weights()
    assert torch.equal(before, rows().to(dtype))
    assert before.dtype == dtype
    before = before.float()
    tbe(IDS, OFFSETS).sum().backward()
    [after] = tbe.split_embedding_weights()
    wanted = before - torch.tensor([[0.1], [0.2], [0.1], [0.0]])
    torch.testing.assert_close(after.float(), wanted, rtol=0, atol=float(torch.finfo(dtype).eps))
