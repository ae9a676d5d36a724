"""Keyed tensors regroup to other columns, or their gradients are not those of plain cat."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse import jagged_tensor as torchrec
from torchrec.types import DataType

from support.keyed import GROUPS, KEYS, LENGTHS, features, gradients, keyed, tensors
from tierbed.jagged import KeyedTensor, multi_remap_to_groups, permute_multi_embedding

PERMUTES = [
    [0, 0, 0, 0, 3, 4], [1, 0, 0, 3, 5, 0], [0, 1, 3, 0, 4, 0], [1, 2, 5, 0, 6, 0],
    [0, 2, 0, 6, 3, -6], [2, 2, 0, 9, 8, 0], [0, 3, 0, 0, 3, -8], [1, 3, 11, 3, 7, 0],
]  # fmt: skip


@given(st.data())
def test_groups_are_those_of_torchrec_and_what_is_left_out_has_gradients_of_zero(data: st.DataObject) -> None:
    """Memory is poisoned with NaN, which TorchRec's KTRegroupAsDict leaves in gradients of features left out."""
    group = st.lists(st.sampled_from(sorted(features(tensors()))), max_size=5, min_size=1)
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
    for key, grad in features(grads).items():
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
