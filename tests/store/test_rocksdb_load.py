"""Rows that a load writes: sorted files hold them, whatever their order, and nothing tells them from written rows."""

from __future__ import annotations

import operator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from support.embeddings import DIM, contents, make, train
from support.stores import options
from tierbed.engine import _core
from tierbed.engine.errors import StoreError
from tierbed.engine.store.rocksdb import RocksDB

ROWS = 5000
SMALL_FILES = "target_file_size_base=16384"


def make_rows() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns tables, keys and lines [ROWS], in the order of a scan."""
    random = np.random.default_rng(0)
    tables = random.integers(0, 3, ROWS).astype(np.uint32)
    keys = random.permutation(1 << 20)[:ROWS].astype(np.uint64) << np.uint64(40)
    lines = random.random((ROWS, DIM + 4), np.float32)
    order = np.lexsort((keys, tables, _core.buckets(tables, keys)))
    return tables[order], keys[order], lines


def write(database: RocksDB, rows: tuple[np.ndarray, np.ndarray, np.ndarray], part: np.ndarray | slice) -> None:
    tables, keys, lines = (np.ascontiguousarray(column[part]) for column in rows)
    addresses = lines.ctypes.data + lines.strides[0] * np.arange(len(lines), dtype=np.uint64)
    database.write(tables, keys, addresses.astype(np.uint64))


def read_all(database: RocksDB) -> bytes:
    return b"".join(rows.tobytes() for _, rows in database.scan())


@pytest.mark.parametrize("order", ["sorted", "reversed chunks", "random", "empty"])
@pytest.mark.parametrize("options", ["", SMALL_FILES, "compaction_style=kCompactionStyleLevel"])
def test_loaded_rows_equal_written_rows(tmp_path: Path, order: str, options: str) -> None:
    rows = make_rows()
    parts = [slice(begin, begin + 500) for begin in range(0, ROWS, 500)]
    if order == "random":
        parts = np.array_split(np.random.default_rng(1).permutation(ROWS), 10)
    parts = {"reversed chunks": parts[::-1], "empty": []}.get(order, parts)
    loaded, written = (RocksDB(tmp_path / name, DIM, options=options) for name in ("loaded", "written"))
    empty_versions = loaded.read_versions()
    with loaded.load():
        for part in parts:
            write(loaded, rows, part)
    for part in parts:
        write(written, rows, part)
    for database in (loaded, written):
        database.flush()
    assert read_all(loaded) == read_all(written)
    # a database that lost the loaded files must not look like this one
    versions = loaded.read_versions()
    assert all((before != after) is bool(parts) for before, after in zip(empty_versions, versions, strict=True))
    assert not list((tmp_path / "loaded").glob("shard-*/sorted-*"))
    if order == "sorted" and options == SMALL_FILES:
        assert len(list(tmp_path.glob("loaded/shard-*/*.sst"))) > 2 * loaded.shards
    loaded.close()
    loaded = RocksDB(tmp_path / "loaded", DIM, loaded.shards, options=options)
    assert loaded.read_versions() == versions
    for database in (loaded, written):  # writes and deletions hide loaded rows
        database.erase(rows[0][::3].copy(), rows[1][::3].copy())
        write(database, (rows[0], rows[1], rows[2] + 1), slice(1, None, 3))
        database.flush()
    assert read_all(loaded) == read_all(written)
    loaded.compact()
    assert read_all(loaded) == read_all(written)
    loaded.close()
    written.close()


@pytest.mark.parametrize(
    "given",
    [{}, {"read_mode": "direct"}, {"options": "compression=kLZ4Compression"}, {"block_bytes": 16384}],
    ids=str,
)
def test_loaded_files_have_the_checksums_that_rocksdb_keeps(tmp_path: Path, given: dict) -> None:
    database = RocksDB(tmp_path, DIM, **given)
    with database.load():
        write(database, make_rows(), slice(None))
    with database.hold_files() as files:
        row_files = [file for file in files if file.name.endswith(".sst")]
        assert sum(file.size for file in row_files) > 4 * DIM * ROWS / 2
        for file in row_files:
            crc = _core.Crc32c()
            crc.update(np.fromfile(tmp_path / file.name, np.uint8))
            assert file.crc32c == crc.finish()
    database.close()


def test_a_load_that_fails_adds_no_row(tmp_path: Path) -> None:
    database = RocksDB(tmp_path, DIM)
    with suppress(KeyError), database.load():
        write(database, make_rows(), slice(None))
        raise KeyError
    database.close()
    database = RocksDB(tmp_path, DIM, database.shards)
    assert read_all(database) == b""
    database.close()


def test_a_load_whose_files_cannot_be_made_names_the_folder(tmp_path: Path) -> None:
    database = RocksDB(tmp_path, DIM)
    for shard in range(database.shards):
        (tmp_path / f"shard-{shard}" / "sorted-0.sst").mkdir()
    with pytest.raises(StoreError, match=f"RocksDB in {tmp_path}: load"), database.load():
        write(database, make_rows(), slice(None))
    database.close()


def test_a_flushed_cache_replaces_rows_in_files_and_memtables(tmp_path: Path) -> None:
    embedding = make(options("ssd", tmp_path, 1), "adam", tables=1)
    plain = make(options("host"), "adam", "plain", tables=1)
    for step in range(4):
        for rows in (embedding, plain):
            train(rows, range(100 * step, 600))
            if step % 2:
                rows.delete(range(50 * step, 100 * step))
        table = embedding._handle.table
        versions = table.stack.bottom.read_versions()
        table.flush()
        assert not any(map(operator.eq, versions, table.stack.bottom.read_versions()))
        assert contents(embedding).tobytes() == contents(plain).tobytes()
    assert not list(tmp_path.rglob("sorted-*"))
    embedding.close()
