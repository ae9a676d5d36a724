"""Rounds of the crash harness with embeddings that are trained together, and what it finds where that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from .model_plan import draw_model_round
from .model_ranks import ModelRankRounds
from .model_rounds import ModelRounds

SEEDS, SLOW_SEEDS = range(401, 403), range(403, 412)
BROKEN = {
    "instants are of one store": "from tierbed.embedding.training_group import Membership as M; "
    "own = lambda id, i: i._replace(versions={id: i.versions[id]}); "
    "M.instant = lambda member, f=M.instant, own=own: own(member.id, f(member))",
    "instants have no order": "from tierbed.embedding.training_group import Membership as M; "
    "M.instant = lambda member, f=M.instant: f(member)._replace(number=1)",
    "clean markers are dropped late": "from tierbed.snapshots.store.folder import StoreFolder as F; "
    "F.drop_clean_markers = lambda folder: None",
    "a commit is not synced": "from tierbed.engine import durable as d; "
    "d.fsync_dir = lambda path, f=d.fsync_dir: None if path.name == 'snapshots' else f(path)",
    "a prune looks at one store": "from tierbed.snapshots.store import retention as r; "
    "r.needed_snapshots = lambda path: set()",
    "writes are not counted": "from tierbed.snapshots.files.versions import Versions as V; "
    "V.rows = property(lambda versions: versions._initial)",
}


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)])
def test_killed_models_are_of_an_instant_of_their_log(tmp_path: Path, seed: int) -> None:
    ModelRounds(tmp_path).run(draw_model_round(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_found(tmp_path: Path, name: str) -> None:
    broken, found = ModelRounds(tmp_path, BROKEN[name]), []
    first = 600 if name == "clean markers are dropped late" else 500  # few rounds are killed within a recovery
    for seed in range(first, first + 60):
        try:
            broken.run(draw_model_round(seed))
        except AssertionError as error:
            found.append(str(error))
            break
    assert found
    assert "ended by itself" not in found[0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(601, 607))
def test_killed_ranks_of_a_model_are_of_an_instant_of_their_log(tmp_path: Path, seed: int) -> None:
    ModelRankRounds(tmp_path, 2).run(draw_model_round(seed))
