"""A collection takes offsets, inverse indices or shared tables that are wrong, and gives rows of other samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierbed
from tierbed import GraphError, InputError, OptionError
from tierbed.jagged import (
    ComputeDevice,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingLocation,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingMode,
    PositionWeighted,
    TableBatchedEmbeddingBags,
    VariableBatchKeyedJaggedTensor,
)

STORE = tierbed.make_device_mem_store_options()
THREE = torch.tensor([1, 2, 3])


@pytest.mark.parametrize("sample", [-1, 1])
def test_a_sample_gets_no_bag_of_another_key(sample: int) -> None:
    inverse = (["x", "y"], torch.tensor([[0, sample], [0, 1]]))
    batch = VariableBatchKeyedJaggedTensor(["x", "y"], THREE, None, torch.tensor([1, 1, 1]), None, [1, 2], inverse)
    message = f"inverse_indices of key 'x', sample 1: {sample}; give the number of one of its 1 bags"
    with pytest.raises(InputError, match=message):
        batch.validate()
    with (
        EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["x", "y"])], STORE) as bags,
        pytest.raises(InputError, match=message),
    ):
        bags(batch)


def test_inverse_indices_are_integers() -> None:
    inverse = (["x"], torch.tensor([[0.0, 0.9]]))
    with pytest.raises(InputError, match=r"inverse_indices: a tensor of torch\.float32"):
        VariableBatchKeyedJaggedTensor(["x"], THREE, None, torch.tensor([1, 2]), None, [2], inverse)


@pytest.mark.parametrize("padded", [None, {"x": 4}])
@pytest.mark.parametrize("offsets", [[0, 5, 3], [1, 1, 3], [0, 1, 2]])
def test_rows_that_are_not_pooled_need_offsets_of_all_their_ids(offsets: list[int], padded: Any) -> None:
    given = {"x": JaggedTensor(THREE, offsets=torch.tensor(offsets))}
    keyed = KeyedJaggedTensor(["x"], THREE, offsets=torch.tensor(offsets))
    tables = [EmbeddingConfig(9, 4, "t", feature_names=["x"])]
    with EmbeddingCollection(tables, STORE, padded=padded) as rows:
        for batch in (given, keyed):
            with pytest.raises(InputError, match=r"offsets"):
                rows(batch)
    with pytest.raises(InputError, match=r"offsets"):
        PositionWeighted({"x": 3})(keyed)


@pytest.mark.parametrize(
    ("config", "collection", "message"),
    [
        ({"initializer": tierbed.make_constant_initializer(3.0)}, {}, "table 't': new rows or bad_ids"),
        ({"weight_init_max": 0.5}, {}, "table 't': new rows or bad_ids"),
        ({"bad_ids": "drop"}, {}, "table 't': new rows or bad_ids"),
        ({}, {"output_dtype": torch.float16}, "output_dtype=torch.float16: the tables of share return torch.float32"),
    ],
)
def test_a_shared_table_is_described_as_where_it_is(config: Any, collection: Any, message: str) -> None:
    with (
        EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], STORE) as first,
        pytest.raises(OptionError, match=message),
    ):
        EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", **config)], share=first, **collection)


@pytest.mark.parametrize("kind", [(EmbeddingBagCollection, EmbeddingBagConfig), (EmbeddingCollection, EmbeddingConfig)])
def test_a_device_is_refused_with_the_remedy(kind: Any) -> None:
    collection, config = kind
    with pytest.raises(OptionError, match=r"device=device.type='meta'.: store_options say where rows are"):
        collection([config(9, 4, "t")], STORE, device=torch.device("meta"))


@pytest.mark.parametrize("kind", [(EmbeddingBagCollection, EmbeddingBagConfig), (EmbeddingCollection, EmbeddingConfig)])
def test_no_two_results_have_one_name(kind: Any) -> None:
    collection, config = kind
    tables = [config(9, 4, "a", feature_names=["x", "x@b"]), config(9, 4, "b", feature_names=["x"])]
    with pytest.raises(OptionError, match="two results would be called 'x@b'"):
        collection(tables, STORE)


def test_a_collection_that_shares_tables_leaves_them_open() -> None:
    tables = [EmbeddingBagConfig(9, 4, "t")]
    batch = KeyedJaggedTensor(["t", "own"], THREE, lengths=torch.tensor([2, 1]))
    with EmbeddingBagCollection(tables, STORE) as first:
        own = EmbeddingBagConfig(9, 4, "own")
        with EmbeddingBagCollection([*tables, own], STORE, name="second", share=first) as second:
            second(batch)
        assert second.embedding_of("own").is_closed
        assert first(batch).values().shape == (1, 4)


def test_variable_batch_sizes_in_a_graph_name_the_remedy() -> None:
    class Step(tierbed.Graph):
        """The sum of all rows."""

        def __init__(self, bags: EmbeddingBagCollection) -> None:
            super().__init__()
            self.bags = bags

        def build(self, features: Any) -> torch.Tensor:
            return self.bags(features).values().sum()

    inverse = (["t"], torch.tensor([[0, 1, 1]]))
    batch = VariableBatchKeyedJaggedTensor(["t"], THREE, None, torch.tensor([1, 2]), None, [2], inverse)
    with (
        EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], STORE) as bags,
        pytest.raises(GraphError, match=r"variable batch sizes .* train it in a plain loop"),
    ):
        Step(bags)(batch)


def test_configs_of_the_other_collection_are_refused() -> None:
    bag, row = EmbeddingBagConfig(9, 4, "t"), EmbeddingConfig(9, 4, "t")
    with pytest.raises(
        OptionError, match="got a EmbeddingBagConfig; give a list of EmbeddingConfig, which pools nothing"
    ):
        EmbeddingCollection([bag], STORE)
    with pytest.raises(OptionError, match="got a EmbeddingConfig; give a list of EmbeddingBagConfig"):
        EmbeddingBagCollection([row], STORE)
    with pytest.raises(OptionError, match="group='a/b'; give printable characters without slashes"):
        EmbeddingBagConfig(9, 4, "t", group="a/b")


def test_a_key_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(KeyError, match="'zz' is no key; there are x, y"):
        KeyedJaggedTensor(["x", "y"], THREE, lengths=torch.tensor([1, 2]))["zz"]
    with pytest.raises(KeyError, match="'zz' is no key; there are x"):
        KeyedTensor(["x"], [1], torch.ones(1, 1))["zz"]


def test_sizes_of_batches_mean_nothing_to_rows_that_are_not_pooled() -> None:
    specs = [(9, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    with (
        TableBatchedEmbeddingBags(specs, pooling_mode=PoolingMode.NONE) as tbe,
        pytest.raises(InputError, match=r"batch_size_per_feature_per_rank: PoolingMode\.NONE"),
    ):
        tbe(THREE, torch.tensor([0, 1, 3]), batch_size_per_feature_per_rank=[[2]])


def test_what_is_no_mapping_is_told() -> None:
    with pytest.raises(OptionError, match=r"padded=3: give \{feature: places\}"):
        EmbeddingCollection([EmbeddingConfig(9, 4, "t")], STORE, padded=3)  # type: ignore[arg-type]
    nested = torch.nested.nested_tensor([[1, 2], [3]], layout=torch.jagged)
    with pytest.raises(InputError, match="values: got a list; give a dict of one nested tensor for each key"):
        KeyedJaggedTensor.from_nested([nested])  # type: ignore[arg-type]
