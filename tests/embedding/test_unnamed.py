"""Unnamed embeddings take their place in the model as name; rows begin by the name, the seed, or what is stored."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.embeddings import DIM, TABLES, attach, train
from support.graphs import graph_of
from support.ranks import run_ranks
from support.stores import STORES, options
from tierbed import MultiTableEmbedding
from tierbed.distributed import World
from tierbed.embedding.tables import names
from tierbed.jagged import (
    ComputeDevice,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingLocation,
    TableBatchedEmbeddingBags,
)
from tierbed.jagged import KeyedJaggedTensor as Jagged

IDS = torch.arange(5)


def test_a_folder_waits_for_its_name_and_for_an_embedding_that_was_dropped_in_a_cycle(tmp_path) -> None:
    towers = Towers(tmp_path)
    towers.state_dict()
    for use in (lambda: towers(IDS), lambda: towers.user.put(IDS, torch.ones(5, 4)), lambda: towers.user.size()):
        with pytest.raises(tierbed.StoreError, match="give it name="):
            use()
    assert not any(tmp_path.iterdir())
    names.name_embeddings(towers)
    towers(IDS)
    first, second = unnamed(tmp_path, "same"), unnamed(tmp_path, "same")
    first.put(IDS, torch.ones(5, 4))
    first.circle = first  # type: ignore[assignment]
    del first
    assert second.size() == 5  # as by a notebook's cell that is run again


def eager_step(towers: Towers, path: Path) -> None:
    optimizer = tierbed.EagerOptimizer(sgd(towers), towers)
    towers(IDS).backward()
    optimizer.step()


SEEN = {
    "eager": eager_step,
    "graph": lambda towers, path: graph_of(lambda graph, ids: graph.towers(ids).backward(), sgd(towers), towers=towers)(
        IDS
    ),
    "checkpoint": lambda towers, path: tierbed.save_checkpoint(path / "checkpoint", towers, sgd(towers)),
}


def unnamed(path: Path | None = None, name: str | None = None) -> tierbed.MultiTableEmbedding:
    return tierbed.MultiTableEmbedding(name, 4, torch.float32, torch.int64, None, options("host", path))


class Towers(nn.Module):
    def __init__(self, path: Path | None = None, make: Callable[..., Any] = unnamed) -> None:
        super().__init__()
        self.user = make(path)
        self.items = nn.ModuleList([make(path), make(path)])

    def forward(self, ids: Tensor) -> Tensor:
        return sum(one(ids).sum() for one in self.each())  # type: ignore[return-value]

    def each(self) -> list[Any]:
        return [self.user, *self.items]


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1)


@pytest.mark.parametrize("see", SEEN)
@pytest.mark.parametrize("is_stored", [False, True])
def test_an_unnamed_embedding_is_named_by_its_place(tmp_path, see, is_stored) -> None:
    path = tmp_path / "stores" if is_stored else None
    towers, expected = Towers(path), ["user", "items.0", "items.1"]
    before = None if is_stored else [one(IDS).detach() for one in towers.each()]
    SEEN[see](towers, tmp_path)
    assert [one.name for one in towers.each()] == expected
    assert towers.user.metrics()
    rows = [one.get(IDS) for one in towers.each()]
    if before is not None:
        assert see != "checkpoint" or all(map(torch.equal, rows, before))
        return
    assert sorted(one.name for one in (tmp_path / "stores").iterdir() if one.is_dir()) == sorted(expected)
    for one in towers.each():
        one.close()
    again = Towers(path)
    names.name_embeddings(again)
    assert all(torch.equal(one.get(IDS), first) for one, first in zip(again.each(), rows, strict=True))


def test_unnamed_embeddings_begin_unlike_each_other_and_equal_scripts_alike(monkeypatch) -> None:
    runs = []
    for _ in range(2):
        monkeypatch.setitem(names._seed_counters, False, count(1))
        made = [*Towers().each(), *Towers(make=lambda path: tierbed.Embedding(9, 4)).each()]
        runs.append([one(IDS).detach() for one in made])
    flat = torch.stack(runs[0]).flatten(1)
    assert len(flat.unique(dim=0)) == len(flat)
    assert all(map(torch.equal, *runs))
    state = Towers()
    state.user.load_state_dict(state.items[0].state_dict())
    assert torch.equal(state.user(IDS), state.items[0](IDS))
    assert not torch.equal(state.user(IDS), state.items[1](IDS))


def made_by(world: World) -> tuple[str, Tensor]:
    if world.rank:
        tierbed.Embedding(9, 4)(IDS)  # of this rank alone
    shared = tierbed.Embedding(9, 4, world=world)
    return shared.name, shared(IDS).detach()


def test_ranks_agree_on_unnamed_rows_whatever_else_each_has_made() -> None:
    (name, rows), (other_name, other_rows) = run_ranks(2, made_by)
    assert name == other_name
    assert torch.equal(rows, other_rows)


def test_table_batched_modules_without_names_begin_unlike_each_other() -> None:
    specs = [(5, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)]
    rows = []
    for names_of_tables in (None, None, ["a"], ["a"]):
        tbe = TableBatchedEmbeddingBags(specs, table_names=names_of_tables)
        tbe.init_embedding_weights_uniform(-1, 1)
        rows.append(tbe.split_embedding_weights()[0].clone())
    assert not (rows[0] == rows[1]).any()
    assert torch.equal(rows[2], rows[3])


@pytest.mark.parametrize("see", SEEN)
def test_two_embeddings_of_one_name_do_not_meet_in_a_model(tmp_path, see) -> None:
    towers = Towers(make=lambda path: unnamed(path, "same"))
    with pytest.raises(tierbed.TierbedError, match="two embeddings named 'same'"):
        SEEN[see](towers, tmp_path)


def collections(path: Path | None = None, **more: Any) -> nn.ModuleDict:
    made = nn.ModuleDict()
    for tower, table in (("query", "users"), ("candidate", "items")):
        config = EmbeddingBagConfig(name=table, embedding_dim=4, num_embeddings=9, feature_names=[tower])
        made[tower] = EmbeddingBagCollection([config], store_options=options("host", path), **more)
    return made


def rows_of(model: nn.ModuleDict) -> list[Tensor]:
    jagged = Jagged(["query", "candidate"], torch.cat([IDS, IDS]), lengths=torch.ones(10, dtype=torch.int64))
    return [module(jagged)[tower].detach() for tower, module in model.items()]


def test_collections_of_other_tables_begin_with_other_rows_and_names() -> None:
    model = collections()
    query, candidate = rows_of(model)
    assert not (query == candidate).any()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    kept = tierbed.EagerOptimizer(sgd(model), model)
    found = [embedding.name for module in model.values() for embedding in module.each()]
    assert found == ["query.embeddings.ebc-d4", "candidate.embeddings.ebc-d4"]
    assert model.state_dict().keys() == state.keys()
    rows_of(model)
    model.load_state_dict(state)
    assert all(map(torch.equal, rows_of(model), [query, candidate]))
    assert kept.param_groups
    alone = EmbeddingCollection([EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["a"])])
    names.name_embeddings(nn.ModuleDict({"model": alone}))
    assert [one.name for one in alone.each()] == ["ec-d4"]
    with pytest.raises(tierbed.TierbedError, match="named 'same-d4'"):
        names.name_embeddings(collections(name="same"))


def test_a_collection_keeps_the_seed_of_stored_rows_and_its_folder_to_itself(tmp_path) -> None:
    first = collections(tmp_path)["query"]
    [embedding] = first.each()
    embedding.set_spec(seed=5)
    embedding.put(torch.tensor([1]), torch.ones(1, 4))
    rows = embedding.get(IDS)
    first.close()
    model = collections(tmp_path)
    [again] = model["query"].each()
    assert torch.equal(again.get(IDS), rows)
    with pytest.raises(tierbed.StoreError, match=r"call its close\(\)"):
        rows_of(model)


FORTY = torch.arange(40)


def seeded(
    name: str, store: str = "host", path: Path | None = None, trained: int = 0, **more: Any
) -> MultiTableEmbedding:
    made = MultiTableEmbedding(name, DIM, torch.float32, torch.int64, TABLES[:1], options(store, path), **more)
    attach(made, "adagrad")
    if trained:
        train(made, range(trained))
    return made


def rows(made: MultiTableEmbedding) -> bytes:
    return made.get(FORTY).numpy().tobytes()


@pytest.mark.parametrize("store", STORES)
def test_two_names_begin_with_other_rows_and_one_seed_with_equal_ones(tmp_path, store) -> None:
    users, items = (seeded(name, store, tmp_path) for name in ("users", "items"))
    assert not (users.get(FORTY) == items.get(FORTY)).any()
    a, b = (seeded(name, store, tmp_path, seed=5) for name in ("a", "b"))
    assert rows(a) == rows(b)
    assert rows(seeded("users", "device")) == rows(users)


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_store_that_exists_opens_as_it_is(tmp_path, store, caplog) -> None:
    first = seeded("users", store, tmp_path, 5, seed=0)
    expected = rows(first)
    first.save_snapshot("one")
    first.close()
    in_memory = seeded("users", trained=5, seed=0)
    others = [seeded("others", store, tmp_path), seeded("items")]
    assert all(rows(other) != expected for other in others)
    (tmp_path / "others" / "snapshots").mkdir(exist_ok=True)
    (tmp_path / "others" / "snapshots" / "one").symlink_to(tmp_path / "users" / "snapshots" / "one")
    others[0].load_snapshot("one")
    again = seeded("users", store, tmp_path)
    others[1].load_state_dict(in_memory.state_dict())
    assert [rows(made) for made in (again, *others)] == [expected] * 3
    train(again, range(30, 35))
    again.close()
    assert rows(seeded("users", store, tmp_path, seed=0)) != expected  # five more rows are trained
    assert "another seed" not in caplog.text
    seeded("users", store, tmp_path, seed=9).size()
    assert "another seed" in caplog.text


def of_ranks(world: World, path: Path) -> list[bytes]:
    made = seeded("users", "host", path, 5, world=world, seed=0)
    expected = rows(made)
    made.close()
    again = seeded("users", "host", path, world=world)
    assert rows(again) == expected
    return [rows(seeded(name, world=world)) for name in ("users", "items")]


def test_over_ranks_as_in_one_process(tmp_path) -> None:
    (one, two), other = run_ranks(2, of_ranks, tmp_path)
    assert one != two
    assert other == [one, two] == [rows(seeded(name)) for name in ("users", "items")]
