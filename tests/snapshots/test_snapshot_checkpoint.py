"""Checkpoints, which share RocksDB's files by links: the rows of a full snapshot, for good, and all damage found."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.spawn
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.forged import crc32c
from support.forked import Disk, disk_path, in_process
from support.killed import remarks
from support.small_snapshots import description, files, flip_bit, joined, make_rows
from tierbed import SnapshotError, StoreError
from tierbed.engine import _core
from tierbed.engine.options.store_options import format_options
from tierbed.engine.store.rocksdb import RocksDB
from tierbed.engine.table.row_scan import locate_lines
from tierbed.snapshots import Manifest, Snapshot, write_snapshot
from tierbed.snapshots.files.read_errors import ReadIOError
from tierbed.snapshots.files.rocksdb_files import checkpoint_chunks, write_rocksdb
from tierbed.snapshots.files.verify import find_chains, verify_all
from tierbed.snapshots.files.writer import new_snapshot, write_manifest

__all__ = ["disk_path"]

WIDTH = 6

pytestmark = pytest.mark.skipif(not _core.has_rocksdb, reason="no RocksDB")


def put(tier: RocksDB, count: int = 400, seed: int = 0) -> None:
    rows = make_rows(WIDTH, count, seed)
    tier.write(rows["table"].copy(), rows["key"].copy(), locate_lines(rows))


def erase(tier: RocksDB, count: int = 400, seed: int = 0) -> None:
    rows = make_rows(WIDTH, count, seed)
    tier.erase(rows["table"].copy(), rows["key"].copy())


def write_checkpoint(folder: Path, about: dict[str, Any], rows: int, tier: RocksDB) -> None:
    with new_snapshot(folder, about) as place:
        write_manifest(place, about, rows, rocksdb=write_rocksdb(place, folder.name, rows, tier))


def save(tier: RocksDB, folder: Path) -> Snapshot:
    rows = sum(len(rows) for _, rows in tier.scan())
    write_checkpoint(folder, description(WIDTH), rows, tier)
    return Snapshot.open(folder)


def rocksdb_files(manifest: Manifest) -> dict[str, dict[str, int]]:
    assert manifest.rocksdb is not None
    return manifest.rocksdb.files


def tables_of(snapshot: Snapshot) -> list[str]:
    return [name for name in rocksdb_files(snapshot.manifest) if name.endswith(".sst")]


@given(pieces=st.lists(st.binary(max_size=40), max_size=4))
def test_the_checksum_of_pieces_is_the_standard_one_of_all(pieces: list[bytes]) -> None:
    assert crc32c(b"123456789") == 0xE3069283
    native = _core.Crc32c()
    for piece in pieces:
        native.update(np.frombuffer(piece, np.uint8))
    assert native.finish() == crc32c(b"".join(pieces))


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[RocksDB]:
    with closing(RocksDB(tmp_path / "live", WIDTH, new_shards=2)) as tier:
        put(tier)
        yield tier


def test_it_has_the_rows_of_a_full_snapshot(tmp_path: Path) -> None:
    with closing(RocksDB(tmp_path / "live", WIDTH, new_shards=3)) as tier:
        put(tier, 2000)
        tier.flush()
        put(tier, 500, seed=1)
        erase(tier, 900)
        write_snapshot(tmp_path / "full", description(WIDTH), tier.scan())
        save(tier, tmp_path / "linked")
    full, linked = Snapshot.open(tmp_path / "full"), Snapshot.open(tmp_path / "linked")
    assert linked.kind == "checkpoint"
    assert linked.manifest.rows == full.manifest.rows > 1000
    assert linked.manifest.total_bytes == sum(file.stat().st_size for file in (linked.folder / "rocksdb").glob("*/*"))
    expected, before, reported = joined(full.chunks()), files(linked.folder), list[int]()
    assert joined(linked.chunks()) == expected
    in_small = list(checkpoint_chunks(linked.folder, linked.manifest, max_rows=3))
    assert max(len(rows) for _, rows in in_small) == 3
    assert joined(in_small) == expected
    linked.verify(reported.append)
    assert (files(linked.folder), sum(reported)) == (before, linked.manifest.rows)
    with closing(RocksDB(tmp_path / "empty", WIDTH)) as tier:
        save(tier, tmp_path / "none").verify()
    assert list(Snapshot.open(tmp_path / "none").chunks()) == []


def test_files_of_rows_are_linked_with_the_checksums_that_rocksdb_kept(tier: RocksDB, tmp_path: Path) -> None:
    snapshot = save(tier, tmp_path / "s")
    assert tables_of(snapshot)
    for name, entry in rocksdb_files(snapshot.manifest).items():
        file = snapshot.folder / "rocksdb" / name
        assert entry == {"bytes": file.stat().st_size, "crc32c": crc32c(file.read_bytes())}
        assert os.path.samefile(file, tier.folder / name) == name.endswith(".sst")
        assert file.stat().st_nlink == (2 if name.endswith(".sst") else 1)
    with closing(RocksDB(snapshot.folder / "rocksdb", WIDTH, 2, read_only=True)) as stored:
        assert joined(stored.scan()) == joined(tier.scan())
        with pytest.raises(StoreError, match="read only"):
            put(stored)


def test_it_outlasts_what_becomes_of_the_store(tier: RocksDB, tmp_path: Path) -> None:
    expected = joined(tier.scan())
    snapshot = save(tier, tmp_path / "s")
    tables = [tier.folder / name for name in tables_of(snapshot)]
    with tier.hold_files():
        for seed in range(1, 3):
            put(tier, 400, seed)
            erase(tier, 150)
            tier.compact()
        assert all(file.exists() for file in tables)  # while they are linked
    assert joined(tier.scan()) != expected
    tier.close()
    RocksDB(tier.folder, WIDTH, 2).close()
    assert not any(file.exists() for file in tables)
    assert joined(snapshot.chunks()) == expected
    shutil.rmtree(tier.folder)
    snapshot.verify()
    assert joined(snapshot.chunks()) == expected


def test_checkpoints_while_another_thread_writes_and_merges_are_all_sound(tmp_path: Path) -> None:
    small = format_options({"write_buffer_size": 1 << 16, "min_write_buffer_number_to_merge": 1})
    ended = threading.Event()
    with closing(RocksDB(tmp_path / "live", WIDTH, options=small)) as tier:
        put(tier, 1500)

        def work() -> None:
            while not ended.is_set():
                put(tier, 1500)
                tier.compact()

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for number in range(2):
                write_checkpoint(tmp_path / f"s{number}", description(WIDTH), 1500, tier)
                Snapshot.open(tmp_path / f"s{number}").verify()
        finally:
            ended.set()
            worker.join()


def refused(snapshot: Snapshot, named: str) -> None:
    for read in (snapshot.verify, lambda: list(snapshot.chunks())):
        with pytest.raises(SnapshotError) as error:
            read()
        assert named in str(error.value)
        assert str(snapshot.folder) in str(error.value)


def test_a_flipped_bit_a_cut_end_and_an_absence_of_each_file_in_turn_are_found(tier: RocksDB, tmp_path: Path) -> None:
    snapshot = save(tier, tmp_path / "s")
    names = rocksdb_files(snapshot.manifest)
    assert {Path(name).name.split("-")[0].split(".")[-1] for name in names} == {"sst", "CURRENT", "MANIFEST", "OPTIONS"}
    for name in names:
        file = snapshot.folder / "rocksdb" / name
        whole = file.read_bytes()
        for bit in {0, 3, 4 * len(whole), 8 * len(whole) - 1}:
            flip_bit(file, bit)
            refused(snapshot, name)
            flip_bit(file, bit)
        for changed in (whole[: len(whole) // 2], b"", whole + b"x"):
            file.write_bytes(changed)
            refused(snapshot, name)
        file.unlink()
        refused(snapshot, name)
        file.mkdir()
        refused(snapshot, name)
        file.rmdir()
        os.mkfifo(file)
        refused(snapshot, name)
        file.unlink()
        file.write_bytes(whole)
    snapshot.verify()
    for name in ("LOG", "shard-0/LOCK", "shard-1/999999.sst", "shard-7/CURRENT"):
        file = snapshot.folder / "rocksdb" / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        refused(snapshot, name)
        file.unlink()
    snapshot.verify()
    (snapshot.folder / "rocksdb" / "shard-1").rename(tmp_path / "elsewhere")
    refused(snapshot, "shard-1")
    shutil.rmtree(snapshot.folder / "rocksdb")
    refused(snapshot, "rocksdb")


def test_damage_of_which_rocksdb_would_end_the_process_is_found_first(tier: RocksDB, tmp_path: Path) -> None:
    """One of these bits is the highest of the number of restarts of the block of properties."""
    snapshot = save(tier, tmp_path / "s")
    name = tables_of(snapshot)[0]
    file = snapshot.folder / "rocksdb" / name
    size = file.stat().st_size
    for byte in range(size - 300, size):
        flip_bit(file, 8 * byte + 7)
        with pytest.raises(SnapshotError, match=name):
            next(snapshot.chunks())
        flip_bit(file, 8 * byte + 7)


def test_a_bit_that_flips_in_a_live_file_damages_all_and_a_cut_is_not_linked(tier: RocksDB, tmp_path: Path) -> None:
    before = save(tier, tmp_path / "before")
    file = tier.folder / tables_of(before)[0]
    flip_bit(file, 4 * file.stat().st_size)
    write_checkpoint(tmp_path / "after", description(WIDTH), 400, tier)  # reads no file of rows
    for snapshot in (before, Snapshot.open(tmp_path / "after")):
        refused(snapshot, file.name)
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(SnapshotError, match=f"{file.name}.*load the last snapshot"):
        write_checkpoint(tmp_path / "snapshots" / "s", description(WIDTH), 400, tier)
    assert list((tmp_path / "snapshots").iterdir()) == []


def test_a_wrong_width_and_no_rocksdb_are_named(tier: RocksDB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path / "s", description(8), 400, tier)
    snapshot = Snapshot.open(tmp_path / "s")
    with pytest.raises(SnapshotError, match=r"is damaged.*a stored row has"):
        list(snapshot.chunks())
    monkeypatch.setattr(_core, "has_rocksdb", False)
    with pytest.raises(SnapshotError, match=r"'s' is a checkpoint.*no RocksDB; install it"):
        snapshot.verify()


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another filesystem than `tmp_path`."""
    places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.access(place, os.W_OK)]
    place = next((place for place in places if os.stat(place).st_dev != tmp_path.stat().st_dev), None)
    if place is None:
        pytest.skip(f"this system has no second filesystem at {' or '.join(places)}")
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


