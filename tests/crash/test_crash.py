"""Rounds of the crash harness, and what it finds where the contract is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.cells import rotated
from support.embeddings import contents
from support.stores import STORES

from .history import LIVES, TYPES, History, Types, in_order
from .plan import draw_round
from .power import Disk
from .rounds import Rounds

SEEDS, SLOW_SEEDS = range(101, 104), range(104, 116)
BROKEN = {
    "folders are not synced": "import tierbed.engine.durable as d; "
    "d.fsync_dir.__code__ = (lambda path: None).__code__",  # wherever it was imported to
    "files are not synced": "import os, stat; os.fsync = lambda file, s=os.fsync: "
    "stat.S_ISDIR(os.fstat(file).st_mode) and s(file)",
    "the clean marker stays": "from tierbed.snapshots.store.folder import StoreFolder as F; "
    "F.clear_clean_marker = lambda folder, *more: None",
    "the record is not written": "from tierbed.snapshots.store.group import Group; "
    "Group.write = lambda group, **more: None",
}


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    return Rounds(tmp_path_factory.mktemp("crash"))


@pytest.mark.parametrize("seed", [*SEEDS, *(pytest.param(seed, marks=pytest.mark.slow) for seed in SLOW_SEEDS)])
def test_a_killed_trainer_leaves_what_its_log_allows(rounds: Rounds, seed: int) -> None:
    rounds.run(draw_round(seed))


@pytest.mark.slow
@pytest.mark.parametrize("script", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_contract_is_found(tmp_path: Path, script: str) -> None:
    broken = Rounds(tmp_path, script)
    with pytest.raises(Exception, match=r"."):  # noqa: PT012
        for seed in range(200, 220):
            broken.run(draw_round(seed))


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
