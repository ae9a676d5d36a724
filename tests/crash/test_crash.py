"""Rounds of the crash harness, and what it finds where the contract is broken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.cells import rotated
from support.embeddings import contents
from support.stores import STORES

from .history import LIVES, TYPES, History, Types, in_order
from .model_rounds import ModelRankRounds, ModelRounds
from .plan import draw_model_round, draw_rank_round, draw_round, draw_serving_round
from .power import Disk
from .rounds import RankRounds, Rounds
from .serving_rounds import ServingRounds

BROKEN = {
    "folders are not synced": "import tierbed.engine.durable as d; "
    "d.fsync_dir.__code__ = (lambda path: None).__code__",  # wherever it was imported to
    "files are not synced": "import os, stat; os.fsync = lambda file, s=os.fsync: "
    "stat.S_ISDIR(os.fstat(file).st_mode) and s(file)",
    "the clean marker stays": "from tierbed.snapshots.store.folder import StoreFolder as F; "
    "F.clear_clean_marker = lambda folder, *more: None",
    "the record is not written": "from tierbed.snapshots.store.group import StoreGroup; "
    "StoreGroup.write = lambda group, **more: None",
}
BROKEN_FOR_MODELS = {
    "moments are of each store alone": "import tierbed.snapshots.store.group as g; "
    "g.find_newest_moment = lambda spans, clock: "
    "(0, {x: of[-1].snapshot for x, of in spans.items()}) if all(spans.values()) else None",
    "a save does not count": "import tierbed.embedding.saving.table_save as s; "
    "s.record_save = lambda snapshots, is_parent=True: None",
    "a commit is not synced": "from tierbed.engine import durable as d; "
    "d.fsync_dir = lambda path, f=d.fsync_dir: None if path.name == 'snapshots' else f(path)",
    "a prune looks at no record": "from tierbed.snapshots.store import retention as r; "
    "r.list_needed_names = lambda store: set()",
    "writes are not noted": "from tierbed.snapshots.store.group import Member as M; "
    "M.begin_change = lambda member, replaces=False: None",
}
BROKEN_FOR_SERVING = {
    "names of row files are not synced": "from tierbed.serving.table_files import NewFiles; "
    "NewFiles.sync = lambda files: None",
    "a rollback does not hold": "from dataclasses import replace; from tierbed.serving import ServingFolder as F; "
    "F.write_current = lambda f, c, w=F.write_current: w(f, replace(c, hold=False))",
    "readers see a version before it is written": "from tierbed.serving import ServingFolder as F; "
    "from tierbed.serving.version import Current; "
    "F.write_version = lambda f, v, w=F.write_version: (f.write_current(Current(v.version)), w(f, v))",
    "files are removed before their version": "from tierbed.serving import ServingFolder as F; "
    "F.remove_old = lambda f, keep, r=F.remove_old: ([f.find_file(x).unlink() for v in f.list_versions()[:-keep] "
    "if v != f.read_current().version for x in f.read_version(v).files[:1] "
    "if x not in f.read_latest().files], r(f, keep))[1]",
}


def seeds(fast: range, slow: range) -> Any:
    return pytest.mark.parametrize("seed", [*fast, *(pytest.param(seed, marks=pytest.mark.slow) for seed in slow)])


@seeds(range(101, 103), range(103, 116))
def test_a_killed_trainer_leaves_what_its_log_allows(tmp_path: Path, seed: int) -> None:
    Rounds(tmp_path).run(draw_round(seed))


@seeds(range(401, 402), range(402, 412))
def test_killed_models_are_of_a_moment_of_their_log(tmp_path: Path, seed: int) -> None:
    ModelRounds(tmp_path).run(draw_model_round(seed))


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
@seeds(range(301, 302), range(302, 310))
def test_killed_ranks_leave_what_their_log_allows(tmp_path: Path, seed: int, ranks: int) -> None:
    RankRounds(tmp_path).run(draw_rank_round(seed, ranks))


@seeds(range(701, 702), range(702, 712))
def test_a_killed_publisher_leaves_what_its_log_allows(tmp_path: Path, seed: int) -> None:
    ServingRounds(tmp_path).run(draw_serving_round(seed))


@seeds(range(0), range(601, 607))
def test_killed_ranks_of_a_model_are_of_a_moment_of_their_log(tmp_path: Path, seed: int) -> None:
    ModelRankRounds(tmp_path, 2).run(draw_model_round(seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*BROKEN, *BROKEN_FOR_MODELS])
def test_a_broken_contract_is_found(tmp_path: Path, name: str) -> None:
    is_model = name in BROKEN_FOR_MODELS
    rounds = ModelRounds(tmp_path, BROKEN_FOR_MODELS[name]) if is_model else Rounds(tmp_path, BROKEN[name])
    with pytest.raises(Exception, match=r".") as found:  # noqa: PT012
        for seed in range(500, 560):
            rounds.run(draw_model_round(seed) if is_model else draw_round(seed))
    assert not is_model or (found.type is AssertionError and "ended by itself" not in str(found.value))


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN_FOR_SERVING)
def test_a_broken_contract_of_serving_is_found(tmp_path: Path, name: str) -> None:
    rounds = ServingRounds(tmp_path, BROKEN_FOR_SERVING[name])
    with pytest.raises(AssertionError) as found:  # noqa: PT012
        for seed in range(800, 860):
            rounds.run(draw_serving_round(seed))
    assert "ended by itself" not in str(found.value)


def test_a_line_that_a_kill_cut_off_does_not_change_the_next(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    for name in ("first", "second"):
        (store / name).touch()
    lines = [f"\ncreate\t{store / name}\t{(store / name).stat().st_ino}\t." for name in ("first", "second")]
    for cut in range(len(lines[0])):
        disk = Disk(store, lines[0][:cut] + lines[1])
        assert [change.name for change in disk.root.changes] == ["second"]


@rotated("types")
@pytest.mark.parametrize("types", sorted(set(TYPES)))
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("store", STORES)
def test_rows_are_those_of_the_steps(tmp_path: Path, store: str, life: str, types: Types) -> None:
    history = History(150, life, types)
    with history.embedding(tmp_path, store) as embedding:
        for step in range(1, 16):
            history.take(embedding, step)
        assert in_order(contents(embedding)).tobytes() == history.rows(15).tobytes()
    assert len(history.rows(15)) > 0
