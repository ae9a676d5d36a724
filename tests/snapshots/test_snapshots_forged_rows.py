"""Rows that no table has, under right checksums, and what stands in the place of a file: refused by load and verify.

A link is followed, whatever is made of the snapshot; no pipe is.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.checkpoints import rating, state, steps
from support.embeddings import contents, make, train
from support.forged import (
    CRC32C,
    KINDS,
    MANIFEST,
    TYPES,
    blocks_of,
    change,
    copied,
    is_sound,
    of_rows,
    refused,
    save_each_kind,
    save_parts,
    with_right_checksums,
    write_file,
    write_rows,
)
from support.graphs import id_batches
from support.small_snapshots import key_in
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.engine import _core
from tierbed.engine.row_format import ROW_KEY_DTYPE, extract_row_keys
from tierbed.snapshots import Snapshot, list_snapshots
from tierbed.snapshots.store.selection import Types

Sound = dict[Types, dict[str, Path]]  # snapshots of each kind, and the same tables in parts

pytestmark = pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[Types, dict[str, Path]]:
    """Snapshots of each kind, and the same tables in parts."""
    found = {}
    for types in TYPES:
        whole = save_each_kind(tmp_path_factory.mktemp("sound"), types)
        found[types] = {"whole": whole, "parts": save_parts(whole, tmp_path_factory.mktemp("parts"))}
    return found


def first_file(folder: Path, kind: str = "bucket") -> str:
    return min(name for name in Snapshot.open(folder).manifest.files if name.startswith(kind))


def write_more(folder: Path, name: str, rows: Any) -> None:
    """A file, which may be new, with these rows or keys as well, in their places by (table, key)."""
    if (folder / name).exists():
        rows = np.concatenate([np.load(folder / name), rows])
    write_rows(folder, name, rows[np.lexsort((rows["key"], rows["table"]))])


def a_row_more(folder: Path, **fields: Any) -> None:
    """A row of another bucket's file once more, as it is but for `fields`."""
    name, other = sorted(name for name in Snapshot.open(folder).manifest.files if name.startswith("bucket"))[:2]
    row = np.load(folder / other)[:1]
    for field, value in fields.items():
        row[field] = value
    write_more(folder, name, row)


def a_row_twice(folder: Path) -> None:
    name = first_file(folder)
    write_rows(folder, name, np.load(folder / name)[[0, 0]])


def backwards(folder: Path) -> None:
    """Two rows of a bucket, the one of the greater key first."""
    name = first_file(folder)
    rows = np.load(folder / name)[[0, 0]]
    rows["key"][1] = key_in(int(name[-6:-4]), 0, 5)
    write_rows(folder, name, rows[np.argsort(rows["key"])[::-1]])


def written_and_deleted(folder: Path) -> None:
    name = first_file(folder)
    write_more(folder, name.replace("bucket", "deleted"), extract_row_keys(np.load(folder / name))[:1])


def of_another_part(folder: Path, kind: str = "bucket", more: bool = False) -> None:
    """A file of one part becomes that of another, or a row of it is in both."""
    name = first_file(folder, kind)
    other = f"{name[:-5]}1.npy" if name.endswith("0.npy") else f"{name[:-5]}0.npy"
    if more:
        write_more(folder, other, np.load(folder / name)[:1])
        return
    write_rows(folder, other, np.load(folder / name))
    (folder / name).unlink()
    count = "deleted" if kind == "deleted" else "rows"
    change(folder, lambda content: content.update({count: content[count] - content["files"].pop(name)["rows"]}))


def numbers(**changes: int) -> Callable[[Path], None]:
    """Of a manifest."""
    return lambda folder: change(folder, lambda content: content.update(changes))


def swapped_shards(folder: Path) -> None:
    place = folder / "rocksdb"
    (place / "shard-0").rename(place / "shard")
    (place / "shard-1").rename(place / "shard-0")
    (place / "shard").rename(place / "shard-1")

    def other(name: str) -> str:
        return name.replace("shard-0", "shard").replace("shard-1", "shard-0").replace("shard/", "shard-1/")

    def edit(content: dict[str, Any]) -> None:
        files = content["rocksdb"]["files"]
        content["rocksdb"]["files"] = {other(name): entry for name, entry in files.items()}

    change(folder, edit)


