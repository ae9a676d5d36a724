"""Keyed tensors regroup to other columns, or their gradients are not those of plain cat."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec.sparse import jagged_tensor as torchrec

from tierbed.engine.errors import InputError
from tierbed.jagged import KeyedTensor, multi_remap_to_groups, permute_multi_embedding

# the example of FBGEMM's change that brought permute_multi_embedding
KEYS = [["f1", "f2"], ["f3", "f4", "f5"], ["f6"]]
LENGTHS = [[3, 4], [5, 6, 7], [8]]
GROUPS = [["f1", "f3"], ["f2"], ["f4", "f1", "f6"], ["f1", "f5"]]
PERMUTES = [
    [0, 0, 0, 0, 3, 4],
    [1, 0, 0, 3, 5, 0],
    [0, 1, 3, 0, 4, 0],
    [1, 2, 5, 0, 6, 0],
    [0, 2, 0, 6, 3, -6],
    [2, 2, 0, 9, 8, 0],
    [0, 3, 0, 0, 3, -8],
    [1, 3, 11, 3, 7, 0],
]


def tensors(batch: int = 5, **options: Any) -> list[Tensor]:
    return [torch.randn(batch, sum(lengths), **options) for lengths in LENGTHS]


def features(values: list[Tensor]) -> dict[str, Tensor]:
    """Each feature of the example, by slices."""
    parts = {}
    for keys, lengths, tensor in zip(KEYS, LENGTHS, values, strict=True):
        ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        parts |= {key: tensor[:, begin : begin + n] for key, begin, n in zip(keys, ends, lengths, strict=False)}
    return parts


def keyed(values: list[Tensor], kind: Any = KeyedTensor) -> list[Any]:
    return [kind(keys, lengths, tensor) for keys, lengths, tensor in zip(KEYS, LENGTHS, values, strict=True)]


def gradients(made: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    outside = [torch.randn(part.shape, generator=generator) for part in made]
    return list(torch.autograd.grad(made, values, outside, materialize_grads=True))


def test_a_keyed_tensor_has_the_parts_of_torchrecs() -> None:
    parts = [torch.randn(4, 2), torch.randn(4, 1), torch.randn(4, 3)]
    mine, peer = (kind.from_tensor_list(["a", "b", "c"], parts) for kind in (KeyedTensor, torchrec.KeyedTensor))
    assert (mine.keys(), mine.length_per_key(), mine.offset_per_key()) == (["a", "b", "c"], [2, 1, 3], [0, 2, 3, 6])
    assert (peer.keys(), peer.length_per_key(), peer.offset_per_key()) == (["a", "b", "c"], [2, 1, 3], [0, 2, 3, 6])
    assert torch.equal(mine.values(), peer.values())
    for key, part in zip(mine.keys(), parts, strict=True):
        assert torch.equal(mine[key], part)
        assert torch.equal(mine.to_dict()[key], part)
    with pytest.raises(KeyError, match="nobody"):
        mine["nobody"]
    again = pickle.loads(pickle.dumps(mine))
    assert (again.keys(), again.length_per_key()) == (mine.keys(), mine.length_per_key())
    assert torch.equal(again["c"], parts[2])
    assert mine.to("meta")["c"].device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_groups_and_gradients_are_those_of_plain_cat(dtype: torch.dtype) -> None:
    values = tensors(dtype=dtype, requires_grad=True)
    made = KeyedTensor.regroup(keyed(values), GROUPS)
    expected = [torch.cat([features(values)[key] for key in group], 1) for group in GROUPS]
    for one, other in zip(made, expected, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(gradients(made, values), gradients(expected, values), strict=True):
        torch.testing.assert_close(one, other)


@given(st.data())
def test_groups_are_those_of_torchrec_and_what_is_left_out_has_gradients_of_zero(data: st.DataObject) -> None:
    """Memory is poisoned with NaN, which TorchRec's KTRegroupAsDict leaves in gradients of features left out."""
    group = st.lists(st.sampled_from(sorted(features(tensors()))), max_size=5, min_size=1)
    groups = data.draw(st.lists(group, min_size=1, max_size=4))
    values = tensors(data.draw(st.integers(0, 3)), requires_grad=True)
    made = KeyedTensor.regroup(keyed(values), groups)
    peer = torchrec.KeyedTensor.regroup(keyed(values, torchrec.KeyedTensor), groups)
    for one, other in zip(made, peer, strict=True):
        assert torch.equal(one, other)
    grads = gradients(made, values)
    for one, other in zip(grads, gradients(peer, values), strict=True):
        torch.testing.assert_close(one, other)
    for key, grad in features(grads).items():
        if not any(key in group for group in groups):
            assert (grad == 0).all()


def test_torchrecs_keyed_tensors_are_regrouped_as_well() -> None:
    values = tensors()
    named = KeyedTensor.regroup_as_dict(keyed(values, torchrec.KeyedTensor), GROUPS, ["a", "b", "c", "d"])
    expected = KeyedTensor.regroup(keyed(values), GROUPS)
    assert [*named] == ["a", "b", "c", "d"]
    assert all(torch.equal(one, other) for one, other in zip(named.values(), expected, strict=True))


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


def test_the_moves_of_groups_are_those_of_the_seed_and_of_fbgemm() -> None:
    permutes, in_lengths, out_lengths = multi_remap_to_groups(KEYS, LENGTHS, GROUPS)
    assert permutes.tolist() == PERMUTES
    assert (in_lengths.tolist(), out_lengths.tolist()) == ([7, 18, 8], [8, 4, 17, 10])
    peer = torch.ops.fbgemm.kt_regroup_arguments(tensors()[0], KEYS, LENGTHS, GROUPS)
    for one, other in zip((permutes, in_lengths, out_lengths), peer, strict=False):
        assert torch.equal(one, other)
    with pytest.raises(KeyError, match="nobody"):
        multi_remap_to_groups(KEYS, LENGTHS, [["nobody"]])
    with pytest.raises(InputError, match="'f6' is there 2 times"):
        multi_remap_to_groups([*KEYS, ["f6"]], [*LENGTHS, [8]], GROUPS)


def test_moves_give_what_fbgemm_gives_and_the_gradients_of_plain_cat() -> None:
    values = tensors(requires_grad=True)
    permutes, in_lengths, out_lengths = multi_remap_to_groups(KEYS, LENGTHS, GROUPS)
    made = permute_multi_embedding(values, permutes, out_lengths.tolist(), in_lengths, out_lengths)
    peer = torch.ops.fbgemm.permute_multi_embedding(values, permutes, in_lengths, out_lengths, out_lengths.tolist())
    expected = [torch.cat([features(values)[key] for key in group], 1) for group in GROUPS]
    for one, two, three in zip(made, peer, expected, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    for one, other in zip(gradients(made, values), gradients(expected, values), strict=True):
        torch.testing.assert_close(one, other)


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
