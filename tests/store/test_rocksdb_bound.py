"""The bound of compactions: all that they move passes it, flushes do not, and nobody waits for what it holds back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from support.rocksdb_rows import WIDTH, keys_from, read_all, write
from tierbed.engine.store.rocksdb import RocksDB

ROWS = 3000
SMALL = "write_buffer_size=64k"
TINY = (8 << 20) / 20  # bytes a second, the least that the bound is


def make(folder: Path, rate: int, mode: str = "mmap") -> RocksDB:
    """By mmap, compactions ask for the bytes that they read, and not for those that they may read ahead."""
    return RocksDB(folder, WIDTH, new_shards=1, compaction_rate=rate, read_mode=mode, options=SMALL)


def write_often(tier: RocksDB, times: int) -> None:
    for fill in range(times):
        write(tier, keys_from(0, ROWS), fill)
        tier.flush()


def wait_for(tier: RocksDB, running: int) -> None:
    while tier.metrics()["ssd"]["running_compactions"] != running:
        time.sleep(0.001)


def test_all_that_compactions_move_passes_the_bound_and_flushes_do_not(tmp_path: Path) -> None:
    tier = make(tmp_path, 1 << 30)
    write_often(tier, 40)
    tier.compact()
    wait_for(tier, 0)
    counts = tier.metrics()["ssd"]
    moved = counts["compaction_read_bytes"] + counts["compaction_bytes"]
    assert counts["flush_bytes"] > 0.3 * moved > 0
    assert 0.9 * moved < counts["compaction_bounded_bytes"] <= moved  # not what says where in a file rows are
    assert (1 << 30) // 20 <= counts["compaction_bytes_per_second"] <= 1 << 30
    tier.close()


@pytest.mark.parametrize("mode", ["mmap", "buffered", "direct"])
def test_nobody_waits_for_what_a_tiny_bound_holds_back(tmp_path: Path, mode: str) -> None:
    tier = make(tmp_path, 1, mode)
    write_often(tier, 10)
    wait_for(tier, 1)
    held = tier.metrics()["ssd"]
    tier.compact()
    merged = tier.metrics()["ssd"]
    passed = merged["compaction_bounded_bytes"] - held["compaction_bounded_bytes"]
    waited = merged["compaction_wait_seconds"] - held["compaction_wait_seconds"]
    assert merged["sst_bytes"] < held["sst_bytes"] / 3
    assert passed > 10 * TINY * waited
    write_often(tier, 10)
    wait_for(tier, 1)
    tier.close()
    again = make(tmp_path, 1)
    assert read_all(again, keys_from(0, ROWS)) == [9] * ROWS
    again.close()


def test_a_shard_that_falls_behind_is_not_held_back(tmp_path: Path) -> None:
    tier = make(tmp_path, 1)
    write_often(tier, 100)
    counts = tier.metrics()["ssd"]
    assert counts["compaction_wait_seconds"] > 0
    assert counts["compaction_bounded_bytes"] > 10 * TINY * counts["compaction_wait_seconds"]
    assert read_all(tier, keys_from(0, ROWS)) == [99] * ROWS
    tier.close()
