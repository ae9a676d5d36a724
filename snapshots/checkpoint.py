"""Checkpoints: snapshots of an SSD store that share RocksDB's files with it by hard links."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ..engine import _core
from ..engine.errors import SnapshotError, StoreError
from ..engine.store.contract import Chunks
from ..engine.store.durable import check_regular, fsync_dir, open_regular
from ..engine.store.rocksdb import LiveFile, RocksDB, require_rocksdb
from .apart import ApartError, NotStartedError, rows_apart
from .format import ROCKSDB, Manifest, RocksDBFiles
from .unread import UnreadError, cause_of, damaged, unread
from .writer import Progress, finish, new_snapshot

log = logging.getLogger("tierbed")

_PIECE_BYTES = 4 << 20
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def write_checkpoint(
    folder: Path,
    description: dict[str, Any],
    rows: int,
    tier: RocksDB,
    progress: Progress | None = None,
    overwrite: bool = False,
) -> Manifest:
    """Write the rows that `tier` holds, `rows` of them, as the snapshot `folder`, in the way of `write_snapshot`.

    Files of rows are linked, so the time does not grow with them; their checksums are those that RocksDB kept when it
    wrote them. Where the file system cannot link, they are copied, and a warning says so. A file that RocksDB has no
    checksum of, from a tierbed that kept none, is read once. Raises SnapshotError, StoreError.
    """
    folder = Path(folder)
    with new_snapshot(folder, description, overwrite) as place, tier.live_files() as files:
        told = _in_rows(progress, rows, sum(file.size for file in files))
        entries, refusal = _place(files, tier.folder, place / ROCKSDB, told)
        if refusal is not None:
            other = refusal.errno == errno.EXDEV
            reason = f"is on another filesystem than {tier.folder}" if other else f"cannot have links: {refusal}"
            log.warning("snapshot %r: copied, not linked, as %s %s", folder.name, folder.parent, reason)
        return finish(place, "checkpoint", description, rows, rocksdb=RocksDBFiles(tier.shards, entries))


def checkpoint_chunks(folder: Path, manifest: Manifest, max_rows: int = 65536) -> Chunks:
    """The rows of a checkpoint as `Snapshot.chunks` yields them, every file compared before the first chunk.

    A process of its own reads them: RocksDB may end it where the files are forged. Without writing into the folder. A
    link shares the bytes: damage to a file of the running store is found here as well. Raises SnapshotError naming a
    file that is missing, changed, or foreign.
    """
    assert manifest.rocksdb is not None
    _require_rocksdb(folder)
    files = manifest.rocksdb.files
    _check_names(folder, files)
    for name, entry in files.items():
        _check_file(folder, name, entry)
    try:
        yield from rows_apart(folder / ROCKSDB, manifest.width, manifest.rocksdb.shards, max_rows)
    except ApartError as error:
        if (of_system := cause_of(error)) is not None:
            raise unread(folder / ROCKSDB, of_system, folder) from error
        raise _damaged(folder, folder / ROCKSDB, str(error)) from error
    except NotStartedError as error:
        raise UnreadError(
            f"{str(folder / ROCKSDB)!r} cannot be read: the Python that is to read it did not start: {error}. Nothing "
            "says that it is not whole: free memory, or give the path of a Python to multiprocessing.set_executable(), "
            "then try again"
        ) from error
    except OSError as error:
        raise unread(folder / ROCKSDB, error, folder) from error


def _place(
    files: list[LiveFile], source: Path, place: Path, told: Progress
) -> tuple[dict[str, dict[str, int]], OSError | None]:
    """Put the files into the new folder `place`, durably. Their entries, and why files of rows could not be linked."""
    entries: dict[str, dict[str, int]] = {}
    refusal = None
    for file in files:
        target = place / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not file.name.endswith(".sst"):
            crc32c = _copy(source / file.name, target, file)
        elif (refused := _link(source / file.name, target, file)) is None:
            crc32c = _checksum_of(target, file.size) if file.crc32c is None else file.crc32c
        else:
            refusal, crc32c = refused, _copy(source / file.name, target, file)
        entries[file.name] = {"bytes": file.size, "crc32c": crc32c}
        told(file.size)
    for folder in (*place.iterdir(), place):
        fsync_dir(folder)
    return entries, refusal


def _link(source: Path, target: Path, file: LiveFile) -> OSError | None:
    """Link a file of rows, which RocksDB made durable. Why the file system cannot, where it cannot."""
    try:
        os.link(source.resolve(), target)  # of what a symbolic link leads to
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return error
    if (size := target.stat().st_size) != file.size:
        raise _damaged_store(source, f"it has {size} bytes instead of {file.size}")
    return None


def _copy(source: Path, target: Path, file: LiveFile) -> int:
    """Copy a file durably, or what it is to hold. Its checksum, which is the one that RocksDB has of it."""
    checksum = _core.Crc32c()
    with open_regular(source) as from_, target.open("xb") as to:
        content = file.content
        pieces = _pieces(from_, file.size) if content is None else [np.frombuffer(content, np.uint8)]
        for piece in pieces:
            checksum.update(piece)
            to.write(piece.data)
        to.flush()
        os.fsync(to.fileno())
    crc32c = checksum.finish()
    if file.crc32c not in (None, crc32c):
        raise _damaged_store(source, "its checksum does not match")
    return crc32c


def _checksum_of(path: Path, size: int) -> int:
    checksum = _core.Crc32c()
    with open_regular(path) as file:
        for piece in _pieces(file, size):
            checksum.update(piece)
    return checksum.finish()


def _pieces(file: BinaryIO, size: int) -> Iterator[NDArray[np.uint8]]:
    """The first `size` bytes, each piece in the memory of the one before. Raises OSError where there are fewer."""
    memory = np.empty(min(size, _PIECE_BYTES), np.uint8)
    while size:
        piece = memory[: min(size, len(memory))]
        if file.readinto(piece.data) != len(piece):  # type: ignore[attr-defined]
            raise OSError(errno.EIO, "it ended while it was read", str(file.name))
        size -= len(piece)
        yield piece


def _check_names(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """That the files in the folder are these, with their sizes."""
    place = folder / ROCKSDB
    try:
        found = {str(path.relative_to(place)): path for path in _files_in(place)}
    except OSError as error:
        raise unread(place, error, folder) from error
    for name in sorted(found.keys() - files.keys()):
        raise SnapshotError(f"{str(place / name)!r} is a foreign file in snapshot {folder.name!r}: remove it")
    for name, entry in files.items():
        if name not in found:
            raise _damaged(folder, place / name, "it is missing")
        try:
            check_regular(found[name])
            size = found[name].stat().st_size
        except OSError as error:
            raise unread(found[name], error, folder) from error
        if size != entry["bytes"]:
            raise _damaged(folder, found[name], f"it has {size} bytes instead of {entry['bytes']}")


def _files_in(folder: Path) -> Iterator[Path]:
    """What lies in the folder and in those in it, which may be links."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from (folder / entry.name / inner for inner in os.listdir(entry))
        else:
            yield folder / entry.name


