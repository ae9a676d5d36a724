"""A collection takes arguments, batches or shared tables that are wrong, or refuses them without the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tierbed
from support.refusals import Refusal, check_refusal
from tierbed import InputError, OptionError
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
    PositionWeightedModule,
    VariableBatchKeyedJaggedTensor,
)
from tierbed.jagged import PositionWeightedModuleCollection as Positions

STORE = tierbed.make_device_mem_store_options()
THREE = torch.tensor([1, 2, 3])
BAG, ROW = EmbeddingBagConfig(9, 4, "t"), EmbeddingConfig(9, 4, "t")


def config(**change: Any) -> Callable[[], EmbeddingBagConfig]:
    return lambda: EmbeddingBagConfig(**{"num_embeddings": 9, "embedding_dim": 4, "name": "t", **change})


def bags(*arguments: Any, **options: Any) -> Callable[[], EmbeddingBagCollection]:
    return lambda: EmbeddingBagCollection(*arguments, **options)


def rows(*arguments: Any, **options: Any) -> Callable[[], EmbeddingCollection]:
    return lambda: EmbeddingCollection(*arguments, **options)


def keyed(key: str, ids: Any = THREE, lengths: Any = (3,), weights: Any = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([key], torch.as_tensor(ids), weights, lengths=torch.tensor(lengths))


def inverse(*bags_of: list[int]) -> VariableBatchKeyedJaggedTensor:
    """Two keys, of which the first has one bag and the second has two."""
    lengths, indices = torch.tensor([1, 1, 1]), (["x", "y"], torch.tensor(bags_of))
    return VariableBatchKeyedJaggedTensor(["x", "y"], THREE, None, lengths, None, [1, 2], indices if bags_of else None)


# of which two results would be called x@b
TWO = [EmbeddingConfig(9, 4, "a", feature_names=["x", "x@b"]), EmbeddingConfig(9, 4, "b", feature_names=["x"])]

ARGUMENTS: list[Refusal] = [
    (config(num_embeddings=0), OptionError, "table 't': num_embeddings=", "0"),
    (config(embedding_dim=0), OptionError, "table 't': embedding_dim=", "0"),
    (config(name=""), OptionError, "table '': name=", "''"),
    (config(data_type="INT8"), OptionError, "table 't': data_type=", "'INT8'"),
    (config(init_fn=torch.nn.init.eye_), OptionError, "table 't': init_fn=", "eye_", "initializer=make_normal"),
    (config(need_pos=True), OptionError, "table 't': need_pos=", "True", "PositionWeightedModuleCollection"),
    (config(use_virtual_table=True), OptionError, "use_virtual_table=", "True", "num_embeddings=None"),
    (config(feature_names=["x", "x"]), OptionError, "feature_names=", "repeats a name"),
    (config(pooling=PoolingType.NONE), OptionError, "table 't': pooling=", "NONE"),
    (config(weight_init_min=1.0, weight_init_max=0.0), OptionError, "low=", "1.0", "high=0.0"),
    (config(num_embeddings=None, weight_init_min=1.0), OptionError, "table 't'", "weight_init_min and weight_init_max"),
    (config(initializer={"type": "none"}), OptionError, "initializer type", "'none'", "uniform"),
    (config(group="a/b"), OptionError, "group=", "'a/b'"),
    (bags([BAG, BAG], STORE), OptionError, "tables:", "2 have name='t'"),
    (bags([ROW], STORE), OptionError, "tables:", "got a EmbeddingConfig"),
    (rows([BAG], STORE), OptionError, "tables:", "got a EmbeddingBagConfig", "EmbeddingConfig, which pools nothing"),
    (bags([BAG], {"ebc-d8": STORE}), OptionError, "store_options[", "'ebc-d8'", "did you mean 'ebc-d4'"),
    (bags([BAG], STORE, name="a.b"), OptionError, "name=", "'a.b'"),
    (bags([BAG], STORE, state_dtype=torch.float16), OptionError, "state_dtype=", "torch.float16", "sums of squares"),
    (rows([ROW], STORE, padded={"x": 3}), OptionError, "padded[", "'x'"),
    (rows([ROW], STORE, padded={"t": 0}), OptionError, "padded['t']=", "0"),
    (bags([BAG], STORE, device="moon"), OptionError, "device=", "'moon'"),
    (rows(TWO, STORE), OptionError, "feature_names:", "'x@b'"),
    (lambda: Positions({}), OptionError, "max_feature_lengths=", "{}"),
    (lambda: Positions({"x": 0}), OptionError, "max_feature_lengths['x']=", "0"),
    (lambda: Positions({"x.y": 2}), OptionError, "max_feature_lengths: ", "'x.y'"),
]  # fmt: skip


@pytest.mark.parametrize("refusal", ARGUMENTS)
def test_wrong_arguments_are_refused(refusal: Refusal) -> None:
    check_refusal(refusal)


def test_a_shared_table_is_described_as_where_it_is() -> None:
    with EmbeddingBagCollection([BAG], STORE) as first:

        def other(**change: Any) -> Callable[[], EmbeddingBagCollection]:
            return bags([config(**change)()], share=first)

        own, there = [EmbeddingBagConfig(9, 4, "own")], "in the shared collection 'ebc'"
        for call, *named in (
            (other(num_embeddings=8), "table 't': num_embeddings=", "8, but it is 9", there),
            (other(initializer=tierbed.make_constant_initializer(3.0)), "table 't': its initializer", there),
            (other(weight_init_max=0.5), "table 't': its initializer", there),
            (other(bad_ids="drop"), "bad_ids", there),
            (bags([BAG], share=first, output_dtype=torch.float16), "output_dtype=", "float16"),
            (bags([BAG], share=first, key_type=torch.int32), "key_type=", "int32"),
            (bags([BAG], share=first, state_dtype=torch.bfloat16), "state_dtype=", "bfloat16"),
            (bags([BAG], STORE, share=first), "store_options"),
            (bags([BAG, *own], STORE, share=first), "name=", "'ebc-d4'"),
            (rows([ROW], share=first, padded={"t": 3}), "padded=", "{'t': 3}"),
        ):
            check_refusal((call, OptionError, *named))


def test_wrong_batches_are_refused() -> None:
    two = [EmbeddingBagConfig(9, 4, "t", feature_names=["x", "y"])]
    step = "give a bag number >= 0 and < 1"
    weighted, positions = keyed("t", weights=torch.ones(3)), Positions({"t": 2})
    with (
        EmbeddingBagCollection([BAG], STORE) as plain,
        EmbeddingBagCollection([BAG], STORE, is_weighted=True) as weighs,
        EmbeddingBagCollection([BAG], STORE, key_type=torch.int32) as narrow,
        EmbeddingBagCollection(two, STORE) as both,
        EmbeddingCollection([ROW], STORE) as jagged,
    ):
        refusals: list[Refusal] = [
            (lambda: plain(keyed("x")), KeyError, "feature", "'t'", "whose keys are x"),
            (lambda: jagged({"x": keyed("x")["x"]}), KeyError, "feature", "'t'", "whose keys are x"),
            (lambda: plain(THREE), InputError, "features:", "got a Tensor"),
            (lambda: jagged({"t": 3}), InputError, "features:", "got a int"),
            (lambda: plain(keyed("t", [1.0], [1])), InputError, "'ebc'", "torch.float32"),
            (lambda: narrow(keyed("t")), InputError, "is wider than key_type=", "torch.int32", "key_type=torch.int64"),
            (lambda: weighs(keyed("t")), InputError, "is_weighted=", "True"),
            (lambda: plain.embedding_of("u"), InputError, "table of 'ebc'", "'u'", "0 to 0, or by name 't'"),
            (lambda: positions(keyed("x")), KeyError, "feature", "'t'", "whose keys are x"),
            (lambda: positions(keyed("t")), InputError, "feature 't'", "more than 2 ids", "max_feature_lengths['t']"),
            (lambda: positions(weighted), InputError, "features:", "", "without weights"),
            (lambda: PositionWeightedModule(2)(keyed("t")["t"]), InputError, "more than 2 ids"),
            (lambda: plain(keyed("t", [9], [1])), InputError, "9 is no id", "table t", "0 to 8"),
            (lambda: both(inverse()), InputError, "inverse_indices=", "None"),
            *[
                (call, InputError, "inverse_indices of key 'x', sample 1", str(sample), step)
                for sample in (-1, 1)
                for wrong in [inverse([0, sample], [0, 1])]
                for call in (wrong.validate, lambda wrong=wrong: both(wrong))
            ],
        ]  # fmt: skip
        for refusal in refusals:
            check_refusal(refusal)


@pytest.mark.parametrize("padded", [None, {"x": 4}])
@pytest.mark.parametrize("offsets", [[0, 5, 3], [1, 1, 3], [0, 1, 2]])
def test_rows_that_are_not_pooled_need_offsets_of_all_their_ids(offsets: list[int], padded: Any) -> None:
    given = {"x": JaggedTensor(THREE, offsets=torch.tensor(offsets))}
    batch = KeyedJaggedTensor(["x"], THREE, offsets=torch.tensor(offsets))
    with EmbeddingCollection([EmbeddingConfig(9, 4, "t", feature_names=["x"])], STORE, padded=padded) as collection:
        for call, one in ((collection, given), (collection, batch), (Positions({"x": 3}), batch)):
            with pytest.raises(InputError, match="offsets"):
                call(one)


def test_a_collection_that_shares_tables_leaves_them_open() -> None:
    batch = KeyedJaggedTensor(["t", "own"], THREE, lengths=torch.tensor([2, 1]))
    with EmbeddingBagCollection([BAG], STORE) as first:
        own = EmbeddingBagConfig(9, 4, "own")
        with EmbeddingBagCollection([own, BAG], STORE, name="second", share=first) as second:
            second(batch)
            assert [*second.embedding_bags] == ["own", "t"]  # the order of the configs
        assert second.embedding_of("own").is_closed
        assert first(batch).values().shape == (1, 4)
