"""What RocksDB is opened with: options by name reach it, wrong ones and those that would break a promise do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embeddings import DIM, contents, make, options, train
from rows import Table

from tierbed.engine import OptionError, make_cached_ssd_store_options
from tierbed.engine.options import store_options_from_dict
from tierbed.engine.store.rocksdb import RocksDB, rocksdb_info


def in_file(folder: Path) -> dict[str, str]:
    """The options that RocksDB itself wrote down of the first shard."""
    file = max((folder / "shard-0").glob("OPTIONS-*"))
    lines = [line.split("=", 1) for line in file.read_text().splitlines() if "=" in line and not line.startswith("#")]
    return {name.strip(): value.strip() for name, value in lines}


@pytest.mark.parametrize(
    "given",
    [
        {
            "write_buffer_size": 1 << 20,
            "level0_stop_writes_trigger": 40,
            "block_based_table_factory": {"block_size": 8192},
        },
        " write_buffer_size=1m;level0_stop_writes_trigger=40;block_based_table_factory={block_size=8192;} ",
    ],
)
def test_options_by_name_reach_rocksdb_and_the_others_stay(tmp_path: Path, given: Any) -> None:
    made = make_cached_ssd_store_options(1, tmp_path, rocksdb_options=given, shards=2)
    assert isinstance(made.rocksdb_options, str)
    assert store_options_from_dict(made.as_dict()) == made
    assert hash(made) == hash(store_options_from_dict(dict(made)))
    with make(made, "sgd") as embedding:
        train(embedding, [1, 2, 3])
        live = tmp_path / "rows" / "live"
        assert len(list(live.glob("shard-*"))) == 2
        kept = in_file(live)
        assert kept["write_buffer_size"] == str(1 << 20)
        assert kept["level0_stop_writes_trigger"] == "40"
        assert kept["block_size"] == "8192"
        assert kept["min_write_buffer_number_to_merge"] == "8"
        assert kept["filter_policy"].startswith("bloomfilter:10")


def test_the_disks_block_is_the_files_block(tmp_path: Path) -> None:
    RocksDB(tmp_path, DIM, block_bytes=16384).close()
    assert in_file(tmp_path)["block_size"] == "16384"


@pytest.mark.parametrize(
    ("mode", "cache_mb", "cached"), [("buffered", 32, False), ("direct", 2, True), ("direct", 0, False)]
)
def test_blocks_are_cached_once(tmp_path: Path, mode: str, cache_mb: int, cached: bool) -> None:
    try:
        tier = RocksDB(tmp_path, DIM, read_mode=mode, cache_mb=cache_mb)
    except OptionError:
        pytest.skip("this filesystem has no direct reads")
    table = Table([DIM])
    tables, keys = np.zeros(200_000, np.uint32), np.arange(200_000, dtype=np.uint64)
    _memory, lines = table.lines(200_000)
    tier.write(tables, keys, lines)
    tier.flush()
    for first in range(0, 200_000, 10_000):
        piece = slice(first, first + 10_000)
        assert tier.read(tables[piece], keys[piece], lines[piece]).all()
    taken = tier.metrics()["ssd"]["block_cache_bytes"]
    tier.close()
    assert in_file(tmp_path)["no_block_cache"] == str(not cached).lower()
    assert (cache_mb << 19 < taken <= cache_mb << 20) if cached else taken == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"write_buffer_sizes": 3}, r"write_buffer_sizes='3': .* no option of this name.*mean write_buffer_size\?"),
        ({"block_size": 4096}, r"block_size='4096': RocksDB [\d.]+ has no option of this name"),
        ({"write_buffer_size": "much"}, r"write_buffer_size='much': RocksDB cannot read this value"),
        ({"compaction_style": "kNone"}, r"compaction_style='kNone': RocksDB cannot read"),
        ({"block_based_table_factory": {"block_sizes": 3}}, r"block_sizes=3.*fields of its BlockBasedTableOptions"),
        ({"comparator": "x"}, r"comparator='x': rows are stored in the order.*leave it out"),
        ({"merge_operator": "put"}, r"merge_operator='put'.*leave it out"),
        ({"create_if_missing": True}, r"create_if_missing='true': tierbed decides.*leave it out"),
        ({"db_paths": "/a"}, r"db_paths='/a'.*leave it out"),
        ({"wal_dir": "/a"}, r"wal_dir='/a': .*no write-ahead log"),
        ({"WAL_ttl_seconds": 3}, r"WAL_ttl_seconds='3': .*no write-ahead log"),
        ({"max_total_wal_size": 3}, r"max_total_wal_size='3': .*no write-ahead log"),
        ({"allow_mmap_reads": True}, r"allow_mmap_reads='true': give read_mode="),
        ({"paranoid_checks": False}, r"paranoid_checks='false': damage of a file would go unseen"),
        ({"inplace_update_support": True}, r"inplace_update_support.*rows of two steps"),
        ({"compaction_style": "kCompactionStyleFIFO"}, r"compaction_style='kCompactionStyleFIFO': FIFO drops rows"),
        ({"block_based_table_factory": {"checksum": "kNoChecksum"}}, r"kNoChecksum: damage of a file"),
        ({"block_based_table_factory": {"no_block_cache": True}}, r"give rocksdb_cache_mb instead"),
        ({"write_buffer_size": [1]}, r"write_buffer_size=\[1\]: give a name and a str, int, float, bool or dict"),
        ({3: 4}, r"3=4: give a name"),
        ("write_buffer_size", r"'write_buffer_size': .*give name=value;"),
        (3, r"rocksdb_options=3: give a dict of RocksDB options or RocksDB's options string"),
    ],
)
def test_options_that_rocksdb_or_a_promise_refuses_are_named(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        make_cached_ssd_store_options(1, tmp_path, rocksdb_options=given)
    assert "rocksdb_options" in str(error.value)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shards": 0}, "shards=0: give a whole number from 1 to 64"),
        ({"shards": 65}, "shards=65"),
        ({"shards": True}, "shards=True"),
        ({"read_mode": "fast"}, "read_mode='fast': give one of 'buffered', 'mmap', 'direct'"),
        ({"async_io": 1}, "async_io=1: give True or False"),
        ({"rocksdb_cache_mb": -1}, "rocksdb_cache_mb=-1: give a number of MiB >= 0"),
    ],
)
def test_a_wrong_setting_of_the_tier_is_named(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        make_cached_ssd_store_options(1, tmp_path, **wrong)


def test_rows_do_not_depend_on_how_rocksdb_runs(tmp_path: Path) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"shards": 1},
        {"shards": 64, "rocksdb_options": {"max_open_files": 100}},
        {"shards": 7, "read_mode": "mmap", "rocksdb_cache_mb": 0},
        {"read_mode": "direct", "physical_block_size": 512},
        {"async_io": False, "rocksdb_options": {"compaction_style": "kCompactionStyleUniversal"}},
        {"rocksdb_options": {"write_buffer_size": 1, "enable_blob_files": True, "compression": "kZSTD"}},
    ]
    seen = set()
    for number, setting in enumerate(settings):
        with make(options("ssd", tmp_path, **setting), "adam", name=f"rows{number}") as embedding:
            for step in range(6):
                train(embedding, torch.arange(step * 50, step * 50 + 200))
                embedding._table().stack.bottom.flush()
            seen.add(contents(embedding).tobytes())
    assert len(seen) == 1


def test_a_folder_keeps_its_number_of_shards(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path, shards=2), "sgd") as embedding:
        train(embedding, range(100))
    with make(options("ssd", tmp_path, shards=5, open="error"), "sgd") as embedding:
        assert embedding.size() == len(contents(embedding)) == 100
        assert len(list((tmp_path / "rows" / "live").glob("shard-*"))) == 2


def test_what_rocksdb_can_do_and_takes_is_told(tmp_path: Path) -> None:
    assert rocksdb_info()["version"].count(".") == 2
    tier = RocksDB(
        tmp_path, DIM, new_shards=3, options="write_buffer_size=1m;max_write_buffer_number=5;max_background_jobs=8"
    )
    info = tier.info()
    tier.close()
    assert info["memtable_bytes_max"] == 3 * 5 << 20
    assert (info["flush_threads"], info["compaction_threads"]) == (2, 6)
    assert info["async_io"] == rocksdb_info()["async_io"]
