"""A table-batched embedding trains otherwise than its formulas say, or depends on where its rows live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import tierbed
from support.graphs import graph_of
from support.tbe import MAP, TABLES, batch, fill, ours
from tierbed.engine.errors import ClosedError, GraphError, InputError, OptionError
from tierbed.engine.table.table import PinnedBatch
from tierbed.jagged import (
    BoundsCheckMode,
    CacheAlgorithm,
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    PoolingMode,
    SSDTableBatchedEmbeddingBags,
    TableBatchedEmbeddingBags,
)

ADAM, ROWWISE = OptimType.ADAM, OptimType.EXACT_ROWWISE_ADAGRAD
IDS, OFFSETS = torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 3, 4])


def one(rows: int = 4, dim: int = 3, **options) -> TableBatchedEmbeddingBags:
    """One table whose rows are counted up."""
    tbe = ours([(rows, dim)], [0], **options)
    fill(tbe, [torch.arange(rows * dim, dtype=torch.float32).reshape(rows, dim) / 10])
    return tbe


PLACES = ["DEVICE", "MANAGED", "MANAGED_CACHING", "MANAGED_CACHING, LFU", "HOST", "SSD", "SSD, ahead", "few SSD sets"]


@pytest.mark.parametrize("optimizer", [pytest.param(ADAM, marks=pytest.mark.slow), ROWWISE])
def test_rows_have_the_same_bits_wherever_they_live(optimizer, tmp_path):
    rows = [train_at(place, optimizer, tmp_path / str(i)) for i, place in enumerate(PLACES)]
    for place, others in zip(PLACES, rows, strict=True):
        for mine, first in zip(others, rows[0], strict=True):
            assert torch.equal(mine, first), place


def train_at(place: str, optimizer: OptimType, path: Path) -> list[torch.Tensor]:
    tables = [(800, 8), (140, 5), (460, 8)]
    location = EmbeddingLocation[place.split(",")[0]] if "SSD" not in place else EmbeddingLocation.HOST
    specs = [(rows, dim, location, ComputeDevice.CPU) for rows, dim in tables]
    options = {"optimizer": optimizer, "learning_rate": 0.1, "seed": 0}
    if place.startswith("SSD"):
        options["store_options"] = tierbed.make_cached_ssd_store_options(0.02, path, shards=2)
    if "LFU" in place:
        options["cache_algorithm"] = CacheAlgorithm.LFU
    torch.manual_seed(0)
    batches = [batch(tables, MAP, [16] * len(MAP), weighted=True) for _ in range(16)]
    if place.startswith("few"):
        folder = {"ssd_storage_directory": str(path), "ssd_uniform_init_lower": -1.0, "ssd_uniform_init_upper": 1.0}
        tbe = SSDTableBatchedEmbeddingBags(tables, MAP, cache_sets=1, **folder, **options)
    else:
        tbe = TableBatchedEmbeddingBags(specs, MAP, **options)
    with tbe:
        if not place.startswith("few"):
            tbe.init_embedding_weights_uniform(-1, 1)
        if "ahead" in place:
            for made in batches:
                tbe.prefetch(made.indices, made.offsets)
        for made in batches:
            output = tbe(*made)
            output.backward(output.detach().sin())
        if "ahead" in place:
            assert all(of["table"]["prefetch_hits"] == len(batches) for of in tbe.metrics().values())
        return tbe.split_embedding_weights() + [state for of in tbe.split_optimizer_states() for state in of]


@pytest.mark.parametrize("dims", [[128], [4, 16], [4, 8, 12, 16, 20]], ids=str)
@pytest.mark.parametrize("sets", [1, 3, 9])
@pytest.mark.rotated("sets")
def test_any_number_of_sets_is_a_cache(dims, sets, tmp_path):
    tables = [(90, dim) for dim in dims]
    with SSDTableBatchedEmbeddingBags(tables, None, sets, str(tmp_path), optimizer=OptimType.LAMB) as tbe:
        assert tbe.embedding_specs == tables
        made = batch(tables, range(len(dims)), [8] * len(dims))
        tbe(made.indices, made.offsets).sum().backward()
        capacities = [embedding.metrics()["device"]["capacity"] for embedding in tbe.each()]
        assert min(capacities) >= 64
        assert sum(capacities) > sets * 32 - 64 * len(dims)  # each is a whole number of sets


SMALL = [(4, 4), (9, 4)]
BAD = torch.tensor([1, -1, 3, 4, 2, 9, 8])  # two of each table are no rows: -1 and 4, and 9 beside 4 of the second
BAD_OFFSETS = torch.tensor([0, 2, 4, 5, 7])
GOOD, GOOD_OFFSETS = torch.tensor([1, 3, 2, 8]), torch.tensor([0, 1, 2, 3, 4])


def bounded(mode: BoundsCheckMode, **options) -> TableBatchedEmbeddingBags:
    tbe = ours(SMALL, [0, 1], bounds_check_mode=mode, table_names=["user", "item"], optimizer=ROWWISE, **options)
    torch.manual_seed(0)
    fill(tbe, [torch.rand(rows, dim) for rows, dim in SMALL])
    return tbe


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.NONE])
@pytest.mark.parametrize("mode", [BoundsCheckMode.FATAL, BoundsCheckMode.V2_FATAL])
def test_fatal_raises_before_any_row_changed(mode, pooling):
    tbe = bounded(mode, pooling_mode=pooling)
    before = tbe.split_embedding_weights()
    with pytest.raises(InputError, match="user"):
        tbe(BAD, BAD_OFFSETS)
    tbe(GOOD, GOOD_OFFSETS)
    assert all(map(torch.equal, tbe.split_embedding_weights(), before))


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.MEAN])
@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE, BoundsCheckMode.V2_IGNORE])
def test_dropped_indices_are_like_none(mode, pooling, caplog):
    """FBGEMM reads and trains row 0 in their place."""
    tbe, other = bounded(mode, pooling_mode=pooling), bounded(mode, pooling_mode=pooling)
    for _ in range(3):
        output, wanted = tbe(BAD, BAD_OFFSETS), other(GOOD, GOOD_OFFSETS)
        assert torch.equal(output, wanted)
        for result in (output, wanted):
            result.sum().backward()
    assert all(map(torch.equal, tbe.split_embedding_weights(), other.split_embedding_weights()))
    counted = tbe.metrics()["tbe-d4-host"]["tables"]
    assert counted["user"]["dropped"] == 2 * counted["item"]["dropped"] > 0
    warned = [record for record in caplog.records if "dropped" in record.getMessage()]
    assert len(warned) == (mode is BoundsCheckMode.WARNING)
    assert not warned or "'user', 'item'" in warned[0].getMessage()


def test_without_pooling_a_dropped_index_is_a_row_of_zeros():
    tbe = bounded(BoundsCheckMode.WARNING, pooling_mode=PoolingMode.NONE)
    rows, zeros = tbe.split_embedding_weights(), torch.zeros(4)
    wanted = [rows[0][1], zeros, rows[0][3], zeros, rows[1][2], zeros, rows[1][8]]
    assert torch.equal(tbe(BAD, BAD_OFFSETS), torch.stack(wanted))


def test_unchecked_indices_are_rows():
    tbe = bounded(BoundsCheckMode.NONE, learning_rate=1.0)
    before = tbe.split_embedding_weights()
    tbe(BAD, BAD_OFFSETS).sum().backward()
    embedding = tbe.embedding_of("user")
    assert not torch.equal(embedding.get([-1, 4], "user"), torch.zeros(2, 4))
    assert embedding.size() == 13 + 3
    assert torch.equal(tbe.split_embedding_weights()[0][0], before[0][0])


def test_the_gradient_of_weights_is_computed_only_where_it_is_wanted(monkeypatch):
    calls = []
    computed = PinnedBatch.weights_grad
    monkeypatch.setattr(PinnedBatch, "weights_grad", lambda *given: calls.append(1) or computed(*given))
    tbe = one()
    tbe(IDS, OFFSETS, torch.ones(4)).sum().backward()
    assert not calls
    weights = torch.ones(4, requires_grad=True)
    tbe(IDS, OFFSETS, weights).sum().backward()
    assert calls == [1]
    assert weights.grad is not None


@pytest.mark.parametrize("way", ["eval", "no_grad", "inference", "frozen"])
def test_evaluation_changes_nothing(way):
    tbe, other = one(optimizer=ADAM), one(optimizer=ADAM)
    weights = torch.ones(4, requires_grad=True)
    for _ in range(3):
        if way in ("no_grad", "inference"):
            with torch.no_grad() if way == "no_grad" else torch.inference_mode():
                assert not tbe(IDS, OFFSETS, weights).requires_grad
            continue
        tbe.train(way != "eval").requires_grad_(way != "frozen")
        tbe(IDS, OFFSETS, weights).sum().backward()
    if way in ("eval", "frozen"):
        assert weights.grad is not None
    assert torch.equal(tbe.split_embedding_weights()[0], other.split_embedding_weights()[0])
    tbe.train().anchor.requires_grad_()
    for trained in (tbe, other):
        trained(IDS, OFFSETS).sum().backward()
    assert tbe.metrics()["tbe-d3-host"]["table"]["step"] == 1
    assert torch.equal(tbe.split_embedding_weights()[0], other.split_embedding_weights()[0])


def test_the_gradient_of_something_else_updates_no_row():
    tbe = one()
    weights = torch.ones(4, requires_grad=True)
    torch.autograd.grad(tbe(IDS, OFFSETS, weights).sum(), [weights])
    with pytest.raises(GraphError, match=r"torch.autograd.grad got the anchor"):
        torch.autograd.grad(tbe(IDS, OFFSETS).sum(), [tbe.anchor])
    assert tbe.metrics()["tbe-d3-host"]["table"]["step"] == 0


def test_two_forwards_are_two_updates():
    tbe = one(optimizer=ROWWISE)
    (tbe(IDS, OFFSETS) + tbe(IDS, OFFSETS)).sum().backward()
    assert tbe.metrics()["tbe-d3-host"]["table"]["step"] == 2
    weights = torch.ones(4, requires_grad=True)
    late = tbe(IDS, OFFSETS, weights)
    tbe(IDS, OFFSETS).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


@pytest.mark.parametrize("pooling", [PoolingMode.SUM, PoolingMode.NONE])
def test_integers_of_32_bits_and_empty_batches(pooling):
    tbe, other = one(pooling_mode=pooling), one(pooling_mode=pooling)
    mine = tbe(IDS.int(), OFFSETS.int())
    assert torch.equal(mine, other(IDS, OFFSETS))
    mine.sum().backward()
    assert mine._base is not None or pooling is PoolingMode.NONE  # a view of what is pooled
    for tbe in (one(pooling_mode=pooling), ours(TABLES, MAP) if pooling is PoolingMode.SUM else one()):
        nothing = tbe(torch.empty(0, dtype=torch.int64), torch.tensor([0]))
        assert nothing.shape[0] == 0
        nothing.sum().backward()


def test_features_of_several_embeddings_stand_in_their_order():
    """Rows without pooling, and bags of variable batch sizes, of tables of one dim in two places."""
    places = [EmbeddingLocation.HOST, EmbeddingLocation.DEVICE]
    specs = [(20, 3, place, ComputeDevice.CPU) for place in places]
    rows = [torch.randn(20, 3), torch.randn(20, 3)]
    indices, offsets = torch.arange(6), torch.tensor([0, 1, 2, 4, 4, 5, 6])
    feature = [0, 0, 1, 1, 0, 0]  # of each index
    tbe = TableBatchedEmbeddingBags(specs, [0, 1, 0], pooling_mode=PoolingMode.NONE, learning_rate=1.0)
    fill(tbe, rows)
    output = tbe(indices, offsets)
    assert torch.equal(output, torch.stack([rows[f][i] for i, f in enumerate(feature)]))
    output.backward(torch.ones_like(output))
    moved = rows[1][[1, 2, 3]] - tbe.split_embedding_weights()[1][[1, 2, 3]]
    torch.testing.assert_close(moved, torch.tensor([0.0, 1, 1])[:, None].expand(3, 3))
    pooled = TableBatchedEmbeddingBags(specs, [0, 1, 0])
    fill(pooled, rows)
    output = pooled(indices, offsets, batch_size_per_feature_per_rank=[[1, 0], [1, 1], [2, 1]])
    bags = [rows[0][0], rows[1][1], torch.zeros(3), rows[0][4], rows[1][2] + rows[1][3], rows[0][5]]
    torch.testing.assert_close(output, torch.cat(bags))


def test_rows_begin_uniform_without_being_written():
    tbe = ours([(50, 8), (30, 8)], [0, 1])
    tbe.init_embedding_weights_uniform(-0.5, 0.25)
    [first, second] = tbe.split_embedding_weights()
    assert -0.5 <= float(first.min()) < -0.3
    assert 0.1 < float(first.max()) <= 0.25
    assert not torch.equal(first[:30], second)
    assert tbe.embedding_of(0).size() == 0
    tbe.init_embedding_weights_uniform(2, 3)  # rows were looked at
    assert tbe.embedding_of(1).size() == 80
    assert all(float(rows.min()) >= 2 for rows in tbe.split_embedding_weights())


@pytest.mark.parametrize(("optimizer", "shape"), [(ROWWISE, (4,)), (OptimType.EXACT_ADAGRAD, (4, 1)), (ADAM, (4, 1))])
def test_a_dim_of_one_is_a_table_as_any(optimizer, shape):
    tbe = one(dim=1, optimizer=optimizer)
    tbe(IDS, OFFSETS).sum().backward()
    assert {tuple(state.shape) for state in tbe.split_optimizer_states()[0]} == {shape}
    assert tuple(tbe.split_embedding_weights()[0].shape) == (4, 1)


def test_rows_on_ssd_are_there_after_a_restart(tmp_path):
    options = {"store_options": tierbed.make_cached_ssd_store_options(1, tmp_path), "optimizer": ADAM}
    with ours([(40, 8)], [0], **options) as tbe:
        tbe.init_embedding_weights_uniform(-1, 1)
        tbe(IDS, OFFSETS).sum().backward()
        rows, states = tbe.split_embedding_weights(), tbe.split_optimizer_states()
    with pytest.raises(ClosedError):
        tbe(IDS, OFFSETS)
    with ours([(40, 8)], [0], **options) as again:
        again.init_embedding_weights_uniform(-1, 1)
        assert torch.equal(again.split_embedding_weights()[0], rows[0])
        assert torch.equal(again.split_optimizer_states()[0][1], states[0][1])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tbe = one()
        self.dense = nn.Linear(3, 1)

    def forward(self, ids, offsets):
        return self.dense(self.tbe(ids, offsets))


def test_optimizers_of_the_dense_part_leave_its_rows_alone():
    model = Model()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for optimizer in (sgd, tierbed.EagerOptimizer(torch.optim.SGD(model.parameters(), 0.1), model)):
        before = model.dense.weight.detach().clone()
        model(IDS, OFFSETS).sum().backward()
        rows = model.tbe.split_embedding_weights()[0]
        optimizer.step()
        assert not torch.equal(model.dense.weight, before)
        assert torch.equal(model.tbe.split_embedding_weights()[0], rows)
    assert model.tbe.metrics()["tbe-d3-host"]["table"]["step"] == 2


def test_without_an_optimizer_a_graph_or_an_eager_optimizer_trains_it():
    def made(optimizer, **numbers):
        tbe = ours(TABLES, MAP, optimizer=optimizer, pooling_mode=PoolingMode.MEAN, **numbers)
        torch.manual_seed(0)
        fill(tbe, [torch.rand(size) for size in TABLES])
        return tbe

    fused = made(OptimType.EXACT_ADAGRAD, learning_rate=0.1, eps=1e-8)
    eager, graphed = made(OptimType.NONE), made(OptimType.NONE)
    optimizer = tierbed.EagerOptimizer(torch.optim.Adagrad(eager.parameters(), lr=0.1, eps=1e-8), eager)

    def step(graph, indices, offsets, weights):
        out = graph.tbe(indices, offsets, weights)
        out.square().sum().backward()
        return out

    graph = graph_of(step, torch.optim.Adagrad(graphed.parameters(), lr=0.1, eps=1e-8), tbe=graphed)
    for _ in range(3):
        indices, offsets, weights = batch(TABLES, MAP, [3] * len(MAP), weighted=True)
        outputs = [fused(indices, offsets, weights), eager(indices, offsets, weights, total_unique_indices=9)]
        for output in outputs:
            output.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for other in (outputs[1], graph(indices, offsets, weights)):
            assert torch.equal(other, outputs[0])
    for other in (eager, graphed):
        assert all(map(torch.equal, other.split_embedding_weights(), fused.split_embedding_weights()))
    assert eager.get_optimizer_state() == []
    with pytest.raises(OptionError, match=r"with OptimType\.NONE, the module has no optimizer"):
        eager.set_learning_rate(0.1)


def test_a_graph_refuses_it_and_names_what_to_use():
    def step(graph, ids, offsets):
        loss = graph.model(ids, offsets).sum()
        loss.backward()
        return loss

    model = Model()
    graph = graph_of(step, torch.optim.SGD(model.dense.parameters(), 0.1), model=model)
    with pytest.raises(GraphError, match=r"TableBatchedEmbeddingBags 'tbe' .*OptimType\.NONE"):
        graph(IDS, OFFSETS)
