"""A jagged tensor of parts that do not fit is made, or refused without the argument and the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tierbed.engine.errors import InputError
from tierbed.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor, VariableBatchKeyedJaggedTensor

THREE, EIGHT = torch.arange(3), torch.arange(8)


def raised(make: Callable[[], Any]) -> str:
    with pytest.raises(InputError) as error:
        make()
    return str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keys": ["a", "a"]}, "'a' is there 2 times"),
        ({"keys": "ab"}, "list of strings"),
        ({"keys": ["a", 1]}, "list of strings"),
        ({"values": [0, 1, 2]}, "values: a list"),
        ({"values": torch.tensor(3)}, "values: a tensor []"),
        ({"weights": torch.ones(2)}, "weights: a tensor [2]"),
        ({"weights": torch.ones(3, 1)}, "weights: a tensor [3, 1]"),
        ({"weights": torch.ones(3, device="meta")}, "weights are on meta"),
        ({"lengths": torch.tensor([1, 1, 1])}, "3 lengths, 4 offsets, for 2 keys ['a', 'b']"),
        ({"lengths": torch.tensor([1.0, 2.0])}, "lengths: a tensor [2] of torch.float32"),
        ({"lengths": torch.tensor([[1], [2]])}, "lengths: a tensor [2, 1]"),
        ({"lengths": torch.tensor([True, True])}, "lengths: a tensor [2] of torch.bool"),
        ({"lengths": [1, 2]}, "lengths: a list"),
        ({"lengths": torch.ones(2, dtype=torch.int64, device="meta")}, "lengths are on meta"),
        ({"lengths": None}, "lengths=None and offsets=None"),
        ({"lengths": None, "offsets": torch.tensor([0, 3])}, "1 lengths, 2 offsets, for 2 keys"),
        ({"lengths": None, "offsets": torch.tensor([], dtype=torch.int64)}, "offsets: a tensor [0]"),
        ({"offsets": torch.tensor([0, 3])}, "lengths [2] and offsets [2]"),
        ({"offsets": torch.tensor([0, 2, 3])}, "lengths are not the differences of offsets"),
        ({"keys": []}, "for 0 keys"),
    ],
)
def test_a_wrong_argument_is_refused_when_it_is_given(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"keys": ["a", "b"], "values": THREE, "lengths": torch.tensor([1, 2]), **change}
    assert said in raised(lambda: KeyedJaggedTensor(**given))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"stride_per_key": [1, 1]}, "stride_per_key=[1, 1]"),
        ({"stride_per_key": [3]}, "stride_per_key=[3]"),
        ({"stride_per_key": [4, -1]}, "stride_per_key=[4, -1]"),
        ({"inverse_indices": (["a"], torch.zeros(1, 4, dtype=torch.int64))}, "no row for ['b']"),
        ({"inverse_indices": (["a", "b"], torch.zeros(1, 4))}, "a tensor [2, batch]"),
    ],
)
def test_wrong_variable_batch_sizes_are_refused(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"lengths": torch.tensor([2, 1, 5]), "stride_per_key": [1, 2], **change}
    given |= {"weights": None, "offsets": None}
    assert said in raised(lambda: VariableBatchKeyedJaggedTensor(["a", "b"], EIGHT, **given))


WRONG = [
    ([1, 1, 2, 2, 2, 3, 3], "offsets[0]=1"),
    ([0, 1, 2, 2, 2, 2, 2], "offsets[-1]=2 of 3 values"),
    ([0, 1, 2, 4, 4, 4, 4], "offsets[-1]=4 of 3 values"),
    ([0, 1, 3, 3, 2, 3, 3], "lengths[3]=-1 of key 'b', sample 1"),
]
WITHIN_A_KEY = ([0, 1, 2, 1, 2, 3, 3], "lengths[2]=-1 of key 'b', sample 0")


@pytest.mark.parametrize(
    ("offsets", "said", "read"),
    [(*each, read) for each in WRONG for read in ("validate", "to_dict", "length_per_key")]
    + [(*WITHIN_A_KEY, "validate")],
)
def test_wrong_offsets_are_told_by_their_place_where_they_are_read(offsets: list[int], said: str, read: str) -> None:
    made = KeyedJaggedTensor(["a", "b", "c"], THREE, offsets=torch.tensor(offsets))
    assert said in raised(getattr(made, read))


def test_a_jagged_tensor_with_wrong_offsets_does_not_come_apart() -> None:
    made = JaggedTensor(THREE, offsets=torch.tensor([0, 2]))
    assert "offsets[-1]=2 of 3 values" in raised(made.to_dense)
    assert "offsets[-1]=2 of 3 values" in raised(made.validate)


def test_parts_that_do_not_fit_are_refused() -> None:
    both = KeyedJaggedTensor(["f1", "f2"], EIGHT, offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]))
    weighted = KeyedJaggedTensor(["w"], EIGHT, torch.ones(8), offsets=torch.tensor([0, 3, 3, 8]))
    other = KeyedJaggedTensor(["o"], EIGHT, lengths=torch.tensor([8]))
    assert "weights" in raised(lambda: KeyedJaggedTensor.concat([both, weighted]))
    assert "samples" in raised(lambda: KeyedJaggedTensor.concat([both, other]))
    assert "'f1' is there 2 times" in raised(lambda: KeyedJaggedTensor.concat([both, both]))
    uneven = VariableBatchKeyedJaggedTensor(["u", "v"], EIGHT, None, torch.tensor([3, 1, 0, 4]), None, [1, 3])
    assert "numbers of bags" in raised(lambda: KeyedJaggedTensor.concat([uneven]))
    assert "kjt_list=[]" in raised(lambda: KeyedJaggedTensor.concat([]))
    assert "samples" in raised(lambda: KeyedJaggedTensor.from_jt_dict({"a": both["f1"], "b": other["o"]}))
    assert "use KeyedJaggedTensor.empty" in raised(lambda: KeyedJaggedTensor.from_jt_dict({}))
    assert "sum is 2" in raised(lambda: both.split([1]))
    assert "sum is 2" in raised(lambda: both.split([3, -1]))
    assert "'f2' is there 2 times" in raised(lambda: both.permute([1, 1]))
    assert "no weights" in raised(both.weights)
    assert "desired_length=-1" in raised(lambda: both["f1"].to_padded_dense(-1))
    assert "whole number" in raised(lambda: both["f1"].to_padded_dense(2, 0.5))
    assert "values=[]" in raised(lambda: JaggedTensor.from_dense([]))
    assert "weights" in raised(lambda: JaggedTensor.from_dense([THREE], [torch.ones(2)]))
    with pytest.raises(KeyError, match="nobody"):
        both["nobody"]
    with pytest.raises(TypeError, match="device"):
        both.to(torch.float16)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_of_other_kinds_are_refused_with_the_remedy() -> None:
    bags = [torch.arange(3), torch.arange(2)]
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 2, 1])
    gaps = torch.nested.narrow(torch.arange(12).view(3, 4), 1, starts, lengths, layout=torch.jagged)
    jagged = torch.nested.nested_tensor(bags, layout=torch.jagged)
    other = torch.nested.nested_tensor(bags[:1], layout=torch.jagged)
    assert "layout=torch.jagged" in raised(lambda: JaggedTensor.from_nested(torch.nested.nested_tensor(bags)))
    assert "layout=torch.jagged" in raised(lambda: JaggedTensor.from_nested(torch.arange(3)))
    assert "values.contiguous()" in raised(lambda: JaggedTensor.from_nested(gaps))
    assert JaggedTensor.from_nested(gaps.contiguous()).values().tolist() == [0, 1, 5, 6, 10]
    assert "from_nested" in raised(lambda: JaggedTensor(jagged, lengths=torch.tensor([3, 2])))
    assert "weights: a tensor [3]" in raised(lambda: JaggedTensor.from_nested(jagged, other))
    assert "each key" in raised(lambda: KeyedJaggedTensor.from_nested({"a": jagged}, {"b": jagged}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"keys": ["a", "a"]}, "'a' is there 2 times"),
        ({"length_per_key": [3]}, "length_per_key=[3]"),
        ({"length_per_key": [4, -1]}, "length_per_key=[4, -1]"),
        ({"length_per_key": [1, 1]}, "values: [5, 3]; give a tensor [batch, 2]"),
        ({"values": torch.ones(3)}, "values: [3]"),
        ({"values": None}, "values: NoneType"),
    ],
)
def test_a_keyed_tensor_of_parts_that_do_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    given: dict[str, Any] = {"keys": ["a", "b"], "length_per_key": [1, 2], "values": torch.ones(5, 3), **change}
    assert said in raised(lambda: KeyedTensor(**given))
