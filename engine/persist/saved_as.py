"""How a state_dict, which holds no rows, names those that belong to it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...snapshots.files.format import check_name
from ...snapshots.files.reader import Snapshot
from ..errors import SnapshotError

log = logging.getLogger("tierbed")


class SavedAs(NamedTuple):
    """How a state_dict names the rows of an embedding: by their step, and by a snapshot of that step, if there is one.

    `digest` is of the snapshot's rows. It is None without a snapshot, and in state_dicts of early versions.
    """

    step: int
    snapshot: str | None
    digest: str | None

    def may_be(self, other: SavedAs) -> bool:
        """Whether both can name the same rows."""
        if self.step != other.step or not (self.snapshot and other.snapshot):
            return self.step == other.step
        if self.digest and other.digest:
            return self.digest == other.digest
        return self.snapshot == other.snapshot


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


def of_step(step: int, snapshots: Path | None, base: str | None) -> SavedAs:
    """The name of the rows of a step. It has the snapshot `base` where that is of the same step."""
    held = saved_as(snapshots, base)
    if held is None or held.step != step:
        return SavedAs(step, None, None)
    return held


def compare(name: str, mine: SavedAs, awaited: SavedAs, read: Callable[[str], SavedAs | None]) -> None:
    """Log a warning where rows of embedding `name` are not those that a state_dict names. read: of its snapshots."""
    if mine.may_be(awaited):
        return
    remedy = "save a snapshot before each state_dict that is kept, or use graph.save and graph.load"
    held = read(awaited.snapshot) if awaited.snapshot else None
    if held is not None and held.may_be(awaited):
        remedy = f"load_snapshot({awaited.snapshot!r}) brings back its rows"
    log.warning(
        "embedding %r has rows of step %d%s, and the state is of step %d%s; a state_dict holds no rows: %s",
        name,
        mine.step,
        f", snapshot {mine.snapshot!r}" if mine.snapshot else "",
        awaited.step,
        f", snapshot {awaited.snapshot!r}" if awaited.snapshot else "",
        remedy,
    )
