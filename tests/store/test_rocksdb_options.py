"""What RocksDB is opened with: options by name reach it, wrong ones and those that would break a promise do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.embeddings import DIM, attach, contents, make, train
from support.rows import Table
from support.stores import options
from tierbed import ClosedError, OptionError, StoreError, make_cached_ssd_store_options, rocksdb_info
from tierbed.engine.options.rocksdb_options import ALLOWED, TABLE, allowed_text
from tierbed.engine.options.store_options import store_options_from_dict
from tierbed.engine.store.rocksdb import RocksDB


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
        ({"write_buffer_sizes": 3}, r"write_buffer_sizes='3': it is not among the .* tried.*mean write_buffer_size\?$"),
        ({"block_size": 8192}, r"block_size='8192': .*did you mean block_size in block_based_table_factory\?$"),
        ({"block_sizes": 4096}, r"block_sizes='4096': .*mean block_size in block_based_table_factory\?$"),
        ({TABLE: {"block_sizes": 3}}, r"block_based_table_factory.block_sizes='3': .*did you mean block_size\?$"),
        ({TABLE: 8}, r"block_based_table_factory='8': .*block_size"),
        ({"compression_opts": "4:5:6:7"}, r"compression_opts='4:5:6:7': .* from level$"),
        ({"compression_opts": {"levels": 4}}, r"compression_opts.levels='4': .*did you mean level\?$"),
        # what ends the process, or takes minutes
        ({"prefix_extractor": "fixed:4"}, r"prefix_extractor='fixed:4': .* tried .*docs/tiers.md.*leave it out"),
        ({"memtable": "prefix_hash"}, r"memtable='prefix_hash': .*leave it out"),
        ({"memtable_factory": "vector"}, r"memtable_factory='vector': .*leave it out"),
        ({TABLE: {"index_type": "kHashSearch"}}, r"factory.index_type='kHashSearch': give one of kBinarySearch, kTwo"),
        # what breaks a promise
        *(
            ({name: value}, rf"{name}='{value}': .*; leave it out")
            for name, value in {
                "comparator": "x",
                "merge_operator": "put",
                "db_paths": "/a",
                "wal_dir": "/a",
                "WAL_ttl_seconds": 3,
                "paranoid_checks": "false",
                "inplace_update_support": "true",
                "num_levels": 3,
                "enable_blob_files": "true",
                "allow_mmap_writes": "true",
                "two_write_queues": "true",
            }.items()
        ),
        ({"allow_mmap_reads": True}, r"allow_mmap_reads='true': give read_mode="),
        ({"max_background_flushes": 4}, r"max_background_flushes='4': give max_background_jobs instead"),
        ({TABLE: {"no_block_cache": True}}, r"factory.no_block_cache='true': give rocksdb_cache_mb instead"),
        ({TABLE: {"checksum": "kNoChecksum"}}, r"factory.checksum='kNoChecksum': give one of kCRC32c"),
        ({TABLE: {"block_align": True}}, r"block_align='true': give false$"),
        (
            {"compaction_style": "kCompactionStyleFIFO"},
            r"compaction_style='kCompactionStyleFIFO': give one of kCompact",
        ),
        # values outside the range, and those that RocksDB would read as another
        ({"max_background_jobs": "many"}, r"max_background_jobs='many': give 1 to 64$"),
        ({"max_background_jobs": 0}, r"max_background_jobs='0': give 1 to 64$"),
        ({"use_fsync": "yes"}, r"use_fsync='yes': give one of false, true$"),
        ({"compression": "lz4"}, r"compression='lz4': give one of kNoCompression, "),
        ({"max_open_files": 2.9}, r"max_open_files='2.9': give one of -1, 20 to 1M$"),
        ({"max_bytes_for_level_multiplier": "8x"}, r"max_bytes_for_level_multiplier='8x': give 2.0 to 100.0$"),
        *(
            ({"write_buffer_size": value}, rf"write_buffer_size='{re.escape(str(value))}': give 64K to 512M$")
            for value in ("1K", "much", -1, "64 MB", "64KB", "12xyz", 1e17, "99999999999T", "2G", "1.5M", "\uff11m", "")
        ),
        ({"write_buffer_size": "1m;num_levels=3"}, r"write_buffer_size='1m;num_levels=3': give the name of one option"),
        ({"write_buffer_size=1;ttl": 3}, r"write_buffer_size=1;ttl=3: give the name of one option"),
        (" ttl=3; num_levels=2;ttl =4", r"ttl='4': it is given twice; give it once"),
        ("block_based_table_factory={block_size=1k;block_size=2k}", r"block_size='2k': it is given twice"),
        ({"write_buffer_size": [1]}, r"write_buffer_size=\[1\]: give a name and a str, int, float, bool or dict"),
        ({3: 4}, r"3=4: give a name"),
        ("write_buffer_size", r"'write_buffer_size': .*give name=value;"),
        (3, r"rocksdb_options=3: give a dict of RocksDB options or RocksDB's options string"),
    ],
)
def test_options_that_are_not_allowed_are_named(tmp_path: Path, given: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message) as error:
        make_cached_ssd_store_options(1, tmp_path, rocksdb_options=given)
    assert "rocksdb_options" in str(error.value)


def test_the_docs_list_the_options_that_are_allowed() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `([\w.]+)` \| (.+?) \|", docs, re.MULTILINE)
    assert [row for row in rows if row[0] in ALLOWED] == [
        (purpose, name, allowed_text(allowed))
        for purpose, options in ALLOWED.items()
        for name, allowed in options.items()
    ]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shards": 0}, "shards=0: give a whole number from 1 to 64"),
        ({"shards": 65}, "shards=65"),
        ({"shards": True}, "shards=True"),
        ({"read_mode": "fast"}, "read_mode='fast': give one of 'buffered', 'mmap', 'direct'"),
        ({"async_io": 1}, "async_io=1: give True or False"),
        ({"rocksdb_cache_mb": -1, "read_mode": "direct"}, "rocksdb_cache_mb=-1: give a number of MiB >= 0"),
        ({"rocksdb_cache_mb": 8}, "rocksdb_cache_mb=8: read_mode='buffered' .* give read_mode='direct'"),
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
        {"shards": 7, "read_mode": "mmap"},
        {"read_mode": "direct", "physical_block_size": 512},
        {"async_io": False, "rocksdb_options": {"compaction_style": "kCompactionStyleUniversal"}},
        {"rocksdb_options": {"write_buffer_size": 65536, "max_open_files": -1, "compression": "kZSTD"}},
    ]
    seen = set()
    for number, setting in enumerate(settings):
        with make(options("ssd", tmp_path, **setting), "adam", name=f"rows{number}") as embedding:
            for step in range(6):
                train(embedding, torch.arange(step * 50, step * 50 + 200))
                embedding.table_handle().table.stack.bottom.flush()
            seen.add(contents(embedding).tobytes())
    assert len(seen) == 1


def test_a_folder_keeps_its_number_of_shards_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(options("ssd", tmp_path, shards=2), "sgd") as embedding:
        train(embedding, range(100))
    with make(options("ssd", tmp_path, shards=5, open="error"), "sgd") as embedding:
        assert embedding.size() == len(contents(embedding)) == 100
        assert len(list((tmp_path / "rows" / "live").glob("shard-*"))) == 2
    assert re.search(r"shards=5: .*live was created with shards=2", caplog.text)


@pytest.mark.parametrize("given", [{}, {"shards": 2}])
def test_shards_that_are_not_given_or_as_they_are_bring_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: dict[str, int]
) -> None:
    with make(options("ssd", tmp_path, shards=2), "sgd") as embedding:
        train(embedding, range(100))
    with make(options("ssd", tmp_path, open="error", **given), "sgd") as embedding:
        assert embedding.size() == 100
    assert "shards" not in caplog.text


def test_rows_made_with_other_options_move_to_a_wider_row(tmp_path: Path) -> None:
    given = {
        "compaction_style": "kCompactionStyleLevel",
        "level0_file_num_compaction_trigger": 2,
        "block_based_table_factory": {"index_type": "kTwoLevelIndexSearch", "format_version": 4},
    }
    with make(options("ssd", tmp_path, rocksdb_options=given)) as embedding:
        for _ in range(3):
            embedding.put(range(500), torch.ones(500, DIM), table_ids=0)
            embedding.table_handle().table.flush()
        embedding.compact()
        attach(embedding, "adam")
        train(embedding, range(500))
        assert embedding.size() == len(contents(embedding)) == 500


def test_compaction_gives_the_space_of_replaced_rows_back(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path, rocksdb_options={"disable_auto_compactions": True}), "sgd") as embedding:
        for _ in range(5):
            train(embedding, range(2000))
            embedding.table_handle().table.flush()
        before, rows = embedding.metrics()["ssd"]["sst_bytes"], contents(embedding)
        embedding.compact()
        assert embedding.metrics()["ssd"]["sst_bytes"] < before / 3
        assert contents(embedding).tobytes() == rows.tobytes()
    with make(options("host"), "sgd") as embedding, pytest.raises(StoreError, match="a host_mem store has no files"):
        embedding.compact()


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


def test_compact_says_first_that_the_embedding_was_closed() -> None:
    embedding = make(options("host"), "sgd")
    with pytest.raises(StoreError, match="host_mem store has no files to merge"):
        embedding.compact()
    embedding.close()
    with pytest.raises(ClosedError):
        embedding.compact()
