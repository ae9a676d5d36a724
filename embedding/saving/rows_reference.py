"""References that a state_dict contains in place of an embedding's rows.

A reference contains a step and a version, and a snapshot's name and digest if there is a snapshot. Two references name
the same rows if the versions or the snapshots' digests are equal. The digest recognizes the same rows in a snapshot
with another name or in another store folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

from ...engine.errors import SnapshotError, StoreError
from ...snapshots.files.format import check_name
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.folder_state import FolderState
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.recovery_rule import EMPTY_ID, make_snapshot_version

EMPTY_VERSION = make_snapshot_version(EMPTY_ID)  # the version of rows that were never written


class RowsReference(NamedTuple):
    """Identifies the rows of an embedding.

    `step` is None if the rows were not used yet. `version` is None without a store folder. `digest`, a hash of the
    snapshot's rows, is None without a snapshot.
    """

    step: int | None
    snapshot: str | None = None
    digest: str | None = None
    version: str | None = None

    @classmethod
    def parse(cls, fields: Any) -> RowsReference:
        """Return the reference with the fields of a JSON object. Raises ValueError, TypeError."""
        reference = cls(**fields)
        if type(reference.step) not in (int, NoneType) or not all(isinstance(x, str | None) for x in reference[1:]):
            raise ValueError(fields)
        return reference

    @classmethod
    def make_for_failed_load(cls, stopped_at: str) -> RowsReference:
        """Return a reference that matches no rows. Used after a load failed at `stopped_at`: rows may be old or new."""
        return cls(_FAILED_LOAD_STEP, stopped_at)

    def may_match(self, other: RowsReference) -> bool:
        """True if `other`, a reference from a state_dict, may name the same rows as this reference."""
        if other.version is not None and self.version == other.version:
            return True
        if self.digest and other.digest:
            return self.digest == other.digest
        return other.version is None and self.step == other.step


UNLOADABLE_ROWS = RowsReference(-1)  # for a state_dict whose rows cannot be loaded
_FAILED_LOAD_STEP = -2


def read_snapshot_reference(snapshots: Path | None, name: str | None) -> RowsReference | None:
    """Return a reference to a snapshot in a folder; None if the snapshot does not exist or cannot be read."""
    try:
        if snapshots is None or name is None:
            return None
        check_name(name)
        snapshot = Snapshot.open(snapshots / name)
    except SnapshotError:
        return None
    # full snapshots with the same rows and shard count have equal files, even if the snapshots' names differ
    files = [[file, entry.rows, entry.bytes, entry.crc32] for file, entry in sorted(snapshot.manifest.files.items())]
    content = json.dumps(files) if snapshot.kind == "full" else snapshot.manifest.id
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    return RowsReference(int(snapshot.description["step"]), name, digest, make_snapshot_version(snapshot.manifest.id))


def read_reference(store_path: Path, is_fresh: bool) -> RowsReference:
    """Return a reference to the rows that the next open of a closed store folder would use. Raises StoreError."""
    entry = None if is_fresh else GroupFile(FolderState(store_path)).choose_own_entry()
    if entry is None:
        return RowsReference(None, version=EMPTY_VERSION)
    return RowsReference(None, version=entry.live_version or (entry.snapshot and make_snapshot_version(entry.snapshot)))


def compare_references(pending: RowsReference, current: RowsReference, saved: RowsReference | None) -> bool | None:
    """True if the current rows match `pending`, None if only snapshot `saved` does, False if neither does."""
    if saved is None or not saved.may_match(pending):
        return current.may_match(pending)
    return True if current.version == saved.version or current.may_match(pending) else None


def check_not_pending(name: str, pending_references: Sequence[RowsReference]) -> None:
    """Raise StoreError if an embedding lacks the rows that the last loaded state_dict names."""
    if pending_references:
        raise StoreError(
            f"embedding {name!r} was not saved, because it lacks the rows that the last loaded state_dict names. In "
            "the embedding's process, load another state, or accept the present rows by keep_rows()"
        )


def make_mismatch_text(
    name: str, current: RowsReference, pending: RowsReference, names_snapshots: bool, holds_rows: bool = False
) -> str:
    """Return the error text for embedding `name` if a loaded state_dict names other rows than the embedding has.

    names_snapshots: True if the embedding's state_dicts name snapshots. holds_rows: True if they hold the rows.
    """
    if pending.step == _FAILED_LOAD_STEP:
        return (
            f"embedding {name!r} may have other rows than the rest of the model: a load stopped at {pending.snapshot}, "
            "and what comes after it was not loaded; load again, or another state"
        )
    remedy = "load another state"
    if pending == UNLOADABLE_ROWS:
        state = "has rows that cannot be loaded, or names none"
    elif pending.version == EMPTY_VERSION:
        state = "is of no rows, as of an embedding that was never trained"
        remedy = 'make the embedding again with open="fresh" in its store options, or ' + remedy
    else:
        state = f"is of {'other rows of ' * (current.step == pending.step)}step {pending.step}"
        if pending.step is None:
            state = "was made before the embedding was used"
        if pending.snapshot:
            state += f", snapshot {pending.snapshot!r}, which is missing, or has other rows"
            remedy = "put that snapshot back, or " + remedy
        else:
            state += ", which names no snapshot"
            if holds_rows:
                state, remedy = state + " and has no rows.* entries", "load a state with all of its keys"
            elif not names_snapshots:
                remedy = (
                    "give state_dict_snapshots=True in the store options before states are made, or save by graph.save "
                    "or save_checkpoint"
                )
    snapshot = f", snapshot {current.snapshot!r}" if current.snapshot else ""
    return f"embedding {name!r} has rows of step {current.step}{snapshot}, and the loaded state_dict {state}: {remedy}"
