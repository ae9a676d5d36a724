"""Writes RocksDB checkpoints: snapshots that share the files of a store on SSD by hard links."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np

from ...engine import _core
from ...engine.durable import fsync_dir, open_regular
from ...engine.errors import SnapshotError
from ...engine.store.rocksdb import LiveFile, RocksDB
from .format import ROCKSDB, Manifest, RocksDBFiles
from .rocksdb_files import checksum_of, pieces_of
from .writer import ProgressCallback, finish, new_snapshot

log = logging.getLogger("tierbed")

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def write_checkpoint(
    folder: Path,
    description: dict[str, Any],
    rows: int,
    tier: RocksDB,
    progress: ProgressCallback | None = None,
    overwrite: bool = False,
    id: str | None = None,
) -> Manifest:
    """Write all `rows` rows of `tier` as the snapshot `folder`, as `write_snapshot` does.

    Row files are linked, so the time does not depend on their size. Their checksums are those that RocksDB stored when
    it wrote them; a file of an older tierbed, which stored none, is read once. If the file system cannot link, files
    are copied and a warning is logged. Raises SnapshotError, StoreError.
    """
    folder = Path(folder)
    with new_snapshot(folder, description, overwrite) as place:
        rocksdb = write_rocksdb(place, folder.name, rows, tier, progress)
        return finish(place, description, rows, rocksdb=rocksdb, id=id)


def write_rocksdb(
    place: Path, name: str, rows: int, tier: RocksDB, progress: ProgressCallback | None = None
) -> RocksDBFiles:
    """Write the files of the checkpoint `name` into its temporary folder. Raises OSError, SnapshotError, StoreError."""
    with tier.live_files() as files:
        advance = _in_rows(progress, rows, sum(file.size for file in files))
        entries, refusal = _place(files, tier.folder, place / ROCKSDB, advance)
    if refusal is not None:
        other = refusal.errno == errno.EXDEV
        reason = f"is on another filesystem than {tier.folder}" if other else f"cannot have links: {refusal}"
        log.warning("snapshot %r: copied, not linked, because %s %s", name, place.parent, reason)
    return RocksDBFiles(tier.shards, entries)


def _place(
    files: list[LiveFile], source: Path, place: Path, advance: ProgressCallback
) -> tuple[dict[str, dict[str, int]], OSError | None]:
    """Put files durably into the new folder `place`. Returns their entries, and the error if a file was not linked."""
    entries: dict[str, dict[str, int]] = {}
    refusal = None
    for file in files:
        target = place / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if not file.name.endswith(".sst"):
            crc32c = _copy(source / file.name, target, file)
        elif (refused := _link(source / file.name, target, file)) is None:
            crc32c = checksum_of(target, file.size) if file.crc32c is None else file.crc32c
        else:
            refusal, crc32c = refused, _copy(source / file.name, target, file)
        entries[file.name] = {"bytes": file.size, "crc32c": crc32c}
        advance(file.size)
    for folder in (*place.iterdir(), place):
        fsync_dir(folder)
    return entries, refusal


def _link(source: Path, target: Path, file: LiveFile) -> OSError | None:
    """Link a row file, which RocksDB made durable. Returns the error of a file system that cannot link, else None."""
    try:
        os.link(source.resolve(), target)  # follows a symbolic link
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return error
    if (size := target.stat().st_size) != file.size:
        raise _damaged_store(source, f"it has {size} bytes instead of {file.size}")
    return None


def _copy(source: Path, target: Path, file: LiveFile) -> int:
    """Copy a file durably, or write its `content`. Returns the checksum, which must equal that of RocksDB."""
    checksum = _core.Crc32c()
    with open_regular(source) as from_, target.open("xb") as to:
        content = file.content
        pieces = pieces_of(from_, file.size) if content is None else [np.frombuffer(content, np.uint8)]
        for piece in pieces:
            checksum.update(piece)
            to.write(piece.data)
        to.flush()
        os.fsync(to.fileno())
    crc32c = checksum.finish()
    if file.crc32c not in (None, crc32c):
        raise _damaged_store(source, "its checksum does not match")
    return crc32c


def _in_rows(progress: ProgressCallback | None, rows: int, size: int) -> ProgressCallback:
    """A function that takes counts of bytes, `size` in total, and calls `progress` with rows, `rows` in total."""
    read = reported = 0

    def take(count: int) -> None:
        nonlocal read, reported
        read += count
        if progress is not None and (due := rows * read // size) > reported:
            progress(due - reported)
            reported = due

    return take


def _damaged_store(path: Path, problem: str) -> SnapshotError:
    return SnapshotError(f"{str(path)!r}, of the running store, is damaged: {problem}; load the last snapshot")
