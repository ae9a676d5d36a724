"""Writes RocksDB checkpoints: snapshots that share the files of a store on SSD by hard links."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import numpy as np

from ...engine import _core
from ...engine.durable import fsync_dir, open_regular
from ...engine.errors import SnapshotError
from ...engine.store.rocksdb import LiveFile, RocksDB
from .format import ROCKSDB, RocksDBFiles
from .reader import ProgressCallback
from .rocksdb_files import checksum_of, pieces_of

log = logging.getLogger("tierbed")

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)


def write_rocksdb(
    place: Path, name: str, rows: int, tier: RocksDB, progress: ProgressCallback | None = None
) -> RocksDBFiles:
    """Write all `rows` rows of `tier` as files of the checkpoint `name` into its temporary folder.

    Row files are linked, so the time does not depend on their size. Their checksums are those that RocksDB stored when
    it wrote them; a file of an older tierbed, which stored none, is read once. If the file system cannot link, files
    are copied and a warning is logged. Raises OSError, SnapshotError, StoreError.
    """
    top, entries, refusal = place / ROCKSDB, dict[str, dict[str, int]](), None
    with tier.live_files() as files:
        size, written = sum(file.size for file in files), 0
        for file in files:
            source, target = tier.folder / file.name, top / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not file.name.endswith(".sst"):
                crc32c = _copy(source, target, file)
            elif (refused := _link(source, target, file)) is None:
                crc32c = checksum_of(target, file.size) if file.crc32c is None else file.crc32c
            else:
                refusal, crc32c = refused, _copy(source, target, file)
            entries[file.name] = {"bytes": file.size, "crc32c": crc32c}
            before, written = rows * written // size, written + file.size
            if progress is not None and (count := rows * written // size - before):
                progress(count)
        for folder in (*top.iterdir(), top):
            fsync_dir(folder)
    if refusal is not None:
        other = refusal.errno == errno.EXDEV
        reason = f"is on another filesystem than {tier.folder}" if other else f"cannot have links: {refusal}"
        log.warning("snapshot %r: copied, not linked, because %s %s", name, place.parent, reason)
    return RocksDBFiles(tier.shards, entries)


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


def _damaged_store(path: Path, problem: str) -> SnapshotError:
    return SnapshotError(f"{str(path)!r}, of the running store, is damaged: {problem}; load the last snapshot")
