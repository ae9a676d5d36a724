"""Writing a snapshot in parts: several writers, each of its own part of all rows, into one folder that all of them see.

One of them begins the snapshot by `new_snapshot`, and holds that block while each writer calls `write_part`, or
`write_changed_part`, for `place_of` the snapshot. When all have returned, it calls `commit` and ends the block. Where a
writer fails it lets the block raise, which removes what all have written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...engine.durable import aside, fsync_dir
from ...engine.errors import SnapshotError
from ...engine.row_format import Change, Rows
from .format import Kind, Manifest, Parent
from .reader import Snapshot
from .row_files import Part, RowFile
from .row_writer import Progress, write_changes, write_rows
from .writer import Together, finish

Files = dict[str, RowFile]


def place_of(folder: Path) -> Path:
    """Where the parts of the snapshot `folder` are written until it has all of them."""
    return aside(folder)


def write_part(
    place: Path,
    description: dict[str, Any],
    part: Part,
    chunks: Iterable[tuple[int, Rows]],
    progress: Progress | None = None,
) -> Files:
    """Write the rows of a part, durably. `chunks`, `progress`: as of `write_snapshot`. Returns the files, for `commit`.

    Raises SnapshotError, also for rows of another part; what `chunks` raises passes through.
    """
    return _written(place, part, lambda: write_rows(place, description, chunks, progress, part))


def write_changed_part(
    place: Path,
    description: dict[str, Any],
    part: Part,
    changes: Iterable[Change],
    progress: Progress | None = None,
) -> Files:
    """Write the changes of a part, durably, as `write_part`. `changes`: as of `write_incremental`."""
    return _written(place, part, lambda: write_changes(place, description, changes, progress, part))


def commit(
    place: Path,
    description: dict[str, Any],
    rows: int,
    parts: Sequence[Files],
    parent: Snapshot | None = None,
    together: Together | None = None,
) -> Manifest:
    """Write the manifest of a snapshot whose parts are all durable. It goes over `parent`, or is full without one.

    rows: of the whole table. parts: the files of each part, in order. Raises OSError, SnapshotError.
    """
    files = dict(sorted((name, file) for part in parts for name, file in part.items()))
    over = None if parent is None else Parent(parent.name, parent.manifest.id)
    kind: Kind = "full" if parent is None else "incremental"
    return finish(place, kind, description, rows, files=files, parent=over, parts=len(parts), together=together)


def _written(place: Path, part: Part, write: Callable[[], Files]) -> Files:
    try:
        files = write()
        fsync_dir(place)
        return files
    except OSError as error:
        raise SnapshotError(
            f"part {part.number} of {part.of} of a snapshot was not written to {str(place.parent)!r}: {error}"
        ) from error
