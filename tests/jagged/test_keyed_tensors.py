"""Regrouped keyed tensors have other columns or gradients than a plain cat."""

from __future__ import annotations

import pytest
import torch

from support.keyed import GROUPS, features, gradients, keyed, tensors
from tierbed.jagged import KeyedTensor, permute_multi_embedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_groups_and_gradients_are_those_of_plain_cat(dtype: torch.dtype) -> None:
    values = tensors(dtype=dtype, requires_grad=True)
    made = KeyedTensor.regroup(keyed(values), GROUPS)
    expected = [torch.cat([features(values)[key] for key in group], 1) for group in GROUPS]
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients(made, values), gradients(expected, values), strict=True):
        torch.testing.assert_close(one, other)


def test_a_group_of_nothing_has_no_columns() -> None:
    assert [part.shape for part in KeyedTensor.regroup(keyed(tensors()), [[], ["f1"]])] == [(5, 0), (5, 3)]


def test_moves_that_overlap_where_they_read_in_any_order_take_their_columns() -> None:
    values = torch.randn(3, 6, requires_grad=True)
    moves = torch.tensor([[0, 0, 1, 2, 4, 0], [0, 0, 0, 0, 2, 0], [0, 1, 3, 0, 3, 0]])
    widths = torch.tensor([6, 3])
    first, second = permute_multi_embedding([values], moves, [6, 3], torch.tensor([6]), widths)
    assert torch.equal(first, torch.cat([values[:, :2], values[:, 1:5]], 1))
    assert torch.equal(second, values[:, 3:])
    (grad,) = torch.autograd.grad(first.sum() + second.sum(), values)
    assert grad[0].tolist() == [1, 2, 1, 2, 2, 1]
