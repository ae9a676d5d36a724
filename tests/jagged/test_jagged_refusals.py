"""A jagged or keyed tensor of parts that do not fit is made, or refused without the argument and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.keyed import GROUPS, KEYS, LENGTHS, keyed, tensors
from support.refusals import Refusal, check_refusal
from tierbed.engine.errors import InputError
from tierbed.jagged import (
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    VariableBatchKeyedJaggedTensor,
    multi_remap_to_groups,
    permute_multi_embedding,
)

THREE, EIGHT, INT = torch.arange(3), torch.arange(8), torch.int64


def kjt(**change: Any) -> KeyedJaggedTensor:
    given: dict[str, Any] = {"keys": ["a", "b"], "values": THREE, "lengths": torch.tensor([1, 2]), **change}
    return KeyedJaggedTensor(**given)


def variable(**change: Any) -> VariableBatchKeyedJaggedTensor:
    given: dict[str, Any] = {"lengths": torch.tensor([2, 1, 5]), "stride_per_key": [1, 2], **change}
    return VariableBatchKeyedJaggedTensor(["a", "b"], EIGHT, weights=None, offsets=None, **given)


def inverse(names: list[str], indices: torch.Tensor) -> VariableBatchKeyedJaggedTensor:
    return variable(inverse_indices=(names, indices))


def at(offsets: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b", "c"], THREE, offsets=torch.tensor(offsets))


def kt(**change: Any) -> KeyedTensor:
    given: dict[str, Any] = {"keys": ["a", "b"], "length_per_key": [1, 2], "values": torch.ones(5, 3), **change}
    return KeyedTensor(**given)


def permute(moves: list[list[int]], width: int = 3, in_width: int = 6) -> list[torch.Tensor]:
    widths = torch.tensor([in_width]), torch.tensor([width])
    return permute_multi_embedding([torch.randn(3, 6)], torch.tensor(moves), [width], *widths)


def remap(groups: Any, keys: Any = KEYS, lengths: Any = LENGTHS) -> Any:
    return multi_remap_to_groups(keys, lengths, groups)


BOTH = KeyedJaggedTensor(["f1", "f2"], EIGHT, offsets=torch.tensor([0, 2, 2, 3, 4, 5, 8]))
WEIGHTED = KeyedJaggedTensor(["w"], EIGHT, torch.ones(8), offsets=torch.tensor([0, 3, 3, 8]))
OTHER = KeyedJaggedTensor(["o"], EIGHT, lengths=torch.tensor([8]))
UNEVEN = VariableBatchKeyedJaggedTensor(["u", "v"], EIGHT, None, torch.tensor([3, 1, 0, 4]), None, [1, 3])
SHORT = JaggedTensor(THREE, offsets=torch.tensor([0, 2]))
KEYED, FEW = keyed(tensors()), keyed(tensors(2))[1]
KJT, KT = KeyedJaggedTensor, KeyedTensor

CONSTRUCTORS: list[Refusal] = [
    (lambda: kjt(keys=["a", "a"]), InputError, "keys=", "'a' occurs 2 times"),
    (lambda: kjt(keys=[]), InputError, "keys []", "2 lengths (or 3 offsets) for 0"),
    (lambda: kjt(values=torch.tensor(3)), InputError, "values:", "a tensor []"),
    (lambda: kjt(weights=torch.ones(2)), InputError, "weights:", "a tensor [2]"),
    (lambda: kjt(weights=torch.ones(3, device="meta")), InputError, "weights", "on meta"),
    (lambda: kjt(lengths=torch.ones(3, dtype=INT)), InputError, "keys ['a', 'b']", "3 lengths (or 4 offsets)"),
    (lambda: kjt(lengths=torch.tensor([1.0, 2])), InputError, "lengths:", "[2] of torch.float32"),
    (lambda: kjt(lengths=torch.tensor([[[1], [2]]])), InputError, "lengths:", "a tensor [1, 2, 1]"),
    (lambda: kjt(lengths=torch.ones(2, dtype=INT, device="meta")), InputError, "lengths", "on meta"),
    (lambda: kjt(lengths=None), InputError, "lengths=", "None and offsets=None"),
    (lambda: kjt(lengths=None, offsets=torch.ones(0, dtype=INT)), InputError, "offsets:", "is empty"),
    (lambda: kjt(offsets=torch.tensor([0, 3])), InputError, "lengths [2]", "offsets [2]"),
    (lambda: kjt(offsets=torch.tensor([0, 2, 3])), InputError, "lengths", "not the differences of"),
    (lambda: variable(stride_per_key=[1, 1]), InputError, "stride_per_key=", "[1, 1]", "3 in all"),
    (lambda: variable(stride_per_key=[4, -1]), InputError, "stride_per_key=", "[4, -1]"),
    (lambda: inverse(["a"], torch.zeros(1, 4, dtype=INT)), InputError, "inverse_indices", "['b']"),
    (lambda: inverse(["a", "b"], torch.zeros(1, 4)), InputError, "inverse_indices:", "", "a tensor [2, batch]"),
    (lambda: inverse(["a", "b"], torch.zeros(2, 1)), InputError, "inverse_indices:", "torch.float32"),
    (lambda: kt(length_per_key=[4, -1]), InputError, "length_per_key=", "[4, -1]"),
    (lambda: kt(length_per_key=[1, 1]), InputError, "values:", "[5, 3]"),
    (lambda: kt(values=torch.ones(2, 3), key_dim=0), InputError, "values:", "[2, 3]", "[3, batch]"),
    (lambda: kt(key_dim=2), InputError, "key_dim=", "2"),
]  # fmt: skip

METHODS: list[Refusal] = [
    *[
        (getattr(at(offsets), read), InputError, argument, value)
        for offsets, argument, value in [
            ([1, 1, 2, 2, 2, 3, 3], "offsets[0]=", "1"),
            ([0, 1, 2, 2, 2, 2, 2], "offsets[-1]=", "2, but there are 3 values"),
            ([0, 1, 3, 3, 2, 3, 3], "lengths[3]=", "-1 of key 'b', sample 1"),
        ]
        for read in ("validate", "to_dict", "length_per_key")
    ],
    (SHORT.to_dense, InputError, "offsets[-1]=", "2, but there are 3 values"),
    (lambda: KJT.concat([BOTH, WEIGHTED]), InputError, "weights:", "{0: False, 1: True}"),
    (lambda: KJT.concat([BOTH, OTHER]), InputError, "kjt_list:", "samples, {"),
    (lambda: KJT.concat([UNEVEN, BOTH]), InputError, "kjt_list:", "variable_stride_per_key()"),
    (lambda: KJT.concat([]), InputError, "kjt_list=", "[]"),
    (lambda: KJT.from_jt_dict({}), InputError, "jt_dict=", "{}"),
    (lambda: BOTH.split([1, 2]), InputError, "segments=", "[1, 2]"),
    (BOTH.weights, InputError, "KeyedJaggedTensor", "has no weights"),
    (lambda: BOTH["f1"].to_padded_dense(-1), InputError, "desired_length=", "-1"),
    (lambda: BOTH["f1"].to_padded_dense(2, 0.5), InputError, "padding_value=", "0.5"),
    *[
        (lambda call=call, length=length: call(length), InputError, named)
        for lengths, named in (([-1, 9], "lengths[0]="), ([9, -1], "lengths[1]="), ([3, 3], "offsets[-1]="))
        for part in [JaggedTensor(EIGHT, torch.ones(8), torch.tensor(lengths))]
        for call in (part.to_padded_dense, part.to_padded_dense_weights)
        for length in (None, 4)
    ],
    (lambda: KT.from_tensor_list(["a"], [torch.ones(2, 3)], key_dim=0, cat_dim=1), InputError, "cat_dim=", "1"),
    (lambda: JaggedTensor.from_dense([]), InputError, "values=", "[]"),
    (lambda: JaggedTensor.from_dense([THREE], [torch.ones(2)]), InputError, "weights:", ""),
    (lambda: BOTH["nobody"], KeyError, "key", "'nobody'"),
    (lambda: BOTH.permute([0, 2]), IndexError, ""),
    (BOTH.inverse_indices, InputError, "inverse_indices"),
    (lambda: remap([["nobody"]]), KeyError, "nobody"),
    (lambda: remap([["a"]], [["a", "b"]], [[3]]), InputError, "lengths"),
    (lambda: remap([["a"]], [["a"]], [[3], [4]]), InputError, "lengths"),
    (lambda: remap([["a"]], [["a"]], [[-3]]), InputError, "-3"),
    (lambda: remap(GROUPS, [*KEYS, ["f6"]], [*LENGTHS, [8]]), InputError, "'f6' occurs 2 times"),
    (lambda: KEYED[0]["nobody"], KeyError, "key", "'nobody'"),
    (lambda: KT.regroup(KEYED, [["f1", "zz"]]), KeyError, "groups:", "'zz'"),
    (lambda: KT.regroup([*KEYED, KEYED[0]], [["f1"]]), InputError, "keyed_tensors:", "['f1', 'f2']"),
    (lambda: KT.regroup([], [["f1"]]), InputError, "keyed_tensors=", "[]"),
    (lambda: KT.regroup([KEYED[0], FEW], [["f1", "f3"]]), InputError, "keyed_tensors", "[5, 2]"),
    (lambda: KT.regroup_as_dict(KEYED, GROUPS, ["a"]), InputError, "keys=", "['a']"),
    (lambda: KT.from_tensor_list([], []), InputError, "tensors:", ""),
    (lambda: permute([[0, 0, 0, 0, 2, 0], [0, 0, 2, 3, 2, 0]], 5), InputError, "permutes:", "columns 2 to 3 of"),
    (lambda: permute([[0, 0, 0, 0, 2, 0]]), InputError, "permutes:", "columns 2 to 3 of output 0"),
    (lambda: permute([[0, 0, 4, 0, 3, 0]]), InputError, "permutes:", "columns 4 to 7"),
    (lambda: permute([[0, 0, 0, 0, 3, 0], [0, 1, 0, 0, 3, 0]]), InputError, "permutes:", "[0, 1, 0, 0, 3, 0]"),
    (lambda: permute([[-1, 0, 0, 0, 3, 0]]), InputError, "permutes:", "[-1, 0, 0, 0, 3, 0]"),
    (lambda: permute([[0, 0, 0, 0, 3, 0]], in_width=5), InputError, "in_lengths", ""),
]  # fmt: skip


@pytest.mark.parametrize("refusal", CONSTRUCTORS + METHODS)
def test_parts_that_do_not_fit_are_refused(refusal: Refusal) -> None:
    check_refusal(refusal)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_of_other_kinds_are_refused_with_the_remedy() -> None:
    bags = [torch.arange(3), torch.arange(2)]
    starts, lengths = torch.tensor([0, 1, 2]), torch.tensor([2, 2, 1])
    gaps = torch.nested.narrow(torch.arange(12).view(3, 4), 1, starts, lengths, layout=torch.jagged)
    jagged = torch.nested.nested_tensor(bags, layout=torch.jagged)
    other = torch.nested.nested_tensor(bags[:1], layout=torch.jagged)
    strided = torch.nested.nested_tensor(bags)
    for call, *named in (
        (lambda: JaggedTensor.from_nested(strided), "values", "layout=torch.jagged"),
        (lambda: JaggedTensor.from_nested(torch.arange(3)), "values", "layout=torch.jagged"),
        (lambda: JaggedTensor.from_nested(gaps), "values", "values.contiguous()"),
        (lambda: JaggedTensor(jagged, lengths=torch.tensor([3, 2])), "values", "from_nested"),
        (lambda: JaggedTensor.from_nested(jagged, other), "weights", "[3]", "[5]"),
        (lambda: KeyedJaggedTensor.from_nested({"a": jagged}, {"b": jagged}), "weights", "['b']"),
    ):
        check_refusal((call, InputError, *named))
    assert JaggedTensor.from_nested(gaps.contiguous()).values().tolist() == [0, 1, 5, 6, 10]


@pytest.mark.parametrize("wrong", [None, 5, "ab", [None], ["a"], torch.float64])
def test_a_value_of_another_type_is_refused_by_the_name_of_its_argument(wrong: Any) -> None:
    calls = {
        "segments": kjt().split,
        "indices": kjt().permute,
        "other": kjt().copy_,
        "kjt": KeyedJaggedTensor.empty_like,
        "jt": JaggedTensor.empty_like,
        "values": lambda given: JaggedTensor.from_dense_lengths(given, THREE),
        "lengths": lambda given: JaggedTensor.from_dense_lengths(torch.ones(3, 2), given),
        "tensors": lambda given: KeyedTensor.from_tensor_list(["a"], given),
        "keyed_tensors": lambda given: KeyedTensor.regroup(given, [["a"]]),
        "groups": lambda given: KeyedTensor.regroup([kt()], given),
    }
    for name, function in [*calls.items(), ("kjt", KeyedJaggedTensor.from_torchrec)]:
        check_refusal((lambda function=function: function(wrong), InputError, name))
