"""Where a publish reads rows: `RowSource`, and the rows of a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from ..engine.optim.rule import needs_catch_up
from ..engine.options.table_spec import RUN_ID_FIELD
from ..engine.row_format import Change, RowFormat
from ..engine.table.row_scan import catch_up_rows
from ..snapshots.files.reader import Snapshot, read_changes
from ..snapshots.store.selection import Selection
from .version import SnapshotEntry


class RowSource(Protocol):
    """An embedding's rows at one step.

    Attributes:
        label: names the source in messages.
        description: the description of the table, without optimizer state.
        origin: what a version records of the source. Its id names these rows in later calls of `read_since`.
        row_format: the layout of the rows that are read.
        catches_up: True if rows change without being written, so that new bases must be read from the source.
    """

    label: str
    description: dict[str, Any]
    origin: SnapshotEntry
    row_format: RowFormat
    catches_up: bool

    def read_all(self) -> Iterator[Change]:
        """Yields all rows by bucket, table and key. Raises SnapshotError."""

    def read_since(self, id: str) -> Iterator[Change] | None:
        """Yields the changes since the rows with this id, in the same order; None if they are unknown."""


class SnapshotSource:
    """The rows of a snapshot, as evaluation returns them: rows whose optimizer catches up later are settled."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.label = f"snapshot {snapshot.name!r}"
        self.description = Selection(includes_state=False).describe(dict(snapshot.description))
        run = str(snapshot.description.get(RUN_ID_FIELD, ""))
        manifest = snapshot.manifest
        self.origin = SnapshotEntry(manifest.id, run, snapshot.description["step"], manifest.rows)
        self.row_format, self.catches_up = manifest.row_format, needs_catch_up(snapshot.description["optimizer"])
        self._snapshot = snapshot

    def read_all(self) -> Iterator[Change]:
        for bucket, rows, deleted in self._read(self._snapshot.chain):
            yield bucket, rows, deleted[:0]  # what increments deleted is in no older file

    def read_since(self, id: str) -> Iterator[Change] | None:
        chain = self._snapshot.chain
        ids = [snapshot.manifest.id for snapshot in chain]
        return self._read(chain[ids.index(id) + 1 :]) if id in ids else None

    def _read(self, chain: Sequence[Snapshot]) -> Iterator[Change]:
        return settle_changes(self._snapshot.description, read_changes(chain))


def settle_changes(stored: Mapping[str, Any], changes: Iterator[Change]) -> Iterator[Change]:
    """Yield changes after applying the steps that their rows missed. `stored` describes the rows."""
    for bucket, rows, deleted in changes:
        if len(rows):
            ((_, rows),) = catch_up_rows(stored, iter([(bucket, rows)]))
        yield bucket, rows, deleted
