"""TorchRec's modules and models over a collection of ours compute, and train, other numbers than over TorchRec's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection as TheirBags
from torchrec import EmbeddingCollection as TheirRows
from torchrec.models.deepfm import SimpleDeepFMNN
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_tower import EmbeddingTower
from torchrec.modules.feature_processor_ import PositionWeightedModule
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from support.embeddings import make
from support.graphs import compiled_steps, graph_of
from support.stores import options as stored
from tierbed import EagerOptimizer, MultiTableEmbedding
from tierbed.jagged import EmbeddingBagCollection, EmbeddingCollection
from tierbed.jagged import KeyedJaggedTensor as OurBatch

KEYS, ROWS, DIM, BATCH, STEPS = ["f", "g"], 40, 4, 6, 4


def configs(kind: type[Any]) -> list[Any]:
    return [kind(num_embeddings=ROWS, embedding_dim=DIM, name=f"t{key}", feature_names=[key]) for key in KEYS]


def collisions(tables: list[Any]) -> ManagedCollisionCollection:
    """Zero-collision hashing of ids up to 2**20, over the rows of each table."""
    modules = {
        table.name: MCHManagedCollisionModule(
            zch_size=ROWS,
            device=torch.device("cpu"),
            eviction_policy=DistanceLFU_EvictionPolicy(),
            eviction_interval=2,
            input_hash_size=2**20,
        )
        for table in tables
    }
    return ManagedCollisionCollection(modules, tables)


def weighted(bags: Any, _: list[Any]) -> nn.Module:
    processors = {key: PositionWeightedModule(10) for key in KEYS}
    for module in processors.values():
        nn.init.uniform_(module.position_weight, 0.5, 1.5)
    return Alone(FeatureProcessedEmbeddingBagCollection(bags, processors))


class Wide(nn.Module):
    def forward(self, pooled: Any) -> Tensor:
        out: Tensor = pooled.values().sin()
        return out


class Alone(nn.Module):
    """A module of features without a dense part."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        result = self.inner(features)
        if isinstance(result, tuple):  # with the features, which were not asked for
            result = result[0]
        if isinstance(result, dict):
            return torch.cat([result[key].values() for key in KEYS])
        return result if isinstance(result, Tensor) else result.values()


