"""A collection takes offsets, inverse indices or shared tables that are wrong, and gives rows of other samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tierbed
from tierbed.engine import InputError, OptionError
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PositionWeighted,
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
