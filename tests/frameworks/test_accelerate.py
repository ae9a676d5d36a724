"""Accelerate's `save_state` and `load_state` keep whole models."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

from support.forked import in_process
from support.two_towers import IDS, KINDS, TwoTowers, losses, optimizer_of, stores

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
