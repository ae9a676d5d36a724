"""Recovery from a RocksDB checkpoint links its files, reads no row, and still finds damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from support.changed_rows import check_saved
from support.embeddings import contents, make, train
from support.small_snapshots import flip_bit
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.engine.errors import SnapshotError
from tierbed.snapshots.files import rocksdb_files

on_disk = pytest.mark.parametrize("store", ["ssd", "ssd_host"])


def killed_after_checkpoint(folder: Path, store: str, index_mb: float | None = None) -> tuple[Path, bytes]:
    """A copy of a store whose run saved a RocksDB checkpoint, trained on, and was killed; and the saved rows."""
    with make(options(store, folder / "first", index_mb=index_mb), "adagrad") as embedding:
        train(embedding, range(500))
        embedding.delete(np.arange(20), 0)
        embedding.save_snapshot("base", kind="checkpoint")
        saved = contents(embedding).tobytes()
        train(embedding, range(300, 900))
        ignored = shutil.ignore_patterns("LOCK", "SOCKET")
        shutil.copytree(folder / "first", folder / "killed", ignore=ignored)
    return folder / "killed", saved


def size_again_and_again(embedding: MultiTableEmbedding) -> None:
    """Until a call raises what a thread has found."""
    while True:
        embedding.size()


@on_disk
@pytest.mark.parametrize("limits", [(None, None), (None, 1), (1, None)])
def test_recovery_from_a_checkpoint_reads_no_row(
    tmp_path: Path, store: str, limits: tuple[float | None, float | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the limit for the files' indexes changes, and with it the format of new files."""
    path, saved = killed_after_checkpoint(tmp_path, store, limits[0])
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
def test_a_damaged_row_file_is_named(tmp_path: Path, store: str) -> None:
    path, _ = killed_after_checkpoint(tmp_path, store)
    file = max((path / "rows" / "snapshots").rglob("*.sst"), key=lambda file: file.stat().st_size)
    flip_bit(file, 4 * file.stat().st_size)
    with make(options(store, path), "adagrad") as embedding, pytest.raises(SnapshotError, match=file.name):
        size_again_and_again(embedding)


@pytest.mark.parametrize("name", ["MANIFEST", "CURRENT", "OPTIONS"])
def test_damage_outside_of_rows_is_named_at_the_open(tmp_path: Path, name: str) -> None:
    path, _ = killed_after_checkpoint(tmp_path, "ssd")
    file = next((path / "rows" / "snapshots").rglob(f"{name}*"))
    flip_bit(file, 4 * file.stat().st_size)
    with make(options("ssd", path), "adagrad") as embedding, pytest.raises(SnapshotError, match=file.name):
        embedding.size()
