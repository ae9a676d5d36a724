"""Embeddings without a name take their place in the model as name, begin unlike each other, and never share a name."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tierbed
from support.ranks import run_ranks
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


def options(path: Path | None = None) -> Any:
    return tierbed.make_host_mem_store_options(persistent_path=None if path is None else str(path))


def unnamed(path: Path | None = None, name: str | None = None) -> tierbed.MultiTableEmbedding:
    return tierbed.MultiTableEmbedding(name, 4, torch.float32, torch.int64, None, options(path))


class Towers(nn.Module):
    def __init__(self, path: Path | None = None, make: Callable[..., Any] = unnamed) -> None:
        super().__init__()
        self.user = make(path)
        self.items = nn.ModuleList([make(path), make(path)])

    def forward(self, ids: Tensor) -> Tensor:
        return sum(one(ids).sum() for one in (self.user, *self.items))  # type: ignore[return-value]

    def each(self) -> list[Any]:
        return [self.user, *self.items]


class TowersGraph(tierbed.Graph):
    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers = towers
        self.add_optimizer(torch.optim.SGD(towers.parameters(), lr=0.1))

    def build(self, ids: Tensor) -> Tensor:
        loss = self.towers(ids)
        loss.backward()
        return loss


def see_eager(towers: Towers, path: Path) -> None:
    optimizer = tierbed.EagerOptimizer(torch.optim.SGD(towers.parameters(), lr=0.1), towers)
    towers(IDS).backward()
    optimizer.step()


def see_graph(towers: Towers, path: Path) -> None:
    TowersGraph(towers)(IDS)


def see_checkpoint(towers: Towers, path: Path) -> None:
    tierbed.save_checkpoint(path / "checkpoint", towers, torch.optim.SGD(towers.parameters(), lr=0.1))


SEEN = [see_eager, see_graph, see_checkpoint]


@pytest.mark.parametrize("see", SEEN)
@pytest.mark.parametrize("is_stored", [False, True])
def test_an_unnamed_embedding_is_named_by_its_place(tmp_path: Path, see: Any, is_stored: bool) -> None:
    towers = Towers(tmp_path / "stores" if is_stored else None)
    before = None if is_stored else [one(IDS).detach() for one in towers.each()]
    see(towers, tmp_path)
    expected = ["user", "items.0", "items.1"]
    assert [one.name for one in towers.each()] == expected
    assert towers.user.metrics()
    if before is not None and see is see_checkpoint:
        assert all(torch.equal(one(IDS), rows) for one, rows in zip(towers.each(), before, strict=True))
    if is_stored:
        assert sorted(one.name for one in (tmp_path / "stores").iterdir() if one.is_dir()) == sorted(expected)
        rows = [one.get(IDS) for one in towers.each()]
        for one in towers.each():
            one.close()
        again = Towers(tmp_path / "stores")
        names.name_embeddings(again)
        assert all(torch.equal(one.get(IDS), first) for one, first in zip(again.each(), rows, strict=True))


def test_a_folder_waits_for_its_name(tmp_path: Path) -> None:
    towers = Towers(tmp_path)
    towers.state_dict()
    for use in (lambda: towers(IDS), lambda: towers.user.put(IDS, torch.ones(5, 4)), lambda: towers.user.size()):
        with pytest.raises(tierbed.StoreError, match="give it name="):
            use()
    assert not any(tmp_path.iterdir())
    names.name_embeddings(towers)
    towers(IDS)


def test_unnamed_embeddings_begin_unlike_each_other_and_equal_scripts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for _ in range(2):
        monkeypatch.setitem(names._seeded, False, count(1))
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
    named: dict[str, Any] = {"table_names": ["a"]}
    one, two, three, four = (TableBatchedEmbeddingBags(specs, **more) for more in ({}, {}, named, named))
    for tbe in (one, two, three, four):
        tbe.init_embedding_weights_uniform(-1, 1)
    rows = [tbe.split_embedding_weights()[0].clone() for tbe in (one, two, three, four)]
    assert not (rows[0] == rows[1]).any()
    assert torch.equal(rows[2], rows[3])


@pytest.mark.parametrize("see", SEEN)
def test_two_embeddings_of_one_name_do_not_meet_in_a_model(tmp_path: Path, see: Any) -> None:
    towers = Towers(make=lambda path: unnamed(path, "same"))
    with pytest.raises(tierbed.TierbedError, match="two embeddings named 'same'"):
        see(towers, tmp_path)


def test_two_embeddings_of_one_name_do_not_meet_in_a_folder(tmp_path: Path) -> None:
    first = unnamed(tmp_path, "same")
    first.put(IDS, torch.ones(5, 4))
    second = unnamed(tmp_path, "same")
    with pytest.raises(tierbed.StoreError, match=r"call its close\(\)"):
        second.size()
    assert first.size() == 5
    first.circle = first  # type: ignore[assignment]
    del first
    assert second.size() == 5  # it was dropped, as by a notebook's cell that is run again
    gc.collect()


def collections(named: bool = False, path: Path | None = None) -> nn.Module:
    made = nn.Module()
    for tower, table in (("query", "users"), ("candidate", "items")):
        config = EmbeddingBagConfig(name=table, embedding_dim=4, num_embeddings=9, feature_names=[tower])
        more = {"name": "same"} if named else {}
        made.add_module(tower, EmbeddingBagCollection([config], store_options=options(path), **more))
    return made


def rows_of(model: nn.Module) -> list[Tensor]:
    jagged = Jagged(["query", "candidate"], torch.cat([IDS, IDS]), lengths=torch.ones(10, dtype=torch.int64))
    return [getattr(model, tower)(jagged)[tower].detach() for tower in ("query", "candidate")]


def test_collections_of_other_tables_begin_with_other_rows_and_names() -> None:
    model = collections()
    query, candidate = rows_of(model)
    assert not (query == candidate).any()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = tierbed.EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = [next(iter(getattr(model, tower).each())).name for tower in ("query", "candidate")]
    assert found == ["query.embeddings.ebc-d4", "candidate.embeddings.ebc-d4"]
    assert model.state_dict().keys() == state.keys()
    rows_of(model)
    model.load_state_dict(state)
    assert all(map(torch.equal, rows_of(model), [query, candidate]))
    assert optimizer.param_groups
    alone = EmbeddingCollection([EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["a"])])
    names.name_embeddings(nn.ModuleDict({"model": alone}))
    assert [one.name for one in alone.each()] == ["ec-d4"]


def test_collections_of_one_name_do_not_meet(tmp_path: Path) -> None:
    with pytest.raises(tierbed.TierbedError, match="named 'same-d4'"):
        names.name_embeddings(collections(named=True))
    model = collections(path=tmp_path)
    with pytest.raises(tierbed.StoreError, match=r"call its close\(\)"):
        rows_of(model)


def test_a_collection_keeps_the_seed_of_stored_rows(tmp_path: Path) -> None:
    first = collections(path=tmp_path).get_submodule("query")
    [embedding] = first.each()  # type: ignore[operator]
    embedding.set_spec(seed=5)
    embedding.put(torch.tensor([1]), torch.ones(1, 4))
    rows = embedding.get(IDS)
    first.close()  # type: ignore[operator]
    [again] = collections(path=tmp_path).get_submodule("query").each()  # type: ignore[operator]
    assert torch.equal(again.get(IDS), rows)
