"""TorchRec's own modules around a collection of ours compute, and train, other numbers than around TorchRec's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection as TheirBags
from torchrec import EmbeddingCollection as TheirRows
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
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tierbed import EagerOptimizer
from tierbed.jagged import EmbeddingBagCollection, EmbeddingCollection
from tierbed.jagged import KeyedJaggedTensor as OurBatch

KEYS, ROWS, BATCH, STEPS = ["f", "g"], 40, 6, 4


def configs(kind: type[Any]) -> list[Any]:
    return [kind(num_embeddings=ROWS, embedding_dim=4, name=f"t{key}", feature_names=[key]) for key in KEYS]


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
    torch.manual_seed(1)
    processors = {key: PositionWeightedModule(10) for key in KEYS}
    for module in processors.values():
        nn.init.uniform_(module.position_weight, 0.5, 1.5)
    return FeatureProcessedEmbeddingBagCollection(bags, processors)


class Wide(nn.Module):
    def forward(self, pooled: Any) -> Tensor:
        out: Tensor = pooled.values().sin()
        return out


CASES: dict[str, tuple[bool, dict[str, Any], int, Callable[[Any, list[Any]], nn.Module]]] = {
    "position weights": (True, {"is_weighted": True}, ROWS, weighted),
    "tower": (True, {}, ROWS, lambda bags, _: EmbeddingTower(bags, Wide())),
    "collisions of bags": (
        True, {}, 2**20, lambda bags, tables: ManagedCollisionEmbeddingBagCollection(bags, collisions(tables)),
    ),
    "collisions of rows": (
        False, {}, 2**20, lambda rows, tables: ManagedCollisionEmbeddingCollection(rows, collisions(tables)),
    ),
}  # fmt: skip


def values_of(result: Any) -> Tensor:
    if isinstance(result, tuple):  # with the features, which were not asked for
        result = result[0]
    if isinstance(result, Tensor):
        return result
    values: Tensor = torch.cat([result[key].values() for key in KEYS]) if isinstance(result, dict) else result.values()
    return values


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_modules_of_torchrec_around_ours_have_their_numbers(case: Any) -> None:
    pools, options, ids, around = case
    config, ours, theirs = (
        (EmbeddingBagConfig, EmbeddingBagCollection, TheirBags)
        if pools
        else (EmbeddingConfig, EmbeddingCollection, TheirRows)
    )
    tables = configs(config)
    inner, other = ours(tables, **options), theirs(tables, **options)
    for table in tables:
        weights = (other.embedding_bags if pools else other.embeddings)[table.name].weight
        weights.data = inner.embedding_of(table.name).get(torch.arange(ROWS), table.name)
    model, peer = around(inner, tables), around(other, tables)
    optimizer = EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    peers = torch.optim.SGD(peer.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        lengths = torch.randint(0, 4, (len(KEYS) * BATCH,), generator=random)
        values = torch.randint(0, ids, (int(lengths.sum()),), generator=random)
        own = KeyedJaggedTensor if options else OurBatch  # its feature processors read private attributes
        found, expected = (
            values_of(one(kind(KEYS, values.clone(), lengths=lengths.clone())))
            for one, kind in ((model, own), (peer, KeyedJaggedTensor))
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        for result, each in ((found, optimizer), (expected, peers)):
            each.zero_grad()
            result.square().sum().backward()
            each.step()


@pytest.mark.parametrize("bags", [TheirBags, EmbeddingBagCollection])
def test_a_collection_of_a_script_of_torchrec_needs_no_other_arguments(bags: Any) -> None:
    tables, sequences, device = configs(EmbeddingBagConfig), configs(EmbeddingConfig), torch.device("cpu")
    module = bags(tables=tables, device=device)
    assert (module.device, module.is_weighted(), module.embedding_bag_configs()) == (device, False, tables)
    rows = (TheirRows if bags is TheirBags else EmbeddingCollection)(tables=sequences, device=device, need_indices=True)
    assert (rows.need_indices(), rows.embedding_dim()) == (True, 4)
    assert rows.embedding_names_by_table() == [["f"], ["g"]]
    assert rows.embedding_configs() == sequences


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
