"""A collection of tables departs from TorchRec's: names, rows, or gradients of rows and weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchrec import EmbeddingBagCollection as TheirBags
from torchrec import EmbeddingCollection as TheirRows
from torchrec.models.dlrm import DLRM
from torchrec.modules import embedding_configs as theirs
from torchrec.modules.regroup import KTRegroupAsDict
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as TheirKeyed

import tierbed
from support.jagged import KEYS, Features, features
from tierbed import EagerOptimizer
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
)
from tierbed.jagged.collections.tables import TableCollection

STORE = tierbed.make_device_mem_store_options()
IDS = 30  # of every batch


def close(ours: Tensor, other: Tensor, terms: float = 1e-30) -> None:
    """To 1e-6 of the largest magnitude, or of `terms`, that of what they are sums of: a sum of these may cancel."""
    ours, other = ours.detach(), other.detach()
    assert ours.shape == other.shape
    largest = float(other.abs().max()) if other.numel() else 0.0
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-6 * max(largest, terms))


@dataclass
class Drawn:
    """Tables, and a batch that has their features."""

    tables: list[dict[str, Any]]
    batch: Features


@st.composite
def drawn(draw: Any, one_dim: bool = False, weighted: bool | None = False, min_batch: int = 0) -> Drawn:
    dims = [draw(st.sampled_from([1, 3, 8]))] if one_dim else [1, 3, 8]
    tables = [
        {
            "num_embeddings": draw(st.integers(IDS, IDS + 9)),
            "embedding_dim": draw(st.sampled_from(dims)),
            "name": f"t{number}",
            "feature_names": draw(st.lists(st.sampled_from(KEYS[:4]), min_size=1, max_size=3, unique=True)),
        }
        for number in range(draw(st.integers(1, 4)))
    ]
    required = sorted({feature for table in tables for feature in table["feature_names"]})
    return Drawn(tables, draw(features(required=required, ids=IDS, weighted=weighted, min_batch=min_batch)))


def fill(other: Any, ours: TableCollection) -> None:
    """Give TorchRec's tables our rows."""
    tables = other.embedding_bags if hasattr(other, "embedding_bags") else other.embeddings
    for config in ours.configs:
        ids = torch.arange(config.num_embeddings)
        tables[config.name].weight.data = ours.embedding_of(config.name).get(ids, config.name)


def check_rows(ours: TableCollection, other: Any) -> None:
    """Rows after a step of SGD of lr 1 are TorchRec's less its gradients."""
    tables = other.embedding_bags if hasattr(other, "embedding_bags") else other.embeddings
    for config in ours.configs:
        weight = tables[config.name].weight.detach()
        ids = torch.arange(config.num_embeddings)
        now = ours.embedding_of(config.name).get(ids, config.name)
        grad = tables[config.name].weight.grad
        grad = torch.zeros_like(weight) if grad is None else grad.to_dense()
        largest = max(float(grad.abs().max()), float(weight.abs().max()))
        torch.testing.assert_close(now, weight - grad, rtol=0, atol=2e-6 * largest)


def step(model: TableCollection) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)


def slopes(values: Tensor) -> Tensor:
    """A gradient that differs for every element."""
    return torch.linspace(0.5, 1.5, values.numel()).view(values.shape)


@given(
    case=drawn(weighted=None, min_batch=1), mean=st.lists(st.booleans(), min_size=4, max_size=4), takes=st.booleans()
)
def test_pooled_rows_and_their_gradients_are_torchrecs(case: Drawn, mean: list[bool], takes: bool) -> None:
    weighted = takes and case.batch.weights is not None
    pooling = [PoolingType.MEAN if one and not weighted else PoolingType.SUM for one in mean]  # TorchRec has not both
    tables = [
        EmbeddingBagConfig(**table, pooling=pooling) for table, pooling in zip(case.tables, pooling, strict=False)
    ]
    given = case.batch.arguments()
    leaf = None if case.batch.weights is None else case.batch.weights.clone().requires_grad_()
    with EmbeddingBagCollection(tables, STORE, is_weighted=weighted) as ours:
        other = TheirBags(
            [
                theirs.EmbeddingBagConfig(**table, pooling=theirs.PoolingType(pooling.value))
                for table, pooling in zip(case.tables, pooling, strict=False)
            ],
            is_weighted=weighted,
        )
        fill(other, ours)
        optimizer = step(ours)
        out = ours(KeyedJaggedTensor(**{**given, "weights": leaf}))
        their_leaf = None if case.batch.weights is None else case.batch.weights.clone().requires_grad_()
        expected = other(TheirKeyed(**{**given, "weights": their_leaf}))
        assert (out.keys(), out.length_per_key()) == (expected.keys(), expected.length_per_key())
        close(out.values(), expected.values())
        (out.values() * slopes(out.values())).sum().backward()
        (expected.values() * slopes(expected.values())).sum().backward()
        optimizer.step()
        check_rows(ours, other)
        if weighted:
            close(leaf.grad, their_leaf.grad)
        elif leaf is not None:
            assert leaf.grad is None  # weights that nothing takes have no gradient


