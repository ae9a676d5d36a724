"""What a process that did not close leaves behind: the last snapshot, never rows of different steps; and it says so."""

from __future__ import annotations

import itertools
import random
import re
import shutil
from pathlib import Path

import pytest

from support.killed import Trainer, embedding_at, holds, remarks, steps, trainer
from support.small_snapshots import flip_bit
from support.stores import STORES
from tierbed import SnapshotError, StoreError
from tierbed.engine.store import rocksdb
from tierbed.snapshots import list_snapshots

__all__ = ["trainer"]
every_store = pytest.mark.parametrize("store", STORES)
on_memory_and_disk = pytest.mark.parametrize("store", ["device", "ssd_host"])


@pytest.fixture(autouse=True)
def two_rows_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scan of RocksDB comes in many chunks though tables are small."""
    monkeypatch.setattr(rocksdb, "SCAN_BYTES", 200)


@every_store
def test_a_killed_run_resumes_from_its_last_snapshot_and_says_which(
    tmp_path: Path, store: str, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.train(tmp_path, store, count=10, saves=[3, 6])
    for _ in range(2):
        with pytest.raises(StoreError, match=r'rows\' was not closed by its last run.*open="resume" restores'):
            embedding_at(tmp_path, store, open="error").size()
    assert not remarks(caplog)
    with embedding_at(tmp_path, store) as embedding:
        holds(embedding, 6)
        (said,) = remarks(caplog)
        assert re.search(r"'rows'.*rows was not closed by its last run; restored snapshot 's6', of step 6", said)
        assert said.endswith("what was written since, steps 7 to 10, is lost")
        steps(embedding, 3)
        holds(embedding, 9)
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 9)
    assert not remarks(caplog)


@on_memory_and_disk
def test_a_killed_run_without_a_snapshot_starts_empty_and_says_so(
    tmp_path: Path, store: str, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.train(tmp_path, store, count=10)
    with pytest.raises(StoreError, match=r"not closed by its last run"):
        embedding_at(tmp_path, store, open="error").size()
    with embedding_at(tmp_path, store) as embedding:
        holds(embedding, 0)
        (said,) = remarks(caplog)
        assert "started empty: it has no snapshot" in said
        assert said.endswith("what was written since, steps 1 to 10, is lost")
        steps(embedding, 2)
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 2)


@on_memory_and_disk
def test_a_restored_folder_that_is_closed_is_clean(
    tmp_path: Path, store: str, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    for saves in ([3], []):
        path = tmp_path / str(len(saves))
        trainer.train(path, store, count=5, saves=saves)
        with embedding_at(path, store) as embedding:
            holds(embedding, sum(saves))
        assert remarks(caplog)
        with embedding_at(path, store, open="error") as embedding:
            holds(embedding, sum(saves))
        assert not remarks(caplog)


@on_memory_and_disk
def test_a_killed_run_is_read_without_an_optimizer_from_its_last_snapshot(
    tmp_path: Path, store: str, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.train(tmp_path, store, count=5, saves=[3])
    with embedding_at(tmp_path, store, None) as reader:
        holds(reader, 3)
    assert "restored snapshot 's3'" in remarks(caplog)[0]
    with embedding_at(tmp_path, store) as embedding:
        steps(embedding, 1)
        holds(embedding, 4)


@on_memory_and_disk
def test_fresh_starts_empty_and_keeps_snapshots(
    tmp_path: Path, store: str, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.train(tmp_path, store, count=5, saves=[3])
    for _ in range(2):  # from a folder that was not closed, and from one that was
        with embedding_at(tmp_path, store, open="fresh") as embedding:
            holds(embedding, 0)
            steps(embedding, 2)
            embedding.load_snapshot("s3")
            holds(embedding, 3)
            steps(embedding, 1)
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 4)
    assert not remarks(caplog)


@pytest.mark.parametrize("end", ["exit", "error", "fork"])
@on_memory_and_disk
@pytest.mark.rotated("store")
def test_a_process_that_ends_without_a_close_leaves_a_clean_folder(
    tmp_path: Path, store: str, end: str, trainer: Trainer
) -> None:
    events = trainer.train(tmp_path, store, count=5, end=end)
    assert (events[-1] == "worker ended 0") == (end == "fork")
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 6 if end == "fork" else 5)


@on_memory_and_disk
def test_a_damaged_last_snapshot_is_not_passed_over_for_an_older_one(
    tmp_path: Path, store: str, trainer: Trainer
) -> None:
    trainer.train(tmp_path, store, count=8, saves=[3, 6])
    bucket = sorted((tmp_path / "rows" / "snapshots" / "s6").glob("*.npy"))[0]
    flip_bit(bucket, -8)
    for _ in range(2):
        with pytest.raises(SnapshotError, match=rf"s6/{bucket.name}' is damaged"):
            embedding_at(tmp_path, store).size()
    shutil.rmtree(bucket.parent)
    with embedding_at(tmp_path, store) as embedding:
        holds(embedding, 3)


@pytest.mark.parametrize("kills", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_kills_at_random_instants_never_serve_mixed_rows(
    tmp_path: Path, kills: int, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    chance = random.Random(5)
    seen = []
    for number in range(kills):
        # the store changes from kill to kill; every seventh run begins in a new folder
        path, store = tmp_path / str(number // 7), STORES[number % 5]
        events = trainer.train(
            path, store, end="any", after=(chance.randrange(14), chance.uniform(0, 0.05)), ahead=number % 3
        )
        names = [event.split() for event in events]
        returned = max((int(count) for what, count in names if what == "saved"), default=0)
        with embedding_at(path, STORES[(3 * number + 1) % 5], (None, "adagrad")[number % 2]) as embedding:
            last = embedding.metrics()["table"]["step"]
            assert last in newest(path)
            assert returned <= last
            holds(embedding, last)
        said = remarks(caplog)
        if names:  # it had trained
            assert len(said) == 1
            assert (f"restored snapshot 's{last}'" if last else "started empty") in said[0]
        seen.append((len(names), last))
    assert sum(trained > 0 for trained, _ in seen) >= kills / 4
    assert sum(last > 0 for _, last in seen) >= kills / 4
    assert len({last for _, last in seen}) >= 3


def newest(path: Path) -> list[int]:
    """The steps of the last two snapshots: a kill may come before the record says the last."""
    saved = sorted(int(s.name[1:]) for s in list_snapshots(path / "rows" / "snapshots").snapshots)
    return [0, *saved][-2:]


@pytest.mark.parametrize("kills", [10, pytest.param(40, marks=pytest.mark.slow)])
def test_kills_while_it_closes_and_opens_leave_what_was_closed_or_saved(
    tmp_path: Path, kills: int, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    chance, clean = random.Random(7), 0
    for number in itertools.count():
        if number >= kills and 0 < clean < number:  # some before the clean marker of a close and some after it
            break
        path, store = tmp_path / str(number // 5), STORES[number % 5]
        events = trainer.train(path, store, end="close", after=(chance.randrange(1, 4), chance.uniform(0, 0.05)))
        closed = int(events[-1].split()[1])
        with embedding_at(path, store) as embedding:
            count = embedding.metrics()["table"]["step"]
            if remarks(caplog):
                assert count in newest(path)
            else:
                assert closed <= count <= closed + 3
                clean += 1
            holds(embedding, count)
