"""List, verify and prune checkpoints on disk. Importing this module does not import torch."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.checks import is_folder_name
from ...engine.durable import TEMPORARY_PREFIX, open_regular, read_sealed, remove_folder, unseal
from ...engine.errors import SnapshotError
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.linking import remove_snapshot
from ...snapshots.store.status import CHECKPOINT, find_stores

STATE, TENSORS, ROWS = CHECKPOINT, "tensors.safetensors", "rows"
FORMATS = {"graph": 2, "loop": 3}
CALLS = {"graph": ("graph.save", "graph.load"), "loop": ("save_checkpoint", "load_checkpoint")}
_CHUNK_BYTES = 1 << 24
# errors that reading or loading a value of a wrong type may raise
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError, ArithmeticError)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk."""

    path: Path
    kind: str  # "graph" or "loop"
    created_ns: int  # nanoseconds since 1970
    total_bytes: int  # size of all files, including files shared with a store folder
    checksum: int
    snapshots: dict[str, Snapshot]  # an embedding's path in the model -> its snapshot

    def tensors(self) -> dict[str, Any]:
        """Return each tensor's entry in the header of the tensor file. Raises SnapshotError."""
        try:
            with open_regular(self.path / TENSORS) as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return {name: entry for name, entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, AttributeError) as error:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSORS} cannot be read: {error}") from error

    def verify(self) -> None:
        """Read every file and compare its checksum. Raises SnapshotError."""
        try:
            is_intact = checksum(self.path / TENSORS) == self.checksum
        except OSError as error:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSORS} cannot be read: {error}") from error
        if not is_intact:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSORS} is damaged: its checksum does not match")
        for snapshot in self.snapshots.values():
            snapshot.verify()


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read a checkpoint's record. Raises SnapshotError if the record cannot be read."""
    try:
        record = read_format(folder)
        names = record["embeddings"]
        rows = {
            path: Snapshot.open(folder / ROWS / str(index) / record["snapshot"]) for index, path in enumerate(names)
        }
        files = [(folder / name).stat() for name in (STATE, TENSORS)]
        size = sum(file.st_size for file in files) + sum(snapshot.manifest.total_bytes for snapshot in rows.values())
        created = record.get("created", files[0].st_mtime_ns)  # earlier versions did not record the time
        return StoredCheckpoint(folder, record.get("of", "graph"), int(created), size, record["checksum"], rows)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} cannot be read: {error}") from error


def read_format(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's record, and check its format and field types. Raises OSError, ValueError."""
    record: Any = unseal(read_sealed(folder / STATE))
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise ValueError(f"{STATE} was not written by tierbed")
    if record["format"] not in FORMATS.values():
        raise ValueError(f"format {record['format']}, but this tierbed reads {FORMATS['graph']} to {FORMATS['loop']}")
    names = record.get("embeddings")
    is_valid = {
        "of": record.get("of", "graph") in (*CALLS,),
        "embeddings": isinstance(names, list) and all(type(name) is str for name in names),
        "snapshot": is_folder_name(record.get("snapshot")),
        "checksum": type(record.get("checksum")) is int,
        "created": type(record.get("created", 0)) is int,
        "state": "state" in record,
        "metadata": "metadata" in record,
    }
    if not all(is_valid.values()):
        raise ValueError(f"{STATE} has no valid {', '.join(field for field in is_valid if not is_valid[field])}")
    return record


def checksum(path: Path) -> int:
    """Return a file's CRC-32. Raises OSError."""
    crc = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(chunk, crc)
    return crc


def list_checkpoints(path: Path) -> tuple[list[StoredCheckpoint], dict[str, SnapshotError]]:
    """Return checkpoints, oldest first, and the error of each damaged checkpoint by folder name.

    path: a checkpoint, or a folder of checkpoints. Raises SnapshotError if there is no checkpoint.
    """
    checkpoints, damaged, folders = [], {}, []
    if os.path.lexists(path / STATE):
        folders = [path.resolve()]
    elif path.is_dir():
        visible = (entry for entry in sorted(path.resolve().iterdir()) if not entry.name.startswith("."))
        folders = [entry for entry in visible if not entry.is_symlink() and (entry / STATE).is_file()]
    for folder in folders:
        try:
            checkpoints.append(read_checkpoint(folder))
        except SnapshotError as error:
            damaged[folder.name] = error
    if not checkpoints and not damaged:
        if find_stores(path) or (path / "snapshots").is_dir():
            raise SnapshotError(f"{str(path)!r} is a folder of stores, not of checkpoints: use `tierbed snapshot`")
        raise SnapshotError(
            f"{str(path)!r} is not a checkpoint and contains none: give a checkpoint of graph.save or save_checkpoint, "
            "or a folder of checkpoints"
        )
    return sorted(checkpoints, key=lambda entry: (entry.created_ns, entry.path.name)), damaged


def prune(path: Path, keep_last: int, dry_run: bool = False) -> tuple[list[StoredCheckpoint], list[StoredCheckpoint]]:
    """Remove a folder's checkpoints from the oldest on, but retain the latest `keep_last`. Returns (retained, removed).

    A kill leaves each checkpoint complete or absent. Store snapshots stay. Raises SnapshotError if any is damaged.
    """
    checkpoints, damaged = list_checkpoints(path)
    for error in damaged.values():
        raise SnapshotError(f"nothing is pruned while a checkpoint cannot be read: {error}") from error
    removed, retained = checkpoints[:-keep_last], checkpoints[-keep_last:]
    if dry_run:
        return retained, removed
    try:
        for leftover in path.glob(f"{TEMPORARY_PREFIX}.*/"):  # an interrupted removal left this folder
            remove_folder(leftover)
        for checkpoint in removed:
            remove_snapshot(checkpoint.path)
    except (OSError, SnapshotError) as error:
        raise SnapshotError(f"checkpoints in {str(path)!r} cannot be removed: {error}") from error
    return retained, removed
