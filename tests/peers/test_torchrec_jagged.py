"""A jagged tensor, keyed or not, has other bags than it was given, or others than TorchRec's."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torchrec.sparse import jagged_tensor as torchrec

from support.jagged import Features, check_same, check_same_parts, features
from tierbed import InputError
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    VariableBatchKeyedJaggedTensor,
)

EIGHT, OFFSETS = torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8])


def ours(drawn: Features) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**drawn.arguments())


def theirs(drawn: Features) -> torchrec.KeyedJaggedTensor:
    return torchrec.KeyedJaggedTensor(**drawn.arguments())


@given(features())
def test_bags_are_those_of_torchrec_and_of_plain_lists(drawn: Features) -> None:
    mine, peer = ours(drawn), theirs(drawn)
    mine.validate()
    check_same(mine, peer)
    for key, jagged in mine.to_dict().items():
        check_same_parts(jagged, peer.to_dict()[key] if drawn.batch else peer[key])  # theirs needs a sample
        check_same_parts(mine[key], peer[key])
        assert drawn.batch == 0 or str(jagged) == str(peer[key])
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


@given(features(), st.none() | st.integers(0, 70), st.integers(-3, 3))
def test_padding_is_that_of_torchrec(drawn: Features, length: int | None, padding: int) -> None:
    for key, jagged in ours(drawn).to_dict().items():
        if drawn.batch == 0:  # theirs has no longest one
            assert jagged.to_padded_dense(length, padding).shape == (0, length or 0)
            continue
        peer = theirs(drawn)[key]
        assert torch.equal(jagged.to_padded_dense(length, padding), peer.to_padded_dense(length, padding))


@pytest.mark.parametrize("weighted", [False, True])
def test_from_dense_undoes_to_dense(weighted: bool) -> None:
    bags = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    weights = [bag + 1 for bag in bags] if weighted else None
    made = JaggedTensor.from_dense(bags, weights)
    check_same_parts(made, torchrec.JaggedTensor.from_dense(bags, weights))
    assert [bag.tolist() for bag in made.to_dense()] == [bag.tolist() for bag in bags]


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
    part = torchrec.KeyedJaggedTensor(["a"], EIGHT, lengths=torch.tensor([8])).split([0, 1])[0]
    assert KeyedJaggedTensor.from_torchrec(part).offsets().tolist() == [0]


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


def check_parts(made: list[VariableBatchKeyedJaggedTensor], peers: list[torchrec.KeyedJaggedTensor]) -> None:
    for one, other in zip(made, peers, strict=True):
        check_same_parts(one, other)
        assert (one.keys(), one.stride(), str(one)) == (other.keys(), other.stride() if other.keys() else 4, str(other))
        assert one.stride_per_key_per_rank() == other.stride_per_key_per_rank()


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
    check_parts(made.split([0, 1, 0, 1]), peer.split([0, 1, 0, 1]))
    check_parts([made.permute([1, 0, 1])], [peer.permute([1, 0, 1])])
    swapped = made.permute([1, 0])
    check_same_parts(swapped, peer.permute([1, 0]))
    assert inverse_of(swapped) == [[2, 1, 0, 0], [0, 0, 1, 0]]
    assert inverse_of(swapped.split([1, 1])[0]) == [[2, 1, 0, 0]]


def test_variable_batch_sizes_without_a_way_back_are_those_of_the_longest_key() -> None:
    made = VariableBatchKeyedJaggedTensor(["a", "b"], EIGHT, None, torch.tensor([2, 1, 5]), None, [1, 2])
    assert (made.stride(), made.inverse_indices_or_none()) == (2, None)
    assert pickle.loads(pickle.dumps(made)).to_dict()["b"].lengths().tolist() == [1, 5]


@pytest.mark.parametrize("given", [[[1, 1], [3, 0]], torch.tensor([[0, 2], [1, 3]], dtype=torch.int32), [[2], [4]]])
def test_batch_sizes_of_each_rank_are_those_that_were_given(given: Any) -> None:
    lengths = torch.tensor([2, 1, 1, 1, 1, 2])[: 2 + int(torch.as_tensor(given)[1].sum())]
    arguments = {"keys": ["a", "b"], "values": torch.arange(int(lengths.sum())), "lengths": lengths}
    peer = torchrec.KeyedJaggedTensor(**arguments, stride_per_key_per_rank=given)
    made = KeyedJaggedTensor(**arguments, stride_per_key_per_rank=given)
    copies = (made, made.to("cpu"), pickle.loads(pickle.dumps(made)), KeyedJaggedTensor.from_torchrec(peer))
    for one in (*copies, pytree.tree_unflatten(*pytree.tree_flatten(made))):
        assert one.stride_per_key_per_rank() == peer.stride_per_key_per_rank()
        assert one.stride_per_key() == one.strides().tolist() == peer.stride_per_key()
        assert one.permute([1]).stride_per_key_per_rank() == peer.permute([1]).stride_per_key_per_rank()
        assert one.split([1, 1])[1].stride_per_key_per_rank() == peer.split([1, 1])[1].stride_per_key_per_rank()
    arguments["lengths"] = torch.tensor([1, int(lengths.sum()) - 1])
    plain, other = KeyedJaggedTensor(**arguments), torchrec.KeyedJaggedTensor(**arguments)
    assert plain.stride_per_key_per_rank() == other.stride_per_key_per_rank() == []


@pytest.mark.parametrize("weighted", [False, True])
def test_features_of_different_batch_sizes_are_of_a_variable_batch(weighted: bool) -> None:
    weights = torch.rand(8) if weighted else None
    lengths = {"a": torch.tensor([3, 5]), "b": torch.tensor([0, 7, 1]), "c": torch.tensor([8])}
    made = KeyedJaggedTensor.from_jt_dict({key: JaggedTensor(EIGHT, weights, of) for key, of in lengths.items()})
    peer = torchrec.KeyedJaggedTensor.from_jt_dict(
        {key: torchrec.JaggedTensor(EIGHT, weights, of) for key, of in lengths.items()}
    )
    assert isinstance(made, VariableBatchKeyedJaggedTensor)
    made.validate()
    check_same_parts(made, peer)
    assert (made.keys(), made.stride(), made.stride_per_key()) == (peer.keys(), peer.stride(), peer.stride_per_key())
    assert made.stride_per_key_per_rank() == peer.stride_per_key_per_rank()
    assert str(made) == str(peer)


def test_text_of_values_of_any_kind_is_torchrecs() -> None:
    texts = [
        [kind(torch.arange(6.0).view(3, 2), lengths=torch.tensor([1, 0, 2])), kind(EIGHT, EIGHT / 3, torch.tensor([8]))]
        for kind in (JaggedTensor, torchrec.JaggedTensor)
    ]
    assert [*map(str, texts[0])] == [*map(str, texts[1])]
    assert str(JaggedTensor.empty()) == str(torchrec.JaggedTensor.empty())
    assert str(KeyedJaggedTensor.empty()) == str(torchrec.KeyedJaggedTensor.empty())
    assert str(KeyedJaggedTensor.from_torchrec(variable())) == str(variable())


@pytest.mark.parametrize("dtype", [None, torch.float64, torch.float16])
def test_only_weights_take_the_dtype_of_a_copy(dtype: torch.dtype | None) -> None:
    arguments = {"values": EIGHT, "weights": torch.rand(8), "lengths": torch.tensor([2, 1, 1, 1, 3])}
    sizes = {"stride_per_key_per_rank": [[2], [3]]}
    variable_one = KeyedJaggedTensor(["a", "b"], **arguments, **sizes)
    expected = torchrec.KeyedJaggedTensor(["a", "b"], **arguments, **sizes).to(torch.device("cpu"), True, dtype)
    whole = KeyedJaggedTensor(["a"], **arguments)
    for made in (variable_one, whole, whole.split_by_key()):
        moved = made.to(torch.device("cpu"), non_blocking=True, dtype=dtype)
        assert type(moved) is type(made)
        assert moved.values().dtype == expected.values().dtype == torch.int64
        assert moved.weights().dtype == expected.weights().dtype == (dtype or torch.float32)
        assert torch.equal(moved.weights(), expected.weights())
        assert moved["a"].weights().dtype == moved.weights().dtype
        assert made.weights().dtype == torch.float32
    assert KeyedJaggedTensor(["a"], EIGHT, lengths=EIGHT[:1]).to("cpu", dtype=dtype).weights_or_none() is None


def test_parts_have_the_batch_size_of_the_whole() -> None:
    peer = torchrec.KeyedJaggedTensor(["a", "b"], EIGHT, lengths=torch.tensor([2, 1, 1, 1, 1, 2]))
    uneven = torchrec.KeyedJaggedTensor(
        ["a", "b"], EIGHT, lengths=torch.tensor([2, 1, 1, 1, 1, 1, 1]), stride_per_key_per_rank=[[3], [4]]
    )
    for whole, batch in ((peer, 3), (uneven, 4)):
        made = KeyedJaggedTensor.from_torchrec(whole)
        assert whole.stride() == batch  # from here on its parts know it
        for segments in ([0, 2], [1, 0, 1]):
            for part, other in zip(made.split(segments), whole.split(segments), strict=True):
                taken = KeyedJaggedTensor.from_torchrec(other)
                rebuilt = pytree.tree_unflatten(*pytree.tree_flatten(part))
                all_of = (other, part, taken, rebuilt, part.to("cpu"), pickle.loads(pickle.dumps(part)))
                assert [one.stride() for one in all_of] == [batch] * len(all_of)
                assert part.stride_per_key() == other.stride_per_key()
    first, second = KeyedJaggedTensor.from_torchrec(peer).split([0, 2])
    assert KeyedJaggedTensor.concat([first, first]).stride() == KeyedJaggedTensor.concat([first, second]).stride() == 3


def test_one_that_moves_has_all_of_its_parts_there() -> None:
    weighted = KeyedJaggedTensor(["w"], EIGHT, torch.ones(8), offsets=torch.tensor([0, 3, 3, 8]))
    for made in (weighted, weighted["w"], KeyedJaggedTensor.from_torchrec(variable())):
        moved = made.to("meta")
        leaves = [leaf for leaf in pytree.tree_leaves(moved) if leaf is not None]
        if isinstance(moved, VariableBatchKeyedJaggedTensor):  # batch sizes stay known
            assert moved.stride_per_key() == made.stride_per_key()
            leaves = [leaf for leaf in leaves if leaf is not moved._strides]
        assert {leaf.device.type for leaf in leaves} == {"meta"}
        assert made.device().type == "cpu"
    assert weighted.to("meta").keys() == ["w"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_empty_batches_are_taken_in_every_shape_that_torchrec_takes(device: str) -> None:
    none, ids = torch.tensor([], device=device), torch.empty(0, dtype=torch.int64, device=device)
    with EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "a")], device=device) as bags:
        for values, lengths, offsets in ((none, none, None), (ids, None, none), (ids, ids, ids), (none, None, None)):
            for kind in (KeyedJaggedTensor, torchrec.KeyedJaggedTensor):
                batch = kind(["a"], values, lengths=lengths, offsets=offsets)
                assert batch.stride() == 0
                assert batch.keys() == ["a"]
                assert bags(batch).values().shape == (0, 4)
        two = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.zeros(2, 3, dtype=torch.int32, device=device))
        assert two.stride() == 3
        assert bags(two).values().shape == (3, 4)
    assert KeyedJaggedTensor([], none).stride() == torchrec.KeyedJaggedTensor([], none).stride() == 0
    assert KeyedTensor([], [], none).values().numel() == 0


@given(features(min_batch=1))
def test_less_used_methods_return_what_torchrecs_do(drawn: Features) -> None:
    mine, peer = ours(drawn), theirs(drawn)
    assert (mine.length_per_key_or_none(), peer.length_per_key_or_none()) == (None, None)
    mine.sync(), peer.sync()
    for name in ("length_per_key_or_none", "offset_per_key_or_none", "index_per_key", "lengths_offset_per_key"):
        assert getattr(mine, name)() == getattr(peer, name)()
    assert mine.unsync().offset_per_key_or_none() is None
    check_same(mine.flatten_lengths(), peer.flatten_lengths())
    none, nothing = KeyedJaggedTensor.empty_like(mine), torchrec.KeyedJaggedTensor.empty_like(peer)
    check_same_parts(none, nothing)
    assert (none.keys(), none.stride()) == (nothing.keys(), nothing.stride())
    there = KeyedJaggedTensor.empty_like(mine, torch.device("meta"))
    assert (there.device().type, there.values().shape) == ("meta", mine.values().shape)
    check_same(KeyedJaggedTensor.empty_like(mine, torch.device("cpu")).copy_(mine), peer)
    for key, one in mine.to_dict().items():
        other = peer[key]
        for method in ("to_dense_weights", "to_padded_dense_weights"):
            found, expected = getattr(one, method)(), getattr(other, method)()
            assert (found is None) == (expected is None)
            assert found is None or all(map(torch.equal, found, expected))
        dense = one.to_padded_dense()
        weights = None if drawn.weights is None else one.to_padded_dense_weights()
        check_same_parts(JaggedTensor.from_dense_lengths(dense, one.lengths(), weights), other)
        assert JaggedTensor.empty_like(one).values().dtype == one.values().dtype
    with pytest.raises(InputError, match="has no inverse_indices"):
        mine.inverse_indices()
    with pytest.raises(AttributeError, match=r"has no dist_labels: .*give world="):
        mine.dist_labels()
    size = mine.size_in_bytes()
    assert size >= mine.values().nbytes
    assert mine.clear_storage() == size
