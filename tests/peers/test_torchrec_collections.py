"""A collection of tables departs from TorchRec's: names, rows, or gradients of rows and weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec.optim
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection as TheirBags
from torchrec import EmbeddingCollection as TheirRows
from torchrec.modules import embedding_configs as theirs
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor as TheirKeyed

import tierbed
from support.jagged import KEYS, features
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


def close(ours: Tensor, other: Tensor) -> None:
    """To 1e-6 of the largest magnitude: a sum may cancel."""
    ours, other = ours.detach(), other.detach()
    assert ours.shape == other.shape
    largest = float(other.abs().max()) if other.numel() else 0.0
    torch.testing.assert_close(ours, other, rtol=0, atol=1e-6 * largest)


@st.composite
def drawn(draw: Any, one_dim: bool = False, weighted: bool | None = False, min_batch: int = 0) -> Any:
    """Tables, and a batch that has their features."""
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
    return tables, draw(features(required=required, ids=IDS, weighted=weighted, min_batch=min_batch))


def weights_of(other: Any) -> dict[str, nn.Parameter]:
    """TorchRec's tables by name."""
    tables = other.embedding_bags if hasattr(other, "embedding_bags") else other.embeddings
    return {name: table.weight for name, table in tables.items()}


def fill(other: Any, ours: TableCollection) -> None:
    """Give TorchRec's tables our rows."""
    for config in ours.configs:
        ids = torch.arange(config.num_embeddings)
        weights_of(other)[config.name].data = ours.embedding_of(config.name).get(ids, config.name)


def check_rows(ours: TableCollection, other: Any) -> None:
    """Rows after a step of SGD of lr 1 are TorchRec's less its gradients."""
    for config in ours.configs:
        weight = weights_of(other)[config.name]
        now = ours.embedding_of(config.name).get(torch.arange(config.num_embeddings), config.name)
        grad = torch.zeros_like(weight) if weight.grad is None else weight.grad.to_dense()
        largest = max(float(grad.abs().max()), float(weight.detach().abs().max()))
        torch.testing.assert_close(now, weight.detach() - grad, rtol=0, atol=2e-6 * largest)


def step(model: TableCollection) -> EagerOptimizer:
    return EagerOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)


def loss_of(values: Tensor) -> Tensor:
    """A loss whose gradient differs for every element."""
    return (values * torch.linspace(0.5, 1.5, values.numel()).view(values.shape)).sum()


@given(
    case=drawn(weighted=None, min_batch=1), mean=st.lists(st.booleans(), min_size=4, max_size=4), takes=st.booleans()
)
def test_pooled_rows_and_their_gradients_are_torchrecs(case: Any, mean: list[bool], takes: bool) -> None:
    weighted = takes and case[1].weights is not None
    pooling = ["MEAN" if one and not weighted else "SUM" for one in mean]  # TorchRec has not both
    tables = [
        EmbeddingBagConfig(**table, pooling=PoolingType(one)) for table, one in zip(case[0], pooling, strict=False)
    ]
    configs = [
        theirs.EmbeddingBagConfig(**table, pooling=theirs.PoolingType(one))
        for table, one in zip(case[0], pooling, strict=False)
    ]
    leaves = [None if case[1].weights is None else case[1].weights.clone().requires_grad_() for _ in range(2)]
    with EmbeddingBagCollection(tables, STORE, is_weighted=weighted) as ours:
        other = TheirBags(configs, is_weighted=weighted)
        fill(other, ours)
        optimizer = step(ours)
        out = ours(KeyedJaggedTensor(**{**case[1].arguments(), "weights": leaves[0]}))
        expected = other(TheirKeyed(**{**case[1].arguments(), "weights": leaves[1]}))
        assert (out.keys(), out.length_per_key()) == (expected.keys(), expected.length_per_key())
        close(out.values(), expected.values())
        loss_of(out.values()).backward()
        loss_of(expected.values()).backward()
        optimizer.step()
        check_rows(ours, other)
        if weighted:
            close(leaves[0].grad, leaves[1].grad)
        elif leaves[0] is not None:
            assert leaves[0].grad is None  # weights that nothing takes have no gradient


@given(case=drawn(one_dim=True, min_batch=1), need=st.booleans())  # TorchRec fails without a sample
def test_rows_of_ids_and_their_gradients_are_torchrecs(case: Any, need: bool) -> None:
    given = case[1].arguments()
    with EmbeddingCollection([EmbeddingConfig(**table) for table in case[0]], STORE, need_indices=need) as ours:
        other = TheirRows([theirs.EmbeddingConfig(**table) for table in case[0]], need_indices=need)
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
            loss, their_loss = loss + loss_of(one.values()), their_loss + loss_of(expected[name].values())
        if loss.requires_grad:
            loss.backward()
            their_loss.backward()
            optimizer.step()
        check_rows(ours, other)


@given(case=drawn(min_batch=1))
def test_torchrecs_own_batches_and_configs_are_taken(case: Any) -> None:
    configs = [theirs.EmbeddingBagConfig(**table) for table in case[0]]
    given = case[1].arguments()
    with (
        EmbeddingBagCollection(configs, STORE, name="e") as one,
        EmbeddingBagCollection([EmbeddingBagConfig(**table) for table in case[0]], STORE, name="e") as two,
    ):
        expected = two(KeyedJaggedTensor(**given)).values()
        batches = [TheirKeyed(**given), KeyedJaggedTensor(**given).to_dict(), TheirKeyed(**given).to_dict()]
        assert all(torch.equal(one(batch).values(), expected) for batch in batches)


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
        loss_of(out.values()).backward()
        loss_of(expected.values()).backward()
        optimizer.step()
        check_rows(ours, other)


@pytest.mark.parametrize("name", ["PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB", "LarsSGD", "Adam"])
def test_an_optimizer_of_torchrec_is_refused_with_the_name_of_ours(name: str) -> None:
    ours = f"{'torch' if name == 'Adam' else 'tierbed'}.optim.{name}"
    with EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")], STORE) as bags:
        other = getattr(torchrec.optim, name)(bags.parameters(), lr=0.1)
        with pytest.raises(tierbed.OptimizerError, match=rf"{name} cannot update rows; use {ours}, with the same"):
            EagerOptimizer(other, bags)
