"""What a process leaves that did not close: the last snapshot, never rows of different steps; and it says so."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch

from support.embeddings import contents, make, train
from support.killed import embedding_at, holds, remarks, steps, trainer, two_rows_a_chunk
from support.limits import file_size_limit
from support.stores import STORES, options
from tierbed import StoreError
from tierbed.embedding.state_dict.model_snapshots import save_rows
from tierbed.engine.durable import atomic_folder
from tierbed.snapshots import list_snapshots
from tierbed.snapshots.store.status import read_store_status

__all__ = ["trainer", "two_rows_a_chunk"]
every_store = pytest.mark.parametrize("store", STORES)
on_memory_and_disk = pytest.mark.parametrize("store", ["device", "ssd_host"])


@pytest.mark.parametrize("kills", [8, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("end", ["any", "close"])
@pytest.mark.usefixtures("two_rows_a_chunk")
def test_kills_at_random_instants_never_serve_mixed_rows(tmp_path, end, kills, trainer, caplog) -> None:
    """end: whether the run trains and saves, or closes and opens again and again."""
    chance, seen, clean = random.Random(5), [], 0
    for number in itertools.count():
        if number >= kills and (end == "any" or 0 < clean < number):  # some before a clean marker and some after it
            break
        # the store changes from kill to kill; every seventh run begins in a new folder
        path, store = tmp_path / str(number // 7), STORES[number % len(STORES)]
        count = chance.randrange(14) if end == "any" else chance.randrange(1, 4)
        events = trainer.train(path, store, end=end, after=(count, chance.uniform(0, 0.05)), ahead=number % 3)
        returned = max((int(event.split()[1]) for event in events if event[:4] in ("save", "clos")), default=0)
        other = STORES[(3 * number + 1) % 5] if end == "any" else store
        with embedding_at(path, other, (None, "adagrad")[number % 2]) as embedding:
            last = embedding.metrics()["table"]["step"]
            # the last two snapshots: a kill may come before the record says the last
            saved = [0, *sorted(int(s.name[1:]) for s in list_snapshots(path / "rows" / "snapshots").snapshots)][-2:]
            said = remarks(caplog)
            assert last in saved if said or end == "any" else returned <= last <= returned + 3
            assert returned <= last or end == "close"
            holds(embedding, last)
        clean += not said
        if events and end == "any":  # it had trained
            (one,) = said
            assert (f"restored snapshot 's{last}'" if last else "started empty") in one
        seen.append((len(events), last))
    assert sum(trained > 0 for trained, _ in seen) >= kills / 4
    assert sum(last > 0 for _, last in seen) >= kills / 4
    assert len({last for _, last in seen}) >= 3


@every_store
@pytest.mark.parametrize(
    ("saves", "last", "source"),
    [([3, 6], 6, "restored snapshot 's6', of step 6"), ([], 0, "started empty, because it has no snapshot")],
)
@pytest.mark.parametrize("first", ["adagrad", None])
@pytest.mark.rotated("first")
@pytest.mark.usefixtures("two_rows_a_chunk")
def test_a_killed_run_resumes_from_its_last_snapshot_and_says_which(
    tmp_path, store, saves, last, source, first, trainer, caplog
) -> None:
    """first: the optimizer of who opens the folder first, if any."""
    trainer.train(tmp_path, store, count=10, saves=saves)
    for _ in range(2):
        with pytest.raises(StoreError, match=r'rows\' was not closed by its last run.*open="resume" restores'):
            embedding_at(tmp_path, store, open="error").size()
    assert not remarks(caplog)
    with embedding_at(tmp_path, store, first) as embedding:
        holds(embedding, last)
        (said,) = remarks(caplog)
        assert re.search(rf"'rows'.*rows was not closed by its last run; {source}", said)
        assert said.endswith(f"are lost (steps {last + 1} to 10)")
        steps(embedding, 3 if first else 0)
    for count in (last + 3 if first else last, last + 4 if first else last + 1):
        with embedding_at(tmp_path, store, open="error") as embedding:
            holds(embedding, count)
            steps(embedding, 1)
    assert not remarks(caplog)


@pytest.mark.parametrize("end", ["exit", "error", "fork"])
@on_memory_and_disk
@pytest.mark.rotated("store")
@pytest.mark.usefixtures("two_rows_a_chunk")
def test_a_process_that_ends_without_a_close_leaves_a_clean_folder(tmp_path, store, end, trainer) -> None:
    events = trainer.train(tmp_path, store, count=5, end=end)
    assert (events[-1] == "worker ended 0") == (end == "fork")
    with embedding_at(tmp_path, store, open="error") as embedding:
        holds(embedding, 6 if end == "fork" else 5)


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_what_a_killed_close_left_does_not_stay_until_the_next_close(tmp_path, store) -> None:
    with make(options(store, tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(100))
    killed = atomic_folder(tmp_path / "rows" / "incoming")
    (killed.__enter__() / "bucket-00.npy").write_bytes(bytes(1 << 20))
    assert list((tmp_path / "rows").glob(".tmp-*"))
    with make(options(store, tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(100))
        assert not list((tmp_path / "rows").glob(".tmp-*"))


def test_rows_are_not_live_where_a_close_fails_while_it_writes_them(tmp_path) -> None:
    embedding = make(options("ssd", tmp_path), "adagrad", tables=1)
    train(embedding, torch.arange(1000))
    with file_size_limit(1 << 12), pytest.raises(StoreError):
        embedding.close()
    assert read_store_status(tmp_path / "rows").restart.origin == "empty"
    embedding.close()
    assert read_store_status(tmp_path / "rows").restart.origin == "live"


def test_a_load_of_checkpoint_rows_that_fails_last_leaves_the_snapshot_to_go_back_to(tmp_path) -> None:
    """The next run took the latest snapshot, which this one had gone back from."""
    place = tmp_path / "checkpoint" / "best-0123"
    with make(options("ssd", tmp_path / "one"), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(10))
        save_rows([embedding], [place])
        rows = contents(embedding).tobytes()
    store = tmp_path / "two" / "rows"
    with make(options("ssd", tmp_path / "two"), "adagrad", tables=1) as embedding:
        for name in ("early", "late"):
            train(embedding, torch.arange(100))
            embedding.save_snapshot(name)
        embedding.load_snapshot("early")
        train(embedding, torch.arange(100))
        obstacle = next(live for live in (store / "live", store / "live-2") if not live.exists())
        obstacle.write_text("")
        with pytest.raises(StoreError, match="cannot replace the live rows"):
            embedding.table_handle().snapshot_manager.load_snapshot_at(place)
        assert embedding.last_snapshot == place.name
    obstacle.unlink()
    with make(options("ssd", tmp_path / "two"), "adagrad", tables=1) as embedding:
        assert contents(embedding).tobytes() == rows
