"""Blocks of RocksDB's files: they begin with a page where they can, and checksums count what lies between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.embeddings import DIM
from tierbed.engine import _core
from tierbed.engine.cache.memory_split import compute_index_bytes
from tierbed.engine.store.rocksdb import MB, RocksDB

ROWS = 2000


def checksum(path: Path, size: int) -> int:
    crc = _core.Crc32c()
    crc.update(np.fromfile(path, np.uint8, size))
    return crc.finish()


@pytest.mark.parametrize(
    ("width", "given", "aligned"),
    [
        (DIM, {}, True),
        (DIM, {"block_bytes": 16384}, True),
        (DIM, {"read_mode": "direct"}, False),
        (1000, {}, True),
        (334, {}, False),  # two rows in a block of 4096 bytes
        (504, {}, False),  # one
        (1014, {}, False),  # a block for each row, and more than 4096 bytes
        (2000, {}, False),
        (DIM, {"options": "compression=kLZ4Compression"}, False),
        (DIM, {"options": "bottommost_compression=kZSTD"}, False),
        (DIM, {"options": "use_direct_io_for_flush_and_compaction=true"}, False),
        (DIM, {"options": "block_based_table_factory={block_size=5000}"}, False),
        (DIM, {"options": "block_based_table_factory={block_align=false}"}, False),
    ],
)
def test_blocks_are_aligned_where_little_is_lost_and_files_have_the_checksums_that_rocksdb_keeps(
    tmp_path: Path, width: int, given: dict[str, Any], aligned: bool
) -> None:
    database = RocksDB(tmp_path, width, **given)
    assert f"block_align={str(aligned).lower()}" in (kept := max((tmp_path / "shard-0").glob("OPTIONS-*")).read_text())
    assert f"block_size={given.get('block_bytes', 4096)}" in kept or "options" in given or width > 500
    lines = np.zeros((ROWS, width + 4), np.float32)
    keys, tables = np.arange(ROWS, dtype=np.uint64), np.zeros(ROWS, np.uint32)
    addresses = (lines.ctypes.data + lines.strides[0] * np.arange(ROWS)).astype(np.uint64)
    for value in (1, 2):  # flushed, and then merged
        lines[:, :width] = value
        database.write(tables, keys, addresses)
        database.compact() if value == 2 else database.flush()
        with database.hold_files() as files:
            rows = [file for file in files if file.name.endswith(".sst")]
            assert rows
            for file in rows:
                assert file.crc32c == checksum(tmp_path / file.name, file.size)
                assert file.size == (tmp_path / file.name).stat().st_size
    stored = sum(file.stat().st_size for file in tmp_path.glob("shard-*/*.sst"))
    assert stored < 1.4 * ROWS * (4 * width + 28)
    lines[:] = np.nan
    assert database.read(tables, keys, addresses).all()
    assert (lines[:, :width] == 2).all()
    database.close()


@pytest.mark.parametrize("limits", [(None, 1), (1, None)])
def test_rows_stay_if_the_limit_for_indexes_changes(tmp_path: Path, limits: tuple[float | None, float | None]) -> None:
    """Files of both formats hold the same rows at the same time, and the cache keeps to its limit."""
    rows = 40_000
    lines = np.zeros((rows, DIM + 4), np.float32)
    keys, tables = np.arange(rows, dtype=np.uint64) * 977, np.zeros(rows, np.uint32)
    addresses = (lines.ctypes.data + lines.strides[0] * np.arange(rows)).astype(np.uint64)
    for value, limit in enumerate([*limits, *limits]):
        database = RocksDB(tmp_path, DIM, 4 if value else None, index_mb=limit, options="write_buffer_size=64k")
        if value == 3:
            database.compact()  # of files of both formats
        half = slice(value % 2, None, 2) if value else slice(None)
        lines[half, :DIM] = value
        database.write(*(np.ascontiguousarray(part[half]) for part in (tables, keys, addresses)))
        database.flush()
        expected = lines.copy()
        for _ in range(3):
            lines[:] = np.nan
            assert database.read(tables, keys, addresses).all()
            lines[:, DIM:] = expected[:, DIM:] = 0
            assert lines.tobytes() == expected.tobytes()
        assert not database.read(tables, keys + np.uint64(1), addresses).any()
        assert sum(len(chunk) for _, chunk in database.scan()) == rows
        metrics = database.metrics()["ssd"]
        assert (0 < metrics["block_cache_bytes"] <= 1.05 * MB) if limit else metrics["block_cache_bytes"] == 0
        database.close()


@pytest.mark.parametrize("width", [4, 32, 128, 256])
def test_the_predicted_size_of_indexes_and_filters_is_what_rocksdb_reports(tmp_path: Path, width: int) -> None:
    rows = 20_000
    lines = np.zeros((rows, width + 4), np.float32)
    keys, tables = np.random.default_rng(width).integers(0, 1 << 40, rows, np.uint64), np.zeros(rows, np.uint32)
    addresses = (lines.ctypes.data + lines.strides[0] * np.arange(rows)).astype(np.uint64)
    database = RocksDB(tmp_path, width, new_shards=1)
    database.write(tables, keys, addresses)
    database.compact()
    metrics = database.metrics()["ssd"]
    database.close()
    assert metrics["index_filter_bytes"] / rows == pytest.approx(compute_index_bytes(4 * width + 8), rel=0.15)
