"""Rows that no table has, under right checksums: no load takes them, and `verify` says of each what a load would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.embeddings import make, train
from support.forged import (
    CRC32C,
    KINDS,
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
from support.small_snapshots import key_in
from support.stores import options
from tierbed import MultiTableEmbedding
from tierbed.engine import _core
from tierbed.engine.row_format import KEY
from tierbed.snapshots import Snapshot
from tierbed.snapshots.store.selection import Types

pytestmark = pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[Types, Path]:
    return {types: save_each_kind(tmp_path_factory.mktemp("sound"), types) for types in TYPES}


@pytest.fixture(scope="module")
def of_crc32c(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_each_kind(tmp_path_factory.mktemp("crc32c"), rocksdb_options=CRC32C)


@pytest.fixture(params=[(store, types) for types in TYPES for store in ("device", "ssd")], ids=str)
def embedding(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MultiTableEmbedding]:
    store, types = request.param
    with make(options(store, tmp_path), "adagrad", **of_rows(types)) as embedding:
        train(embedding, range(10))
        yield embedding


def at(embedding: MultiTableEmbedding, sound: dict[Types, Path]) -> Path:
    """A copy of the snapshots of such rows where the embedding finds them."""
    path = embedding.store_options.persistent_path
    assert path is not None
    rows, state = embedding.table_handle().table.form.fields
    return copied(sound[rows.type, state.type], Path(path))


def first_file(folder: Path, kind: str = "bucket") -> str:
    return min(name for name in Snapshot.open(folder).manifest.files if name.startswith(kind))


def a_row_more(folder: Path, **fields: Any) -> None:
    """A row of another bucket's file once more, in its place by (table, key), as it is but for `fields`."""
    name, other = sorted(name for name in Snapshot.open(folder).manifest.files if name.startswith("bucket"))[:2]
    row = np.load(folder / other)[:1]
    for field, value in fields.items():
        row[field] = value
    rows = np.concatenate([np.load(folder / name), row])
    write_rows(folder, name, rows[np.lexsort((rows["key"], rows["table"]))])


def of_both(folder: Path) -> None:
    row = np.load(folder / first_file(folder))[0]
    bucket = first_file(folder)[-6:-4]
    deleted = np.array([(row["table"], row["key"])], KEY)
    write_rows(folder, f"deleted-{bucket}.npy", deleted)


def a_deleted_key_of_another_bucket(folder: Path) -> None:
    write_rows(folder, "deleted-63.npy", np.array([(0, key_in(1, 0, 5))], KEY))


def a_number_of_rows(folder: Path) -> None:
    change(folder, lambda content: content.update(rows=10**9))


def one_row_more_than_there_is(folder: Path) -> None:
    change(folder, lambda content: content.update(rows=content["rows"] + 1))


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