def test_on_another_filesystem_files_are_copied_and_it_says_so(
    tier: RocksDB, tmp_path: Path, elsewhere: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tierbed")
    expected = joined(tier.scan())
    linked = save(tier, tmp_path / "s")
    assert remarks(caplog) == []
    copied = save(tier, elsewhere / "s")
    [said] = remarks(caplog)
    assert f"'s': copied, not linked, because {elsewhere} is on another filesystem than {tier.folder}" in said
    assert {name: rocksdb_files(copied.manifest)[name] for name in tables_of(copied)} == {
        name: rocksdb_files(linked.manifest)[name] for name in tables_of(linked)
    }
    assert all((copied.folder / "rocksdb" / name).stat().st_nlink == 1 for name in tables_of(copied))
    flip_bit(tier.folder / tables_of(linked)[0], 800)
    refused(linked, tables_of(linked)[0])
    assert joined(copied.chunks()) == expected
    with pytest.raises(SnapshotError, match=f"{tables_of(linked)[0]}.*running store.*checksum"):
        write_checkpoint(elsewhere / "t", description(WIDTH), 400, tier)
    assert [entry.name for entry in elsewhere.iterdir()] == ["s"]


def full_and_read_only(path: Path) -> None:
    disk = Disk(path, 4 << 20)
    with closing(RocksDB(path / "live", WIDTH, new_shards=2)) as tier:
        put(tier)
        tier.flush()
        expected = joined(tier.scan())
        with disk.full():
            with pytest.raises(SnapshotError, match=r"'s' was not written to .*No space left"):
                write_checkpoint(path / "s", description(WIDTH), 400, tier)
            assert sorted(entry.name for entry in path.iterdir()) == ["filler", "live"]
        assert joined(tier.scan()) == expected
        snapshot = save(tier, path / "s")
    with disk.read_only():
        snapshot.verify()
        assert joined(snapshot.chunks()) == expected


def test_a_full_disk_is_left_as_it_was_and_one_that_cannot_be_written_is_read(disk_path: Path) -> None:
    in_process(full_and_read_only, disk_path)


@pytest.fixture
def python() -> Iterator[Any]:
    """That reads a checkpoint in a process of its own."""
    python = multiprocessing.spawn.get_executable()
    yield python
    multiprocessing.set_executable(python)


def test_a_good_one_is_not_called_damaged_where_no_python_starts(tier: RocksDB, tmp_path: Path, python: Any) -> None:
    snapshot = save(tier, tmp_path / "s")
    chains = find_chains([snapshot])
    # a program that has no Python beside it, one that was removed under the process, and those that are another program
    for executable in (None, "", "/nowhere/python", "/etc/passwd", "/bin/true", "/bin/cat"):
        multiprocessing.set_executable(executable)
        for read in (snapshot.verify, lambda: list(snapshot.chunks()), lambda: verify_all(*chains, lambda rows: None)):
            with pytest.raises(ReadIOError, match=r"did not start: .* may be intact\. .* multiprocessing.set_exec"):
                read()
    (tmp_path / "python").symlink_to(Path(os.fsdecode(python)).resolve())
    multiprocessing.set_executable(str(tmp_path / "python"))
    assert joined(snapshot.chunks()) == joined(tier.scan())
