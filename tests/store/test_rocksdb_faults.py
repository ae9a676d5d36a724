"""A full disk, damaged and missing files: the call says which and what to do, other rows stay readable, it goes on."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from support.forked import Disk, disk_path, in_process
from support.limits import file_size_limit
from support.rocksdb_rows import WIDTH, keys_from, read_all, write
from support.warm import Child
from tierbed import StoreError
from tierbed.engine.store.rocksdb import RocksDB

__all__ = ["disk_path"]

SMALL = "write_buffer_size=64k;min_write_buffer_number_to_merge=1"
COUNT = 20_000


def filled(folder: Path, options: str = SMALL, value: int = 1) -> RocksDB:
    tier = RocksDB(folder, WIDTH, new_shards=2, options=options)
    write(tier, keys_from(0, COUNT), value)
    tier.flush()
    return tier


def until_refused(tier: RocksDB) -> tuple[str, int]:
    """Write new values until a call fails: what it said, and the value that it had."""
    for value in range(2, 200):
        try:
            write(tier, keys_from(0, COUNT), value)
        except StoreError as error:
            return str(error), value
    raise AssertionError("all writes succeeded")


def goes_on(tier: RocksDB, value: int) -> None:
    """It writes, flushes and reads, and every file is whole."""
    write(tier, keys_from(0, COUNT), value)
    tier.flush()
    tier.compact()
    assert read_all(tier, keys_from(0, COUNT)) == [value] * COUNT
    tier.close()


def fill_the_disk(path: Path) -> None:
    disk = Disk(path, 48 << 20)
    folder = path / "rows"
    folder.mkdir()
    tier = filled(folder)
    with disk.full():
        said, value = until_refused(tier)
        assert str(folder) in said
        assert "No space" in said
        assert "free space on its disk and go on" in said
        assert {*read_all(tier, keys_from(0, COUNT))} <= {value - 1, value}, "a row that was written is lost"
        with pytest.raises(StoreError, match="No space"):
            tier.flush()
        assert tier.metrics()["ssd"]["background_errors"] > 0
    tier.flush()  # by itself enough to go on
    assert {*read_all(tier, keys_from(0, COUNT))} <= {value - 1, value}
    with disk.full():
        until_refused(tier)
    goes_on(tier, 500)
    tier = RocksDB(folder, WIDTH, 2)
    assert read_all(tier, keys_from(0, COUNT)) == [500] * COUNT
    tier.close()


def test_a_disk_that_fills_loses_no_row_and_with_space_it_goes_on(disk_path: Path) -> None:
    in_process(fill_the_disk, disk_path)


def die_after_flushes(folder: Path) -> None:
    tier = RocksDB(folder, WIDTH, new_shards=2, options=SMALL)
    write(tier, keys_from(0, COUNT), 1)
    tier.flush()
    with file_size_limit(1 << 14):
        until_refused(tier)
    tier.flush()
    for value in range(500, 510):
        write(tier, keys_from(0, 400), value)
        tier.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_flush_that_returned_after_one_that_failed_survives_a_kill(tmp_path: Path) -> None:
    assert Child(die_after_flushes, tmp_path).wait() == -signal.SIGKILL
    tier = RocksDB(tmp_path, WIDTH, 2)
    assert read_all(tier, keys_from(0, 400)) == [509] * 400
    tier.close()


def test_a_file_that_cannot_grow_loses_no_row_and_when_it_can_it_goes_on(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    with file_size_limit(1 << 14):
        said, value = until_refused(tier)
        assert str(tmp_path) in said
        assert "check the disk" in said
        assert {*read_all(tier, keys_from(0, COUNT))} <= {value - 1, value}
        with pytest.raises(StoreError, match="flush: IO error"):
            tier.flush()
    goes_on(tier, 500)


def files_of(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.sst"), key=lambda file: file.stat().st_size)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


@pytest.mark.parametrize("mode", ["buffered", "mmap"])
def test_a_flipped_byte_fails_its_block_alone(tmp_path: Path, mode: str) -> None:
    filled(tmp_path).close()
    damaged = files_of(tmp_path)[-1]
    flip(damaged, 5000)  # in a block of rows: the index and the filter lie at the end
    tier = RocksDB(tmp_path, WIDTH, 2, read_mode=mode)
    said = []
    for first in range(0, COUNT, 20):
        try:
            assert read_all(tier, keys_from(first, 20)) == [1] * 20
        except StoreError as error:
            said.append(str(error))
    assert 0 < len(said) < COUNT // 20
    assert all(str(damaged) in error and "load the last snapshot" in error for error in said)
    with pytest.raises(StoreError, match=f"{damaged.name}.*load the last snapshot"):
        for _ in tier.scan():
            pass
    write(tier, keys_from(COUNT, 50), 3)
    with pytest.raises(StoreError, match=f"{damaged.name}.*load the last snapshot"):
        tier.compact()
    assert read_all(tier, keys_from(COUNT, 50)) == [3] * 50
    tier.close()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated table": lambda folder: os.truncate(files_of(folder)[-1], 3000),
    "missing table": lambda folder: files_of(folder)[-1].unlink(),
    "flipped footer": lambda folder: flip(files_of(folder)[-1], -2),
    "flipped manifest": lambda folder: flip(next((folder / "shard-0").glob("MANIFEST-*")), 40),
    "missing manifest": lambda folder: next((folder / "shard-0").glob("MANIFEST-*")).unlink(),
    "missing shard": lambda folder: [file.unlink() for file in (folder / "shard-1").iterdir()],
    "foreign CURRENT": lambda folder: (folder / "shard-0" / "CURRENT").write_text("nonsense"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_or_missing_file_is_named_when_it_is_opened_or_read(tmp_path: Path, damage: str) -> None:
    filled(tmp_path).close()
    DAMAGES[damage](tmp_path)

    def use() -> None:
        tier = RocksDB(tmp_path, WIDTH, 2)
        try:
            read_all(tier, keys_from(0, COUNT))
        finally:
            tier.close()

    with pytest.raises(StoreError, match=f"RocksDB in {tmp_path}.*: (open|read): .*snapshot") as error:
        use()
    assert "shard-" in str(error.value)


def test_a_row_of_another_width_is_refused(tmp_path: Path) -> None:
    filled(tmp_path).close()
    tier = RocksDB(tmp_path, WIDTH - 1, 2)
    with pytest.raises(StoreError, match=r"a stored row has 20 bytes, and 16 are expected"):
        read_all(tier, keys_from(0, 10))
    tier.close()


def test_too_few_open_files_are_an_error_and_nothing_is_lost(tmp_path: Path) -> None:
    filled(tmp_path).close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))
    try:
        with pytest.raises(StoreError, match=r"Too many open files.*then try again"):
            RocksDB(tmp_path, WIDTH, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    goes_on(RocksDB(tmp_path, WIDTH, 2), 2)
