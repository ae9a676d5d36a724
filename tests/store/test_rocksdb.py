"""The RocksDB tier against a dict of rows: what it holds, that its folders last, what it counts, how large it grows."""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.examples import examples
from support.rocksdb_rows import STORED, WIDTH, Rows, keys_from, read_all, write
from support.rows import any_key
from tierbed import OptionError, StoreError
from tierbed.engine import _core
from tierbed.engine.store import rocksdb
from tierbed.engine.store.rocksdb import RocksDB

row = st.tuples(st.integers(0, 3) | st.just(2**32 - 2), any_key)
some_rows = st.lists(row, unique=True, max_size=40)
actions = st.lists(
    st.tuples(st.sampled_from(["write", "write", "read", "erase"]), some_rows)
    | st.tuples(st.sampled_from(["flush", "compact", "reopen", "scan"]), st.just([])),
    max_size=12,
)


@examples(0.5)
@given(
    actions=actions,
    shards=st.sampled_from([1, 3, 8]),
    mode=st.sampled_from(["buffered", "mmap"]),
    limits=st.tuples(*[st.sampled_from([None, 1])] * 2),
)
def test_it_holds_what_a_dict_of_rows_holds(actions: Any, shards: int, mode: str, limits: Any) -> None:
    model: dict[tuple[int, int], int] = {}
    with tempfile.TemporaryDirectory() as path:
        tier = RocksDB(
            Path(path), WIDTH, new_shards=shards, read_mode=mode, index_mb=limits[0], options="write_buffer_size=64k"
        )
        for count, (action, names) in enumerate(actions, 1):
            rows = Rows(names, count)
            if action == "write":
                rows.stored[:, 1] = np.arange(len(names))
                tier.write(rows.tables, rows.keys, rows.lines)
                model |= {name: count + index * 2**32 for index, name in enumerate(names)}
            elif action == "erase":
                tier.erase(rows.tables, rows.keys)
                for name in names:
                    model.pop(name, None)
            elif action == "read":
                rows.memory[:] = 2**32 - 1
                found = tier.read(rows.tables, rows.keys, rows.lines)
                assert found.tolist() == [name in model for name in names]
                for words, name in zip(rows.memory.tolist(), names, strict=True):
                    value = model.get(name)
                    absent = value is None
                    assert words[0] == (2**32 - 1 if absent else value % 2**32)
                    assert words[1] == (2**32 - 1 if absent else value >> 32)
                    assert words[WIDTH + 2 :] == [2**32 - 1] * 3, "the padding was written"
            elif action == "reopen":
                tier.flush()
                tier.close()
                tier = RocksDB(Path(path), WIDTH, shards, read_mode=mode, index_mb=limits[1])
            elif action == "scan":
                scanned = [(bucket, row) for bucket, rows_ in tier.scan() for row in rows_]
                assert {(int(row["table"]), int(row["key"])) for _, row in scanned} == set(model)
                order = [(bucket, int(row["table"]), int(row["key"])) for bucket, row in scanned]
                assert order == sorted(order)
            else:
                getattr(tier, action)()
        counts = tier.metrics()["ssd"]
        assert counts["bytes_in"] == STORED * counts["rows_written"]
        assert counts["bytes_out"] == STORED * counts["hits"]
        tier.close()


def test_large_batches_are_read_and_written_in_pieces(tmp_path: Path, threads: int) -> None:
    names = [(key % 3, key * 2**40 + key) for key in range(30_000)]
    tier = RocksDB(tmp_path, WIDTH, options="write_buffer_size=256k")
    rows = Rows(names)
    rows.stored[:, 0] = np.arange(len(names))
    tier.write(rows.tables, rows.keys, rows.lines)
    assert read_all(tier, names[::-1] + keys_from(10**6, 100)) == [*range(30_000)][::-1] + [None] * 100
    metrics = tier.metrics()["ssd"]
    assert (metrics["hits"], metrics["misses"], metrics["rows_written"]) == (30_000, 100, 30_000)
    tier.close()


