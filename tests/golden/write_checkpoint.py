"""Writes tests/golden/checkpoint-N: a checkpoint of a graph in format N, and what it holds.

Run once for a new format; what is there for earlier ones is never written again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.golden_checkpoint import Golden, batch, state_arrays
from tierbed.graph.state.kept import FORMATS


def write(folder: Path) -> None:
    graph = Golden()
    for step in range(1, 4):
        graph(batch(step))
    graph.save(folder)
    np.savez(f"{folder}.npz", **state_arrays(graph))


if __name__ == "__main__":
    write(Path(__file__).parent / f"checkpoint-{FORMATS['graph']}")
