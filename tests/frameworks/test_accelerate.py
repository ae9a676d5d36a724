"""Accelerate's `save_state` and `load_state` keep whole models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.forked import in_process
from support.ranks import fails, run_ranks
from support.two_towers import IDS, TwoTowers, kinds, losses, optimizer_of, stores
from tierbed import OptimizerError
from tierbed.distributed import World

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package


def prepared(kind: str, path: Path, *more: Any) -> tuple[Accelerator, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = TwoTowers(stores(kind, path), *more)
    return accelerator, *accelerator.prepare(model, optimizer_of(model))


def quietly(task: Callable[..., Any], *given: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return task(*given)


def trained(kind: str, path: Path, at: Path) -> list[float]:
    """Train, save, train on; or resume from a save."""
    accelerator, model, optimizer = prepared(kind, path)
    if at.exists():
        accelerator.load_state(str(at))
        return list(losses(model, optimizer, IDS[5:8]))
    list(losses(model, optimizer, IDS[:2]))
    accelerator.save_state(str(at))
    expected = list(losses(model, optimizer, IDS[5:8]))
    accelerator.load_state(str(at))
    assert list(losses(model, optimizer, IDS[5:8])) == expected
    return expected


@kinds
def test_a_run_that_is_resumed_by_load_state_is_the_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    given = quietly, trained, kind, tmp_path / "store", tmp_path / "saved"
    first, second = (in_process(*given) for _ in range(2))
    assert first == second
    assert torch.tensor(first).isfinite().all()


def prepared_twice(kind: str, path: Path) -> list[float]:
    """The losses of steps where the optimizer was made and prepared again in between, as a notebook cell does."""
    accelerator, model, _ = prepared(kind, path)
    found: list[float] = []
    for part in (IDS[:2], IDS[2:5]):
        again, optimizer = accelerator.prepare(model, optimizer_of(model))
        again, optimizer = accelerator.prepare(again, optimizer)
        found += losses(again, optimizer, part)
    return found


def test_a_model_and_its_optimizer_are_prepared_again(tmp_path: Path) -> None:
    found = in_process(quietly, prepared_twice, "host", tmp_path / "store")
    assert len(found) == 5
    assert torch.tensor(found).isfinite().all()


def clipped(kind: str, path: Path, by_accelerate: bool) -> list[float]:
    """The losses of steps that are clipped."""
    accelerator, model, optimizer = prepared(kind, path)
    clip = accelerator.clip_grad_norm_ if by_accelerate else optimizer.optimizer.clip_grad_norm_
    found = []
    for ids in IDS[:5]:
        torch.manual_seed(int(ids.sum()))
        optimizer.zero_grad()
        loss = model(ids)
        accelerator.backward(loss)
        clip(model.parameters(), 0.05)
        optimizer.step()
        found.append(float(loss.detach()))
    model.close()
    return found


@pytest.mark.parametrize("kind", ["host", "ssd folder"])
@pytest.mark.parametrize("by_accelerate", [False, True])
@pytest.mark.rotated("kind")
def test_gradients_are_clipped_by_the_wrapped_optimizer_and_by_accelerate(
    tmp_path: Path, kind: str, by_accelerate: bool
) -> None:
    found = in_process(quietly, clipped, kind, tmp_path / "store", by_accelerate)
    model = TwoTowers(stores("host", tmp_path))
    expected = list(losses(model, optimizer_of(model), IDS[:5], 0.05))
    assert found == (pytest.approx(expected, rel=1e-6) if by_accelerate else expected)


def over_ranks(world: World, path: Path) -> str:
    _, model, optimizer = quietly(prepared, "host", path, world)
    return fails(lambda: quietly(list, losses(model, optimizer, IDS[:1])), OptimizerError)


def test_over_ranks_it_wraps_the_rows_too_and_that_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_ranks(2, over_ranks, tmp_path):
        assert "embedding 'users' is in a DistributedDataParallel" in said
        assert "give the loop the module without it" in said
