"""What the record of a store says, of one that is trained alone."""

from __future__ import annotations

from pathlib import Path

from tierbed.snapshots.files.format import read_snapshot_id
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.folder_state import FolderState
from tierbed.snapshots.store.group_file import GroupFile
from tierbed.snapshots.store.recovery_rule import Entry, Record


def last_snapshot(store: Path) -> str | None:
    """The name of the snapshot that recovery of a store loads."""
    return GroupFile(FolderState(store)).last_snapshot


def note_snapshot(store: StoreFolder, name: str) -> None:
    """Let recovery of a store load a snapshot, as a save of it does."""
    id = read_snapshot_id(store.snapshots_path / name)
    store.change(store_id="id", record=Record({"id": Entry(id)}, {"id": id}, {"id": id}, parents={"id": id}))
