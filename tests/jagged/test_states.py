"""The state_dict of a collection and of a table-batched embedding has the rows of all its embeddings."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch

from support import tbe
from support.two_towers import KINDS, stores
from tierbed import EagerOptimizer, SnapshotError
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, OptimType
from tierbed.snapshots import Snapshot
from tierbed.snapshots.control.client import request_save

IDS = torch.randint(0, 30, (20, 2, 12), generator=torch.Generator().manual_seed(5))


def collection(kind: str, path: Path) -> EmbeddingBagCollection:
    configs = [EmbeddingBagConfig(50, dim, f"t{dim}", feature_names=[f"f{dim}"]) for dim in (4, 8)]
    return EmbeddingBagCollection(configs, stores(kind, path))


def steps(bags: EmbeddingBagCollection, optimizer: EagerOptimizer, at: range) -> list[float]:
    found = []
    for number in at:
        batch = KeyedJaggedTensor(["f4", "f8"], IDS[number].flatten(), lengths=torch.full((8,), 3))
        loss = (bags(batch).values() - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def test_rows_of_a_collection_that_a_state_lacks_stay_if_they_are_to(tmp_path: Path) -> None:
    bags = collection("host", tmp_path)
    optimizer = EagerOptimizer(torch.optim.Adagrad(bags.parameters(), lr=0.5), bags)
    steps(bags, optimizer, range(2))
    state = bags.state_dict()
    lacking = {name: value for name, value in state.items() if "8" not in name}
    for end in bags.keep_rows, lambda: bags.load_state_dict(state):
        with pytest.raises(RuntimeError, match="Missing key"):
            bags.load_state_dict(lacking)
        with pytest.raises(SnapshotError, match="names none"):
            steps(bags, optimizer, range(2, 3))
        end()
        steps(bags, optimizer, range(2, 3))
    bags.load_state_dict(lacking, strict=False)
    steps(bags, optimizer, range(2, 3))


def batched(kind: str, path: Path) -> Any:
    made = tbe.ours(tbe.TABLES, tbe.MAP, optimizer=OptimType.ADAM, store_options=stores(kind, path))
    made.init_embedding_weights_uniform(-0.5, 0.5)
    return made


def passes(made: Any, seeds: range) -> list[float]:
    found = []
    for seed in seeds:
        torch.manual_seed(seed)
        batch = tbe.batch(tbe.TABLES, tbe.MAP, [4] * len(tbe.MAP))
        loss = made(batch.indices, batch.offsets).square().sum()
        loss.backward()
        found.append(float(loss.detach()))
    return found


def trained(made: Any, at: range) -> list[float]:
    if isinstance(made, EmbeddingBagCollection):
        return steps(made, EagerOptimizer(torch.optim.Adagrad(made.parameters(), lr=0.5), made), at)
    return passes(made, at)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [collection, batched])
def test_all_embeddings_come_back_whole(tmp_path: Path, kind: str, make: Any) -> None:
    first = make(kind, tmp_path)
    trained(first, range(3))
    state = copy.deepcopy(first.state_dict())
    expected = trained(first, range(3, 6))
    first.close()
    again = make(kind, tmp_path)
    again.load_state_dict(state)
    assert trained(again, range(3, 6)) == expected


def test_a_save_during_a_backward_pass_is_of_one_step(tmp_path: Path) -> None:
    """Two embeddings are updated one after the other; a save of another process comes in between."""
    made = batched("host folder", tmp_path)
    passes(made, range(2))
    parts = list(made.each())
    stores, pins = [tmp_path / part.name for part in parts], list[str]()
    saved: list[Any] = []
    asking = Thread(target=lambda: saved.append(request_save(stores[0], "now", "full", None, 60, False, stores)))

    def pinned(part: Any, plain: Any, *given: Any) -> Any:
        pins.append(part.name)
        if len(pins) == 2:
            asking.start()
            while not part.group.gate.has_reader:
                sleep(0.001)
        return plain(*given)

    for part in parts:
        part.pin = partial(pinned, part, part.pin)
    passes(made, range(2, 3))
    asking.join()
    assert len(set(pins)) == 2
    assert saved
    assert [Snapshot.open(store / "snapshots" / "now").description["step"] for store in stores] == [3, 3]
