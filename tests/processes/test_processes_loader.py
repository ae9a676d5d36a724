"""Forked and spawned workers of a `DataLoader` beside an open store: none hangs, none touches it, no row changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.data_loaders import load_beside_training
from support.forked import in_process


@pytest.mark.parametrize("store", ["host", "ssd_host"])
def test_forked_workers_leave_the_store_alone(tmp_path: Path, store: str) -> None:
    done = in_process(load_beside_training, tmp_path, store, "fork", 4)
    assert done == {"codes": [0] * 10, "untouched": True, "same": True, "again": True}


@pytest.mark.slow
def test_spawned_workers_leave_the_store_alone(tmp_path: Path) -> None:
    done = in_process(load_beside_training, tmp_path, "ssd_host", "spawn", 1)
    assert done == {"codes": [0] * 2, "untouched": True, "same": True, "again": True}
