"""Recovery from a RocksDB checkpoint links its files, reads no row, and still finds damage."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from threading import Event

import numpy as np
import pytest
import torch

from support.changed_rows import check_saved
from support.embeddings import contents, make, train
from support.killed import copy_as_killed
from support.small_snapshots import flip_bit
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.embedding.tables import linked_rows
from tierbed.engine.errors import SnapshotError
from tierbed.snapshots import Snapshot
from tierbed.snapshots.files import rocksdb_files

on_disk = pytest.mark.parametrize("store", ["ssd", "ssd_host"])


def killed_after_checkpoint(
    folder: Path, store: str, increments: int = 0, index_mb: float | None = None
) -> tuple[Path, bytes]:
    """A copy of a store whose run saved a RocksDB checkpoint, trained on, and was killed; and the rows saved last."""
    with make(options(store, folder / "first", index_mb=index_mb), "adagrad") as embedding:
        train(embedding, range(500))
        embedding.delete(np.arange(20), 0)
        embedding.save_snapshot("base", kind="checkpoint")
        for i in range(increments):
            train(embedding, range(100 * i, 100 * i + 50), 1)
            embedding.delete(np.arange(20 + 70 * i, 50 + 70 * i), 0)
            embedding.put(torch.arange(10 * i, 10 * i + 15), torch.full((15, embedding.dim), float(i)), 2)
            embedding.save_snapshot(f"increment {i}", kind="incremental")
        saved = contents(embedding).tobytes()
        train(embedding, range(300, 900))
        return copy_as_killed(folder / "first", folder / "killed"), saved


def refuse(*arguments: object) -> None:
    """As of the system at its limit of threads."""
    raise RuntimeError("can't start new thread")


def size_again_and_again(embedding: MultiTableEmbedding) -> None:
    """Until a call raises what a thread has found."""
    while True:
        embedding.size()


@on_disk
@pytest.mark.parametrize(
    ("increments", "limits"), [(0, (None, None)), (3, (None, None)), (0, (None, 1)), (3, (1, None))]
)
def test_recovery_reads_only_what_follows_a_checkpoint(
    tmp_path: Path,
    store: str,
    increments: int,
    limits: tuple[float | None, float | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if the limit for the files' indexes changes, and with it the format of new files."""
    path, saved = killed_after_checkpoint(tmp_path, store, increments, limits[0])
    monkeypatch.setattr(rocksdb_files, "checkpoint_chunks", None)
    for _ in range(2):  # the second time from the clean marker
        with make(options(store, path, index_mb=limits[1]), "adagrad") as embedding:
            assert contents(embedding).tobytes() == saved
    monkeypatch.undo()
    with make(options(store, path, index_mb=limits[1]), "adagrad") as embedding:
        train(embedding, range(5))
        embedding.save_snapshot("next", kind="incremental")
        check_saved(embedding, "next")


@on_disk
@pytest.mark.parametrize("increments", [0, 1])
def test_a_damaged_row_file_is_named(tmp_path: Path, store: str, increments: int) -> None:
    path, _ = killed_after_checkpoint(tmp_path, store, increments)
    file = max((path / "rows" / "snapshots").rglob("*.sst"), key=lambda file: file.stat().st_size)
    flip_bit(file, 4 * file.stat().st_size)
    with make(options(store, path), "adagrad") as embedding, pytest.raises(SnapshotError, match=file.name):
        size_again_and_again(embedding)


def test_a_damaged_increment_after_a_checkpoint_is_named(tmp_path: Path) -> None:
    path, _ = killed_after_checkpoint(tmp_path, "ssd", 2)
    file = next((path / "rows" / "snapshots" / "increment 0").glob("bucket-*"))
    flip_bit(file, 8 * file.stat().st_size - 1)
    with make(options("ssd", path), "adagrad") as embedding, pytest.raises(SnapshotError, match=file.name):
        embedding.size()


def test_a_damaged_file_is_found_beside_files_that_a_prune_removed(tmp_path: Path) -> None:
    path, _ = killed_after_checkpoint(tmp_path, "ssd")
    snapshot = Snapshot.open(path / "rows" / "snapshots" / "base")
    removed, damaged = sorted(snapshot.folder.rglob("*.sst"))
    removed.unlink()
    flip_bit(damaged, 4 * damaged.stat().st_size)
    assert snapshot.manifest.rocksdb is not None
    error = rocksdb_files.find_damaged_file(snapshot.folder, snapshot.manifest.rocksdb, lambda seconds: False)
    assert str(damaged) in str(error)


def test_a_store_whose_embedding_is_collected_in_the_thread_of_the_check_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = killed_after_checkpoint(tmp_path, "ssd")
    snapshot, is_ready = Snapshot.open(path / "rows" / "snapshots" / "base"), Event()
    flip_bit(max(snapshot.folder.rglob("*.sst")), 999)
    embeddings = [make(options("ssd", tmp_path / "first"), "adagrad")]

    def drop(error: SnapshotError) -> None:
        is_ready.wait()
        embeddings.clear()
        gc.collect()

    table = embeddings[0].table_handle().table
    monkeypatch.setattr(table, "defer_error", drop)
    check = linked_rows.FileCheck(snapshot, table)
    is_ready.set()
    check._thread.join()
    with make(options("ssd", tmp_path / "first"), "adagrad") as embedding:
        assert embedding.size() == 880


def test_an_open_without_a_thread_for_the_check_leaves_the_store_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, saved = killed_after_checkpoint(tmp_path, "ssd")
    refused = make(options("ssd", path), "adagrad")
    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        refused.size()
    monkeypatch.undo()
    with make(options("ssd", path), "adagrad") as embedding:
        assert contents(embedding).tobytes() == saved


@pytest.mark.parametrize("name", ["MANIFEST", "CURRENT", "OPTIONS"])
def test_damage_outside_of_rows_is_named_at_the_open(tmp_path: Path, name: str) -> None:
    path, _ = killed_after_checkpoint(tmp_path, "ssd")
    file = next((path / "rows" / "snapshots").rglob(f"{name}*"))
    flip_bit(file, 4 * file.stat().st_size)
    with make(options("ssd", path), "adagrad") as embedding, pytest.raises(SnapshotError, match=file.name):
        embedding.size()
