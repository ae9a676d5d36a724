"""Keyed tensors regroup to other columns, or their gradients are not those of plain cat."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse import jagged_tensor as torchrec
from torchrec.types import DataType

from support.keyed import GROUPS, KEYS, LENGTHS, features, gradients, keyed, tensors
from tierbed.engine.errors import InputError
from tierbed.jagged import KeyedTensor, multi_remap_to_groups, permute_multi_embedding

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


def test_a_keyed_tensor_has_the_parts_of_torchrecs() -> None:
    parts = [torch.randn(4, 2), torch.randn(4, 1), torch.randn(4, 3)]
    mine, peer = (kind.from_tensor_list(["a", "b", "c"], parts) for kind in (KeyedTensor, torchrec.KeyedTensor))
    assert (mine.keys(), mine.length_per_key(), mine.offset_per_key()) == (["a", "b", "c"], [2, 1, 3], [0, 2, 3, 6])
    assert (peer.keys(), peer.length_per_key(), peer.offset_per_key()) == (["a", "b", "c"], [2, 1, 3], [0, 2, 3, 6])
    assert torch.equal(mine.values(), peer.values())
    assert str(mine) == str(peer)
    assert str(KeyedTensor([], [], torch.empty(3, 0))) == str(torchrec.KeyedTensor([], [], torch.empty(3, 0)))
    for key, part in zip(mine.keys(), parts, strict=True):
        assert torch.equal(mine[key], part)
        assert torch.equal(mine.to_dict()[key], part)
    with pytest.raises(KeyError, match="nobody"):
        mine["nobody"]
    again = pickle.loads(pickle.dumps(mine))
    assert (again.keys(), again.length_per_key()) == (mine.keys(), mine.length_per_key())
    assert torch.equal(again["c"], parts[2])
    assert mine.to("meta")["c"].device.type == "meta"


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


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("groups", [GROUPS, [["f6", "f1", "f3"], ["f5", "f4", "f2"]]])
@pytest.mark.parametrize("dtype", [None, DataType.FP16])
def test_torchrecs_regrouping_takes_ours(dim: int, groups: list[list[str]], dtype: DataType | None) -> None:
    values = [tensor if dim else tensor.t().contiguous() for tensor in tensors()]
    ours, theirs = (
        [kind(keys, widths, tensor, dim) for keys, widths, tensor in zip(KEYS, LENGTHS, values, strict=True)]
        for kind in (KeyedTensor, torchrec.KeyedTensor)
    )
    names = [str(number) for number in range(len(groups))]
    made, expected = (KTRegroupAsDict(groups, names, emb_dtype=dtype)(tensors) for tensors in (ours, theirs))
    regrouped = KeyedTensor.regroup(ours, groups)
    assert [*made] == [*expected]
    for one, other, mine in zip(made.values(), expected.values(), regrouped, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, mine.to(one.dtype))
    if dim or groups is GROUPS:  # TorchRec's regroup of all features ignores key_dim
        assert all(map(torch.equal, torchrec.KeyedTensor.regroup(ours, groups), regrouped))


def test_the_moves_of_groups_are_those_of_the_seed_and_of_fbgemm() -> None:
    permutes, in_lengths, out_lengths = multi_remap_to_groups(KEYS, LENGTHS, GROUPS)
    assert permutes.tolist() == PERMUTES
    assert (in_lengths.tolist(), out_lengths.tolist()) == ([7, 18, 8], [8, 4, 17, 10])
    peer = torch.ops.fbgemm.kt_regroup_arguments(tensors()[0], KEYS, LENGTHS, GROUPS)
    for one, other in zip((permutes, in_lengths, out_lengths), peer, strict=False):
        assert torch.equal(one, other)
    with pytest.raises(KeyError, match="nobody"):
        multi_remap_to_groups(KEYS, LENGTHS, [["nobody"]])
    with pytest.raises(InputError, match="'f6' occurs 2 times"):
        multi_remap_to_groups([*KEYS, ["f6"]], [*LENGTHS, [8]], GROUPS)


def test_moves_give_what_fbgemm_gives_and_the_gradients_of_plain_cat() -> None:
    values = tensors(requires_grad=True)
    permutes, in_lengths, out_lengths = multi_remap_to_groups(KEYS, LENGTHS, GROUPS)
    made = permute_multi_embedding(values, permutes, out_lengths.tolist(), in_lengths, out_lengths)
    theirs = (values, permutes, in_lengths, out_lengths, out_lengths.tolist())
    peer = torch.ops.fbgemm.permute_multi_embedding(*theirs)
    assert all(map(torch.equal, made, permute_multi_embedding(*theirs)))
    expected = [torch.cat([features(values)[key] for key in group], 1) for group in GROUPS]
    for one, two, three in zip(made, peer, expected, strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one, three)
    for one, other in zip(gradients(made, values), gradients(expected, values), strict=True):
        torch.testing.assert_close(one, other)


def test_features_one_below_the_other_are_torchrecs() -> None:
    tensors = [torch.rand(2, 3), torch.rand(1, 3)]
    mine = KeyedTensor.from_tensor_list(["a", "b"], tensors, key_dim=0, cat_dim=0)
    peer = torchrec.KeyedTensor.from_tensor_list(["a", "b"], tensors, key_dim=0, cat_dim=0)
    assert mine.key_dim() == peer.key_dim() == 0
    assert mine._key_indices() == peer._key_indices()
    assert torch.equal(mine.values(), peer.values())
    assert str(mine) == str(peer)
    for key, tensor in zip("ab", tensors, strict=True):
        assert torch.equal(mine[key], peer[key])
        assert torch.equal(mine.to_dict()[key], tensor)
    with pytest.raises(InputError, match="key_dim=2: give 1, or 0"):
        KeyedTensor(["a"], [3], torch.ones(3, 2), 2)
    with pytest.raises(InputError, match=r"values: \[2, 3\]; give a tensor \[3, batch\]"):
        KeyedTensor(["a"], [3], torch.ones(2, 3), 0)
