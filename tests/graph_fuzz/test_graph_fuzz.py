"""Random programs: a graph trains as eager torch, for batches of any size, and to the same bits on every store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from .blocks import BLOCKS
from .programs import HANDS, Program, draw_program
from .runs import check

pytestmark = pytest.mark.op

QUICK = 7  # it evaluates, thaws, and has an SSD
SEEDS = range(HANDS)
SLOW_SEEDS = [*(seed for seed in SEEDS if seed != QUICK), *range(100 * HANDS, 104 * HANDS)]
SIZES = (5, 9, 4, 11, 7, 6)
# by the seed of what else they do: one accumulates and scales, one clips, two look ahead
LEFT = [name for name in BLOCKS if name not in draw_program(QUICK).blocks]
MANY_SIZES = [name for name in LEFT if not BLOCKS[name].one_size]
ALL = {seed: MANY_SIZES[part::4] for part, seed in enumerate((5, 4, 8, 2))}
ALL[0] = [name for name in LEFT if BLOCKS[name].one_size]


@pytest.mark.parametrize("seed", [QUICK, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)])
def test_a_random_graph_trains_as_eager_torch_on_every_store_and_shares_a_step(seed: int, tmp_path: Path) -> None:
    program = draw_program(seed)
    try:
        check(program, tmp_path)
    except Exception as error:
        error.add_note(f"repeat it by: PYTHONPATH=tests python -P -m graph_fuzz -n 1 --seed {seed}\n{program}")
        raise


@pytest.mark.parametrize("seed", [5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in ALL if seed != 5)])
def test_every_other_block_trains_as_eager_torch_and_shares_a_step(seed: int, tmp_path: Path) -> None:
    """Many blocks in a few programs of two traces each."""
    program = replace(draw_program(seed), blocks=tuple(ALL[seed]), residual=True, own=1, events={}, other_store=None)
    check(replace(program, sizes=SIZES if program.shares else SIZES[:2] * 2), tmp_path)


def test_the_programs_that_run_have_every_block_most_of_them_beside_blocks_for_many_sizes() -> None:
    assert {name for names in ALL.values() for name in names} | {*draw_program(QUICK).blocks} == set(BLOCKS)
    programs: list[Program] = [draw_program(seed) for seed in SEEDS]
    assert {name for program in programs for name in program.blocks} == set(BLOCKS)
    assert sum(program.shares for program in programs) > 0.75 * len(programs)