@given(case=drawn(one_dim=True, min_batch=1), need=st.booleans())  # TorchRec fails without a sample
def test_rows_of_ids_and_their_gradients_are_torchrecs(case: Drawn, need: bool) -> None:
    given = case.batch.arguments()
    with EmbeddingCollection([EmbeddingConfig(**table) for table in case.tables], STORE, need_indices=need) as ours:
        other = TheirRows([theirs.EmbeddingConfig(**table) for table in case.tables], need_indices=need)
        fill(other, ours)
        optimizer = step(ours)
        out, expected = ours(KeyedJaggedTensor(**given)), other(TheirKeyed(**given))
        assert [*out] == [*expected]
        loss, their_loss = torch.zeros(()), torch.zeros(())
        for name, one in out.items():
            assert isinstance(one, JaggedTensor)
            close(one.values(), expected[name].values())
            assert torch.equal(one.offsets(), expected[name].offsets())
            if need:
                assert torch.equal(one.weights(), expected[name].weights())
            loss = loss + (one.values() * slopes(one.values())).sum()
            their_loss = their_loss + (expected[name].values() * slopes(expected[name].values())).sum()
        if loss.requires_grad:
            loss.backward()
            their_loss.backward()
            optimizer.step()
        check_rows(ours, other)


@given(case=drawn(min_batch=1))
def test_torchrecs_own_batches_and_configs_are_taken(case: Drawn) -> None:
    configs = [theirs.EmbeddingBagConfig(**table) for table in case.tables]
    given = case.batch.arguments()
    with (
        EmbeddingBagCollection(configs, STORE, name="e") as one,
        EmbeddingBagCollection([EmbeddingBagConfig(**table) for table in case.tables], STORE, name="e") as two,
    ):
        expected = two(KeyedJaggedTensor(**given)).values()
        assert torch.equal(one(TheirKeyed(**given)).values(), expected)
        apart = KeyedJaggedTensor(**given).to_dict()
        assert torch.equal(one(apart).values(), expected)
        assert torch.equal(one(TheirKeyed(**given).to_dict()).values(), expected)


@given(case=drawn(weighted=True), mean=st.booleans())
def test_a_mean_with_weights_has_the_gradients_of_plain_torch(case: Drawn, mean: bool) -> None:
    """TorchRec refuses it, and FBGEMM's gradients are too large by the length of the bag."""
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    tables = [EmbeddingBagConfig(**table, pooling=pooling) for table in case.tables]
    with EmbeddingBagCollection(tables, STORE, is_weighted=True) as ours:
        leaf = case.batch.weights.clone().requires_grad_()
        rows = {
            config.name: ours.embedding_of(config.name)
            .get(torch.arange(config.num_embeddings), ours.table_location(config.name)[1])
            .requires_grad_()
            for config in tables
        }
        ends = [0, *case.batch.lengths.cumsum(0).tolist()]
        columns = []
        for config in tables:
            for feature in config.feature_names:
                at = case.batch.keys.index(feature) * case.batch.batch
                for begin, end in zip(ends[at:], ends[at + 1 : at + 1 + case.batch.batch], strict=False):
                    bag = leaf[begin:end, None] * rows[config.name][case.batch.values[begin:end]]
                    columns.append(bag.sum(0) / (max(end - begin, 1) if mean else 1))
        optimizer = step(ours)
        weights = case.batch.weights.clone().requires_grad_()
        out = ours(KeyedJaggedTensor(**{**case.batch.arguments(), "weights": weights}))
        if not case.batch.batch:
            return
        flat = torch.cat([out[key].flatten() for key in out.keys()])  # noqa: SIM118
        expected = torch.cat(columns)
        close(flat, expected.detach())
        (flat * slopes(flat)).sum().backward()
        (expected * slopes(expected)).sum().backward()
        largest_row = max(float(values.detach().abs().max()) for values in rows.values())
        terms = largest_row * float(slopes(flat).abs().max())
        close(weights.grad, leaf.grad if leaf.grad is not None else torch.zeros_like(leaf), terms)
        optimizer.step()
        for config in tables:
            grad = rows[config.name].grad
            expected_rows = rows[config.name].detach() - (0 if grad is None else grad)
            now = ours.embedding_of(config.name).get(
                torch.arange(config.num_embeddings), ours.table_location(config.name)[1]
            )
            largest = max(1.0, float(expected_rows.abs().max()))
            torch.testing.assert_close(now, expected_rows, rtol=0, atol=2e-6 * largest)


