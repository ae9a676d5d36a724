"""The table that the snapshots of a chain make together, with every row checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from ...engine.errors import SnapshotError
from ...engine.row_format import Chunks, keys_of
from .aligned import changed
from .format import Manifest

Progress = Callable[[int], None]


class Link(Protocol):
    """What a chain needs of a `Snapshot`."""

    @property
    def name(self) -> str: ...

    @property
    def manifest(self) -> Manifest: ...

    def parts(self, max_rows: int = ...) -> tuple[Chunks, Chunks]:
        """The rows, and the keys of deleted rows."""

    def counted(self, rows: int) -> None:
        """Take the number of rows of the table up to here. Raises SnapshotError."""

    def named_twice(self, bucket: int) -> SnapshotError: ...


Watch = Callable[[Link, Chunks], Chunks]


def table_of(
    chain: Sequence[Link], max_rows: int = 65536, progress: Progress | None = None, watch: Watch | None = None
) -> Chunks:
    """The rows of the table that a chain makes, each snapshot counted when its last row is known.

    progress: called with the rows that were read from files; with it, a chain of several snapshots gives the names of
    rows alone. watch: called with each snapshot and the table up to it. Raises SnapshotError naming what is damaged.
    """
    table: Chunks = iter(())
    for snapshot in chain:
        rows, deleted = (told(part, progress, len(chain) > 1) for part in snapshot.parts(max_rows))
        table = rows if snapshot.manifest.parent is None else changed(table, rows, deleted, snapshot.named_twice)
        table = _counted(snapshot, table)
        if watch is not None:
            table = watch(snapshot, table)
    return table


def verify_chain(chain: Sequence[Link], progress: Progress | None = None, watch: Watch | None = None) -> None:
    """Read all files of a chain. Raises SnapshotError where a load of its rows would."""
    read_all(table_of(chain, progress=progress or _untold, watch=watch))


def _counted(snapshot: Link, chunks: Chunks) -> Chunks:
    count = 0
    for bucket, rows in chunks:
        count += len(rows)
        yield bucket, rows
    snapshot.counted(count)


def told(chunks: Chunks, progress: Progress | None, names: bool) -> Chunks:
    """The chunks, with their rows counted to `progress`. With `progress` and `names`, chunks of keys alone."""
    for bucket, rows in chunks:
        if progress is None:
            yield bucket, rows
        else:
            progress(len(rows))
            yield bucket, keys_of(rows) if names else rows


def read_all(chunks: Chunks) -> None:
    """Read chunks to their end, and keep nothing."""
    deque(chunks, maxlen=0)


def _untold(count: int) -> None:
    pass
