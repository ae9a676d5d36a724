"""The command line on folders of real stores: what it saves and loads is what the engine trained."""

from __future__ import annotations

from pathlib import Path

import pytest
from embeddings import STORES, contents, make, options, train

from tierbed.engine import _core
from tierbed.snapshots.cli import main


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["snapshot", *arguments])
    assert not end.value.code


@pytest.mark.parametrize("store", STORES)
def test_a_snapshot_saved_by_the_shell_loads_on_every_store(tmp_path: Path, store: str) -> None:
    folder = str(tmp_path / "rows")
    with make(options(store, tmp_path), "adam") as embedding:
        train(embedding, list(range(500)))
        trained = contents(embedding)
    run("save", folder, "shell")
    run("verify", folder)
    for other in ("device", "ssd"):
        with make(options(other, tmp_path), "adam") as embedding:
            train(embedding, [1, 2, 3, 1000])
            embedding.load_snapshot("shell")
            assert contents(embedding).tobytes() == trained.tobytes()
            train(embedding, [4, 5, 6])


@pytest.mark.parametrize("store", ["device", "ssd"])
def test_a_snapshot_loaded_by_the_shell_is_what_the_next_run_resumes(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), "adam") as embedding:
        train(embedding, list(range(500)))
        embedding.save_snapshot("early")
        early = contents(embedding)
        train(embedding, list(range(600)))
    run("load", str(tmp_path / "rows"), "early")
    with make(options(store, tmp_path, open="error"), "adam") as embedding:
        assert contents(embedding).tobytes() == early.tobytes()
        assert embedding.size() == 500
        train(embedding, list(range(600)))


@pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")
@pytest.mark.parametrize("style", ["kCompactionStyleLevel", "kCompactionStyleUniversal"])
def test_the_shell_leaves_files_made_with_other_options_as_they_are(tmp_path: Path, style: str) -> None:
    given = {
        "compaction_style": style,
        "level0_file_num_compaction_trigger": 100,
        "level0_slowdown_writes_trigger": 200,
        "level0_stop_writes_trigger": 300,
        "write_buffer_size": 1 << 16,
        "min_write_buffer_number_to_merge": 1,
        "compression": "kLZ4Compression",
        "prefix_extractor": "fixed:4",
        "block_based_table_factory": {"index_type": "kHashSearch", "format_version": 4},
    }
    with make(options("ssd", tmp_path, shards=1, read_mode="mmap", rocksdb_options=given), "adam") as embedding:
        for first in range(0, 20_000, 2000):
            train(embedding, range(first, first + 2000))
            embedding._table().flush()  # a file each
        trained = contents(embedding)
    live = tmp_path / "rows" / "live" / "shard-0"

    def files() -> dict[str, int]:
        return {file.name: file.stat().st_size for file in live.glob("*.sst")}

    before = files()
    assert len(before) > 8  # which tierbed's own options would merge
    run("save", str(tmp_path / "rows"), "shell")
    assert files() == before
    with make(options("device", tmp_path, open="error"), "adam") as embedding:
        assert contents(embedding).tobytes() == trained.tobytes()
        embedding.load_snapshot("shell")
        assert contents(embedding).tobytes() == trained.tobytes()
