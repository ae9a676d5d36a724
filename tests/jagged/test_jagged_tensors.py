"""A jagged tensor loses, moves or alters a value."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from support.jagged import Features, check_same, check_same_parts, features
from support.scripts import run_script
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, VariableBatchKeyedJaggedTensor

EIGHT, OFFSETS = torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8])


def test_padded_rows_have_the_gradients_of_their_places_and_nan_stays_in_its_own() -> None:
    values = JaggedTensor(torch.tensor([float("nan"), 1.0]), lengths=torch.tensor([1, 0, 1]))
    assert values.to_padded_dense(2, 5.0)[1:].tolist() == [[5, 5], [1, 5]]
    rows = torch.randn(8, 3, requires_grad=True)
    dense = JaggedTensor(rows, lengths=torch.tensor([2, 0, 5, 1])).to_padded_dense(3, 7.0)
    assert dense.shape == (4, 3, 3)
    assert (dense[1] == 7.0).all()
    gradient = torch.randn(4, 3, 3)
    dense.backward(gradient)
    expected = torch.zeros(8, 3)
    for row, place in {0: (0, 0), 1: (0, 1), 2: (2, 0), 3: (2, 1), 4: (2, 2), 7: (3, 0)}.items():
        expected[row] = gradient[place]
    assert rows.grad is not None
    assert torch.equal(rows.grad, expected)


def test_the_example_of_two_features() -> None:
    both = KeyedJaggedTensor(["f1", "f2"], EIGHT, offsets=OFFSETS)
    assert (both.keys(), both.stride(), both.length_per_key()) == (["f1", "f2"], 3, [3, 5])
    assert [bag.tolist() for bag in both["f1"].to_dense()] == [[0, 1], [], [2]]
    assert [bag.tolist() for bag in both["f2"].to_dense()] == [[3], [4], [5, 6, 7]]
    assert both["f2"].to_padded_dense().tolist() == [[3, 0, 0], [4, 0, 0], [5, 6, 7]]
    assert both["f2"].to_padded_dense(2, -1).tolist() == [[3, -1], [4, -1], [5, 6]]
    assert both.permute([1, 0]).values().tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert both.permute([-1, -1]).keys() == ["f2", "f2"]


@pytest.mark.parametrize("kind", [JaggedTensor, KeyedJaggedTensor])
@pytest.mark.parametrize("weighted", [False, True])
def test_an_empty_one_has_no_bag(kind: Any, weighted: bool) -> None:
    empty = kind.empty(weighted, values_dtype=torch.int32, weights_dtype=torch.float16)
    empty.validate()
    assert (empty.values().dtype, empty.offsets().tolist()) == (torch.int32, [0])
    assert (empty.weights_or_none() is not None) == weighted
    if kind is KeyedJaggedTensor:
        assert (empty.keys(), empty.stride(), empty.to_dict(), empty.split([])) == ([], 0, {}, [])
        assert kind.empty(weighted, "cpu", torch.int8, torch.float16, torch.int32).offsets().dtype == torch.int64


@given(features(min_batch=1))
def test_nested_tensors_become_the_same_bags(drawn: Features) -> None:
    def nested(jagged: JaggedTensor, of: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(of, jagged.offsets())

    made = KeyedJaggedTensor(**drawn.arguments())
    parts = made.to_dict()
    values = {key: nested(part, part.values()) for key, part in parts.items()}
    weights = None if drawn.weights is None else {key: nested(part, part.weights()) for key, part in parts.items()}
    check_same(KeyedJaggedTensor.from_nested(values, weights), made)


def containers() -> list[Any]:
    weights, inverse = torch.rand(8), (["b", "a"], torch.tensor([[0, 0, 1], [3, 1, 0]]))
    whole = KeyedJaggedTensor(["a", "b"], EIGHT, weights, offsets=OFFSETS)
    sizes = {"stride_per_key_per_rank": [[3, 1], [1, 1]], "inverse_indices": inverse}
    variable = KeyedJaggedTensor(["a", "b"], EIGHT, offsets=OFFSETS, **sizes)
    jagged = [
        whole,
        whole.sync().split([1, 0, 1])[1],
        whole.split_by_key(),
        whole["b"],
        variable,
        variable.permute([1]),
    ]
    return [*jagged, KeyedJaggedTensor.empty(), KeyedTensor(["a", "b"], [1, 2], torch.rand(3, 4), key_dim=0)]


def structure_and_parts(container: Any) -> tuple[Any, list[Any]]:
    leaves, structure = pytree.tree_flatten(container)
    return structure, [None if leaf is None else leaf.tolist() for leaf in leaves]


@pytest.mark.parametrize("made", containers())
def test_a_copy_of_any_kind_is_the_same(made: Any) -> None:
    deep = copy.deepcopy(made)
    copies = [pickle.loads(pickle.dumps(made, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for again in (*copies, deep, copy.copy(made), pytree.tree_unflatten(*pytree.tree_flatten(made))):
        assert type(again) is type(made)
        assert structure_and_parts(again) == structure_and_parts(made)
        assert (str(again), repr(again)) == (str(made), repr(made))
    for leaf, other in zip(pytree.tree_leaves(deep), pytree.tree_leaves(made), strict=True):
        assert leaf is None or leaf is not other


def test_a_kjt_that_another_is_copied_into_forgets_the_old_bags() -> None:
    mine = KeyedJaggedTensor(["a", "b"], EIGHT.clone(), offsets=OFFSETS.clone()).sync()
    other = KeyedJaggedTensor(["a", "b"], EIGHT.flip(0), lengths=torch.tensor([4, 2, 1, 1, 0, 0]))
    assert mine.copy_(other) is mine
    check_same(mine, other)
    check_same_parts(mine["b"], other["b"])
    one, two = (KeyedJaggedTensor(["a", "b"], EIGHT, offsets=OFFSETS, stride_per_key=each) for each in ([5, 1], [2, 4]))
    assert one.to_dict()["b"].lengths().tolist() == [3]
    assert one.copy_(two)["b"].lengths().tolist() == [1, 1, 1, 3]


def test_text_of_tensors_without_values_is_the_repr() -> None:
    made = containers()
    for one in made:
        if not isinstance(one, VariableBatchKeyedJaggedTensor):
            assert str(one.to("meta")) == repr(one.to("meta")) != str(one)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert [*map(str, made)] == [*map(repr, made)]


WITHOUT = """
import sys

for name in ("torchrec", "fbgemm_gpu"):
    assert name not in sys.modules
    sys.modules[name] = None  # importing it raises ImportError
import torch
import tierbed.jagged

for name in tierbed.jagged.__all__:
    getattr(tierbed.jagged, name)
features = tierbed.jagged.KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 1, 0, 2]))
assert features["b"].to_padded_dense().tolist() == [[0, 0], [3, 4]]
assert not hasattr(torch.ops.fbgemm, "permute_multi_embedding")
"""


def test_it_needs_neither_torchrec_nor_fbgemm() -> None:
    done = run_script(WITHOUT)
    assert done.returncode == 0, done.stderr
