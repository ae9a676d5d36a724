"""torch.distributed.checkpoint saves and loads whole models: modules, graphs and optimizers, in a new process too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint._fsspec_filesystem  # as a first save does
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from support.forked import in_process
from support.graphs import graph_of
from support.ranks import fails, run_kept, run_ranks
from support.stores import options
from support.two_towers import IDS, KINDS, TwoTowers, kinds, losses, optimizer_of, stores
from tierbed import EagerOptimizer, GroupError, SnapshotError
from tierbed.distributed import World

BEFORE, AFTER = IDS[:2], IDS[5:8]


def loop(kind: str, path: Path, at: Path, world: Any = None, optimizer_of: Any = optimizer_of) -> list[float]:
    """Train, save, train on; or resume from a save."""
    model = TwoTowers(stores(kind, path), world)
    optimizer = optimizer_of(model)
    if at.exists():
        loaded(model, optimizer, at)
        return list(losses(model, optimizer, AFTER))
    list(losses(model, optimizer, BEFORE))
    if optimizer_of is plain_sgd:
        saved = dcp.async_save(state_of(model, optimizer), checkpoint_id=at)
        list(losses(model, optimizer, AFTER[:2]))
        saved.result()  # type: ignore[union-attr]
        loaded(model, optimizer, at)
    else:
        dcp.save(state_of(model, optimizer), checkpoint_id=at)
    expected = list(losses(model, optimizer, AFTER))
    loaded(model, optimizer, at)  # in the same process
    assert list(losses(model, optimizer, AFTER)) == expected
    return expected


def state_of(model: TwoTowers, optimizer: Any) -> dict[str, Any]:
    module, of_optimizer = get_state_dict(model, optimizer)
    return {"model": module, "optimizer": of_optimizer}


def loaded(model: TwoTowers, optimizer: Any, at: Path) -> None:
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=at)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def resumes(task: Callable[..., list[float]], path: Path, kind: str, *more: Any) -> None:
    """In a new process, to the bit."""
    first, second = (in_process(task, kind, path / "store", path / "saved", *more) for _ in range(2))
    assert first == second


@kinds
def test_a_plain_loop_resumes_to_the_bit_in_a_new_process(tmp_path: Path, kind: str) -> None:
    resumes(loop, tmp_path, kind)


def plain_sgd(model: nn.Module) -> EagerOptimizer:
    """One without state."""
    return EagerOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_an_optimizer_without_state_resumes_from_an_async_save(tmp_path: Path, kind: str) -> None:
    resumes(loop, tmp_path, kind, None, plain_sgd)


def towers_graph(store_options: Any, world: Any = None) -> Any:
    def build(graph: Any, ids: Tensor) -> Tensor:
        loss: Tensor = graph.model(ids)
        loss.backward()
        return loss

    model = TwoTowers(store_options, world)
    return graph_of(build, torch.optim.Adam(model.parameters(), lr=0.02), model=model)


def graph(kind: str, path: Path, at: Path, world: Any = None) -> list[float]:
    model = towers_graph(stores(kind, path), world)
    if at.exists():
        state = model.state_dict()
        dcp.load(state, checkpoint_id=at)
        model.load_state_dict(state)
    else:
        for ids in BEFORE:
            model(ids)
        dcp.save(model.state_dict(), checkpoint_id=at)
    return [float(model(ids)) for ids in AFTER]


@kinds
def test_a_graph_resumes_to_the_bit_in_a_new_process(tmp_path: Path, kind: str) -> None:
    resumes(graph, tmp_path, kind)


def of_ranks(world: World, task: Any, kind: str, path: Path, at: Path) -> list[float]:
    found: list[float] = task(kind, path, at, world)
    return found


@pytest.mark.parametrize("task", [loop, graph])
@kinds
@pytest.mark.rotated("task")
def test_ranks_resume_to_the_bit(tmp_path: Path, kind: str, task: Any) -> None:
    first, second = (run_ranks(2, of_ranks, task, kind, tmp_path / "store", tmp_path / "saved") for _ in range(2))
    assert first == second


def trained(kind: str, path: Path, world: World) -> tuple[TwoTowers, EagerOptimizer]:
    model = TwoTowers(stores(kind, path), world)
    optimizer = optimizer_of(model)
    list(losses(model, optimizer, BEFORE))
    return model, optimizer


def wrong(world: World, kind: str, path: Path) -> str:
    """What is raised for a state that one rank has otherwise: of rows inside, rank 0 alone has those of all."""
    model, optimizer = trained(kind, path, world)
    kept = copy.deepcopy(model.state_dict())
    list(losses(model, optimizer, IDS[2:3]))
    if world.rank == 1 and kind == "host folder":
        kept["users._extra_state"] = torch.zeros(1024, dtype=torch.uint8)
    said = fails(lambda: model.load_state_dict(kept), (GroupError, RuntimeError))
    fails(lambda: next(losses(model, optimizer, IDS[2:3])), (GroupError, SnapshotError))
    model.users.keep_rows()
    model.items.keep_rows()
    list(losses(model, optimizer, IDS[2:3]))
    return said


@pytest.mark.parametrize("kind", ["host", "host folder"])
def test_a_state_that_is_wrong_on_one_rank_is_refused_on_all(tmp_path: Path, kind: str) -> None:
    inside = "rank 1: it has no rows: the rows of all ranks are in the state_dict() of rank 0"
    for said in run_kept(2, wrong, kind, tmp_path):
        assert (inside if kind == "host" else "ranks differ, rank 0: state_dict: ") in said


def written(world: World, path: Path) -> str:
    """Rows that were put at the step of a state are replaced; what is raised if no snapshot has those of the state."""

    def made(store_options: Any) -> tuple[TwoTowers, EagerOptimizer]:
        model = TwoTowers(store_options, world)
        return model, optimizer_of(model)

    model, _ = trained("host folder", path, world)
    kept, rows = copy.deepcopy(model.state_dict()), model.users.get(range(40))
    for _ in range(2):
        model.users.put([1], torch.ones(1, 4))
        model.load_state_dict(kept)
        assert torch.equal(model.users.get(range(40)), rows)
    model.close()
    model, _ = made(options("host", path))  # without the option
    assert torch.equal(model.users.get(range(40)), rows)
    model.users.put([1], torch.ones(1, 4))
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    model.close()
    model, _ = made(options("host", path))
    model.load_state_dict(kept)
    model.users.put([1], torch.zeros(1, 4))
    return fails(lambda: model.load_state_dict(kept), SnapshotError)


def test_ranks_compare_the_versions_of_rows(tmp_path: Path) -> None:
    for said in run_kept(2, written, tmp_path):
        assert "other rows of step 2, which names no snapshot" in said


def alone(world: World, kind: str, path: Path) -> str:
    model, _optimizer = trained(kind, path, world)
    return fails(model.state_dict if world.rank else lambda: model.users.get([1]), GroupError)


@pytest.mark.parametrize("kind", ["host", "host folder"])
def test_a_state_that_one_rank_asks_for_alone_is_refused_on_all(tmp_path: Path, kind: str) -> None:
    for said in run_kept(2, alone, kind, tmp_path):
        assert "ranks are in different calls" in said
        assert "state_dict" in said
