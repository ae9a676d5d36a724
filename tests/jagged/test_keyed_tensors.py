"""Regrouped keyed tensors have other columns or gradients than a plain cat."""

from __future__ import annotations

import pytest
import torch

from support.keyed import GROUPS, features, gradients, keyed, tensors
from tierbed.engine.errors import InputError
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


def test_groups_that_cannot_be_are_refused() -> None:
    parts = keyed(tensors())
    with pytest.raises(KeyError, match=r"groups: .nobody. is a key of no keyed tensor"):
        KeyedTensor.regroup(parts, [["f1", "nobody"]])
    with pytest.raises(InputError, match=r"\['f1', 'f2'\] are keys of two"):
        KeyedTensor.regroup([*parts, parts[0]], [["f1"]])
    with pytest.raises(InputError, match=r"keyed_tensors=\[\]"):
        KeyedTensor.regroup([], [["f1"]])
    with pytest.raises(InputError, match=r"they have \[5, 2\] samples"):
        KeyedTensor.regroup([parts[0], keyed(tensors(2))[1]], [["f1", "f3"]])
    with pytest.raises(InputError, match="one for each of 4 groups"):
        KeyedTensor.regroup_as_dict(parts, GROUPS, ["a"])
    with pytest.raises(InputError, match="'a' is there 2 times"):
        KeyedTensor.regroup_as_dict(parts, GROUPS[:2], ["a", "a"])
    with pytest.raises(InputError, match="tensors"):
        KeyedTensor.from_tensor_list([], [])


def test_moves_that_overlap_where_they_read_in_any_order_take_their_columns() -> None:
    values = torch.randn(3, 6, requires_grad=True)
    moves = torch.tensor([[0, 0, 1, 2, 4, 0], [0, 0, 0, 0, 2, 0], [0, 1, 3, 0, 3, 0]])
    widths = torch.tensor([6, 3])
    first, second = permute_multi_embedding([values], moves, [6, 3], torch.tensor([6]), widths)
    assert torch.equal(first, torch.cat([values[:, :2], values[:, 1:5]], 1))
    assert torch.equal(second, values[:, 3:])
    (grad,) = torch.autograd.grad(first.sum() + second.sum(), values)
    assert grad[0].tolist() == [1, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("moves", "widths", "said"),
    [
        ([[0, 0, 0, 0, 2, 0], [0, 0, 2, 3, 2, 0]], [5], "columns 2 to 3 of output 0"),
        ([[0, 0, 0, 0, 2, 0], [0, 0, 2, 1, 2, 0]], [4], "columns 2 to 1 of output 0"),
        ([[0, 0, 0, 0, 2, 0]], [3], "output 0 has 2 columns of moves"),
        ([[0, 0, 4, 0, 3, 0]], [3], "columns 0 to 7 of a tensor of 6 columns"),
        ([[0, 0, -1, 0, 3, 0]], [3], "columns -1 to 6 of a tensor of 6 columns"),
        ([[0, 0, 0, 0, 3, 0], [0, 1, 0, 0, 3, 0]], [3], r"\[0, 1, 0, 0, 3, 0\] of 1 inputs and 1 outputs"),
        ([[-1, 0, 0, 0, 3, 0]], [3], r"\[-1, 0, 0, 0, 3, 0\] of 1 inputs and 1 outputs"),
        ([[1, 0, 0, 0, 3, 0]], [3], r"\[1, 0, 0, 0, 3, 0\] of 1 inputs and 1 outputs"),
    ],
)
def test_moves_that_do_not_fill_an_output_are_refused(moves: list[list[int]], widths: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        permute_multi_embedding(
            [torch.randn(3, 6)], torch.tensor(moves), widths, torch.tensor([6]), torch.tensor(widths)
        )
    with pytest.raises(InputError, match="in_lengths"):
        permute_multi_embedding(
            [torch.randn(3, 6)], torch.tensor(moves), widths, torch.tensor([5]), torch.tensor(widths)
        )
