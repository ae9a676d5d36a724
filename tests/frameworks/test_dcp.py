"""torch.distributed.checkpoint saves and loads whole models: modules, graphs and optimizers, in a new process too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from support.forked import in_process
from support.ranks import fails, run_ranks
from support.two_towers import IDS, KINDS, TwoTowers, losses, optimizer_of, stores
from tierbed.distributed import World
from tierbed.engine import GroupError
from tierbed.graph import Graph


def loop(kind: str, path: Path, at: Path, world: Any = None) -> list[float]:
    """Train, save, train on; or, where a save is there, resume."""
    model = TwoTowers(stores(kind, path), world)
    optimizer = optimizer_of(model)
    if not at.exists():
        list(losses(model, optimizer, IDS[:5]))
        module, of_optimizer = get_state_dict(model, optimizer)
        dcp.save({"model": module, "optimizer": of_optimizer}, checkpoint_id=at)
        expected = list(losses(model, optimizer, IDS[5:10]))
        loaded(model, optimizer, at)  # in the same process
        assert list(losses(model, optimizer, IDS[5:10])) == expected
        return expected
    loaded(model, optimizer, at)
    return list(losses(model, optimizer, IDS[5:10]))


def loaded(model: TwoTowers, optimizer: Any, at: Path) -> None:
    module, of_optimizer = get_state_dict(model, optimizer)
    state = {"model": module, "optimizer": of_optimizer}
    dcp.load(state, checkpoint_id=at)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_loop_resumes_to_the_bit_in_a_new_process(tmp_path: Path, kind: str) -> None:
    first, second = (in_process(loop, kind, tmp_path / "store", tmp_path / "saved") for _ in range(2))
    assert first == second


class TowersGraph(Graph):
    def __init__(self, store_options: Any, world: Any = None) -> None:
        super().__init__()
        self.model = TwoTowers(store_options, world)
        self.add_optimizer(torch.optim.Adam(self.model.parameters(), lr=0.02))

    def build(self, ids: Tensor) -> Tensor:
        loss = self.model(ids)
        loss.backward()
        return loss


def graph(kind: str, path: Path, at: Path, world: Any = None) -> list[float]:
    model = TowersGraph(stores(kind, path), world)
    if at.exists():
        state = model.state_dict()
        dcp.load(state, checkpoint_id=at)
        model.load_state_dict(state)
        return [float(model(ids)) for ids in IDS[5:10]]
    for ids in IDS[:5]:
        model(ids)
    dcp.save(model.state_dict(), checkpoint_id=at)
    return [float(model(ids)) for ids in IDS[5:10]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_resumes_to_the_bit_in_a_new_process(tmp_path: Path, kind: str) -> None:
    first, second = (in_process(graph, kind, tmp_path / "store", tmp_path / "saved") for _ in range(2))
    assert first == second


def of_ranks(world: World, task: Any, kind: str, path: Path, at: Path) -> list[float]:
    found: list[float] = task(kind, path, at, world)
    return found


@pytest.mark.parametrize("task", [loop, graph])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_resume_to_the_bit(tmp_path: Path, kind: str, task: Any) -> None:
    first, second = (run_ranks(2, of_ranks, task, kind, tmp_path / "store", tmp_path / "saved") for _ in range(2))
    assert first == second


def alone(world: World, kind: str, path: Path) -> str:
    model = TwoTowers(stores(kind, path), world)
    optimizer = optimizer_of(model)
    list(losses(model, optimizer, IDS[:2]))
    return fails(model.state_dict if world.rank else lambda: model.users.get([1]), GroupError)


@pytest.mark.parametrize("kind", ["host", "host folder"])
def test_a_state_that_one_rank_asks_for_alone_is_refused_on_all(tmp_path: Path, kind: str) -> None:
    for said in run_ranks(2, alone, kind, tmp_path):
        assert "ranks are in different calls" in said
        assert "state_dict" in said
