"""Live rows that were cut or replaced by those of another moment: an error and a remedy that works, never old rows."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.embeddings import contents, make, rows_by_key, train
from support.live_rows import alone, opened, own_rows, run, together
from support.ranks import run_ranks
from support.shell import Cli, command
from support.stores import options
from tierbed import SnapshotError, StoreError
from tierbed.distributed import World
from tierbed.engine.durable import seal, unseal

KEYS = torch.arange(300)


def closed_twice(path: Path, store: str) -> tuple[bytes, bytes]:
    """A store closed after each of two lots of steps, and a copy of its first live rows at `old`.

    Returns the rows of its snapshot, which is of the first close, and the last rows.
    """
    with make(options(store, path), "adam", tables=1) as embedding:
        train(embedding, KEYS)
        embedding.save_snapshot("good")
        saved = contents(embedding).tobytes()
    shutil.copytree(live(path), path / "old")
    with make(options(store, path), "adam", tables=1) as embedding:
        for _ in range(3):
            train(embedding, KEYS)
            embedding.table_handle().table.flush()
        return saved, contents(embedding).tobytes()


def live(path: Path) -> Path:
    (found,) = (path / "rows").glob("live*")
    return found


def restrict_to_shard(path: Path, name: str, shard: int = 0) -> Path:
    return max((live(path) / f"shard-{shard}").glob(name))


def older_shard(path: Path) -> None:
    shutil.rmtree(live(path) / "shard-1")
    shutil.copytree(path / "old" / "shard-1", live(path) / "shard-1")


def swapped_shards(path: Path) -> None:
    one, other, between = live(path) / "shard-0", live(path) / "shard-1", live(path) / "between"
    one.rename(between)
    other.rename(one)
    between.rename(other)


def shard_of_another_store(path: Path) -> None:
    """One that was written by as many calls."""
    closed_twice(path / "other", "ssd")
    shutil.rmtree(live(path) / "shard-0")
    shutil.copytree(live(path / "other") / "shard-0", live(path) / "shard-0")


def older_list_of_files(path: Path) -> None:
    """With the files of both moments."""
    for file in (path / "old" / "shard-0").iterdir():
        if not (live(path) / "shard-0" / file.name).exists() or file.name == "CURRENT":
            shutil.copy(file, live(path) / "shard-0" / file.name)


def cut_rows(path: Path) -> None:
    file = restrict_to_shard(path, "*.sst")
    os.truncate(file, file.stat().st_size - 1)


def rows_of_the_other_shard(path: Path) -> None:
    """Two files of rows, of one size, change places."""
    one, other = restrict_to_shard(path, "*.sst"), restrict_to_shard(path, "*.sst", shard=1)
    longer = max(one, other, key=lambda file: file.stat().st_size)
    size = longer.stat().st_size
    shutil.copy(min(one, other, key=lambda file: file.stat().st_size), path / "copy")
    os.truncate(path / "copy", size)
    shutil.copy(path / "copy", longer)


def no_file_of_rows(path: Path) -> None:
    restrict_to_shard(path, "*.sst").unlink()


def lost_page(path: Path) -> None:
    """A list of files whose last half reads as zeros."""
    file = restrict_to_shard(path, "MANIFEST-*")
    size = file.stat().st_size
    os.truncate(file, size // 2)
    os.truncate(file, size)


DAMAGES: list[Callable[[Path], None]] = [
    older_shard,
    swapped_shards,
    shard_of_another_store,
    older_list_of_files,
    cut_rows,
    rows_of_the_other_shard,
    no_file_of_rows,
    lost_page,
]


def older_rows(path: Path) -> None:
    """All of one moment, of as many rows."""
    where = live(path)
    shutil.rmtree(where)
    shutil.copytree(path / "old", where)


def older_file(path: Path) -> None:
    for file in (path / "old").glob("bucket-*.npy"):
        shutil.copy(file, live(path) / file.name)


def older_manifest(path: Path) -> None:
    shutil.copy(path / "old" / "manifest.msgpack", live(path) / "manifest.msgpack")


@pytest.mark.parametrize(
    ("store", "damage"),
    [
        *(pytest.param("ssd", damage, id=damage.__name__) for damage in DAMAGES),
        *(pytest.param("host", damage, id=damage.__name__) for damage in (older_rows, older_file, older_manifest)),
    ],
)
def test_rows_of_another_moment_are_refused_and_the_remedy_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: str, damage: Callable[[Path], None]
) -> None:
    saved, _ = closed_twice(tmp_path, store)
    damage(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreError, match="rows' have a clean marker and cannot be read") as said:
            contents(make(options(store, tmp_path), "adam", tables=1))
    assert "snapshot" in Cli(tmp_path / "rows", capsys).fails("save", "bad")  # without opening the embedding, too
    remedy = str(said.value).split("`")[1].split()
    assert remedy == ["tierbed", "snapshot", "load", str(tmp_path / "rows"), "good"]
    assert command(*remedy[1:]) == 0
    with make(options(store, tmp_path), "adam", tables=1) as embedding:
        assert contents(embedding).tobytes() == saved


def opens(world: World, path: Path) -> str:
    with pytest.raises(StoreError) as said:
        own_rows(opened(world, path, "ssd"))
    return str(said.value)


def test_an_older_shard_of_a_rank_is_refused_and_the_remedy_works(tmp_path: Path) -> None:
    saved = alone(tmp_path, "ssd", 2, "base")
    run(2, tmp_path, "ssd", 1)
    rows = tmp_path / "rows" / "ranks" / "1-of-2" / "live"
    shutil.copytree(rows / "shard-0", tmp_path / "old")
    run(2, tmp_path, "ssd", 1)
    shutil.rmtree(rows / "shard-0")
    shutil.copytree(tmp_path / "old", rows / "shard-0")
    for said in run_ranks(2, opens, tmp_path):
        assert "1-of-2' have a clean marker and cannot be read" in said
    assert command(*said.split("`")[1].split()[1:]) == 0
    found = run(2, tmp_path, "ssd", 0)
    assert together([before for before, _, _ in found], saved)


def test_no_length_of_rocksdbs_list_of_files_gives_other_rows(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path / "sound", shards=1), "adam", tables=1) as embedding:
        for lot in range(3):
            train(embedding, range(lot * 20, lot * 20 + 40))
            embedding.table_handle().table.flush()
        expected = rows_by_key(embedding)
    size = restrict_to_shard(tmp_path / "sound", "MANIFEST-*").stat().st_size
    refused = 0
    for cut in range(0, size, 7):
        path = tmp_path / str(cut)
        shutil.copytree(tmp_path / "sound", path)
        os.truncate(restrict_to_shard(path, "MANIFEST-*"), cut)
        with make(options("ssd", path), tables=1) as embedding:
            try:
                assert rows_by_key(embedding) == expected
            except StoreError:
                refused += 1
        shutil.rmtree(path)
    assert refused > size // 7 // 2


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_live_rows_that_an_earlier_version_closed_are_read(tmp_path: Path, store: str) -> None:
    _, last = closed_twice(tmp_path, store)
    file = tmp_path / "rows" / "MARK"
    content = unseal(file.read_bytes())
    assert content.pop("live_files")
    file.write_bytes(seal(content))
    with make(options(store, tmp_path, open="error"), "adam", tables=1) as embedding:
        assert contents(embedding).tobytes() == last


def test_merging_and_reading_leave_live_rows_as_good_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Cli(tmp_path / "rows", capsys)
    _, last = closed_twice(tmp_path, "ssd")
    cli.json("store compact")
    cli.json("save", "shell")
    more = {"capacity": 10_000, "eviction": "lru"}  # reads all rows at the open
    for given in ({}, more, {"rocksdb_options": {"level0_file_num_compaction_trigger": 2}}):
        with make(options("ssd", tmp_path, open="error", **given), "adam", tables=1) as embedding:
            embedding.get(KEYS)
            embedding.compact()
            assert contents(embedding).tobytes() == last


def test_a_checkpoint_whose_list_of_files_was_cut_is_refused(tmp_path: Path) -> None:
    with make(options("ssd", tmp_path, shards=1), "adam", tables=1) as embedding:
        train(embedding, KEYS)
        embedding.save_snapshot("linked", kind="checkpoint")
        (file,) = (tmp_path / "rows" / "snapshots" / "linked").glob("rocksdb/shard-0/MANIFEST-*")
        os.truncate(file, file.stat().st_size - 30)
        with pytest.raises(SnapshotError, match="MANIFEST"):
            embedding.load_snapshot("linked")
