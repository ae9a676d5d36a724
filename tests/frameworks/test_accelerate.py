"""Accelerate's `save_state` and `load_state` keep whole models."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from support.forked import in_process
from support.ranks import run_ranks
from support.two_towers import IDS, KINDS, TwoTowers, losses, optimizer_of, stores
from tierbed.distributed import World
from tierbed.engine import OptimizerError

pytestmark = pytest.mark.filterwarnings("ignore")  # of the package


def trained(kind: str, path: Path, at: Path) -> list[float]:
    """Train, save, train on; or, where a save is there, resume."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        model = TwoTowers(stores(kind, path))
        model, optimizer = accelerator.prepare(model, optimizer_of(model))
        if at.exists():
            accelerator.load_state(str(at))
            return list(losses(model, optimizer, IDS[5:10]))
        list(losses(model, optimizer, IDS[:5]))
        accelerator.save_state(str(at))
        expected = list(losses(model, optimizer, IDS[5:10]))
        accelerator.load_state(str(at))
        assert list(losses(model, optimizer, IDS[5:10])) == expected
        return expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_that_is_resumed_by_load_state_is_the_uninterrupted_one(tmp_path: Path, kind: str) -> None:
    first, second = (in_process(trained, kind, tmp_path / "store", tmp_path / "saved") for _ in range(2))
    assert first == second
    assert torch.tensor(first).isfinite().all()


def over_ranks(world: World, path: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from accelerate import Accelerator

        model = TwoTowers(stores("host", path), world)
        prepared, optimizer = Accelerator(cpu=True).prepare(model, optimizer_of(model))
        try:
            list(losses(prepared, optimizer, IDS[:1]))
        except OptimizerError as error:
            return str(error)
        return "no error"


def test_over_ranks_it_wraps_the_rows_too_and_that_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_ranks(2, over_ranks, tmp_path):
        assert "embedding 'users' is in a DistributedDataParallel" in said
        assert "give the loop the module without it" in said