class Sequences(nn.Module):
    """A model of unpooled rows, as TorchRec's sequence models are."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows, self.gru = rows, nn.GRU(DIM, 3, batch_first=True)

    def forward(self, dense: Tensor, features: Any) -> Tensor:
        found = self.rows(features)
        total = torch.stack([found[key].values().sum() for key in KEYS])
        return self.gru(found["f"].to_padded_dense(4))[0].sum((1, 2)) + total.sum() / 10


# of pooled rows?, options of the collection, ids, what is made around a collection of its tables, in a graph?
CASES: dict[str, tuple[bool, dict[str, Any], int, Callable[[Any, list[Any]], nn.Module], bool]] = {
    "position weights": (True, {"is_weighted": True}, ROWS, weighted, False),
    "tower": (True, {}, ROWS, lambda bags, _: Alone(EmbeddingTower(bags, Wide())), False),
    "collisions of bags": (
        True, {}, 2**20, lambda bags, tables: Alone(ManagedCollisionEmbeddingBagCollection(bags, collisions(tables))),
        False,
    ),
    "collisions of rows": (
        False, {}, 2**20, lambda rows, tables: Alone(ManagedCollisionEmbeddingCollection(rows, collisions(tables))),
        False,
    ),
    "DLRM": (True, {}, ROWS, lambda bags, _: DLRM(bags, 3, [4, DIM], [4, 1]), True),
    "SimpleDeepFMNN": (True, {}, ROWS, lambda bags, _: SimpleDeepFMNN(3, bags, 6, 4), False),
    "sequences": (False, {}, ROWS, lambda rows, _: Sequences(rows), True),
}  # fmt: skip


def batches(kind: Any, ids: int) -> list[tuple[Tensor, Any]]:
    random = torch.Generator().manual_seed(7)
    found = []
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (len(KEYS) * BATCH,), generator=random)
        values = torch.randint(ids, (int(lengths.sum()),), generator=random)
        found.append((torch.rand(BATCH, 3, generator=random), kind(KEYS, values, lengths=lengths)))
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_torchrec_makes_around_ours_has_its_numbers(name: str) -> None:
    pools, options, ids, around, in_graph = CASES[name]
    tables = configs(EmbeddingBagConfig if pools else EmbeddingConfig)
    ours = (EmbeddingBagCollection if pools else EmbeddingCollection)(tables, **options)
    theirs = (TheirBags if pools else TheirRows)(tables, **options)
    ours.load_state_dict(theirs.state_dict())
    models = []
    for inner in (ours, theirs):
        torch.manual_seed(3)
        models.append(around(inner, tables))
    model, peer = models
    sgd, peers = (torch.optim.SGD(one.parameters(), lr=0.1) for one in models)
    given = batches(KeyedJaggedTensor if options else OurBatch, ids)  # its feature processors read private attributes

    def step(graph: Any, dense: Tensor, features: Any) -> Tensor:
        out: Tensor = graph.model(dense, features)
        out.square().mean().backward()
        return out

    if in_graph:
        graph = graph_of(step, sgd, model=model)
        found = list(graph.run(given, ahead=2))
        assert compiled_steps(graph) == 1
    else:
        optimizer, found = EagerOptimizer(sgd, model), []
        for one in given:
            found.append(model(*one))
            found[-1].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for out, one in zip(found, batches(KeyedJaggedTensor, ids), strict=True):
        expected = peer(*one)
        expected.square().mean().backward()
        peers.step()
        peers.zero_grad()
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.to_torchrec_state_dict(), dict(theirs.state_dict()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("bags", "rows"), [(TheirBags, TheirRows), (EmbeddingBagCollection, EmbeddingCollection)], ids=["theirs", "ours"]
)
def test_a_collection_of_a_script_of_torchrec_needs_no_other_arguments(bags: Any, rows: Any) -> None:
    tables, sequences, device = configs(EmbeddingBagConfig), configs(EmbeddingConfig), torch.device("cpu")
    module = bags(tables=tables, device=device)
    assert (module.device, module.is_weighted(), module.embedding_bag_configs()) == (device, False, tables)
    module = rows(tables=sequences, device=device, need_indices=True)
    assert (module.need_indices(), module.embedding_dim(), module.embedding_configs()) == (True, DIM, sequences)
    assert module.embedding_names_by_table() == [["f"], ["g"]]


def test_a_collection_without_tables_has_no_columns_and_one_that_is_reset_its_first_rows() -> None:
    features = KeyedJaggedTensor(KEYS, torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 2, 0]))
    assert EmbeddingBagCollection(tables=[])(features).values().shape == (2, 0)
    module = EmbeddingBagCollection(tables=configs(EmbeddingBagConfig))
    before = module(features).values().clone()
    optimizer = EagerOptimizer(torch.optim.SGD(module.parameters(), lr=0.1), module)
    module(features).values().sum().backward()
    optimizer.step()
    assert not torch.equal(module(features).values(), before)
    module.reset_parameters()
    assert torch.equal(module(features).values(), before)


THREE, SAMPLES = ["a", "b", "c"], 5


def summed(rows: MultiTableEmbedding, values: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    return rows(values, None, offsets, pooling="sum", weights=weights)


def drawn(total: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(total)
    place = torch.randint(0, len(THREE) * SAMPLES, (total,), generator=generator)
    weights = torch.rand(total, generator=generator)
    lengths = torch.bincount(place, minlength=len(THREE) * SAMPLES)
    values = torch.randint(0, 50, (total,), generator=generator)
    return KeyedJaggedTensor(list(THREE), values, weights, lengths=lengths)


def test_a_keyed_jagged_tensor_of_any_total_runs_in_one_step(tmp_path: Path, caplog: Any) -> None:
    def build(graph: Any, features: KeyedJaggedTensor, scale: KeyedTensor, *more: JaggedTensor) -> tuple[Any, ...]:
        bags = summed(graph.rows, features.values(), features.lengths(), features.weights_or_none())
        found = bags.view(len(THREE), SAMPLES, -1).transpose(0, 1).reshape(SAMPLES, -1) * scale.values()
        found.square().sum().backward()
        return KeyedTensor(features.keys(), [bags.shape[1]] * len(THREE), found), features, *more

    totals = [0, 40, 300]
    with make(stored("ssd", tmp_path), tables=1) as rows, make(stored("device"), tables=1) as other:
        dim = rows.spec.dim
        scale = KeyedTensor(list(THREE), [dim] * len(THREE), torch.full((SAMPLES, dim * len(THREE)), 0.5))
        graph = graph_of(build, torch.optim.SGD(rows.parameters(), lr=0.1), rows=rows)
        plain = graph_of(
            lambda graph, *flat: build(graph, KeyedJaggedTensor(THREE, *flat), scale)[0].values(),
            torch.optim.SGD(other.parameters(), lr=0.1),
            rows=other,
        )
        apart = [JaggedTensor(torch.arange(total), lengths=torch.tensor([total])) for total in totals]
        given = [(drawn(total), scale, one) for total, one in zip(totals, apart, strict=True)]
        results = list(graph.run(given, ahead=2))
        assert rows.metrics()["table"]["prefetch_hits"] == len(totals)
        for total, (found, returned, one) in zip(totals, results, strict=True):
            features = drawn(total)
            wanted = plain(features.values(), features.weights_or_none(), features.lengths())
            assert torch.equal(found.values(), wanted)
            assert found.keys() == returned.keys() == THREE
            assert torch.equal(returned.values(), features.values())
            assert (one.values().tolist(), one.lengths().tolist()) == ([*range(total)], [total])
    assert compiled_steps(graph) == 1
    assert compiled_steps(plain) == len(totals)
    assert "args__values: int64 [s" in str(graph)
    assert not [record for record in caplog.records if record.name == "tierbed"]
