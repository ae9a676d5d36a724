"""A graph does not take jagged or keyed tensors, compiles them again, or reads their values while it is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from torch import Tensor, nn

from support.examples import examples
from support.graphs import FEW, graph_of
from support.jagged import Features, check_same_parts, features
from support.refusals import check_refusal
from tierbed import Graph, make_device_mem_store_options
from tierbed.engine.errors import GraphError, InputError
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PositionWeightedModuleCollection,
    VariableBatchKeyedJaggedTensor,
)


def calls(function: Callable[[Any], Any], **modules: nn.Module) -> Graph:
    """A graph whose step is one function of its argument."""

    def build(graph: Any, given: Any) -> Any:
        graph.scale.weight.square().sum().backward()
        return function(given)

    scale = nn.Linear(1, 1, bias=False)
    return graph_of(build, torch.optim.SGD(scale.parameters(), lr=0.1), scale=scale, **modules)


def rebuilt(given: KeyedJaggedTensor) -> tuple[list[Any], Tensor, int]:
    """New ones, made by all that needs no value; one that is padded; and how many samples there are."""
    keys, parts, offsets = given.keys(), (given.values(), given.weights_or_none()), given.offsets()
    again = KeyedJaggedTensor(keys, given.values() + 1, given.weights_or_none(), given.lengths())
    twice = KeyedJaggedTensor([f"second {key}" for key in keys], *parts, offsets=offsets)
    whole = JaggedTensor(*parts, offsets=offsets)
    made = [again, KeyedJaggedTensor.concat([again, twice]), KeyedJaggedTensor.from_jt_dict({"whole": whole}), whole]
    return made, whole.to_padded_dense(3, -1), given.stride()


def check_same(found: tuple[list[Any], Tensor, int], given: KeyedJaggedTensor) -> None:
    made, padded, stride = rebuilt(given)
    for one, other in zip(found[0], made, strict=True):
        assert type(one) is type(other)
        check_same_parts(one, other)
        assert isinstance(one, JaggedTensor) or one.keys() == other.keys()
    assert found[0][0].length_per_key() == given.length_per_key()
    assert torch.equal(found[1], padded)
    assert found[2] == stride


@given(features(keys=["user", "item", "shop"], min_batch=2))
@examples(0.1)
def test_a_step_has_the_bags_of_a_plain_call(drawn: Features) -> None:
    given = KeyedJaggedTensor(**drawn.arguments())
    check_same(calls(rebuilt)(given), given)


@pytest.mark.usefixtures("few_steps_of_their_own")
@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_step_for_many_sizes_has_the_bags_of_each(weighted: bool) -> None:
    graph = calls(lambda given: rebuilt(given)[:2])  # a size as a number would be a step of its own
    generator = torch.Generator().manual_seed(3)
    for count in range(5):
        lengths = torch.randint(1, 5, (4 + 2 * count,), generator=generator)
        total = int(lengths.sum())
        given = KeyedJaggedTensor(["a", "b"], torch.arange(total), torch.rand(total) if weighted else None, lengths)
        check_same((*graph(given), given.stride()), given)
    assert len(graph.why_recompiled()) == FEW


def test_what_was_read_before_a_call_does_not_change_its_signature() -> None:
    graph = calls(lambda given: given.values() + 1)
    first, second = (KeyedJaggedTensor(["a", "b"], torch.arange(5), lengths=torch.tensor([2, 1, 1, 1])) for _ in "12")
    graph(first)
    second.to_dict()
    second.length_per_key()
    second.lengths()
    assert graph(second).tolist() == [1, 2, 3, 4, 5]
    assert graph.why_recompiled() == []


BY_KEY = {
    "kjt['a']": lambda given: given["a"].values(),
    "split": lambda given: given.split([1, 1])[0].values(),
    "permute": lambda given: given.permute([1, 0]).values(),
    "to_dict": lambda given: given.to_dict()["a"].values(),
    "length_per_key": lambda given: given.values() * given.length_per_key()[0],
    "offset_per_key": lambda given: given.values() * given.offset_per_key()[1],
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", BY_KEY)
@pytest.mark.rotated("weighted")
def test_values_of_one_key_are_split_before_a_step(name: str, weighted: bool) -> None:
    graph = calls(BY_KEY[name])
    for lengths in ([2, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 5, 2, 2]):
        values = torch.arange(sum(lengths)) + 1
        given = KeyedJaggedTensor(["a", "b"], values, values / 2 if weighted else None, torch.tensor(lengths))
        assert torch.equal(graph(given), BY_KEY[name](given))
    assert not graph.why_recompiled()


def split(given: Tensor) -> Tensor:
    return KeyedJaggedTensor(["a", "b"], given, lengths=given.new_ones(4))["b"].values()


JAGGED = {"a": JaggedTensor(torch.arange(5), lengths=torch.tensor([2, 3]))}


@pytest.mark.parametrize(
    ("function", "given", "remedy"),
    [
        (split, torch.arange(4), "tierbed.jagged.KeyedJaggedTensor"),
        (lambda given: given["a"].to_dense()[0], JAGGED, "give desired_length"),
        (lambda given: given["a"].to_padded_dense(), JAGGED, "give desired_length"),
        (lambda given: given["a"].validate(), JAGGED, "on the graph's arguments"),
    ],
)
def test_what_needs_values_names_the_remedy(function: Any, given: Any, remedy: str) -> None:
    check_refusal((lambda: calls(function)(given), GraphError, remedy))


def test_variable_batch_sizes_name_the_remedy() -> None:
    inverse = (["t"], torch.tensor([[0, 1, 1]]))
    batch = VariableBatchKeyedJaggedTensor(["t"], torch.arange(3), None, torch.tensor([1, 2]), None, [2], inverse)
    with EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], make_device_mem_store_options()) as bags:
        assert bags(batch).values().shape == (3, 4)
        with pytest.raises(GraphError, match=r"variable batch sizes .* train it in a plain loop"):
            calls(bags)(batch)


def test_a_dict_of_features_that_are_views_of_one_batch_runs_in_one_step() -> None:
    graph = calls(lambda given: (given["a"].values() * 2, given["b"].to_padded_dense(2), given))
    for first, second in ((3, 2), (5, 9), (1, 0), (0, 1), (2, 2)):
        batch = KeyedJaggedTensor(["a", "b"], torch.arange(first + second), lengths=torch.tensor([first, second]))
        given = batch.to_dict()
        doubled, padded, same = graph(given)
        assert torch.equal(doubled, torch.arange(first) * 2)
        assert torch.equal(padded, given["b"].to_padded_dense(2))
        check_same_parts(same["b"], given["b"])
    assert graph.why_recompiled() == []


def test_a_bag_of_more_ids_than_places_fails_the_step_and_not_the_graph() -> None:
    def batch(lengths: list[int]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(["b", "a"], torch.arange(sum(lengths)), lengths=torch.tensor(lengths))

    positions = PositionWeightedModuleCollection({"a": 2})
    graph = calls(lambda given: positions(given).weights().detach(), positions=positions)
    assert graph(batch([3, 1, 2, 1])).tolist() == [1.0] * 7
    with pytest.raises(InputError, match=r"'a': a bag of more than 2 ids; .*raise max_feature_lengths\['a'\]"):
        graph(batch([1, 1, 2, 3]))
    assert graph(batch([5, 1, 2, 2])).tolist() == [1.0] * 10
    assert not graph.why_recompiled()
