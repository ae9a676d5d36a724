"""Rounds of the crash harness with ranks that share the rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from .plan import draw_rank_round
from .rank_rounds import RankRounds

SEEDS, SLOW_SEEDS = [301], range(302, 310)


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)])
def test_killed_ranks_leave_what_their_log_allows(tmp_path: Path, seed: int, ranks: int) -> None:
    RankRounds(tmp_path).run(draw_rank_round(seed, ranks))