def test_a_folder_of_the_first_format_opens(tmp_path: Path) -> None:
    """Keys (bucket u8, table u32, key u64) big-endian, whatever files and filters the databases had."""
    old = "memtable_insert_with_hint_prefix_extractor=nullptr;min_write_buffer_number_to_merge=1;"
    old += "compaction_style=kCompactionStyleLevel;"
    old += "block_based_table_factory={format_version=4;checksum=kCRC32c;filter_policy=nullptr;block_size=512}"
    tier = RocksDB(tmp_path, WIDTH, options=old)
    write(tier, keys_from(0, 400), 7)
    tier.compact()
    write(tier, keys_from(300, 200), 7)
    tier.flush()
    tier.close()
    sst = b"".join(file.read_bytes() for file in tmp_path.rglob("*.sst"))
    bucket = int(_core.buckets(np.zeros(1, np.uint32), np.array([300], np.uint64))[0])
    key = bytes([bucket]) + (0).to_bytes(4, "big") + (300).to_bytes(8, "big")
    assert key[-2:] in sst  # RocksDB leaves out what a key shares with the one before
    tier = RocksDB(tmp_path, WIDTH, rocksdb.SHARDS)
    write(tier, keys_from(400, 200), 8)
    tier.compact()
    assert read_all(tier, keys_from(0, 601)) == [7] * 400 + [8] * 200 + [None]
    tier.close()


@pytest.mark.parametrize("read_threads", [1, 64])
def test_reads_writes_and_scans_of_several_threads(tmp_path: Path, read_threads: int) -> None:
    tier = RocksDB(tmp_path, WIDTH, options="write_buffer_size=64k", read_threads=read_threads)
    write(tier, keys_from(0, 4000), 1)

    def work(number: int) -> None:
        mine = keys_from(1000 * number, 1000)
        for value in range(2, 8):
            write(tier, mine, value)
            assert read_all(tier, mine) == [value] * 1000

    with ThreadPoolExecutor(4) as threads:
        work_done = [threads.submit(work, number) for number in range(4)]
        while not all(done.done() for done in work_done):
            assert sum(len(rows) for _, rows in tier.scan()) == 4000
        for done in work_done:
            done.result()
    assert read_all(tier, keys_from(0, 4000)) == [7] * 4000
    assert 1 <= tier.metrics()["ssd"]["read_threads"] <= read_threads
    tier.close()


def test_a_scan_shows_the_rows_of_when_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocksdb, "SCAN_BYTES", 200)
    tier = RocksDB(tmp_path, WIDTH)
    write(tier, keys_from(0, 1000), 1)
    chunks = tier.scan()
    seen = [next(chunks)[1]]
    write(tier, keys_from(0, 2000), 2)
    tier.compact()
    seen += [rows for _, rows in chunks]
    assert sum(map(len, seen)) == 1000
    assert {value for rows in seen for value in rows["values"].view(np.uint32)[:, 0].tolist()} == {1}
    tier.close()


def test_after_close_calls_say_so(tmp_path: Path) -> None:
    tier = RocksDB(tmp_path, WIDTH)
    native = tier.native
    chunks = tier.scan()
    write(tier, keys_from(0, 10), 1)
    tier.close()
    tier.close()
    for call in (lambda: read_all(tier, []), lambda: write(tier, [], 1), tier.flush, tier.compact, tier.metrics):
        with pytest.raises(StoreError, match=f"RocksDB in {tmp_path} was closed"):
            call()
    with pytest.raises(StoreError, match="closed"):
        next(chunks)
    rows = Rows(keys_from(0, 3))
    with pytest.raises(RuntimeError, match="was closed"):  # as a cache above would
        native.read(rows.tables, rows.keys, rows.lines)


def folder_bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # RocksDB removes files beside
            total += file.stat().st_size if file.is_file() else 0
    return total