DELETED_ELSEWHERE = np.array([(0, key_in(1, 0, 5))], ROW_KEY_DTYPE)
CASES: dict[str, tuple[str, str, Callable[[Path], None], str]] = {
    "a key in two buckets": ("whole", "full", a_row_more, "it has rows of another bucket"),
    "in two of an incremental one": ("whole", "incremental", a_row_more, "it has rows of another bucket"),
    "a table that there is not": ("whole", "full", lambda f: a_row_more(f, table=9), "of tables that do not exist"),
    "never written": ("whole", "incremental", lambda f: a_row_more(f, updates=0), "another bucket|never written"),
    "backwards": ("whole", "full", backwards, "bucket-..\\.npy"),
    "a row twice": ("whole", "full", a_row_twice, "bucket-..\\.npy"),
    "written and deleted": ("whole", "incremental", written_and_deleted, "it has keys of rows"),
    "deleted elsewhere": ("whole", "incremental", lambda f: write_rows(f, "deleted-63.npy", DELETED_ELSEWHERE),
                          "it has rows of another bucket"),
    "rows that there are not": ("whole", "incremental", numbers(rows=10**9), "rows instead of 1000000000"),
    "rows that a checkpoint has not": ("whole", "checkpoint", numbers(rows=10**9), "rows instead of 1000000000"),
    "one row": ("whole", "incremental", numbers(rows=1), "rows instead of"),
    "swapped shards": ("whole", "checkpoint", swapped_shards, "a shard has rows of another"),
    "of another part": ("parts", "full", of_another_part, "it has rows of another part"),
    "of another part, deleted": ("parts", "incremental", lambda f: of_another_part(f, "deleted"), "of another part"),
    "in two parts": ("parts", "full", lambda f: of_another_part(f, more=True), "it has rows of another part"),
    "written and deleted in parts": ("parts", "incremental", written_and_deleted, r"parts of deleted-..\.npy have"),
    "fewer parts": ("parts", "full", numbers(parts=1), "and it has 1 parts"),
    "more parts": ("parts", "full", numbers(parts=7), "rows of another part"),
}  # fmt: skip


@pytest.mark.parametrize("store", ["device", "ssd"])
@pytest.mark.parametrize("types", TYPES, ids="-".join)
@pytest.mark.rotated("store")
def test_forged_rows_are_refused_by_load_and_verify(sound: Sound, tmp_path: Path, types: Types, store: str) -> None:
    with make(options(store, tmp_path), "adagrad", **of_rows(types)) as embedding:
        train(embedding, range(10))
        for of, kind, forge, problem in list(CASES.values())[TYPES.index(types) :: len(TYPES)]:
            shutil.rmtree(tmp_path / "rows" / "snapshots", ignore_errors=True)
            snapshots = copied(sound[types][of], tmp_path)
            forge(snapshots / kind)
            refused(embedding, snapshots, kind, problem)
            if kind == "full" and of == "whole":
                refused(embedding, snapshots, "incremental", problem)
        train(embedding, range(20))
        embedding.save_snapshot("after")
        assert is_sound(snapshots, "after")


def test_keys_that_are_no_int32_are_refused(tmp_path: Path) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1, key_type=torch.int32) as embedding:
        train(embedding, range(-100, 100))
        embedding.save_snapshot("full")
        snapshots = tmp_path / "rows" / "snapshots"
        assert is_sound(snapshots, "full")
        name = first_file(snapshots / "full")
        rows = np.load(snapshots / "full" / name)
        rows["key"][0] = key_in(int(name[-6:-4]), 0, 5)
        write_rows(snapshots / "full", name, np.sort(rows, order=["table", "key"]))
        refused(embedding, snapshots, "full", "keys that are not int32")


