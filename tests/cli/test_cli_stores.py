"""The command line on folders of real stores: what it saves, loads and prints is what the engine trained."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from support.embeddings import DIM, attach, contents, make, train
from support.shell import Cli
from support.small_snapshots import description, flip_bit, save
from support.stores import STORES, options
from tierbed import MultiTableEmbedding
from tierbed.engine import _core
from tierbed.engine.options.lookup import Lookup
from tierbed.snapshots import Snapshot, write_incremental
from tierbed.snapshots.store.folder import StoreFolder

pytestmark = pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")
Trained = Callable[..., bytes]


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "rows", capsys)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, bytes]]:
    @cache
    def made(store: str, optimizer: str) -> tuple[Path, bytes]:
        path = tmp_path_factory.mktemp("made")
        with make(options(store, path), optimizer) as embedding:
            train(embedding, torch.arange(-20, 10), torch.arange(30) % 3)
            embedding.save_snapshot("full")
            train(embedding, torch.arange(7, 19), torch.arange(12) % 3)
            embedding.delete([3, 6], 2)
            embedding.save_snapshot("more", kind="incremental")
            train(embedding, torch.arange(10), 1)
            return path, contents(embedding).tobytes()

    return made


@pytest.fixture
def trained(made: Callable[[str, str], tuple[Path, bytes]], tmp_path: Path) -> Trained:
    """Copies a store that was closed with snapshots "full", "more", its child, and later rows; returns those."""

    def trained(store: str, optimizer: str = "adam") -> bytes:
        path, rows = made(store, optimizer)
        shutil.copytree(path, tmp_path, dirs_exist_ok=True)
        return rows

    return trained


@pytest.mark.parametrize(
    ("store", "kind"), [*zip(STORES, ["full", "incremental"] * 3, strict=False), ("ssd", "checkpoint")]
)
def test_a_save_of_the_shell_loads_anywhere(cli: Cli, tmp_path: Path, trained: Trained, store: str, kind: str) -> None:
    rows = trained(store)
    if not store.startswith("ssd"):
        assert "cached_ssd" in cli.fails("save", "shell", "--kind", "checkpoint")
    assert cli.json("save", "shell", "--kind", kind)["kind"] == kind
    fields, ours = (cli.json("inspect", name)["description"].keys() for name in ("shell", "more"))
    assert fields == ours  # no field that only MARK has
    cli.json("verify", "shell")
    with make(options("device" if "ssd" in store else "ssd", tmp_path), "adam") as embedding:
        assert contents(embedding).tobytes() == rows
        train(embedding, [1, 2, 3, 1000])
        embedding.load_snapshot("shell")
        assert contents(embedding).tobytes() == rows


@pytest.mark.parametrize(("store", "name"), [("device", "more"), ("ssd", "full")])
def test_a_run_resumes_what_the_shell_loaded(cli: Cli, tmp_path: Path, trained: Trained, store: str, name: str) -> None:
    trained(store)
    with make(options(store, tmp_path), "adam") as embedding:
        embedding.load_snapshot("full", tables=[0, 2])
        part = contents(embedding).tobytes()
        embedding.load_snapshot(name)
        expected = contents(embedding).tobytes()
    assert cli.json("load", name)["left_out"] == 0
    assert cli.json("store stat")["base"] == name
    with make(options(store, tmp_path, open="error"), "adam") as embedding:
        assert contents(embedding).tobytes() == expected
        train(embedding, range(30))
    loaded = cli.json("load", "full", "--table", "0", "--table", "2")
    assert loaded["left_out"] > 0
    assert loaded["rows"] + loaded["left_out"] == cli.json("inspect", "full")["rows"]
    assert cli.json("store stat")["base"] == name
    with make(options(store, tmp_path, open="error"), "adam") as embedding:
        assert contents(embedding).tobytes() == part
    code, _, err = cli.run("load", "full", "--table", "3")
    assert (code, "tables 0 to 2" in err) == (2, True)


def test_weights_alone_can_be_trained(cli: Cli, tmp_path: Path, trained: Trained) -> None:
    trained("device", "catch-up")
    with make(options("device", tmp_path), "catch-up") as embedding:
        embedding.load_snapshot("more")
        seen = {table: embedding.get(torch.arange(-20, 19), table) for table in range(3)}
    cli.json("load", "more", "--weights-only")
    with make(options("device", tmp_path, open="error")) as embedding:
        for table, rows in seen.items():
            assert torch.equal(embedding.get(torch.arange(-20, 19), table), rows)
        attach(embedding, "adagrad")
        train(embedding, [1, 2, 3])


def test_a_row_is_that_of_the_engine_and_of_each_snapshot(cli: Cli, trained: Trained) -> None:
    whole = {None: trained("ssd")}
    cli.json("save", "files", "--kind", "checkpoint")
    for name in ("full", "more", "files"):
        snapshot = Snapshot.open(cli.store / "snapshots" / name)
        whole[name] = b"".join(rows.tobytes() for _, rows in snapshot.chunks())
    for name, data in whole.items():
        rows = np.frombuffer(data, snapshot.manifest.row_format.dtype)
        for table, key in ((0, -20), (2, 3), (1, 7)):
            [*row] = rows[(rows["table"] == table) & (rows["key"] == np.int64(key).view(np.uint64))]
            arguments = ["store get", str(key), "--table", str(table)] + (["--snapshot", name] if name else [])
            found = cli.json(*arguments, code=0 if row else 4)
            if row:
                values = np.float32([*found["embedding"], *found["states"]["exp_avg"], *found["states"]["exp_avg_sq"]])
                assert values.tobytes() == row[0]["values"].tobytes()
                shown = [found[field] for field in ("table", "key", "updates", "step")]
                assert shown == [table, key, row[0]["updates"], row[0]["step"]]
            else:
                assert f"no row of table {table}, key {key}" in found["error"]
    assert cli.says("store get", "7", "--table", "1").startswith("table       1\nkey         7\nembedding   ")
    for wrong in (["7", "--table", "3"], [str(2**63)]):
        code, out, err = cli.run("store get", *wrong)
        assert (code, out) == (2, "")
        assert "give one from" in err


def test_get_takes_the_folder_of_a_snapshot_and_tells_damage(
    cli: Cli, tmp_path: Path, trained: Trained, capsys: pytest.CaptureFixture[str]
) -> None:
    trained("device")
    row = cli.json("store get", "-5", "--snapshot", "full")
    assert Cli(cli.store / "snapshots" / "full", capsys).json("store get", "-5") == row
    cli.says("export", "full", str(tmp_path / "elsewhere"), "--format", "snapshot")
    assert Cli(tmp_path / "elsewhere", capsys).json("store get", "-5") == row
    missing = Cli(cli.store / "snapshots" / "none", capsys).fails("store get", "-5")
    assert "there is no snapshot 'none'" in missing
    assert "existing ones: 'full', 'more'" in missing
    for file in (cli.store / "snapshots" / "full").glob("bucket-*.npy"):
        flip_bit(file, 8 * file.stat().st_size - 8)
    assert "checksum" in cli.fails("store get", "--snapshot", "full", "-5")


def test_compaction_keeps_every_row(cli: Cli, tmp_path: Path) -> None:
    given = {"level0_file_num_compaction_trigger": 100}
    with make(options("ssd", tmp_path, rocksdb_options=given), "adam") as embedding:
        for _ in range(5):
            train(embedding, range(1000))
            embedding.table_handle().table.flush()
        rows = contents(embedding).tobytes()
    done = cli.json("store compact", "--rocksdb-options", "level0_file_num_compaction_trigger=50")
    assert done["merged"]
    assert done["bytes_after"] < done["bytes_before"] / 2
    assert "merged: " in cli.says("store compact")
    assert "not among the options" in cli.fails("store compact", "--rocksdb-options", "nonsense=1")
    for store in ("ssd", "device"):  # rows in memory have nothing to merge
        with make(options(store, tmp_path, open="error"), "adam") as embedding:
            assert contents(embedding).tobytes() == rows
            train(embedding, [1])
            rows = contents(embedding).tobytes()
    assert cli.json("store compact")["merged"] is False
    assert cli.says("store compact").startswith("nothing to merge")


def test_stat_tells_what_the_next_run_does(cli: Cli, tmp_path: Path) -> None:
    embedding = make(options("ssd", tmp_path), "adam")
    train(embedding, [1, 2, 3])
    train(embedding, [1, 2, 3])
    stat = cli.json("store stat")
    assert (stat["state"], stat["step"], stat["rows"], stat["base"]) == ("open", 2, None, None)
    assert stat["holder"] > 0
    assert stat["rows_by_table"] is stat["dtype"] is stat["state_dtype"] is None
    assert (stat["restart"]["from"], stat["restart"]["lost_steps"]) == ("empty", 2)
    embedding.save_snapshot("first")
    train(embedding, [4])
    restart = cli.json("store stat")["restart"]
    assert (restart["from"], restart["snapshot"], restart["step"], restart["lost_steps"]) == ("snapshot", "first", 2, 1)
    assert "after a kill, rolls back to snapshot first, at step 2, and loses 1 step\n" in cli.says("store stat")
    embedding.close()
    stat = cli.json("store stat")
    assert (stat["state"], stat["holder"], stat["step"], stat["rows"], stat["base"]) == ("closed", None, 3, 4, "first")
    assert stat["live"] == "rocksdb"
    assert (stat["dtype"], stat["state_dtype"]) == ("float32", "float32")
    assert stat["rows_by_table"] == {"0": 4, "1": 0, "2": 0}
    assert "\nrows by table  0: 4, 1: 0, 2: 0\n" in cli.says("store stat")
    assert (stat["restart"]["from"], stat["restart"]["step"]) == ("live", 3)
    assert all(count > 0 for count in stat["bytes"].values())
    with StoreFolder(cli.store) as folder:
        folder.clear_clean_marker()
    stat = cli.json("store stat")
    assert (stat["state"], stat["restart"]["from"], stat["restart"]["lost_steps"]) == ("unclean", "snapshot", None)
    (cli.store / "snapshots" / "first" / "manifest.msgpack").write_bytes(b"")
    stat = cli.json("store stat")
    assert stat["restart"]["from"] == "nowhere"
    assert "manifest.msgpack" in stat["restart"]["problem"]


@pytest.mark.parametrize("suffix", [".parquet", ""])
def test_exports_and_merged_chains_are_the_same_rows(cli: Cli, tmp_path: Path, trained: Trained, suffix: str) -> None:
    trained("device")
    path, form = str(tmp_path / f"out{suffix}"), [] if suffix else ["--format", "snapshot"]
    done = cli.json("export", "more", path, *form)
    assert done["rows"] == cli.json("inspect", "more")["rows"]
    assert done["bytes"] > 0
    assert "exists" in cli.fails("export", "more", path, *form)
    cli.json("import", "again", path)
    assert cli.says("diff", "more", "again").startswith("the same: ")
    if not suffix:
        assert cli.json("merge", "more", "merged")["kind"] == "full"
        assert cli.says("diff", "more", "merged").startswith("the same: ")
        for name, said in (("full", "choose another name"), ("../x", "snapshot name"), ("", "snapshot name")):
            assert said in cli.fails("merge", "more", name)


def test_what_exists_names_overwriting_only_where_that_is_taken(cli: Cli, tmp_path: Path, trained: Trained) -> None:
    trained("device")
    snapshots = cli.store / "snapshots"
    for folder in (tmp_path / "b.npz", snapshots / "notes"):
        folder.mkdir()
    (tmp_path / "a.npz").touch()
    for named, *arguments in (
        (True, "export", "full", str(tmp_path / "a.npz")),
        (False, "export", "full", str(tmp_path / "b.npz")),
        (False, "export", "full", str(snapshots / "full"), "--format", "snapshot"),
        (True, "save", "full"),
        (False, "save", "notes"),
    ):
        assert ("overwrite" in cli.fails(*arguments)) is named
    some = "export", "full", str(tmp_path / "a.npz"), "--table", "1", "--weights-only", "--overwrite"
    cli.says(*some)
    with np.load(tmp_path / "a.npz") as arrays:
        assert set(arrays["table"]) == {1}
        assert "exp_avg" not in arrays
    code, _, err = cli.run("export", "full", str(tmp_path / "some.csv"))
    assert code == 2
    assert {"npz", "safetensors", "snapshot"} <= set(err.split())


def test_a_dense_table_is_imported_and_trained_on(cli: Cli, tmp_path: Path) -> None:
    dense = torch.randn(50, DIM)
    torch.save({"net": {"emb.weight": dense}}, tmp_path / "model.pt")
    arguments = "import", "dense", str(tmp_path / "model.pt"), "--tensor", "net.emb.weight"
    assert "or add --create to create it" in cli.fails(*arguments)
    imported = cli.json(*arguments, "--create")
    assert imported["rows"] == 50
    assert imported["rows_per_second"] > 0
    assert re.search(r", in .* \([\d,]+ rows/s\)$", cli.says("import", "again", *arguments[2:]).strip())
    cli.json("load", "dense")
    with make(options("device", tmp_path), "adam", tables=1) as embedding:
        assert torch.equal(embedding.get(torch.arange(50)), dense)
        train(embedding, [1, 2, 3])


def test_a_live_trainer_gives_the_row_of_its_closed_store(cli: Cli, tmp_path: Path) -> None:
    """A row that takes several packets."""
    made = options("ssd", tmp_path, budget_mb=4)
    with MultiTableEmbedding("rows", 4096, torch.float32, torch.int64, None, made) as embedding:
        attach(embedding, "catch-up")
        train(embedding, [1, -2])
        train(embedding, [1])
        live = [cli.json("store get", key) for key in ("1", "-2")]
        assert "there is no row of table 0, key 3" in cli.fails("store get", "3", code=4)
    assert live == [cli.json("store get", key) for key in ("1", "-2")]
    assert len(live[0]["states"]["exp_avg"]) == 4096


def test_a_trainer_that_does_not_answer_in_time_is_named(cli: Cli, tmp_path: Path) -> None:
    with make(options("device", tmp_path), "adam") as embedding:
        train(embedding, [1])
        ids = torch.tensor([1])
        embedding.pin([Lookup(ids, torch.zeros_like(ids))])
        said = cli.fails("store get", "1", "--timeout", "0.2")
        assert "was asked to read a row, but did not answer for 0.2 seconds" in said
        embedding.table_handle().unpin_rows()
        with embedding.table_handle().open_table.lock:
            said = cli.fails("prune", "--keep-last", "1", "--timeout", "0.5")
        assert "did not answer for 0.5 seconds" in said
        assert "end it and use the closed store" in said


def test_prune_keeps_what_it_is_told_and_what_that_goes_over(cli: Cli) -> None:
    names = [f"s{step}" for step in range(6)]
    for step, name in enumerate(names):
        over = Snapshot.open(cli.store / "snapshots" / names[step - 1]) if step in (1, 2) else None
        if over is None:
            save(cli.store / "snapshots" / name, step=step + 1)
        else:
            write_incremental(cli.store / "snapshots" / name, over, description(step=step + 1), 30, iter([]))
    (cli.store / "LOCK").touch()
    would = cli.json("prune", "--keep-last", "1", "--dry-run")
    assert (would["removed"], would["kept"]) == (names[:5], names[5:])
    assert would["removed_bytes"] > 0
    assert cli.says("prune", "--keep-last", "1", "--dry-run").startswith("would remove s0\n")
    assert [s["name"] for s in cli.json("list")["snapshots"]] == names
    assert cli.json("prune", "--keep-last", "2", "--keep-every", "3")["removed"] == ["s3"]
    assert [s["name"] for s in cli.json("list")["snapshots"]] == ["s0", "s1", "s2", "s4", "s5"]
    assert cli.run("prune", "--keep-last", "0")[0] == 2
    cli.json("verify")


def test_the_shell_leaves_files_made_with_other_options_as_they_are(cli: Cli, tmp_path: Path) -> None:
    given = {
        "compaction_style": "kCompactionStyleUniversal",
        "level0_file_num_compaction_trigger": 100,
        "level0_slowdown_writes_trigger": 200,
        "level0_stop_writes_trigger": 300,
        "write_buffer_size": 1 << 16,
        "min_write_buffer_number_to_merge": 1,
        "compression": "kLZ4Compression",
        "block_based_table_factory": {"index_type": "kTwoLevelIndexSearch", "format_version": 4},
    }
    with make(options("ssd", tmp_path, shards=1, read_mode="mmap", rocksdb_options=given), "adam") as embedding:
        for first in range(0, 2000, 200):
            train(embedding, range(first, first + 200))
            embedding.table_handle().table.flush()  # a file each
        trained = contents(embedding)
    files = tmp_path / "rows" / "live" / "shard-0"
    before = {file.name: file.stat().st_size for file in files.glob("*.sst")}
    assert len(before) > 8  # which tierbed's own options would merge
    cli.json("save", "shell")
    assert {file.name: file.stat().st_size for file in files.glob("*.sst")} == before
    with make(options("device", tmp_path, open="error"), "adam") as embedding:
        assert contents(embedding).tobytes() == trained.tobytes()
        embedding.load_snapshot("shell")
        assert contents(embedding).tobytes() == trained.tobytes()
