"""What RocksDB is opened with: options by name reach it, wrong ones and those that would break a promise do not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.embeddings import DIM, attach, contents, make, train
from support.refusals import check_refusal
from support.rows import Table
from support.stores import options
from tierbed import ClosedError, OptionError, StoreError, make_cached_ssd_store_options, rocksdb_info
from tierbed.engine.options.rocksdb_options import ALLOWED_OPTIONS, BLOCK_TABLE, format_allowed_values
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


@pytest.mark.parametrize(
    ("mode", "cache_mb", "cached"), [("buffered", 32, False), ("direct", 2, True), ("direct", 0, False)]
)
def test_blocks_are_cached_once(tmp_path: Path, mode: str, cache_mb: int, cached: bool) -> None:
    try:
        tier = RocksDB(tmp_path, DIM, read_mode=mode, cache_mb=cache_mb)
    except OptionError:
        pytest.skip("this filesystem has no direct reads")
    table = Table([DIM])
    tables, keys = np.zeros(60_000, np.uint32), np.arange(60_000, dtype=np.uint64)
    _memory, lines = table.lines(60_000)
    tier.write(tables, keys, lines)
    tier.flush()
    for first in range(0, 60_000, 10_000):
        piece = slice(first, first + 10_000)
        assert tier.read(tables[piece], keys[piece], lines[piece]).all()
    taken = tier.metrics()["ssd"]["block_cache_bytes"]
    tier.close()
    assert in_file(tmp_path)["no_block_cache"] == str(not cached).lower()
    assert (cache_mb << 19 < taken <= cache_mb << 20) if cached else taken == 0


def flat(given: Any, prefix: str = "") -> tuple[str, str]:
    """The name of the last option, and its value as the error has it."""
    name, value = list(given.items())[-1]
    if isinstance(value, dict):
        return flat(value, f"{name}.")
    return f"{prefix}{name}", str(value).lower() if isinstance(value, bool) else str(value)


OWN_PROMISES = {
    "comparator": "x", "merge_operator": "put", "db_paths": "/a", "wal_dir": "/a", "WAL_ttl_seconds": 3,
    "paranoid_checks": "false", "inplace_update_support": "true", "num_levels": 3, "enable_blob_files": "true",
    "allow_mmap_writes": "true", "two_write_queues": "true",
}  # fmt: skip
SIZES = ["1K", "much", -1, "64 MB", "64KB", "12xyz", 1e17, "99999999999T", "2G", "1.5M", "\uff11m", ""]
# options, and what the error says beside name='value'
WRONG: list[tuple[Any, tuple[str, ...]]] = [
    ({"write_buffer_sizes": 3}, ("did you mean write_buffer_size?",)),
    ({"block_size": 8192}, ("did you mean block_size in block_based_table_factory?",)),
    ({"block_sizes": 4096}, ("did you mean block_size in block_based_table_factory?",)),
    ({BLOCK_TABLE: {"block_sizes": 3}}, ("did you mean block_size?",)),
    ({BLOCK_TABLE: 8}, ("block_size",)),
    ({"compression_opts": "4:5:6:7"}, ("level",)),
    ({"compression_opts": {"levels": 4}}, ("did you mean level?",)),
    # what ends the process, or takes minutes
    ({"prefix_extractor": "fixed:4"}, ("docs/tiers.md", "leave it out")),
    ({"memtable": "prefix_hash"}, ("leave it out",)),
    ({"memtable_factory": "vector"}, ("leave it out",)),
    ({BLOCK_TABLE: {"index_type": "kHashSearch"}}, ("give one of kBinarySearch, kTwo",)),
    # what breaks a promise
    *(({name: value}, ("leave it out",)) for name, value in OWN_PROMISES.items()),
    ({"allow_mmap_reads": True}, ("give read_mode=",)),
    ({"max_background_flushes": 4}, ("give max_background_jobs instead",)),
    ({BLOCK_TABLE: {"no_block_cache": True}}, ("give rocksdb_cache_mb instead",)),
    ({BLOCK_TABLE: {"checksum": "kNoChecksum"}}, ("give one of kCRC32c",)),
    ({BLOCK_TABLE: {"block_align": True}}, ("give false",)),
    ({"compaction_style": "kCompactionStyleFIFO"}, ("give one of kCompact",)),
    # values outside the range, and those that RocksDB would read as another
    ({"max_background_jobs": "many"}, ("give 1 to 64",)),
    ({"max_background_jobs": 0}, ("give 1 to 64",)),
    ({"use_fsync": "yes"}, ("give one of false, true",)),
    ({"compression": "lz4"}, ("give one of kNoCompression, ",)),
    ({"max_open_files": 2.9}, ("give one of -1, 20 to 1M",)),
    ({"max_bytes_for_level_multiplier": "8x"}, ("give 2.0 to 100.0",)),
    *(({"write_buffer_size": value}, ("give 64K to 512M",)) for value in SIZES),
    ({"write_buffer_size": "1m;num_levels=3"}, ("give one option's name",)),
]
# options that have no name and value of their own, and what the error says
WRONG_TEXTS: list[tuple[Any, tuple[str, ...]]] = [
    ({"write_buffer_size=1;ttl": 3}, ("write_buffer_size=1;ttl=3: give one option's name",)),
    (" ttl=3; num_levels=2;ttl =4", ("ttl='4': it is given twice",)),
    ("block_based_table_factory={block_size=1k;block_size=2k}", ("block_size='2k': it is given twice",)),
    ({"write_buffer_size": [1]}, ("write_buffer_size=[1]: give a name and a str, int, float, bool or dict",)),
    ({3: 4}, ("3=4: give a name",)),
    ("write_buffer_size", ("'write_buffer_size'", "give name=value;")),
    (3, ("rocksdb_options=3: give a dict of RocksDB options or RocksDB's options string",)),
]


@pytest.mark.parametrize(("given", "named"), [*((one, ("{}='{}'", *named)) for one, named in WRONG), *WRONG_TEXTS])
def test_options_that_are_not_allowed_are_named(given: Any, named: tuple[str, ...]) -> None:
    parts = [part.format(*flat(given)) if "{" in part else part for part in named]

    def make_options() -> object:
        return make_cached_ssd_store_options(1, "folder", rocksdb_options=given)

    check_refusal((make_options, OptionError, "rocksdb_options", *parts))


def test_the_docs_list_the_options_that_are_allowed() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "tiers.md").read_text()
    rows = re.findall(r"^\| (\w+) \| `([\w.]+)` \| (.+?) \|", docs, re.MULTILINE)
    assert [row for row in rows if row[0] in ALLOWED_OPTIONS] == [
        (purpose, name, format_allowed_values(allowed))
        for purpose, options in ALLOWED_OPTIONS.items()
        for name, allowed in options.items()
    ]


WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"shards": 0}, "shards=0"),
    ({"shards": 65}, "shards=65"),
    ({"shards": True}, "shards=True"),
    ({"read_mode": "fast"}, "read_mode='fast'"),
    ({"async_io": 1}, "async_io=1"),
    ({"rocksdb_cache_mb": -1, "read_mode": "direct"}, "rocksdb_cache_mb=-1"),
    ({"rocksdb_cache_mb": 8}, "read_mode='direct'"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG_SETTINGS)
def test_a_wrong_setting_of_the_tier_is_named(tmp_path: Path, wrong: dict[str, Any], named: str) -> None:
    check_refusal((lambda: make_cached_ssd_store_options(1, tmp_path, **wrong), OptionError, named))


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


def test_a_folder_keeps_its_number_of_shards_and_says_so_where_others_are_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(options("ssd", tmp_path, shards=2), "sgd") as embedding:
        train(embedding, range(100))
    for given in ({"shards": None}, {"shards": 2}, {"shards": 5}):
        assert "shards" not in caplog.text
        with make(options("ssd", tmp_path, open="error", **given), "sgd") as embedding:
            assert embedding.size() == len(contents(embedding)) == 100
            assert len(list((tmp_path / "rows" / "live").glob("shard-*"))) == 2
    assert re.search(r"shards=5: .*live was created with shards=2", caplog.text)


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


def test_compaction_gives_the_space_of_replaced_and_deleted_rows_back(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path, rocksdb_options={"disable_auto_compactions": True}), "sgd") as embedding:
        for _ in range(5):
            train(embedding, range(2000))
            embedding.table_handle().table.flush()
        for gone, share in (([], 3), (range(1800), 5)):
            embedding.delete(gone, 0)
            embedding.table_handle().table.flush()
            before, rows = embedding.metrics()["ssd"]["sst_bytes"], contents(embedding)
            embedding.compact()
            assert embedding.metrics()["ssd"]["sst_bytes"] < before / share
            assert contents(embedding).tobytes() == rows.tobytes()


def test_what_rocksdb_can_do_and_takes_is_told(tmp_path: Path) -> None:
    assert rocksdb_info()["version"].count(".") == 2
    tier = RocksDB(
        tmp_path, DIM, new_shards=3, options="write_buffer_size=1m;max_write_buffer_number=5;max_background_jobs=8"
    )
    info = tier.info()
    tier.close()
    assert info["memtable_bytes_max"] == 3 * 5 << 20
    assert (info["flush_threads"], info["compaction_threads"]) == (4, 6)
    assert info["async_io"] == rocksdb_info()["async_io"]


def test_compact_says_first_that_the_embedding_was_closed() -> None:
    embedding = make(options("host"), "sgd")
    with pytest.raises(StoreError, match="host_mem store has no files to merge"):
        embedding.compact()
    embedding.close()
    with pytest.raises(ClosedError):
        embedding.compact()
