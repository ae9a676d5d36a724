"""What the snapshots of a chain make together: one table, of which every row is checked."""

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
    """A snapshot of a chain, as `Snapshot`."""

    @property
    def name(self) -> str: ...

    @property
    def manifest(self) -> Manifest: ...

    def parts(self, max_rows: int = ...) -> tuple[Chunks, Chunks]:
        """Rows, and keys of deleted ones."""

    def named_twice(self, bucket: int) -> SnapshotError: ...

    def damaged(self, name: str | None, problem: str) -> SnapshotError: ...


Watch = Callable[[Link, Chunks], Chunks]


def table_of(
    chain: Sequence[Link], max_rows: int = 65536, progress: Progress | None = None, watch: Watch | None = None
) -> Chunks:
    """The rows of the table that a chain makes, each snapshot counted when its last row is known.

    With `progress`, which is told how many rows of files were read, the names of rows alone where there are several
    snapshots. `watch` gets each snapshot and the table as it is with it. Raises SnapshotError naming what is damaged.
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
    """Read all that the rows of a chain are read from. Raises SnapshotError where a load would."""
    read_all(table_of(chain, progress=progress or _untold, watch=watch))


def _counted(snapshot: Link, chunks: Chunks) -> Chunks:
    count = 0
    for bucket, rows in chunks:
        count += len(rows)
        yield bucket, rows
    if count != snapshot.manifest.rows:
        raise snapshot.damaged(None, f"it has {count} rows instead of {snapshot.manifest.rows}")


def told(chunks: Chunks, progress: Progress | None, names: bool) -> Chunks:
    """The chunks, with their rows counted to `progress`; where it is given and `names` is true, keys alone."""
    for bucket, rows in chunks:
        if progress is None:
            yield bucket, rows
        else:
            progress(len(rows))
            yield bucket, keys_of(rows) if names else rows


def read_all(chunks: Chunks) -> None:
    """Read to the end, and keep nothing."""
    deque(chunks, maxlen=0)


def _untold(count: int) -> None:
    pass
