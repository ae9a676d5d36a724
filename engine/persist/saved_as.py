"""How a state_dict, which holds no rows, names those that belong to it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ...snapshots.files.format import check_name
from ...snapshots.files.reader import Snapshot
from ..errors import SnapshotError

log = logging.getLogger("tierbed")


class SavedAs(NamedTuple):
    """How a state_dict names the rows of an embedding: by their step, and by a snapshot of that step, if there is one.

    `digest` is of the snapshot's rows. It is None without a snapshot, and in state_dicts of early versions; `step` for
    rows that were not used yet.
    """

    step: int | None
    snapshot: str | None
    digest: str | None

    def may_be(self, other: SavedAs) -> bool:
        """Whether both can name the same rows."""
        if self.step != other.step or not (self.snapshot and other.snapshot):
            return self.step == other.step
        if self.digest and other.digest:
            return self.digest == other.digest
        return self.snapshot == other.snapshot


UNKNOWN = SavedAs(-1, None, None)  # of a state_dict whose rows cannot be had


def saved_as(snapshots: Path | None, name: str | None) -> SavedAs | None:
    """The name of the rows of a snapshot in a folder; None where no such snapshot can be read."""
    try:
        if snapshots is None or name is None:
            return None
        check_name(name)
        held = Snapshot.open(snapshots / name)
    except SnapshotError:
        return None
    # two snapshots of the same rows, in as many parts, have the same files, whatever their names
    files = [[file, entry.rows, entry.bytes, entry.crc32] for file, entry in sorted(held.manifest.files.items())]
    said = json.dumps(files) if held.kind == "full" else held.manifest.id
    return SavedAs(int(held.description["step"]), name, hashlib.sha256(said.encode()).hexdigest()[:32])


def of_step(step: int | None, snapshots: Path | None, base: str | None) -> SavedAs:
    """The name of the rows of a step. It has the snapshot `base` where that is of the same step."""
    held = saved_as(snapshots, base)
    if held is None or held.step != step:
        return SavedAs(step, None, None)
    return held


def note_pruned(removed: Iterable[Snapshot], keep: int) -> None:
    """Log snapshots of states that were removed."""
    for snapshot in removed:
        log.info(
            "state_dict_snapshots=%d: removed snapshot %r; the state_dict of step %d that names it can no longer load",
            keep,
            snapshot.name,
            snapshot.description["step"],
        )


class Goes(Protocol):
    """What `go_to` needs of an embedding's hold on its rows."""

    def named(self) -> SavedAs: ...

    def read(self, snapshot: str) -> SavedAs | None: ...

    def has_rows_of(self, snapshot: str) -> bool: ...

    def load_for_state(self, name: str) -> Any: ...


def go_to(held: Goes, awaited: SavedAs) -> bool:
    """Let rows be those that a state_dict names: its snapshot is loaded where they are others, and it is there.

    Returns whether they are. Raises what a load raises.
    """
    there = held.read(awaited.snapshot) if awaited.snapshot else None
    if there is None or awaited.snapshot is None or not there.may_be(awaited):
        return held.named().may_be(awaited)
    if held.named().digest != there.digest and not held.has_rows_of(awaited.snapshot):
        held.load_for_state(awaited.snapshot)
    return True


def unlike(name: str, mine: SavedAs, awaited: SavedAs) -> str:
    """What to tell the user of embedding `name`, whose rows are not those of a loaded state_dict."""
    if awaited == UNKNOWN:
        theirs, remedy = "has rows that cannot be loaded, or names none", "load another state"
    else:
        theirs = f"is of step {awaited.step}"
        if awaited.snapshot:
            theirs += f", snapshot {awaited.snapshot!r}, which is not there, or has other rows"
            remedy = "put that snapshot back, or load another state"
        else:
            theirs += ", which names no snapshot"
            remedy = (
                "give state_dict_snapshots=True in the store options before states are made, or save by graph.save or "
                "save_checkpoint"
            )
    at = f", snapshot {mine.snapshot!r}" if mine.snapshot else ""
    return f"embedding {name!r} has rows of step {mine.step}{at}, and the loaded state_dict {theirs}: {remedy}"
