"""Regrouped keyed tensors have other columns or gradients than a plain cat."""

from __future__ import annotations

import pytest
import torch

from support.keyed import GROUPS, KEYS, LENGTHS, features, gradients, keyed, tensors
from tierbed.engine.errors import InputError
from tierbed.jagged import KeyedTensor, multi_remap_to_groups, permute_multi_embedding


def test_groups_and_gradients_are_those_of_plain_cat() -> None:
    values = tensors(requires_grad=True)
    made = KeyedTensor.regroup(keyed(values), GROUPS)
    expected = [torch.cat([features(values)[key] for key in group], 1) for group in GROUPS]
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients(made, values), gradients(expected, values), strict=True):
        torch.testing.assert_close(one, other)


def test_tensors_without_values_have_groups_of_the_same_shapes_without_values() -> None:
    values = tensors()
    expected = [part.shape for part in KeyedTensor.regroup(keyed(values), GROUPS)]
    moves = multi_remap_to_groups(KEYS, LENGTHS, GROUPS)
    bare = [tensor.to("meta", torch.float16).requires_grad_() for tensor in values]
    for permutes, in_lengths, out_lengths in (moves, [tensor.to("meta") for tensor in moves]):
        parts = permute_multi_embedding(bare, permutes, moves[2].tolist(), in_lengths, out_lengths)
        for made in (parts, KeyedTensor.regroup(keyed(bare), GROUPS)):
            assert [part.shape for part in made] == expected
            assert {(part.device.type, part.dtype) for part in made} == {("meta", torch.float16)}
            grads = torch.autograd.grad(sum(part.sum() for part in made), bare)
            assert [one.shape for one in grads] == [one.shape for one in bare]


def test_features_one_below_the_other_are_regrouped_but_not_with_features_side_by_side() -> None:
    beside = keyed(tensors())
    turned = [KeyedTensor(one.keys(), one.length_per_key(), one.values().t(), key_dim=0) for one in beside]
    groups = [*GROUPS, []]
    for one, other in zip(KeyedTensor.regroup(turned, groups), KeyedTensor.regroup(beside, groups), strict=True):
        assert torch.equal(one, other.t())
    with pytest.raises(InputError, match=r"keyed_tensors have key_dim \[0, 1, 1\]; give tensors of one key_dim"):
        KeyedTensor.regroup([turned[0], *beside[1:]], GROUPS)


def test_moves_that_overlap_where_they_read_in_any_order_take_their_columns() -> None:
    values = torch.randn(3, 6, requires_grad=True)
    moves = torch.tensor([[0, 0, 1, 2, 4, 0], [0, 0, 0, 0, 2, 0], [0, 1, 3, 0, 3, 0]])
    widths = torch.tensor([6, 3])
    first, second = permute_multi_embedding([values], moves, [6, 3], torch.tensor([6]), widths)
    assert torch.equal(first, torch.cat([values[:, :2], values[:, 1:5]], 1))
    assert torch.equal(second, values[:, 3:])
    (grad,) = torch.autograd.grad(first.sum() + second.sum(), values)
    assert grad[0].tolist() == [1, 2, 1, 2, 2, 1]
