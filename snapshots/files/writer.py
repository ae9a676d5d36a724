"""Writing a snapshot: streamed into a temporary folder, synced, renamed into place."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...engine.durable import Commit, UnsyncedError, made_aside
from ...engine.errors import SnapshotError
from ...engine.row_format import Change, RowForm, Rows
from .format import LAST_SEQUENCE, MANIFEST, Kind, Manifest, Parent, RocksDBFiles, check_description, check_name
from .may_replace import check_replaceable
from .reader import Snapshot, list_snapshots
from .row_files import RowFile, is_deleted
from .row_writer import Progress as Progress
from .row_writer import write_changes, write_rows
from .versions import Saved


class Together(NamedTuple):
    """What a snapshot has beside its rows.

    id: the snapshot's. saved: of a store in a group; None for one that trains alone. commit: of a save of several
    stores, when each of them gets its name; None for one by itself.
    """

    id: str
    saved: Saved | None
    commit: Commit | None = None


def write_snapshot(
    folder: Path,
    description: dict[str, Any],
    chunks: Iterable[tuple[int, Rows]],
    progress: Progress | None = None,
    overwrite: bool = False,
    together: Together | None = None,
) -> Manifest:
    """Write the full snapshot `folder`, its last part the name; parents are created. One writer at a time in a parent.

    `chunks` are (bucket, rows [n] of `RowForm.dtype`): buckets ascending, within one (table, key) strictly
    ascending, as `Tier.scan` yields them; a few are held while they are written. `progress` is told how many rows each
    chunk added. When this returns, the snapshot is durable; when it raises, nothing of it is left, or the error says
    that it is there and may not outlive a power loss. With `overwrite` it takes the place of a snapshot of that name,
    at one instant and when it is durable. together: of a store in a group.

    Raises SnapshotError if the name cannot be used or is taken, or what has it cannot be replaced, the description or a
    chunk is not valid, or the device fails; what `chunks` raises passes through.
    """
    with new_snapshot(folder, description, overwrite, together) as place:
        files = write_rows(place, description, chunks, progress)
        rows = sum(file.rows for file in files.values())
        return finish(place, "full", description, rows, files=files, together=together)


def write_incremental(
    folder: Path,
    parent: Snapshot,
    description: dict[str, Any],
    rows: int,
    changes: Iterable[Change],
    progress: Progress | None = None,
    overwrite: bool = False,
    together: Together | None = None,
) -> Manifest:
    """Write what changed since `parent`, which lies beside `folder`, as `write_snapshot`. rows: of the whole table.

    changes: (bucket, rows [n] as they are now, keys [m] of `KEY` of deleted rows). Rows and keys are each ordered as
    `chunks` of `write_snapshot`, and no row is in both.
    """
    folder = Path(folder)
    check_over(folder, parent, description)
    with new_snapshot(folder, description, overwrite, together) as place:
        files = write_changes(place, description, changes, progress)
        over = Parent(parent.name, parent.manifest.id)
        return finish(place, "incremental", description, rows, files=files, parent=over, together=together)


def check_over(folder: Path, parent: Snapshot, description: dict[str, Any]) -> None:
    """Raises SnapshotError where the new snapshot `folder` cannot go over `parent`."""
    if RowForm.described(description).dtype != parent.manifest.form.dtype:
        raise SnapshotError(
            f"snapshot {folder.name!r} cannot go over {parent.name!r}, whose rows have another form: its optimizer "
            'has another state, or numbers another dtype. Save it with kind="full"'
        )
    if folder.name == parent.name:
        raise SnapshotError(
            f'snapshot {folder.name!r} cannot go over the one that it replaces: save it with kind="full", or choose '
            "another name"
        )


@contextmanager
def new_snapshot(
    folder: Path, description: dict[str, Any], overwrite: bool = False, together: Together | None = None
) -> Iterator[Path]:
    """`made_aside` for the snapshot `folder`; `finish` completes it. SnapshotError, also for an OSError in it."""
    folder = Path(folder)
    check_free(folder, overwrite)
    try:
        check_description(description)
    except ValueError as error:
        raise SnapshotError(f"snapshot {folder.name!r} cannot be written: {error}") from error
    try:
        with made_aside(folder, overwrite, None if together is None else together.commit) as place:
            yield place
    except UnsyncedError as error:
        raise SnapshotError(f"snapshot {folder.name!r} was written to {str(folder.parent)!r}: {error}") from error
    except OSError as error:
        if together is not None and together.commit is not None and together.commit.is_made:
            raise SnapshotError(
                f"snapshot {folder.name!r} is saved, and not in {str(folder.parent)!r} yet: {error}. The next open, "
                "save or prune puts it there"
            ) from error
        raise SnapshotError(f"snapshot {folder.name!r} was not written to {str(folder.parent)!r}: {error}") from error


def check_free(folder: Path, overwrite: bool | None = False) -> None:
    """Raises SnapshotError where a snapshot's name cannot be used, or is taken by one that is not to be replaced.

    overwrite: True raises as `check_replaceable`; None is for callers that cannot replace a snapshot.
    """
    check_name(folder.name)
    if not os.path.lexists(folder):
        return
    if not overwrite:
        replaceable = overwrite is not None and os.path.lexists(folder / MANIFEST)
        remedy = ", or save with overwrite=True (--overwrite in a shell)" if replaceable else ""
        raise SnapshotError(f"snapshot {str(folder)!r} exists: choose another name, or delete it first{remedy}")
    check_replaceable(folder)


def finish(
    place: Path,
    kind: Kind,
    description: dict[str, Any],
    rows: int,
    *,
    files: dict[str, RowFile] | None = None,
    rocksdb: RocksDBFiles | None = None,
    parent: Parent | None = None,
    parts: int | None = None,
    together: Together | None = None,
) -> Manifest:
    """Write the manifest of the files in `place`, which are durable already. Raises OSError, SnapshotError.

    parts: how many writers shared the buckets, None for one that knows of no others.
    """
    files = files or {}
    deleted = sum(file.rows for name, file in files.items() if is_deleted(name))
    latest = max(list_snapshots(place.parent).snapshots, key=lambda s: s.manifest.sequence, default=None)
    sequence = 1 if latest is None else latest.manifest.sequence + 1
    if latest is not None and sequence > LAST_SEQUENCE:
        raise SnapshotError(
            f"snapshot {latest.name!r} has the last sequence that there is, {LAST_SEQUENCE}, so that none can come "
            f"after it: no save of tierbed made it. Move {str(latest.folder)!r} elsewhere, or remove it"
        )
    identity, instant = (secrets.token_hex(16), None) if together is None else (together.id, together.saved)
    created = time.time_ns()
    manifest = Manifest(
        kind, identity, parent, description, rows, deleted, files, rocksdb, created, sequence, parts, instant
    )
    try:
        data = manifest.encode()
    except ValueError as error:
        raise SnapshotError(f"the description cannot be stored: {error}") from error
    with (place / MANIFEST).open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return manifest