def _check_file(folder: Path, name: str, entry: dict[str, int]) -> None:
    path = folder / ROCKSDB / name
    try:
        crc32c = _checksum_of(path, entry["bytes"])
    except OSError as error:
        raise unread(path, error, folder) from error
    if crc32c != entry["crc32c"]:
        raise _damaged(folder, path, "its checksum does not match")


def _in_rows(progress: Progress | None, rows: int, size: int) -> Progress:
    """Takes counts of bytes, `size` in all, and tells `progress` counts of rows, `rows` in all."""
    read = told = 0

    def take(count: int) -> None:
        nonlocal read, told
        read += count
        if progress is not None and (due := rows * read // size) > told:
            progress(due - told)
            told = due

    return take


def _require_rocksdb(folder: Path) -> None:
    try:
        require_rocksdb()
    except StoreError as error:
        reason = str(error).partition(": ")[2]
        raise SnapshotError(f"snapshot {folder.name!r} is a checkpoint of RocksDB's files: {reason}") from error


def _damaged(folder: Path, path: Path, problem: str) -> SnapshotError:
    return damaged(path, problem, folder)


def _damaged_store(path: Path, problem: str) -> SnapshotError:
    return SnapshotError(f"{str(path)!r}, of the running store, is damaged: {problem}; load the last snapshot")
