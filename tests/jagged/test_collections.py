"""A collection shares or divides tables or a store wrongly, or trains otherwise in a graph or on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import tierbed
from support.cuda_tables import on_one_device, tables_on
from support.embeddings import contents
from support.graphs import graph_of
from support.refusals import check_refusal
from support.stores import STORES, options
from tierbed import EagerOptimizer
from tierbed.engine.errors import OptionError
from tierbed.engine.ops.cuda.device import Device
from tierbed.jagged import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    Padded,
    PoolingType,
    PositionWeightedModuleCollection,
)
from tierbed.jagged.collections.store_split import BUDGETS, EmbeddingSize, assign_stores, divide_store, format_stores

STORE = tierbed.make_device_mem_store_options()
OTHERS = [pytest.param(store, marks=pytest.mark.slow) for store in STORES if store != "ssd"]
TABLES: list[dict[str, Any]] = [
    {"num_embeddings": 40, "embedding_dim": 4, "name": "t1", "feature_names": ["x", "y"]},
    {"num_embeddings": None, "embedding_dim": 4, "name": "t2", "feature_names": ["z"], "pooling": PoolingType.MEAN},
    {"num_embeddings": 40, "embedding_dim": 2, "name": "t3", "feature_names": ["y"]},
]


def bags(store: Any = STORE, **more: Any) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(**table) for table in TABLES], store, **more)


def batch(seed: int, keys: tuple[str, ...] = ("z", "other", "y", "x"), samples: int = 5) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(keys) * samples,), generator=generator)
    return KeyedJaggedTensor(keys, torch.randint(40, (int(lengths.sum()),), generator=generator), lengths=lengths)


class Model(nn.Module):
    """Bags weighted by position, rows of padded ids, and a layer over both."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.positions = PositionWeightedModuleCollection({"x": 3, "z": 3})
        self.bags = bags(store, is_weighted=True)
        tables = [EmbeddingConfig(40, 3, "history", feature_names=["y"])]
        self.rows = EmbeddingCollection(tables, store, padded={"y": 2})
        torch.manual_seed(0)
        self.layer = nn.Linear(14 + 6, 1)

    def forward(self, features: Any) -> Tensor:
        pooled = self.bags(self.positions(features)).values()
        padded = self.rows(features)["y"]
        assert isinstance(padded, Padded)
        both = torch.cat([pooled, (padded.values * padded.mask[..., None]).flatten(1)], 1)
        out: Tensor = self.layer(both).square().sum()
        return out

    def rows_of(self) -> list[bytes]:
        every = [*self.bags.embeddings.values(), *self.rows.embeddings.values()]
        return [contents(embedding).tobytes() for embedding in every]

    def close(self) -> None:
        self.bags.close()
        self.rows.close()


def optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Of its rows, and of its dense part."""
    rows = [*model.bags.parameters(), *model.rows.parameters()]
    dense = [*model.positions.parameters(), *model.layer.parameters()]
    return [tierbed.optim.RowWiseAdagrad(rows, lr=0.1), torch.optim.SGD(dense, lr=0.01)]


def step(graph: Any, features: Any) -> Tensor:
    loss: Tensor = graph.model(features)
    loss.backward()
    return loss


def in_a_loop(store: Any, place: torch.device | str = "cpu") -> Iterator[Any]:
    model = Model(store).to(place)
    # a GPU's products of matrices have other bits
    model.layer.cpu().register_forward_pre_hook(lambda _, given: (given[0].cpu(),))
    rows, dense = optimizers(model)
    optimizer = EagerOptimizer(rows, model)
    for seed in range(6):
        loss = model(batch(seed).to(place))
        loss.backward()
        optimizer.step()
        dense.step()
        optimizer.zero_grad()
        dense.zero_grad()
        yield loss.item()
    yield model.rows_of()
    model.close()


@pytest.mark.parametrize("store", ["ssd", *OTHERS])
def test_a_graph_trains_collections_as_a_plain_loop_on_every_store(store: str, tmp_path: Path) -> None:
    def at(path: Path) -> Any:
        return options(store, path, budget_mb=0.2) if store in STORES[2:] else options(store, path)

    plain = [*in_a_loop(STORE)]
    assert [*in_a_loop(at(tmp_path / "loop"))] == plain
    model = Model(at(tmp_path / "graph"))
    graph = graph_of(step, *optimizers(model), model=model)
    losses = [loss.item() for loss in graph.run((batch(seed) for seed in range(6)), ahead=8)]
    assert [*losses, model.rows_of()] == plain
    assert not graph.why_recompiled()  # batches of any number of ids share a step
    for embedding in model.bags.embeddings.values():
        assert embedding.metrics()["table"]["prefetch_misses"] == 0
        assert embedding.metrics()["table"]["prefetch_hits"] >= 5
    model.close()


@on_one_device
def test_collections_on_a_gpu_have_the_bits_of_the_cpu(device: Device) -> None:
    expected = [*in_a_loop(STORE)]
    with tables_on(device) as place:
        assert [*in_a_loop(STORE, place)][-1] == expected[-1]


def test_tables_of_one_dim_and_group_share_an_embedding() -> None:
    places = {"a": (4, ""), "b": (4, "slow"), "c": (4, ""), "d": (2, "")}
    tables = [EmbeddingBagConfig(9, dim, name, group=group) for name, (dim, group) in places.items()]
    with EmbeddingBagCollection(tables, STORE, name="e") as made:
        assert [*made.embeddings] == ["e-d4", "e-d4-slow", "e-d2"]
        assert made.embedding_of("a") is made.embedding_of("c") is not made.embedding_of("b")
        assert made.table_location("c") == ("e-d4", 1)
        keys = ["a", "b", "c", "d"]
        features = KeyedJaggedTensor(keys, torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
        rows = made(features)
        assert rows.keys() == keys
        assert torch.equal(rows["c"], made.embedding_of("c").get([2], 1))
        assert torch.equal(rows["d"], made.embedding_of("d").get([3], 0))
        assert not torch.equal(made.embedding_of("a").get([2], 0), made.embedding_of("b").get([2], 0))
        for frozen in "bd":
            made.embedding_of(frozen).requires_grad_(False)
        optimizer = EagerOptimizer(torch.optim.SGD(made.embedding_of("a").parameters(), lr=1.0), made.embedding_of("a"))
        made(features).values().sum().backward()
        optimizer.step()
        assert [made.embedding_of(name).size() for name in "ab"] == [2, 0]


def test_tables_of_one_embedding_have_each_a_pooling_of_their_own() -> None:
    kinds = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
    tables = [EmbeddingBagConfig(9, 4, name, pooling=pooling) for name, pooling in kinds.items()]
    with EmbeddingBagCollection(tables, STORE) as made:
        assert made.embedding_of("sum") is made.embedding_of("mean")
        found = made(KeyedJaggedTensor([*kinds], torch.tensor([1, 2, 1, 2]), lengths=torch.tensor([2, 2])))
        summed, averaged = (made.embedding_of(name).get([1, 2], name) for name in kinds)
        torch.testing.assert_close(found["sum"], summed.sum(0, keepdim=True))
        torch.testing.assert_close(found["mean"], averaged.mean(0, keepdim=True))


def test_new_rows_are_uniform_by_the_number_of_ids() -> None:
    tables = [
        EmbeddingBagConfig(25, 64, "a"), EmbeddingBagConfig(25, 64, "b", weight_init_min=0.5, weight_init_max=0.75),
        EmbeddingBagConfig(None, 64, "c"), EmbeddingBagConfig(25, 64, "e", init_fn=partial(nn.init.constant_, val=3.0)),
        EmbeddingBagConfig(25, 64, "d", initializer=tierbed.make_constant_initializer(3.0)),
    ]  # fmt: skip
    with EmbeddingBagCollection(tables, STORE) as made:
        a, b, c, d, e = (made.embedding_of(name).get(torch.arange(25), name) for name in "abcde")
        assert 0.19 < float(a.abs().max()) <= 0.2
        assert 0.5 <= float(b.min()) < float(b.max()) <= 0.75
        assert 0.04 < float(c.std()) < 0.06
        assert [(one == 3).all() for one in (d, e)] == [True] * 2
        assert made.embedding_of("c").get([2**62], "c").shape == (1, 64)


def test_a_shared_table_is_one_table() -> None:
    with bags() as first:
        tables = [
            EmbeddingConfig(n, 4, name, feature_names=[key]) for n, name, key in ((40, "t1", "w"), (9, "own", "v"))
        ]
        second = EmbeddingCollection(tables, STORE, share=first)
        assert second.embedding_of("t1") is first.embedding_of("t1")
        assert [*second.embeddings] == ["ebc-d4", "ec-d4"]
        features = KeyedJaggedTensor(["w", "v"], torch.tensor([7, 8]), lengths=torch.tensor([1, 1]))
        rows = second(features)["w"]
        assert isinstance(rows, JaggedTensor)
        assert torch.equal(rows.values(), first.embedding_of("t1").get([7], "t1"))
        EmbeddingCollection(tables[:1], share=first).close()


@pytest.mark.parametrize("key_type", [torch.int32, torch.uint64])
def test_a_padded_feature_has_rows_then_zeros(key_type: torch.dtype) -> None:
    tables = [EmbeddingConfig(None, 3, "t", feature_names=["a", "b"])]
    with EmbeddingCollection(tables, STORE, padded={"b": 2}, key_type=key_type) as made:
        features = KeyedJaggedTensor(
            ["b", "a"], torch.tensor([5, 6, 7, 8, 9]).to(key_type), lengths=torch.tensor([3, 0, 1, 1])
        )
        out = made(features)
        assert isinstance(out["b"], Padded)
        assert out["b"].mask.tolist() == [[True, True], [False, False]]
        assert torch.equal(out["b"].values[0], made.embedding_of("t").get([5, 6]))
        assert (out["b"].values[1] == 0).all()
        assert isinstance(out["a"], JaggedTensor)
        assert torch.equal(made(features.to_dict())["b"].values, out["b"].values)
        empty = KeyedJaggedTensor(["b", "a"], torch.empty(0, dtype=key_type), lengths=torch.zeros(4, dtype=torch.int64))
        assert (made(empty)["b"].values == 0).all()


def test_features_apart_are_trained_in_a_graph_as_a_keyed_jagged_tensor() -> None:
    def total(graph: Any, features: Any) -> Tensor:
        found: Tensor = graph.rows(features)["a"].values().square().sum() / 2
        found.backward()
        return found

    tables = [EmbeddingConfig(None, 3, "t", feature_names=["a"])]
    with EmbeddingCollection(tables) as keyed, EmbeddingCollection(tables) as apart:
        sgds = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (keyed, apart)]
        by_batch, by_key = (graph_of(total, sgd, rows=one) for sgd, one in zip(sgds, (keyed, apart), strict=True))
        batches = [batch(seed, ("a", "b")) for seed in range(6)]
        totals = list(by_batch.run([(features,) for features in batches], ahead=2))
        assert totals == [by_key({"a": features["a"]}) for features in batches]
        assert not by_batch.why_recompiled() + by_key.why_recompiled()
        assert keyed.embedding_of("t").size() > 0
        assert torch.equal(*(made.embedding_of("t").get(torch.arange(40)) for made in (keyed, apart)))


def test_position_weights_begin_at_one_and_learn() -> None:
    positions = PositionWeightedModuleCollection({"b": 2, "a": 3})
    features = KeyedJaggedTensor(["a", "c", "b"], torch.arange(6), lengths=torch.tensor([3, 0, 1, 0, 2, 0]))
    assert positions(features).weights().tolist() == [1] * 6
    with torch.no_grad():
        positions.position_weights["b"].copy_(torch.tensor([1.0, 2]))
        positions.position_weights["a"].copy_(torch.tensor([3.0, 4, 5]))
    weighted = positions(features)
    assert weighted.weights().tolist() == [3, 4, 5, 1, 1, 2]
    weighted.weights().sum().backward()
    assert [one.grad.tolist() for one in positions.parameters()] == [[1, 1], [1, 1, 1]]


def test_neither_evaluation_nor_no_sample_nor_bad_ids_reach_a_row() -> None:
    """FBGEMM trains row 0 by bad ids."""
    with bags() as made:
        optimizer = EagerOptimizer(torch.optim.SGD(made.parameters(), lr=0.1), made)
        with torch.no_grad():
            made(batch(0))
        made(batch(1))
        assert {embedding.metrics()["table"]["step"] for embedding in made.each()} == {0}
        out = made(batch(0, samples=0))
        assert out.values().shape == (0, 14)
        out.values().sum().backward()
        optimizer.step()
        assert all(embedding.size() == 0 for embedding in made.each())
    with EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", bad_ids="drop")], STORE) as made:
        optimizer = EagerOptimizer(torch.optim.SGD(made.parameters(), lr=1.0), made)
        made(KeyedJaggedTensor(["t"], torch.tensor([9, -1]), lengths=torch.tensor([2]))).values().sum().backward()
        optimizer.step()
        assert made.embedding_of("t").size() == 0
        assert made.embedding_of("t").metrics()["table"]["dropped"] == 2


@pytest.mark.parametrize("pooled", [False, True])
def test_prefetch_of_a_plain_loop_is_met(pooled: bool) -> None:
    tables = [EmbeddingConfig(40, 4, "t1", feature_names=["x", "y"]), EmbeddingConfig(40, 2, "t2", feature_names=["y"])]
    with bags() if pooled else EmbeddingCollection(tables, STORE, padded={"x": 2}) as made:
        optimizer = EagerOptimizer(torch.optim.SGD(made.parameters(), lr=0.1), made)
        for seed in range(3):
            made.prefetch(batch(seed))
        for seed in range(3):
            found = made(batch(seed))
            results = [found] if pooled else found.values()
            sum((one.values if isinstance(one, Padded) else one.values()).sum() for one in results).backward()
            optimizer.step()
            optimizer.zero_grad()
        for embedding in made.embeddings.values():
            assert embedding.metrics()["table"]["prefetch_hits"] == 3


@pytest.mark.parametrize(("key_type", "narrow"), [(torch.int32, torch.int16), (torch.int64, torch.int32)])
def test_ids_of_a_narrower_integer_dtype_are_converted(key_type: torch.dtype, narrow: torch.dtype) -> None:
    with bags(key_type=key_type) as made:
        wide, expected = batch(0), bags()
        fits = KeyedJaggedTensor(wide.keys(), wide.values().to(narrow), offsets=wide.offsets())
        assert torch.equal(made(fits).values(), expected(wide).values())


def test_a_frozen_embedding_names_all_tables_that_it_freezes(caplog: pytest.LogCaptureFixture) -> None:
    tables = [EmbeddingBagConfig(20, 4, "a"), EmbeddingBagConfig(20, 4, "b"), EmbeddingBagConfig(20, 4, "c", group="c")]
    ebc = EmbeddingBagCollection(tables, options("host"))
    ebc.embedding_of("c").requires_grad_(False)
    ebc.requires_grad_(True)
    assert not caplog.records
    ebc.embedding_of("a").requires_grad_(False)
    [said] = [one.message for one in caplog.records]
    assert "freezes all of its tables, a, b. To freeze a single table, put the table" in said
    assert said.endswith("or into a separate group of the collection")


NEEDS = {"ebc-d8": EmbeddingSize(8, 1000), "ebc-d120": EmbeddingSize(120, 3000)}


def cached(path=None, **options):
    return tierbed.make_cached_host_mem_store_options(**{"cache_budget_mb": 100, **options}, persistent_path=path)


def test_memory_goes_by_bytes_and_capacity_by_rows():
    stores = assign_stores(cached(overflow_mb=10, capacity=4000), NEEDS)
    small, large = stores.values()
    assert [small.capacity, large.capacity] == [1000, 3000]
    ratio = large.cache_budget_mb / small.cache_budget_mb
    assert ratio == pytest.approx(large.overflow_mb / small.overflow_mb, rel=1e-4)
    assert ratio == pytest.approx(3 * (4 * 120 + 16) / (4 * 8 + 16), rel=0.5)  # lines have metadata beside rows
    assert small.cache_budget_mb + large.cache_budget_mb == pytest.approx(100, abs=1e-5)


def test_an_unknown_number_of_rows_makes_equal_parts():
    stores = assign_stores(cached(capacity=7), {**NEEDS, "open": EmbeddingSize(64, None)})
    assert [options.cache_budget_mb for options in stores.values()] == [pytest.approx(100 / 3)] * 3
    assert [options.capacity for options in stores.values()] == [2, 2, 2]


def test_one_embedding_has_all_and_a_mapping_gives_each_its_own():
    options = cached(cache_budget_mb="auto")
    assert assign_stores(options, {"ebc": EmbeddingSize(8, None)}) == {"ebc": options}
    assert assign_stores(dict(options), {"ebc": EmbeddingSize(8, None)}) == {"ebc": options}
    assert assign_stores(OWN, NEEDS) == OWN


@given(
    whole=st.floats(0.5, 1e6),
    rows=st.lists(st.integers(1, 10**9), min_size=2, max_size=6),
    capacity=st.integers(6, 10**12),
)
def test_parts_never_add_up_to_more_than_the_whole(whole, rows, capacity):
    needs = {str(i): EmbeddingSize(1 + i, n) for i, n in enumerate(rows)}
    options = cached(cache_budget_mb=whole, overflow_mb=whole, capacity=capacity)
    parts = assign_stores(options, needs).values()
    for name in ("cache_budget_mb", "overflow_mb", "capacity"):
        assert 0 < sum(part[name] for part in parts) <= options[name]
        assert min(part[name] for part in parts) > 0


OWN = {"ebc-d8": cached(), "ebc-d120": tierbed.make_host_mem_store_options()}


@pytest.mark.parametrize(
    "refusal",
    [
        (cached(cache_budget_mb=0.05), "cache_budget_mb=0.05", "2 embeddings (ebc-d8, ebc-d120)"),
        (cached(cache_budget_mb="auto"), "cache_budget_mb='auto'", "2 share"),
        (cached(capacity=1), "capacity=1", "2 embeddings"),
        ({**OWN, "ebc-d80": cached()}, "store_options['ebc-d80']", "did you mean 'ebc-d8'"),
        ({"ebc-d8": cached()}, "none for embedding 'ebc-d120'"),
        ({**OWN, "ebc-d8": {"store": "tape"}}, "store_options['ebc-d8']"),
        (7, "make_device_mem_store_options"),
    ],
)
def test_a_store_that_cannot_be_divided_is_refused(refusal):
    given, *named = refusal
    check_refusal((lambda: assign_stores(given, NEEDS), OptionError, *named))


def ssd(path, **options):
    return tierbed.make_cached_ssd_store_options(64, path, **options)


def test_rocksdb_takes_write_buffers_by_its_part(tmp_path):
    stores = divide_store(ssd(tmp_path, rocksdb_options={"max_background_jobs": 2}), NEEDS)
    most = {}
    for name, part in stores.items():
        embedding = tierbed.MultiTableEmbedding(name, NEEDS[name].dim, torch.float32, torch.int64, None, part)
        embedding.put([1], torch.ones(1, NEEDS[name].dim))
        most[name] = embedding.table_handle().table.stack.bottom.info()["memtable_bytes_max"]
        embedding.close()
    assert sum(most.values()) <= 64 << 20
    assert most["ebc-d120"] > 8 * most["ebc-d8"]
    own = ssd(tmp_path, rocksdb_options="write_buffer_size=1M")
    assert {options.rocksdb_options for options in divide_store(own, NEEDS).values()} == {"write_buffer_size=1M"}


def test_all_that_is_ssd_is_divided(tmp_path):
    options = ssd(tmp_path, host_cache_budget_mb=100, overflow_mb=64, read_mode="direct", rocksdb_cache_mb=0)
    parts = divide_store(options, NEEDS).values()
    for name in BUDGETS:
        assert sum(part[name] for part in parts) == pytest.approx(options[name], abs=1e-5)
    assert {part.persistent_path for part in parts} == {str(tmp_path)}


def test_the_division_is_shown_with_its_sums(tmp_path):
    shown = format_stores(divide_store(cached(capacity=4000, overflow_mb=64), NEEDS)).splitlines()
    assert shown[0].split() == ["embedding", "store", "cache_budget_mb", "overflow_mb", "capacity"]
    assert [line.split()[0] for line in shown[2:4]] == ["ebc-d8", "ebc-d120"]
    assert shown[-1].split() == ["100", "64", "4000"]
    assert "ebc" in format_stores({"ebc": tierbed.make_host_mem_store_options()})
