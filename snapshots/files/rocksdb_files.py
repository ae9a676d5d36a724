"""RocksDB's files in a checkpoint: their names, sizes and checksums, and the rows in them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.durable import check_regular, open_regular
from ...engine.errors import SnapshotError, StoreError
from ...engine.options.rocksdb_options import require_rocksdb
from ...engine.row_format import Chunks
from .format import ROCKSDB, Manifest
from .reader_process import ApartError, NotStartedError, rows_apart
from .unread import UnreadError, cause_of, damaged, unread

_PIECE_BYTES = 4 << 20


def checkpoint_chunks(folder: Path, manifest: Manifest, max_rows: int = 65536) -> Chunks:
    """The rows of a checkpoint as `Snapshot.chunks` yields them. Every file is compared before the first chunk.

    A process of its own reads the rows, since RocksDB may end the process where files are forged. Nothing is written
    into the folder. A link shares the bytes of a file, so damage to the running store's file is found too. Raises
    SnapshotError naming a file that is missing, changed, or foreign.
    """
    assert manifest.rocksdb is not None
    _require_rocksdb(folder)
    files = manifest.rocksdb.files
    _check_names(folder, files)
    for name, entry in files.items():
        _check_file(folder, name, entry)
    try:
        yield from rows_apart(folder / ROCKSDB, manifest.form, manifest.rocksdb.shards, max_rows)
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


def checksum_of(path: Path, size: int) -> int:
    """The crc32c of the first `size` bytes of a file. Raises OSError."""
    checksum = _core.Crc32c()
    with open_regular(path) as file:
        for piece in pieces_of(file, size):
            checksum.update(piece)
    return checksum.finish()


def pieces_of(file: BinaryIO, size: int) -> Iterator[NDArray[np.uint8]]:
    """The first `size` bytes in pieces, each in the memory of the piece before. OSError where there are fewer."""
    memory = np.empty(min(size, _PIECE_BYTES), np.uint8)
    while size:
        piece = memory[: min(size, len(memory))]
        if file.readinto(piece.data) != len(piece):  # type: ignore[attr-defined]
            raise OSError(errno.EIO, "it ended while it was read", str(file.name))
        size -= len(piece)
        yield piece


def _check_names(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Raises SnapshotError unless the files in the folder are these, with their sizes."""
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
    """The files in a folder and in its folders, which may be links."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from (folder / entry.name / inner for inner in os.listdir(entry))
        else:
            yield folder / entry.name


def _check_file(folder: Path, name: str, entry: dict[str, int]) -> None:
    path = folder / ROCKSDB / name
    try:
        crc32c = checksum_of(path, entry["bytes"])
    except OSError as error:
        raise unread(path, error, folder) from error
    if crc32c != entry["crc32c"]:
        raise _damaged(folder, path, "its checksum does not match")


def _require_rocksdb(folder: Path) -> None:
    try:
        require_rocksdb()
    except StoreError as error:
        reason = str(error).partition(": ")[2]
        raise SnapshotError(f"snapshot {folder.name!r} is a checkpoint of RocksDB's files: {reason}") from error


def _damaged(folder: Path, path: Path, problem: str) -> SnapshotError:
    return damaged(path, problem, folder)
