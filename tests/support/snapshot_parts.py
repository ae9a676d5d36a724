"""Snapshots in parts, which one process writes as several ranks would."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tierbed.engine.row_format import Change
from tierbed.snapshots import Manifest, Snapshot
from tierbed.snapshots.files import writer
from tierbed.snapshots.files.format import HashShard
from tierbed.snapshots.files.writer import RowFiles, check_parent, new_snapshot, write_changes, write_rows

from .small_snapshots import Chunk


def save_in_parts(
    folder: Path, description: dict[str, Any], chunks: Iterable[Chunk], parts: int, overwrite: bool = False
) -> Manifest:
    """Write a full snapshot, one part after the other."""
    kept = list(chunks)

    def write(place: Path, part: HashShard) -> RowFiles:
        return write_rows(place, description, [(bucket, part.select_rows(rows)) for bucket, rows in kept], None, part)

    return _save(folder, description, sum(len(rows) for _, rows in kept), parts, write, overwrite=overwrite)


def save_changes_in_parts(
    folder: Path, parent: Snapshot, description: dict[str, Any], rows: int, changes: Iterable[Change], parts: int
) -> Manifest:
    """Write an incremental snapshot, one part after the other."""
    check_parent(folder, parent, description)
    kept = list(changes)

    def write(place: Path, part: HashShard) -> RowFiles:
        own = [(bucket, part.select_rows(changed), part.select_rows(gone)) for bucket, changed, gone in kept]
        return write_changes(place, description, own, None, part)

    return _save(folder, description, rows, parts, write, parent=parent)


def _save(
    folder: Path,
    description: dict[str, Any],
    rows: int,
    parts: int,
    write: Callable[[Path, HashShard], RowFiles],
    overwrite: bool = False,
    **more: Any,
) -> Manifest:
    with new_snapshot(folder, description, overwrite) as place:
        written = [write(place, HashShard(number, parts)) for number in range(parts)]
        files = dict(sorted((name, file) for part in written for name, file in part.items()))
        return writer.write_manifest(place, description, rows, files=files, num_shards=parts, **more)


def in_parts(snapshot: Snapshot, folder: Path, parts: int) -> Snapshot:
    save_in_parts(folder, snapshot.description, snapshot.chunks(), parts)
    return Snapshot.open(folder)