def test_forged_blocks_of_rocksdb_end_no_process_and_what_loads_is_what_was_verified(tmp_path: Path) -> None:
    """A byte of a block changes, under right checksums: RocksDB ends its process at two of them, by an assertion."""
    of_crc32c = save_each_kind(tmp_path / "crc32c", rocksdb_options=CRC32C)
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        snapshots = copied(of_crc32c, tmp_path)
        present = Snapshot.open(snapshots / "checkpoint").manifest.rocksdb
        assert present is not None
        name = min(name for name in present.files if name.endswith(".sst"))
        whole = (snapshots / "checkpoint" / "rocksdb" / name).read_bytes()
        blocks = blocks_of(whole)
        assert with_right_checksums(whole, blocks) == whole
        rows, filters, index, *_ = blocks
        places = {rows[0] + 1: False, rows[1] - 4: False, filters[0]: True, index[0] + 1: False}
        for place, sound in places.items():
            data = bytearray(whole)
            data[place] ^= 0xFF
            write_file(snapshots / "checkpoint", name, with_right_checksums(bytes(data), blocks))
            if sound:
                assert is_sound(snapshots, "checkpoint")
                embedding.load_snapshot("checkpoint")
            else:
                refused(embedding, snapshots, "checkpoint", "is damaged")
        write_file(snapshots / "checkpoint", name, whole)
        assert is_sound(snapshots, "checkpoint")


IDS = id_batches(16, 2, steps=4)


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


@pytest.mark.parametrize("into", ["ssd", pytest.param(None, marks=pytest.mark.slow)], ids=["store", "no store"])
def test_a_graph_loads_a_checkpoint_of_relative_links_without_a_pipe(tmp_path: Path, into: str | None) -> None:
    graph, far = rating("device", None), tmp_path / "far" / "away"
    steps(graph, IDS[:2])
    graph.save(tmp_path / "checkpoint")
    [rows] = list_snapshots(tmp_path / "checkpoint" / "rows" / "0").snapshots
    behind_relative_links(rows.folder)
    os.mkfifo(rows.folder / "more")
    other = rating("device", None) if into is None else rating(into, far)
    other.load(tmp_path / "checkpoint")
    assert state(other) == state(graph)
    if into is not None:
        [present] = list_snapshots(far / "rows" / "snapshots").snapshots
        assert not any(file.is_symlink() for file in files_of(present.folder))
        assert not (present.folder / "more").exists()
        shutil.rmtree(tmp_path / "checkpoint")
        present.verify()
    for each in (graph, other):
        each.rows.close()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_whatever_reads_follows_links(embedding: MultiTableEmbedding, sound: Sound, tmp_path: Path, kind: str) -> None:
    snapshots = copied(sound[TYPES[0]]["whole"], tmp_path)
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


def test_a_checkpoint_of_links_holds_what_they_lead_to(embedding: MultiTableEmbedding, tmp_path: Path) -> None:
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


def listening(path: Path) -> None:
    place = Path("/proc/self/fd")
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(place / str(folder) / path.name))
    finally:
        os.close(folder)


def to_a_pipe(path: Path) -> None:
    target = path.parents[2] / f"pipe-{path.name}"
    if not target.exists():
        os.mkfifo(target)
    path.symlink_to(target)


STAND_INS: list[Callable[[Path], object]] = [
    os.mkfifo,
    listening,
    lambda path: path.symlink_to("/dev/zero"),
    lambda path: path.symlink_to(path),
    lambda path: path.symlink_to("/etc/passwd"),
    to_a_pipe,
    Path.mkdir,
]


def test_what_is_no_file_in_the_place_of_one_is_named_and_never_waited_for(sound: Sound, tmp_path: Path) -> None:
    with make(options("device", tmp_path), "adagrad", tables=1) as embedding:
        train(embedding, range(10))
        snapshots = copied(sound[TYPES[0]]["whole"], tmp_path)
        rows, table = next((snapshots / "full").glob("bucket-*")), next((snapshots / "checkpoint").rglob("*.sst"))
        places = [(["full", "incremental"], rows), (["checkpoint"], table)]
        places += [([kind], snapshots / kind / MANIFEST) for kind in ("full", "checkpoint")]
        for number, stand_in in enumerate(STAND_INS):
            for kinds, file in places[number % 2 :: 2]:
                place = file.rename(tmp_path / "kept")
                stand_in(file)
                for kind in kinds:
                    refused(embedding, snapshots, kind, file.name)
                file.rmdir() if file.is_dir() and not file.is_symlink() else file.unlink()
                place.rename(file)
        assert is_sound(snapshots, "checkpoint")
