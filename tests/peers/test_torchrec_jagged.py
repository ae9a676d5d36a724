"""A jagged tensor, keyed or not, has other bags than it was given, or others than TorchRec's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse import jagged_tensor as torchrec
from torchrec.types import DataType

from support.jagged import Features, check_same, check_same_parts, features
from support.keyed import GROUPS, KEYS, LENGTHS, gradients, keyed, tensors
from support.keyed import features as parts_of
from tierbed.jagged import (
    KeyedJaggedTensor,
    KeyedTensor,
    VariableBatchKeyedJaggedTensor,
    multi_remap_to_groups,
    permute_multi_embedding,
)

EIGHT = torch.arange(8)


def ours(drawn: Features) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**drawn.arguments())


def theirs(drawn: Features) -> torchrec.KeyedJaggedTensor:
    return torchrec.KeyedJaggedTensor(**drawn.arguments())


@given(features(), st.none() | st.integers(0, 70), st.integers(-3, 3))
def test_bags_and_padding_are_those_of_torchrec(drawn: Features, length: int | None, padding: int) -> None:
    mine, peer = ours(drawn), theirs(drawn)
    mine.validate()
    check_same(mine, peer)
    for key, jagged in mine.to_dict().items():
        check_same_parts(jagged, peer.to_dict()[key] if drawn.batch else peer[key])  # theirs needs a sample
        check_same_parts(mine[key], peer[key])
        assert drawn.batch == 0 or str(jagged) == str(peer[key])
        padded = jagged.to_padded_dense(length, padding)
        expected = peer[key].to_padded_dense(length, padding) if drawn.batch else padded.new_empty(0, length or 0)
        assert torch.equal(padded, expected)
        assert [bag.tolist() for bag in jagged.to_dense()] == drawn.bags()[key]
    arguments = drawn.arguments() | {"offsets": mine.offsets().to(drawn.lengths.dtype)}
    check_same(KeyedJaggedTensor(**arguments), peer)
    lengths = arguments.pop("lengths")
    check_same(KeyedJaggedTensor.from_offsets_sync(**arguments), peer)
    del arguments["offsets"]
    check_same(KeyedJaggedTensor.from_lengths_sync(**arguments, lengths=lengths), peer)
    check_same(KeyedJaggedTensor.from_jt_dict(mine.to_dict()), peer)
    assert str(mine) == str(peer)


@given(features(), st.data())
def test_split_permute_and_concat_are_those_of_torchrec(drawn: Features, data: st.DataObject) -> None:
    mine, peer = ours(drawn), theirs(drawn)
    cut = data.draw(st.integers(0, len(drawn.keys)))
    segments = [cut, len(drawn.keys) - cut]
    parts = mine.split(segments)
    for one, other in zip(parts, peer.split(segments), strict=True):
        if other.keys():
            check_same(one, other)
        else:
            assert (one.keys(), one.offsets().tolist(), one.values().tolist()) == ([], [0], [])
            assert one.stride() == mine.stride()  # theirs forgets it, if nothing asked the whole for it before
            assert one.to_dict() == {}
            assert one.split([0])[0].stride() == mine.stride()
    check_same(KeyedJaggedTensor.concat(parts), peer)
    order = data.draw(st.permutations(range(len(drawn.keys))))[: data.draw(st.integers(1, len(drawn.keys)))]
    check_same(mine.permute(order), peer.permute(order))
    repeated = data.draw(st.lists(st.integers(0, len(drawn.keys) - 1), min_size=1, max_size=7))
    check_same(mine.permute(repeated, torch.tensor(repeated, dtype=torch.int32)), peer.permute(repeated))
    check_same_parts(mine.permute(repeated)[drawn.keys[repeated[-1]]], mine[drawn.keys[repeated[-1]]])


@given(features(), st.booleans())
def test_torchrecs_own_is_taken_as_it_is_and_left_as_it_was(drawn: Features, synced: bool) -> None:
    peer = theirs(drawn).sync() if synced else theirs(drawn)
    leaves, structure = pytree.tree_flatten(peer)
    made = KeyedJaggedTensor.from_torchrec(peer)
    after, structure_after = pytree.tree_flatten(peer)
    assert structure_after == structure
    assert all(one is other for one, other in zip(after, leaves, strict=True))
    assert made.values() is peer.values()
    check_same(made, peer)
    assert KeyedJaggedTensor.from_torchrec(made) is made


def test_torchrecs_own_of_no_keys_is_taken() -> None:
    check_same(KeyedJaggedTensor.from_torchrec(torchrec.KeyedJaggedTensor.empty()), torchrec.KeyedJaggedTensor.empty())
    whole = torchrec.KeyedJaggedTensor(["a"], EIGHT, lengths=torch.tensor([3, 5]))
    assert KeyedJaggedTensor.from_torchrec(whole.split([0, 1])[0]).offsets().tolist() == [0]
    assert whole.stride() == 2  # from here on its parts know it
    assert KeyedJaggedTensor.from_torchrec(whole.split([0, 1])[0]).stride() == 2


def variable() -> torchrec.KeyedJaggedTensor:
    """f1 has two bags, f2 has three; four samples share them. The rows of inverse indices are in another order."""
    return torchrec.KeyedJaggedTensor(
        ["f1", "f2"],
        EIGHT,
        lengths=torch.tensor([2, 1, 1, 1, 3]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=(["f2", "f1"], torch.tensor([[2, 1, 0, 0], [0, 0, 1, 0]])),
    )


def inverse_of(made: Any) -> list[list[int]]:
    names, inverse = made.inverse_indices_or_none()
    assert names == made.keys()
    rows: list[list[int]] = inverse.tolist()
    return rows


def test_variable_batch_sizes_keep_the_bags_of_each_key_and_the_way_back() -> None:
    made, peer = KeyedJaggedTensor.from_torchrec(variable()), variable()
    assert isinstance(made, VariableBatchKeyedJaggedTensor)
    made.validate()
    assert (made.stride(), made.stride_per_key(), made.strides().tolist()) == (4, [2, 3], [2, 3])
    assert inverse_of(made) == [[0, 0, 1, 0], [2, 1, 0, 0]]
    for one, other in zip([made, *made.split([1, 1])], [peer, *peer.split([1, 1])], strict=True):
        check_same_parts(one, other)
        for key, jagged in one.to_dict().items():
            check_same_parts(jagged, other.to_dict()[key])
            check_same_parts(one[key], other[key])
    swapped = made.permute([1, 0])
    check_same_parts(swapped, peer.permute([1, 0]))
    assert inverse_of(swapped) == [[2, 1, 0, 0], [0, 0, 1, 0]]
    assert inverse_of(swapped.split([1, 1])[0]) == [[2, 1, 0, 0]]


def test_variable_batch_sizes_without_a_way_back_are_those_of_the_longest_key() -> None:
    made = VariableBatchKeyedJaggedTensor(["a", "b"], EIGHT, None, torch.tensor([2, 1, 5]), None, [1, 2])
    assert (made.stride(), made.inverse_indices_or_none()) == (2, None)
    assert pickle.loads(pickle.dumps(made)).to_dict()["b"].lengths().tolist() == [1, 5]
    sizes = torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    made = KeyedJaggedTensor(["a", "b"], EIGHT, lengths=torch.tensor([2, 1, 5]), stride_per_key_per_rank=sizes)
    assert made.stride_per_key_per_rank() == [[0, 1], [2, 0]]


def test_storage_is_counted_and_cleared() -> None:
    made = KeyedJaggedTensor(["a"], EIGHT.clone(), torch.rand(8), torch.tensor([5, 3]))
    with pytest.raises(AttributeError, match=r"has no dist_labels: .*give world="):
        made.dist_labels()
    size = made.size_in_bytes()
    assert size >= made.values().nbytes + made.weights().nbytes
    assert made.clear_storage() == size


PERMUTES = [
    [0, 0, 0, 0, 3, 4], [1, 0, 0, 3, 5, 0], [0, 1, 3, 0, 4, 0], [1, 2, 5, 0, 6, 0],
    [0, 2, 0, 6, 3, -6], [2, 2, 0, 9, 8, 0], [0, 3, 0, 0, 3, -8], [1, 3, 11, 3, 7, 0],
]  # fmt: skip


@given(st.data())
def test_groups_are_those_of_torchrec_and_what_is_left_out_has_gradients_of_zero(data: st.DataObject) -> None:
    """Memory is poisoned with NaN, which TorchRec's KTRegroupAsDict leaves in gradients of features left out."""
    group = st.lists(st.sampled_from(sorted(parts_of(tensors()))), max_size=5, min_size=1)
    groups = data.draw(st.lists(group, min_size=1, max_size=4))
    values = tensors(data.draw(st.integers(0, 3)), requires_grad=True)
    theirs = keyed(values, torchrec.KeyedTensor)
    made, peer = KeyedTensor.regroup(keyed(values), groups), torchrec.KeyedTensor.regroup(theirs, groups)
    assert all(map(torch.equal, made, peer))
    names = [str(number) for number in range(len(groups))]
    of_theirs = KeyedTensor.regroup_as_dict(theirs, groups, names)
    assert [*of_theirs] == names
    assert all(map(torch.equal, made, of_theirs.values()))
    grads = gradients(made, values)
    for one, other in zip(grads, gradients(peer, values), strict=True):
        torch.testing.assert_close(one, other)
    for key, grad in parts_of(grads).items():
        assert any(key in group for group in groups) or (grad == 0).all()


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


def test_moves_of_groups_are_those_of_the_seed_and_of_fbgemm_and_give_what_fbgemm_gives() -> None:
    permutes, in_lengths, out_lengths = multi_remap_to_groups(KEYS, LENGTHS, GROUPS)
    assert permutes.tolist() == PERMUTES
    assert (in_lengths.tolist(), out_lengths.tolist()) == ([7, 18, 8], [8, 4, 17, 10])
    values = tensors()
    peer = torch.ops.fbgemm.kt_regroup_arguments(values[0], KEYS, LENGTHS, GROUPS)
    assert all(map(torch.equal, (permutes, in_lengths, out_lengths), peer[:3]))
    given = (values, permutes, in_lengths, out_lengths, out_lengths.tolist())
    expected = torch.ops.fbgemm.permute_multi_embedding(*given)
    assert all(map(torch.equal, permute_multi_embedding(*given), expected))
    made = permute_multi_embedding(values, permutes, out_lengths.tolist(), in_lengths, out_lengths)
    assert all(map(torch.equal, made, expected))
