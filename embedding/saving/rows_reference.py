"""How a state_dict, which holds no rows, names those that belong to it."""

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
    """How a state_dict names the rows of an embedding: by step and version, and by a snapshot of them, if there is one.

    `digest` is of the snapshot's rows. It is None without a snapshot, and in state_dicts of early versions; `step` for
    rows that were not used yet; `version` without a store folder, and in state_dicts of early versions.
    """

    step: int | None
    snapshot: str | None = None
    digest: str | None = None
    version: str | None = None

    @classmethod
    def parse(cls, said: Any) -> RowsReference:
        """From JSON of the fields. ValueError, KeyError, TypeError."""
        step, snapshot, version = said["step"], said["snapshot"], said.get("version")
        match version:
            case [str(epoch), int(writes)]:  # of an earlier version of tierbed
                version = f"{epoch or EMPTY}:{writes}"
        parsed = cls(step, snapshot, said.get("digest"), version)
        if type(step) not in (int, type(None)) or not all(isinstance(name, str | None) for name in parsed[1:]):
            raise ValueError(said)
        return parsed

    def may_be(self, other: RowsReference) -> bool:
        """Whether these can be the rows that `other`, of a state_dict, names."""
        if other.version is not None and self.version == other.version:
            return True
        if self.digest and other.digest:
            return self.digest == other.digest
        if other.version is not None:
            return False
        if self.step != other.step or not (self.snapshot and other.snapshot):
            return self.step == other.step
        return self.snapshot == other.snapshot


UNKNOWN = RowsReference(-1)  # of a state_dict whose rows cannot be had
_STOPPED = -2


def stopped_at(what: str) -> RowsReference:
    """No rows: the load of a state stopped at `what`, and left it unknown which of its parts were loaded."""
    return RowsReference(_STOPPED, what)


def saved_as(snapshots: Path | None, name: str | None) -> RowsReference | None:
    """The name of the rows of a snapshot in a folder; None if no such snapshot can be read."""
    try:
        if snapshots is None or name is None:
            return None
        check_name(name)
        snapshot = Snapshot.open(snapshots / name)
    except SnapshotError:
        return None
    # two snapshots of the same rows, in as many parts, have the same files, whatever their names
    files = [[file, entry.rows, entry.bytes, entry.crc32] for file, entry in sorted(snapshot.manifest.files.items())]
    said = json.dumps(files) if snapshot.kind == "full" else snapshot.manifest.id
    digest = hashlib.sha256(said.encode()).hexdigest()[:32]
    return RowsReference(int(snapshot.description["step"]), name, digest, f"{snapshot.manifest.id}:0")


def reference_at(step: int | None, snapshots: Path | None, base: str | None, now: str | None) -> RowsReference:
    """The name of rows of a step and of version `now`. It has the snapshot `base` if that has these rows."""
    saved = saved_as(snapshots, base)
    return RowsReference(step, version=now) if saved is None or saved.version != now else saved


def of_unopened(store: Path, fresh: bool) -> RowsReference:
    """The name of the rows of a store folder that is not open, as far as its files show their version. StoreError."""
    entry = None if fresh else GroupFile(FolderState(store)).own_entry()
    if entry is None:
        return RowsReference(None, version=NO_ROWS)
    return RowsReference(None, version=entry.live or (entry.snapshot and f"{entry.snapshot}:0"))


def is_at(awaited: RowsReference, mine: RowsReference, saved: RowsReference | None) -> bool | None:
    """Whether rows are those that a state_dict names; None if they are others, and its snapshot `saved` has them."""
    if saved is None or not saved.may_be(awaited):
        return mine.may_be(awaited)
    return True if mine.version == saved.version or mine.may_be(awaited) else None


def check_not_awaiting(name: str, awaited: Sequence[RowsReference]) -> None:
    """Raises StoreError for rows that are to be those of a loaded state, and are others."""
    if awaited:
        raise StoreError(
            f"embedding {name!r} has other rows than the state_dict that was loaded last, and is not saved: in its "
            "process load another state, or call keep_rows(), which accepts these rows"
        )


def unlike(name: str, mine: RowsReference, awaited: RowsReference, snapshots: bool, in_memory: bool = False) -> str:
    """The error for embedding `name`, whose rows are not those of a loaded state_dict.

    snapshots: whether its own states name snapshots. in_memory: whether they hold the rows.
    """
    if awaited.step == _STOPPED:
        return (
            f"embedding {name!r} may have other rows than the rest of the model: a load stopped at {awaited.snapshot}, "
            "and what comes after it was not loaded; load again, or another state"
        )
    remedy = "load another state"
    if awaited == UNKNOWN:
        theirs = "has rows that cannot be loaded, or names none"
    elif awaited.version == NO_ROWS:
        theirs = "is of no rows, as of an embedding that was never trained"
        remedy = 'make the embedding again with open="fresh" in its store options, or ' + remedy
    else:
        theirs = f"is of {'other rows of ' * (mine.step == awaited.step)}step {awaited.step}"
        if awaited.step is None:
            theirs = "was made before the embedding was used"
        if awaited.snapshot:
            theirs += f", snapshot {awaited.snapshot!r}, which is missing, or has other rows"
            remedy = "put that snapshot back, or " + remedy
        else:
            theirs += ", which names no snapshot"
            if in_memory:
                theirs, remedy = theirs + " and has no rows.* entries", "load a state with all of its keys"
            elif not snapshots:
                remedy = (
                    "give state_dict_snapshots=True in the store options before states are made, or save by graph.save "
                    "or save_checkpoint"
                )
    at = f", snapshot {mine.snapshot!r}" if mine.snapshot else ""
    return f"embedding {name!r} has rows of step {mine.step}{at}, and the loaded state_dict {theirs}: {remedy}"
