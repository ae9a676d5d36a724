"""What stands in the place of a snapshot's file: a link is followed, whatever is made of the snapshot; no pipe is."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.checkpoints import rating, state, steps
from support.embeddings import contents, make, train
from support.forged import KINDS, copied, is_sound, refused, save_each_kind
from support.graphs import id_batches
from support.stores import options
from tierbed import MultiTableEmbedding, SnapshotError
from tierbed.engine import _core
from tierbed.snapshots import Snapshot, list_snapshots

pytestmark = pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")

IDS = id_batches(16, 2, steps=4)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_each_kind(tmp_path_factory.mktemp("sound"))


@pytest.fixture
def embedding(tmp_path: Path) -> Iterator[MultiTableEmbedding]:
    with make(options("ssd", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        yield embedding


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def behind_relative_links(folder: Path) -> None:
    """Every file is elsewhere, and a link beside the folders leads to it."""
    elsewhere = folder.parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    for number, file in enumerate(files_of(folder)):
        target = elsewhere / f"{folder.name}-{number}"
        file.rename(target)
        file.symlink_to(os.path.relpath(target, file.parent))


@pytest.mark.parametrize("into", ["ssd", None], ids=["store", "no store"])
def test_a_graph_loads_a_checkpoint_whose_files_are_relative_links_from_any_depth(
    tmp_path: Path, into: str | None
) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    expected = state(graph)
    [rows] = list_snapshots(tmp_path / "checkpoint" / "rows" / "0").snapshots
    behind_relative_links(rows.folder)
    other = rating("device", None) if into is None else rating(into, tmp_path / "far" / "away")
    other.load(tmp_path / "checkpoint")
    assert state(other) == expected
    if into is not None:
        [present] = list_snapshots(tmp_path / "far" / "away" / "rows" / "snapshots").snapshots
        assert not any(file.is_symlink() for file in files_of(present.folder))
        shutil.rmtree(tmp_path / "checkpoint")
        present.verify()
    for each in (graph, other):
        each.rows.close()


@pytest.mark.parametrize("kind", KINDS)
def test_links_are_followed_by_verify_load_saves_merges_and_prunes(
    embedding: MultiTableEmbedding, sound: Path, tmp_path: Path, kind: str
) -> None:
    snapshots = copied(sound, tmp_path)
    expected = b"".join(rows.tobytes() for _, rows in Snapshot.open(snapshots / kind).chunks())
    behind_relative_links(snapshots / kind)
    assert is_sound(snapshots, kind)
    embedding.load_snapshot(kind)
    assert contents(embedding).tobytes() == expected
    train(embedding, range(5))
    embedding.save_snapshot("over", "incremental")
    embedding.save_snapshot("whole")
    assert is_sound(snapshots, "over")
    elsewhere = files_of(snapshots.parent / "elsewhere")
    embedding.save_snapshot("last")
    embedding.prune_snapshots(keep_last=1)
    assert files_of(snapshots.parent / "elsewhere") == elsewhere


def test_a_checkpoint_of_a_store_whose_files_are_links_holds_what_they_lead_to(
    embedding: MultiTableEmbedding, tmp_path: Path
) -> None:
    embedding.save_snapshot("first", "checkpoint")
    for file in (tmp_path / "rows" / "live").rglob("*.sst"):
        target = tmp_path / f"{file.parent.name}-{file.name}"
        file.rename(target)
        file.symlink_to(os.path.relpath(target, file.parent))
    embedding.save_snapshot("second", "checkpoint")
    present = tmp_path / "rows" / "snapshots" / "second"
    assert not any(file.is_symlink() for file in files_of(present))
    assert is_sound(present.parent, "second")
    embedding.load_snapshot("second")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def listening(path: Path) -> None:
    place = Path("/proc/self/fd")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place / str(folder) / path.name))
    finally:
        os.close(folder)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def to_a_pipe(path: Path) -> None:
    target = path.parents[2] / f"pipe-{path.name}"
    if not target.exists():
        os.mkfifo(target)
    path.symlink_to(target)


def folder(path: Path) -> None:
    path.mkdir()


@pytest.mark.parametrize("stand_in", [pipe, listening, device, to_a_pipe, folder])
def test_what_is_no_file_in_the_place_of_one_is_named_and_never_waited_for(
    sound: Path, tmp_path: Path, stand_in: Callable[[Path], None]
) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        snapshots = copied(sound, tmp_path)
        whole = [next((snapshots / "full").glob("bucket-*")), next((snapshots / "checkpoint").rglob("*.sst"))]
        for kind, file in zip(["full", "checkpoint"], whole, strict=True):
            file.unlink()
            stand_in(file)
            refused(embedding, snapshots, kind, rf"{file.name}.*(not a regular file|foreign file)")
        refused(embedding, snapshots, "incremental", rf"{whole[0].name}.*not a regular file")
        for kind in ("full", "checkpoint"):
            manifest = snapshots / kind / "manifest.msgpack"
            manifest.unlink()
            stand_in(manifest)
            with pytest.raises(SnapshotError, match=r"manifest.msgpack.*not a regular file"):
                embedding.load_snapshot(kind)


def test_a_graph_does_not_take_a_pipe_along(tmp_path: Path) -> None:
    graph = rating("device", None)
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    [rows] = list_snapshots(tmp_path / "checkpoint" / "rows" / "0").snapshots
    os.mkfifo(rows.folder / "more")
    other = rating("device", tmp_path / "store")
    other.load(tmp_path / "checkpoint")
    [present] = list_snapshots(tmp_path / "store" / "rows" / "snapshots").snapshots
    assert not (present.folder / "more").exists()
    file = next(rows.folder.glob("bucket-*"))
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(SnapshotError, match=rf"{file.name}.*not a regular file"):
        other.load(tmp_path / "checkpoint")
    for each in (graph, other):
        each.rows.close()
