"""Checkpoints on disk: what each holds, and whether it is damaged. Reading them does not import torch."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.checks import is_folder_name
from ...engine.durable import TEMPORARY, open_regular, read_record, remove_folder, unseal
from ...engine.errors import SnapshotError
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.linked import remove_snapshot
from ...snapshots.store.status import CHECKPOINT, stores_in

STATE, TENSORS, ROWS = CHECKPOINT, "tensors.safetensors", "rows"
FORMATS = {"graph": 2, "loop": 3}
CALLS = {"graph": ("graph.save", "graph.load"), "loop": ("save_checkpoint", "load_checkpoint")}
_CHUNK = 1 << 24
# what reading or loading a value of another type raises
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError, ArithmeticError)


@dataclass(frozen=True)
class Kept:
    """One checkpoint. of: "graph" or "loop". rows: the snapshot of each embedding, by its path in the model.

    bytes: of all its files; rows may be shared with a store folder.
    """

    path: Path
    of: str
    created: int  # nanoseconds since 1970
    bytes: int
    checksum: int
    rows: dict[str, Snapshot]

    def tensors(self) -> dict[str, Any]:
        """The entry of each tensor in the header of the file of tensors. Raises SnapshotError."""
        try:
            with open_regular(self.path / TENSORS) as file:
                header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            return {name: of for name, of in header.items() if name != "__metadata__"}
        except (OSError, ValueError, AttributeError) as error:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSORS} cannot be read: {error}") from error

    def verify(self) -> None:
        """Read every file, and compare it with its checksum. Raises SnapshotError."""
        try:
            sound = checksum(self.path / TENSORS) == self.checksum
        except OSError as error:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSORS} cannot be read: {error}") from error
        if not sound:
            raise SnapshotError(f"checkpoint {str(self.path)!r}: {TENSORS} is damaged: its checksum does not match")
        for snapshot in self.rows.values():
            snapshot.verify()


def kept(folder: Path) -> Kept:
    """A checkpoint. Raises SnapshotError if it cannot be read."""
    try:
        record = read_format(folder)
        names = record["embeddings"]
        rows = {path: Snapshot.open(folder / ROWS / str(at) / record["snapshot"]) for at, path in enumerate(names)}
        files = [(folder / name).stat() for name in (STATE, TENSORS)]
        size = sum(file.st_size for file in files) + sum(snapshot.manifest.total_bytes for snapshot in rows.values())
        created = record.get("created", files[0].st_mtime_ns)  # earlier versions did not write it
        return Kept(folder, record.get("of", "graph"), int(created), size, record["checksum"], rows)
    except (OSError, ValueError) as error:
        raise SnapshotError(f"checkpoint {str(folder)!r} cannot be read: {error}") from error


def read_format(folder: Path) -> dict[str, Any]:
    """The record of a checkpoint of a known format, with fields of the types that a save gives. OSError, ValueError."""
    record: Any = unseal(read_record(folder / STATE))
    if not isinstance(record, dict) or type(record.get("format")) is not int:
        raise ValueError(f"{STATE} is of another program")
    if record["format"] not in range(1, max(FORMATS.values()) + 1):
        raise ValueError(f"format {record['format']}, and this tierbed reads 1 to {max(FORMATS.values())}")
    names = record.get("embeddings")
    valid = {
        "of": record.get("of", "graph") in (*CALLS,),
        "embeddings": isinstance(names, list) and all(type(name) is str for name in names),
        "snapshot": is_folder_name(record.get("snapshot")),
        "checksum": type(record.get("checksum")) is int,
        "created": type(record.get("created", 0)) is int,
        "state": "state" in record,
        "metadata": "metadata" in record,
    }
    if not all(valid.values()):
        raise ValueError(
            f"{STATE} has no valid {', '.join(field for field, is_valid in valid.items() if not is_valid)}"
        )
    return record


def checksum(path: Path) -> int:
    """The CRC-32 of a file. Raises OSError."""
    found = 0
    with open_regular(path) as file:
        while part := file.read(_CHUNK):
            found = zlib.crc32(part, found)
    return found


def kept_at(path: Path) -> tuple[list[Kept], dict[str, SnapshotError]]:
    """The checkpoints at a path, or in it, the oldest first, and errors of damaged ones. SnapshotError for none."""
    found, damaged, folders = [], {}, []
    if os.path.lexists(path / STATE):
        folders = [path.resolve()]
    elif path.is_dir():
        visible = (one for one in sorted(path.resolve().iterdir()) if not one.name.startswith("."))
        folders = [one for one in visible if not one.is_symlink() and (one / STATE).is_file()]
    for folder in folders:
        try:
            found.append(kept(folder))
        except SnapshotError as error:
            damaged[folder.name] = error
    if not found and not damaged:
        if stores_in(path) or (path / "snapshots").is_dir():
            raise SnapshotError(
                f"{str(path)!r} is a folder of stores, without a checkpoint: use `tierbed snapshot` for it"
            )
        raise SnapshotError(
            f"{str(path)!r} is not a checkpoint and has none: give one of graph.save or save_checkpoint, or a folder "
            "of them"
        )
    return sorted(found, key=lambda one: (one.created, one.path.name)), damaged


def prune(path: Path, keep_last: int, dry_run: bool = False) -> tuple[list[Kept], list[Kept]]:
    """Remove the checkpoints in a folder but the latest `keep_last`, the oldest first. Returns kept and removed.

    A kill leaves each complete or absent. Snapshots in store folders are not removed. dry_run: remove nothing. Raises
    SnapshotError if one cannot be read.
    """
    found, damaged = kept_at(path)
    for error in damaged.values():
        raise SnapshotError(f"nothing is pruned while a checkpoint cannot be read: {error}") from error
    removed, retained = found[:-keep_last], found[-keep_last:]
    if dry_run:
        return retained, removed
    try:
        for leftover in path.glob(f"{TEMPORARY}.*/"):  # of a killed removal
            remove_folder(leftover)
        for one in removed:
            remove_snapshot(one.path)
    except (OSError, SnapshotError) as error:
        raise SnapshotError(f"checkpoints in {str(path)!r} cannot be removed: {error}") from error
    return retained, removed
