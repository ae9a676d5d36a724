"""Checkpoints of every format that was ever promised are read forever."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from support.golden_checkpoint import Golden, batch, state_arrays
from support.places import GOLDEN
from tierbed.graph.state.kept import FORMATS as WRITTEN

FORMATS = range(2, WRITTEN["graph"] + 1)


@pytest.mark.parametrize("store", ["device", "host"])
@pytest.mark.parametrize("number", FORMATS)
def test_a_golden_checkpoint_is_loaded_and_trained_on(tmp_path: Path, number: int, store: str) -> None:
    graph = Golden(tmp_path if store == "host" else None, store)
    graph.load(GOLDEN / f"checkpoint-{number}")
    with np.load(GOLDEN / f"checkpoint-{number}.npz") as expected:
        assert state_arrays(graph).keys() == set(expected)
        for name, value in state_arrays(graph).items():
            assert value.tobytes() == expected[name].tobytes(), name
    graph(batch(4))
    assert graph.rows.metrics()["table"]["step"] == 4