@pytest.mark.slow
def test_disk_use_stays_bounded_while_the_same_rows_are_written(tmp_path: Path) -> None:
    names = keys_from(0, 30_000)
    tier = RocksDB(tmp_path, WIDTH, new_shards=1, options="write_buffer_size=64k;min_write_buffer_number_to_merge=1")
    write(tier, names, 1)
    tier.compact()
    once = folder_bytes(tmp_path)
    most = 0
    for value in range(2, 42):
        for first in range(0, len(names), 3000):
            write(tier, names[first : first + 3000], value)
            most = max(most, folder_bytes(tmp_path))
    assert most < 20 * once  # of 41 times written; how far compaction falls behind depends on the machine
    assert tier.metrics()["ssd"]["write_amplification"] < 8
    tier.compact()
    assert folder_bytes(tmp_path) < 1.5 * once
    assert read_all(tier, names) == [41] * len(names)
    tier.close()


def test_metrics_follow_what_was_done(tmp_path: Path) -> None:
    tier = RocksDB(tmp_path, WIDTH)
    write(tier, keys_from(0, 20_000), 1)
    memory = tier.metrics()["ssd"]
    assert memory["memtable_bytes"] > 20_000 * STORED
    assert (memory["sst_bytes"], memory["write_amplification"], memory["compaction_bytes"]) == (0, 0, 0)
    tier.flush()
    write(tier, keys_from(0, 20_000), 2)
    tier.flush()
    flushed = tier.metrics()["ssd"]
    assert flushed["memtable_bytes"] < memory["memtable_bytes"] / 10
    assert flushed["flush_bytes"] >= flushed["sst_bytes"] > 2 * 20_000 * STORED
    read_all(tier, keys_from(10**6, 5000))  # keys between existing ones, so that only a filter can avoid the read
    read_all(tier, [(1, 5)])
    tier.compact()
    read_all(tier, keys_from(0, 20_000))
    metrics = tier.metrics()["ssd"]
    assert metrics["bloom_useful"] > 4000
    assert metrics["compaction_bytes"] > 20_000 * STORED
    assert metrics["compaction_read_bytes"] > metrics["compaction_bytes"]
    assert metrics["sst_bytes"] < 0.6 * flushed["sst_bytes"]
    assert metrics["sst_bytes"] >= metrics["live_data_bytes"] > 0
    per_byte = (metrics["flush_bytes"] + metrics["compaction_bytes"]) / metrics["bytes_in"]
    assert metrics["write_amplification"] == pytest.approx(per_byte)
    assert metrics["bytes"] == sum(
        metrics[part] for part in ("memtable_bytes", "index_filter_bytes", "block_cache_bytes", "read_buffer_bytes")
    )
    for call in ("fetch", "write"):
        p50, p99, most = (metrics[f"{call}_seconds_{name}"] for name in ("p50", "p99", "max"))
        assert 0 < p50 <= p99 <= most < 60
    tier.close()


def read_again(tier: RocksDB, names: list[tuple[int, int]], times: int) -> None:
    for _ in range(times):
        assert read_all(tier, names) == [key for _, key in names]


@pytest.fixture
def disk_folder() -> Iterator[Path]:
    """A folder where temporary files are by default, though `tmp_path` may be in memory."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_more_threads_read_where_they_wait_for_the_disk(disk_folder: Path, pytestconfig: pytest.Config) -> None:
    """Rows that were just written wait for nothing. Direct reads do, where the system counts what they read."""
    if pytestconfig.getoption("--core"):
        pytest.skip("a core with a sanitizer works longer at a row than it waits for a disk")
    rows = Rows(keys_from(0, 20_000))
    rows.memory[:, 0] = rows.keys
    tier = RocksDB(disk_folder, WIDTH)
    tier.write(rows.tables, rows.keys, rows.lines)
    tier.flush()
    at_first = tier.metrics()["ssd"]["read_threads"]
    read_again(tier, keys_from(0, 2000), 5)
    assert tier.metrics()["ssd"]["read_threads"] == at_first
    tier.close()
    try:
        tier = RocksDB(disk_folder, WIDTH, rocksdb.SHARDS, read_mode="direct", cache_mb=0)
    except OptionError:
        pytest.skip("this file system reads through the page cache alone")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock
    read_again(tier, keys_from(0, 2000), 5)
    if resource.getrusage(resource.RUSAGE_SELF).ru_inblock == before:
        pytest.skip("this system does not count the blocks that a thread reads")
    assert tier.metrics()["ssd"]["read_threads"] > at_first
    tier.close()