CASES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "a key in two buckets": ("full", a_row_more, "it has rows of another bucket"),
    "a key in two buckets of an incremental one": ("incremental", a_row_more, "it has rows of another bucket"),
    "a table that there is not": ("full", lambda f: a_row_more(f, table=9), "rows of tables that do not exist"),
    "a row never written": ("incremental", lambda f: a_row_more(f, updates=0), "another bucket|never written"),
    "written and deleted": ("incremental", of_both, "it has keys of rows that bucket-.. has|it has keys of rows"),
    "deleted elsewhere": ("incremental", a_deleted_key_of_another_bucket, "it has rows of another bucket"),
    "rows that an incremental one has not": ("incremental", a_number_of_rows, "rows instead of 1000000000"),
    "rows that a checkpoint has not": ("checkpoint", a_number_of_rows, "rows instead of 1000000000"),
    "one row too few": ("incremental", one_row_more_than_there_is, "rows instead of"),
    "swapped shards": ("checkpoint", swapped_shards, "a shard has rows of another"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.rotated("embedding")
def test_forged_rows_are_refused_by_load_and_unsound_to_verify(
    embedding: MultiTableEmbedding, sound: dict[Types, Path], case: str
) -> None:
    kind, forge, problem = CASES[case]
    snapshots = at(embedding, sound)
    assert all(is_sound(snapshots, name) for name in KINDS)
    forge(snapshots / kind)
    refused(embedding, snapshots, kind, problem)
    if kind == "full":
        refused(embedding, snapshots, "incremental", problem)
        assert not is_sound(snapshots, "incremental")
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


def test_forged_blocks_of_rocksdb_end_no_process_and_what_loads_is_what_was_verified(
    of_crc32c: Path, tmp_path: Path
) -> None:
    """A byte of a block changes, under right checksums: RocksDB ends its process at two of them, by an assertion."""
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
        for place, sound in {
            rows[0] + 1: False,
            rows[1] - 4: False,
            filters[0]: True,
            index[0] + 1: False,
        }.items():
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


@pytest.fixture(scope="module")
def sound_parts(sound: dict[Types, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Types, Path]:
    """The same full snapshots in two parts, by that name, and an incremental one over each."""
    return {types: save_parts(sound[types], tmp_path_factory.mktemp("parts")) for types in TYPES}


def of_another_part(folder: Path, kind: str = "bucket") -> None:
    """A file of one part becomes that of another, under right checksums."""
    name = first_file(folder, kind)
    other = f"{name[:-5]}1.npy" if name.endswith("0.npy") else f"{name[:-5]}0.npy"
    rows = np.load(folder / name)
    write_rows(folder, other, rows)
    (folder / name).unlink()
    count = "deleted" if kind == "deleted" else "rows"
    change(folder, lambda content: content.update({count: content[count] - content["files"].pop(name)["rows"]}))


def in_two_parts(folder: Path) -> None:
    """A row is in both parts of a bucket."""
    name = first_file(folder)
    other = f"{name[:-5]}1.npy" if name.endswith("0.npy") else f"{name[:-5]}0.npy"
    rows = np.load(folder / name)[:1]
    if (folder / other).exists():
        rows = np.concatenate([np.load(folder / other), rows])
    write_rows(folder, other, rows[np.lexsort((rows["key"], rows["table"]))])


def written_and_deleted(folder: Path) -> None:
    name = first_file(folder)
    keys = np.load(folder / name)[["table", "key"]].astype(KEY)[:1]
    there = folder / name.replace("bucket", "deleted")
    if there.exists():
        keys = np.concatenate([np.load(there), keys])
    write_rows(folder, there.name, np.sort(keys, order=["table", "key"]))


PARTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "of another part": ("full", of_another_part, "it has rows of another part"),
    "of another part, deleted": ("incremental", lambda f: of_another_part(f, "deleted"), "it has rows of another part"),
    "in two parts": ("full", in_two_parts, "it has rows of another part"),
    "in two parts of an incremental one": ("incremental", in_two_parts, "it has rows of another part"),
    "written and deleted": ("incremental", written_and_deleted, r"parts of deleted-..\.npy have keys of rows that"),
    "rows that there are not": ("incremental", a_number_of_rows, "rows instead of 1000000000"),
    "fewer parts": ("full", lambda f: change(f, lambda content: content.update(parts=1)), "and it has 1 parts"),
    "more parts": ("full", lambda f: change(f, lambda content: content.update(parts=7)), "rows of another part"),
}


@pytest.mark.parametrize("case", PARTS)
@pytest.mark.rotated("embedding")
def test_forged_parts_are_refused_by_load_and_unsound_to_verify(
    embedding: MultiTableEmbedding, sound_parts: dict[Types, Path], case: str
) -> None:
    kind, forge, problem = PARTS[case]
    snapshots = at(embedding, sound_parts)
    assert all(is_sound(snapshots, name) for name in KINDS[:2])
    forge(snapshots / kind)
    refused(embedding, snapshots, kind, problem)
    train(embedding, range(20))
    embedding.save_snapshot("after")
    assert is_sound(snapshots, "after")
