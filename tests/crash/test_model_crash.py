"""Rounds of the crash harness with embeddings that are trained together, and what it finds where that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from .model_plan import draw_model_round
from .model_ranks import ModelRankRounds
from .model_rounds import ModelRounds

SEEDS, SLOW_SEEDS = range(401, 403), range(403, 412)
BROKEN = {
    "moments are of each store alone": "import tierbed.snapshots.store.group as g; "
    "g.newest_moment = lambda spans, clock: "
    "(0, {x: of[-1].snapshot for x, of in spans.items()}) if all(spans.values()) else None",
    "a save does not count": "import tierbed.embedding.saving.table_save as s; "
    "s.saved = lambda snapshots, is_parent=True: None",
    "a commit is not synced": "from tierbed.engine import durable as d; "
    "d.fsync_dir = lambda path, f=d.fsync_dir: None if path.name == 'snapshots' else f(path)",
    "a prune looks at no record": "from tierbed.snapshots.store import retention as r; "
    "r.needed_names = lambda store: set()",
    "writes are not noted": "from tierbed.snapshots.store.group import Member as M; "
    "M.begin_change = lambda member, replaces=False: None",
}


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)])
def test_killed_models_are_of_a_moment_of_their_log(tmp_path: Path, seed: int) -> None:
    ModelRounds(tmp_path).run(draw_model_round(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(tmp_path: Path, name: str) -> None:
    broken = ModelRounds(tmp_path, BROKEN[name])
    with pytest.raises(AssertionError) as found:  # noqa: PT012
        for seed in range(500, 560):
            broken.run(draw_model_round(seed))
    assert "ended by itself" not in str(found.value)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(601, 607))
def test_killed_ranks_of_a_model_are_of_a_moment_of_their_log(tmp_path: Path, seed: int) -> None:
    ModelRankRounds(tmp_path, 2).run(draw_model_round(seed))
