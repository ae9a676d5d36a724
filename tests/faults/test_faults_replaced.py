"""Live rows that were cut, damaged or replaced by those of another moment: an error and a remedy that works."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from support.embeddings import contents, rows_by_key, train
from support.killed import embedding_at
from support.live_rows import alone, opened, own_rows, run, together
from support.ranks import run_ranks
from support.shell import Cli, command
from support.small_snapshots import flip_bit, keys_of_few_files
from tierbed import StoreError, TierbedError
from tierbed.distributed import World

KEYS = keys_of_few_files(300)


def closed_twice(path: Path, store: str) -> tuple[bytes, bytes]:
    """A store closed after each of two lots of steps, and a copy of its first live rows at `old`.

    Returns the rows of its snapshot, which is of the first close, and the last rows.
    """
    with embedding_at(path, store) as embedding:
        train(embedding, KEYS)
        embedding.save_snapshot("good")
        saved = contents(embedding).tobytes()
    shutil.copytree(live(path), path / "old")
    with embedding_at(path, store) as embedding:
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


OF_FILES = [older_rows, older_file, older_manifest]  # of a store in host memory; the others are of RocksDB
OF_SHARDS = [older_shard, swapped_shards, shard_of_another_store, older_list_of_files, rows_of_the_other_shard]


@pytest.mark.parametrize("damage", [*OF_FILES, *OF_SHARDS, cut_rows, no_file_of_rows, lost_page])
def test_rows_of_another_moment_are_refused_and_the_remedy_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    store = "host" if damage in OF_FILES else "ssd"
    saved, _ = closed_twice(tmp_path, store)
    damage(tmp_path)
    for _ in range(2):
        with pytest.raises(StoreError, match="rows' have a clean marker and cannot be read") as said:
            contents(embedding_at(tmp_path, store))
    assert "snapshot" in Cli(tmp_path / "rows", capsys).fails("save", "bad")  # without opening the embedding, too
    remedy = str(said.value).split("`")[1].split()
    assert remedy == ["tierbed", "snapshot", "load", str(tmp_path / "rows"), "good"]
    assert command(*remedy[1:]) == 0
    with embedding_at(tmp_path, store) as embedding:
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
    with embedding_at(tmp_path / "sound", "ssd", shards=1) as embedding:
        for lot in range(3):
            train(embedding, range(lot * 20, lot * 20 + 40))
            embedding.table_handle().table.flush()
        expected = rows_by_key(embedding)
    size = restrict_to_shard(tmp_path / "sound", "MANIFEST-*").stat().st_size
    refused = 0
    for cut in range(0, size, 17):
        path = tmp_path / str(cut)
        shutil.copytree(tmp_path / "sound", path)
        os.truncate(restrict_to_shard(path, "MANIFEST-*"), cut)
        with embedding_at(path, "ssd", None) as embedding:
            try:
                assert rows_by_key(embedding) == expected
            except StoreError:
                refused += 1
        shutil.rmtree(path)
    assert refused > size // 17 // 2


def test_merging_and_reading_leave_live_rows_as_good_as_they_were(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Cli(tmp_path / "rows", capsys)
    _, last = closed_twice(tmp_path, "ssd")
    cli.json("store compact")
    cli.json("save", "shell")
    more = {"capacity": 10_000, "eviction": "lru"}  # reads all rows at the open
    for given in ({}, more, {"rocksdb_options": {"level0_file_num_compaction_trigger": 2}}):
        with embedding_at(tmp_path, "ssd", open="error", **given) as embedding:
            embedding.get(KEYS)
            embedding.compact()
            assert contents(embedding).tobytes() == last


MANY = torch.arange(6000)


def damaged_store(path: Path) -> tuple[bytes, torch.Tensor]:
    """A store with a bit flipped, closed two steps after a snapshot; its rows at the snapshot, and its embeddings."""
    with embedding_at(path, "ssd") as embedding:
        train(embedding, MANY)
        embedding.save_snapshot("good")
        saved = contents(embedding).tobytes()
        train(embedding, MANY)
        train(embedding, MANY[:50])
        expected = embedding.get(MANY)
    file = max(path.glob("rows/live/*/*.sst"), key=lambda file: int(file.stem))
    flip_bit(file, 8 * (file.stat().st_size // 3))
    return saved, expected


def test_one_flipped_bit_costs_the_rows_of_its_block_alone(tmp_path: Path) -> None:
    saved, expected = damaged_store(tmp_path)
    with embedding_at(tmp_path, "ssd", None) as embedding:
        lost = 0
        for begin in range(0, len(MANY), 40):
            some = slice(begin, begin + 40)
            try:
                assert torch.equal(embedding.get(MANY[some]), expected[some])
            except StoreError as error:
                assert str(tmp_path / "rows") in str(error)  # noqa: PT017
                assert "snapshot" in str(error)  # noqa: PT017
                lost += 1
        assert 0 < lost < len(MANY) / 40 / 2
        with pytest.raises(TierbedError, match="snapshot"):
            contents(embedding)
    assert command("snapshot", "load", tmp_path / "rows", "good") == 0
    with embedding_at(tmp_path, "ssd") as embedding:
        assert contents(embedding).tobytes() == saved


def test_a_damaged_store_that_cannot_be_opened_can_be_begun_anew(tmp_path: Path) -> None:
    damaged_store(tmp_path)
    policy = {"capacity": 10_000, "eviction": "lru"}  # knows every row, so that opening reads all
    with pytest.raises(StoreError, match="a clean marker and cannot be read") as said:
        embedding_at(tmp_path, "ssd", **policy).size()
    with embedding_at(tmp_path, "ssd", open="fresh", **policy) as embedding:
        train(embedding, MANY)
        assert embedding.size() == len(MANY)
    assert 'open="fresh"' in str(said.value)  # the error was held meanwhile, and with it what its frames refer to
