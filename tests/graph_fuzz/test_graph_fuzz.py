"""Random programs: a graph trains as eager torch, for batches of any size, and to the same bits on every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from .programs import draw_program
from .runs import check

SEEDS = range(1, 9)
SLOW_SEEDS = range(1000, 1100)


def run(seed: int, path: Path) -> int:
    program = draw_program(seed)
    path.mkdir(exist_ok=True)
    try:
        return check(program, path).shared
    except Exception as error:
        error.add_note(f"repeat it by: PYTHONPATH=tests python -P -m graph_fuzz -n 1 --seed {seed}\n{program}")
        raise


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_graph_trains_as_eager_torch_on_every_store(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path)


@pytest.mark.slow
def test_a_hundred_random_graphs_train_as_eager_torch_and_most_share_a_step(tmp_path: Path) -> None:
    shared = [run(seed, tmp_path / str(seed)) for seed in SLOW_SEEDS]
    assert sum(map(bool, shared)) > len(shared) // 2
