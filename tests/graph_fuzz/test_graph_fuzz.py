"""Random programs: a graph trains as eager torch, for batches of any size, and to the same bits on every store."""

from __future__ import annotations

from pathlib import Path

import pytest

from .blocks import BLOCKS
from .programs import HANDS, draw_program
from .runs import check

pytestmark = pytest.mark.op

SEEDS = range(HANDS)
SLOW_SEEDS = range(100 * HANDS, 104 * HANDS)


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)])
def test_a_random_graph_trains_as_eager_torch_on_every_store_and_shares_a_step(seed: int, tmp_path: Path) -> None:
    program = draw_program(seed)
    try:
        check(program, tmp_path)
    except Exception as error:
        error.add_note(f"repeat it by: PYTHONPATH=tests python -P -m graph_fuzz -n 1 --seed {seed}\n{program}")
        raise


def test_the_programs_that_run_have_every_block_most_of_them_beside_blocks_for_many_sizes() -> None:
    programs = [draw_program(seed) for seed in SEEDS]
    assert {name for program in programs for name in program.blocks} == set(BLOCKS)
    assert sum(program.shares for program in programs) > 0.75 * len(programs)
