"""What fails late, or is killed late, leaves nothing that takes room, and a snapshot to go back to."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.embeddings import contents, make, train
from support.limits import file_size_limit
from support.stores import options
from tierbed import StoreError
from tierbed.embedding.state_dict.model_snapshots import save_rows
from tierbed.engine.durable import atomic_folder
from tierbed.snapshots.store.status import store_status


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_what_a_killed_close_left_does_not_stay_until_the_next_close(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(100))
    killed = atomic_folder(tmp_path / "rows" / "incoming")
    (killed.__enter__() / "bucket-00.npy").write_bytes(bytes(1 << 20))
    assert list((tmp_path / "rows").glob(".tmp-*"))
    with make(options(store, tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(100))
        assert not list((tmp_path / "rows").glob(".tmp-*"))


def test_rows_are_not_live_where_a_close_fails_while_it_writes_them(tmp_path: Path) -> None:
    embedding = make(options("ssd", tmp_path), "adagrad", tables=1)
    train(embedding, torch.arange(1000))
    with file_size_limit(1 << 12), pytest.raises(StoreError):
        embedding.close()
    assert store_status(tmp_path / "rows").restart.source == "empty"
    embedding.close()
    assert store_status(tmp_path / "rows").restart.source == "live"


def test_a_load_of_checkpoint_rows_that_fails_last_leaves_the_snapshot_to_go_back_to(tmp_path: Path) -> None:
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
            embedding.table_handle().snapshots.load_rows(place)
        assert embedding.last_snapshot == place.name
    obstacle.unlink()
    with make(options("ssd", tmp_path / "two"), "adagrad", tables=1) as embedding:
        assert contents(embedding).tobytes() == rows
