"""A snapshot that is replaced while others read it, or ask whether it may be: nothing is called damaged, or fails."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.embeddings import make, train
from support.small_snapshots import chunked, description, make_buckets, save
from support.stores import options
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.files.read_errors import ReadIOError
from tierbed.snapshots.files.verify import chains_of, verify_all
from tierbed.snapshots.files.writer import check_free

REPLACED = r"x' was replaced by another while it was read: read it again"


def replace(folder: Path) -> None:
    write_snapshot(folder, description(), chunked(make_buckets(6, dict.fromkeys(range(64), 11))), overwrite=True)


def test_a_snapshot_that_is_replaced_while_it_is_read_is_not_called_damaged(tmp_path: Path) -> None:
    save(tmp_path / "x", dict.fromkeys(range(64), 9))
    reading = Snapshot.open(tmp_path / "x").chunks(max_rows=4)
    next(reading)
    replace(tmp_path / "x")
    with pytest.raises(ReadIOError, match=REPLACED):
        list(reading)
    Snapshot.open(tmp_path / "x").verify()


def test_verifying_a_folder_says_that_one_was_replaced(tmp_path: Path) -> None:
    save(tmp_path / "x", dict.fromkeys(range(64), 9))
    chains, damaged = chains_of([Snapshot.open(tmp_path / "x")])
    replace(tmp_path / "x")
    with pytest.raises(ReadIOError, match=REPLACED):
        verify_all(chains, damaged, lambda count: None)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_called_damaged(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, torch.arange(100))
        embedding.save_snapshot("x", "checkpoint")
        old = Snapshot.open(tmp_path / "rows" / "snapshots" / "x")
        train(embedding, torch.arange(500))
        embedding.save_snapshot("x", overwrite=True)
        with pytest.raises(ReadIOError, match=REPLACED):
            old.verify()


def test_damage_is_damage_where_the_name_is_still_of_the_snapshot(tmp_path: Path) -> None:
    save(tmp_path / "x")
    (tmp_path / "x" / "bucket-05.npy").unlink()
    with pytest.raises(Exception, match="is damaged") as caught:
        Snapshot.open(tmp_path / "x").verify()
    assert not isinstance(caught.value, ReadIOError)


def test_asking_whether_a_snapshot_can_be_replaced_fails_no_save_that_replaces_it(tmp_path: Path) -> None:
    save(tmp_path / "x")
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(check_free, tmp_path / "x", True) for _ in range(100)]
        for _ in range(20):
            write_snapshot(tmp_path / "x", description(), chunked(make_buckets(6, {3: 5})), overwrite=True)
        for answer in asked:
            answer.result()
    assert [place.name for place in tmp_path.iterdir()] == ["x"]