@pytest.mark.parametrize("with_weights", [False, True])
def test_samples_that_share_bags_are_expanded_as_torchrec_does(with_weights: bool) -> None:
    tables: list[dict[str, Any]] = [
        {"num_embeddings": 9, "embedding_dim": 4, "name": "a", "feature_names": ["x", "y"]},
        {"num_embeddings": 9, "embedding_dim": 2, "name": "b", "feature_names": ["y"]},
    ]
    values, lengths = torch.tensor([1, 2, 3, 4, 5, 6, 7]), torch.tensor([2, 1, 0, 3, 1])
    inverse = (["x", "y"], torch.tensor([[0, 1, 0, 1], [2, 0, 1, 2]]))
    weights = torch.rand(7) if with_weights else None
    kjt = TheirKeyed(["x", "y"], values, weights, lengths, stride_per_key_per_rank=[[2], [3]], inverse_indices=inverse)
    with EmbeddingBagCollection([EmbeddingBagConfig(**t) for t in tables], STORE, is_weighted=with_weights) as ours:
        other = TheirBags([theirs.EmbeddingBagConfig(**table) for table in tables], is_weighted=with_weights)
        fill(other, ours)
        optimizer = step(ours)
        for batch in (kjt, KeyedJaggedTensor.from_torchrec(kjt)):
            out, expected = ours(batch), other(kjt)
            close(out.values(), expected.values())
        (out.values() * slopes(out.values())).sum().backward()
        (expected.values() * slopes(expected.values())).sum().backward()
        optimizer.step()
        check_rows(ours, other)


def test_rows_of_variable_batch_sizes_are_torchrecs() -> None:
    tables: list[dict[str, Any]] = [
        {"num_embeddings": 9, "embedding_dim": 4, "name": "a", "feature_names": ["x", "y"]},
    ]
    kjt = TheirKeyed(
        ["x", "y"], torch.arange(7), lengths=torch.tensor([2, 1, 0, 3, 1]), stride_per_key_per_rank=[[2], [3]]
    )
    with EmbeddingCollection([EmbeddingConfig(**table) for table in tables], STORE) as ours:
        other = TheirRows([theirs.EmbeddingConfig(**table) for table in tables])
        fill(other, ours)
        out, expected = ours(kjt), other(kjt)
        assert [*out] == [*expected]
        for name, one in out.items():
            assert isinstance(one, JaggedTensor)
            close(one.values(), expected[name].values())
            assert one.lengths().tolist() == expected[name].lengths().tolist()


def test_models_of_torchrec_take_a_collection() -> None:
    tables = [EmbeddingBagConfig(9, 8, name) for name in ("a", "b")]
    with EmbeddingBagCollection(tables, STORE) as bags:
        model = DLRM(bags, 3, [16, 8], [4, 1])
        batch = KeyedJaggedTensor(["b", "a"], torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
        optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        model(torch.rand(2, 3), batch).sum().backward()
        optimizer.step()
        assert bags.embedding_of("a").size() == 4
        groups = KTRegroupAsDict([["a"], ["b"]], ["one", "two"])([bags(batch)])
        assert torch.equal(groups["two"], bags(batch)["b"])


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("PartialRowWiseAdam", "tierbed.optim.PartialRowWiseAdam"),
        ("LAMB", "tierbed.optim.LAMB"),
        ("PartialRowWiseLAMB", "tierbed.optim.PartialRowWiseLAMB"),
        ("LarsSGD", "tierbed.optim.LarsSGD"),
        ("Adam", "torch.optim.Adam"),
    ],
)
def test_an_optimizer_of_torchrec_is_refused_with_the_name_of_ours(name, ours):
    import torchrec.optim

    embedding = tierbed.MultiTableEmbedding(
        "e", 4, torch.float32, torch.int64, None, tierbed.make_host_mem_store_options()
    )
    theirs = getattr(torchrec.optim, name)(embedding.parameters(), lr=0.1)
    with pytest.raises(tierbed.OptimizerError, match=rf"{name} cannot update rows; use {ours}, which has its formula"):
        tierbed.EagerOptimizer(theirs, embedding)
