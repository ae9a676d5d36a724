"""List, verify and prune checkpoints on disk. Importing this module does not import torch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.checks import is_folder_name
from ...engine.checksum import crc32
from ...engine.durable import TEMPORARY_PREFIX, open_regular, read_record_bytes, remove_folder, unseal
from ...engine.errors import SnapshotError
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.linking import remove_snapshot
from ...snapshots.store.status import CHECKPOINT, find_stores

STATE_FILE, TENSOR_FILE, ROWS_FOLDER = CHECKPOINT, "tensors.safetensors", "rows"
FORMAT = 3
FUNCTION_NAMES = {"graph": ("graph.save", "graph.load"), "loop": ("save_checkpoint", "load_checkpoint")}
_CHUNK_BYTES = 1 << 24
# errors that reading or loading a value of a wrong type may raise
LOADING_ERRORS = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError, ArithmeticError)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk."""

    path: Path
    kind: str  # "graph" or "loop"
    created_ns: int  # nanoseconds since 1970
    total_bytes: int  # size of all files, including files shared with a store folder
    checksum: int
    snapshots: dict[str, Snapshot]  # an embedding's path in the model -> its snapshot

    def read_tensors(self) -> dict[str, Any]:
        """Return each tensor's entry in the header of the tensor file. Raises SnapshotError."""
        try:
            with open_regular(self.path / TENSOR_FILE) as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return {name: header_entry for name, header_entry in header.items() if name != "__metadata__"}
        except (OSError, ValueError, AttributeError) as error:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSOR_FILE} cannot be read: {error}") from error

    def verify(self) -> None:
        """Read every file and compare its checksum. Raises SnapshotError."""
        try:
            is_intact = compute_checksum(self.path / TENSOR_FILE) == self.checksum
        except OSError as error:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSOR_FILE} cannot be read: {error}") from error
        if not is_intact:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSOR_FILE} is damaged: its checksum does not match")
        for snapshot in self.snapshots.values():
            snapshot.verify()


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read a checkpoint's record. Raises SnapshotError if the record cannot be read."""
    try:
        record = read_state_file(folder)
        paths = record["embeddings"]
        snapshots = {
            path: Snapshot.open(folder / ROWS_FOLDER / str(i) / record["snapshot"]) for i, path in enumerate(paths)
        }
        files = [(folder / name).stat() for name in (STATE_FILE, TENSOR_FILE)]
        size = sum(file.st_size for file in files) + sum(s.manifest.total_bytes for s in snapshots.values())
        return StoredCheckpoint(folder, record["of"], record["created"], size, record["checksum"], snapshots)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} cannot be read: {error}") from error


def read_state_file(folder: Path) -> dict[str, Any]:
    """Read a checkpoint's record, and check its format and field types. Raises OSError, ValueError."""
    record: Any = unseal(read_record_bytes(folder / STATE_FILE))
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise ValueError(f"{STATE_FILE} was not written by tierbed")
    if record["format"] != FORMAT:
        problem = f"{STATE_FILE} has format {record['format']}, but this tierbed reads {FORMAT}"
        raise ValueError(f"{problem}: load it with the one that wrote it")
    paths = record.get("embeddings")
    is_valid = {
        "of": record.get("of") in (*FUNCTION_NAMES,),
        "embeddings": isinstance(paths, list) and all(type(path) is str for path in paths),
        "snapshot": is_folder_name(record.get("snapshot")),
        "checksum": type(record.get("checksum")) is int,
        "created": type(record.get("created")) is int,
        "state": "state" in record,
        "metadata": "metadata" in record,
        "extra": "extra" in record,
    }
    if not all(is_valid.values()):
        raise ValueError(f"{STATE_FILE} has no valid {', '.join(field for field in is_valid if not is_valid[field])}")
    return record


def compute_checksum(path: Path) -> int:
    """Return a file's CRC-32. Raises OSError."""
    crc = 0
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            crc = crc32(chunk, crc)
    return crc


def list_checkpoints(path: Path) -> tuple[list[StoredCheckpoint], dict[str, SnapshotError]]:
    """Return the intact checkpoints, oldest first, and a dict {folder name: error} of the damaged checkpoints.

    path: a checkpoint, or a folder of checkpoints. Raises SnapshotError if there is no checkpoint.
    """
    checkpoints, errors, folders = [], {}, []
    if os.path.lexists(path / STATE_FILE):
        folders = [path.resolve()]
    elif path.is_dir():
        visible = (child for child in sorted(path.resolve().iterdir()) if not child.name.startswith("."))
        folders = [child for child in visible if not child.is_symlink() and (child / STATE_FILE).is_file()]
    for folder in folders:
        try:
            checkpoints.append(read_checkpoint(folder))
        except SnapshotError as error:
            errors[folder.name] = error
    if not checkpoints and not errors:
        if find_stores(path) or (path / "snapshots").is_dir():
            raise SnapshotError(f"{str(path)!r} is a folder of stores, not of checkpoints: use `tierbed snapshot`")
        raise SnapshotError(
            f"{str(path)!r} is not a checkpoint and contains none: give a checkpoint of graph.save or save_checkpoint, "
            "or a folder of checkpoints"
        )
    return sorted(checkpoints, key=lambda child: (child.created_ns, child.path.name)), errors


def prune(path: Path, keep_last: int, dry_run: bool = False) -> tuple[list[StoredCheckpoint], list[StoredCheckpoint]]:
    """Remove a folder's checkpoints from the oldest on, but retain the latest `keep_last`. Returns (retained, removed).

    A kill leaves each checkpoint complete or absent. Store snapshots stay. Raises SnapshotError if any is damaged.
    """
    checkpoints, errors = list_checkpoints(path)
    for error in errors.values():
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
