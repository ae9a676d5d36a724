"""References by which a state_dict names the rows that belong to it, without holding them.

A reference has a step and a version, and the name and digest of a snapshot if there is one. Two references name the
same rows if their versions are equal, or the digests of their snapshots. The digest recognizes copies of a snapshot, as
in another store folder. References of early versions of tierbed have only a step and a snapshot's name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.errors import SnapshotError, StoreError
from ...snapshots.files.format import check_name
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.folder_state import FolderState
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.recovery_rule import EMPTY

NO_ROWS = f"{EMPTY}:0"  # the version of rows that were never written


class RowsReference(NamedTuple):
    """Names rows of an embedding.

    `step` is None for rows that were not used yet, `version` without a store folder and in state_dicts of early
    versions, `digest` (of the snapshot's rows) without a snapshot and in state_dicts of early versions.
    """

    step: int | None
    snapshot: str | None = None
    digest: str | None = None
    version: str | None = None

    @classmethod
    def parse(cls, fields: Any) -> RowsReference:
        """Return the reference with these fields, from JSON. Raises ValueError, KeyError, TypeError."""
        step, snapshot, version = fields["step"], fields["snapshot"], fields.get("version")
        match version:
            case [str(epoch), int(writes)]:  # written by an earlier version of tierbed
                version = f"{epoch or EMPTY}:{writes}"
        parsed = cls(step, snapshot, fields.get("digest"), version)
        if type(step) not in (int, type(None)) or not all(isinstance(name, str | None) for name in parsed[1:]):
            raise ValueError(fields)
        return parsed

    def may_be(self, other: RowsReference) -> bool:
        """True if these rows can be the rows that `other`, from a state_dict, names."""
        if other.version is not None and self.version == other.version:
            return True
        if self.digest and other.digest:
            return self.digest == other.digest
        if other.version is not None:
            return False
        if self.step != other.step or not (self.snapshot and other.snapshot):
            return self.step == other.step
        return self.snapshot == other.snapshot


UNKNOWN = RowsReference(-1)  # of a state_dict whose rows cannot be loaded
_STOPPED = -2


def stopped_at(culprit: str) -> RowsReference:
    """Return the reference of a load that stopped at `culprit`. It matches no rows: they may be old or new."""
    return RowsReference(_STOPPED, culprit)


def reference_of_snapshot(snapshots: Path | None, name: str | None) -> RowsReference | None:
    """Return the reference of a snapshot in a folder; None if there is no such snapshot or it cannot be read."""
    try:
        if snapshots is None or name is None:
            return None
        check_name(name)
        snapshot = Snapshot.open(snapshots / name)
    except SnapshotError:
        return None
    # full snapshots of the same rows in as many shards have equal files, whatever their names
    files = [[file, entry.rows, entry.bytes, entry.crc32] for file, entry in sorted(snapshot.manifest.files.items())]
    content = json.dumps(files) if snapshot.kind == "full" else snapshot.manifest.id
    digest = hashlib.sha256(content.encode()).hexdigest()[:32]
    return RowsReference(int(snapshot.description["step"]), name, digest, f"{snapshot.manifest.id}:0")


def reference_at(step: int | None, snapshots: Path | None, base: str | None, version: str | None) -> RowsReference:
    """Return the reference of rows of a step and a version. It names the snapshot `base` if that has these rows."""
    saved = reference_of_snapshot(snapshots, base)
    return RowsReference(step, version=version) if saved is None or saved.version != version else saved


def reference_of_unopened(store: Path, fresh: bool) -> RowsReference:
    """Return the reference of the rows that a closed store folder would open with. Raises StoreError."""
    entry = None if fresh else GroupFile(FolderState(store)).own_entry()
    if entry is None:
        return RowsReference(None, version=NO_ROWS)
    return RowsReference(None, version=entry.live or (entry.snapshot and f"{entry.snapshot}:0"))


def matches(pending: RowsReference, present: RowsReference, saved: RowsReference | None) -> bool | None:
    """Return True if the present rows are those that a state_dict names.

    None if they are not, but its snapshot `saved` has them. False if they cannot be found.
    """
    if saved is None or not saved.may_be(pending):
        return present.may_be(pending)
    return True if present.version == saved.version or present.may_be(pending) else None


def check_not_pending(name: str, pending: Sequence[RowsReference]) -> None:
    """Raise StoreError if an embedding does not have the rows of the state_dict that was loaded last."""
    if pending:
        raise StoreError(
            f"embedding {name!r} has other rows than the state_dict that was loaded last, and is not saved: in its "
            "process load another state, or call keep_rows(), which accepts these rows"
        )


def mismatch_text(
    name: str, present: RowsReference, pending: RowsReference, snapshots: bool, in_memory: bool = False
) -> str:
    """Return the error for embedding `name`, which does not have the rows of a loaded state_dict.

    snapshots: True if its own state_dicts name snapshots. in_memory: True if they hold the rows.
    """
    if pending.step == _STOPPED:
        return (
            f"embedding {name!r} may have other rows than the rest of the model: a load stopped at {pending.snapshot}, "
            "and what comes after it was not loaded; load again, or another state"
        )
    remedy = "load another state"
    if pending == UNKNOWN:
        state = "has rows that cannot be loaded, or names none"
    elif pending.version == NO_ROWS:
        state = "is of no rows, as of an embedding that was never trained"
        remedy = 'make the embedding again with open="fresh" in its store options, or ' + remedy
    else:
        state = f"is of {'other rows of ' * (present.step == pending.step)}step {pending.step}"
        if pending.step is None:
            state = "was made before the embedding was used"
        if pending.snapshot:
            state += f", snapshot {pending.snapshot!r}, which is missing, or has other rows"
            remedy = "put that snapshot back, or " + remedy
        else:
            state += ", which names no snapshot"
            if in_memory:
                state, remedy = state + " and has no rows.* entries", "load a state with all of its keys"
            elif not snapshots:
                remedy = (
                    "give state_dict_snapshots=True in the store options before states are made, or save by graph.save "
                    "or save_checkpoint"
                )
    snapshot = f", snapshot {present.snapshot!r}" if present.snapshot else ""
    return f"embedding {name!r} has rows of step {present.step}{snapshot}, and the loaded state_dict {state}: {remedy}"
