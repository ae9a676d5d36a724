"""Exports snapshots to formats of other programs, streamed. A file is complete or absent."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...engine.checks import checked_arguments
from ...engine.durable import UnsyncedError, fsync_file, make_folder, put_in_place, temporary_path
from ...engine.errors import InputError, SnapshotError
from ...engine.options.table_names import Names, choices, names_in, table_number
from ..files.reader import Snapshot
from ..files.writer import ProgressCallback, write_snapshot
from ..store.selection import LoadReport, Selection
from .array_files import spilled_columns, write_npz, write_safetensors
from .columns import Columns
from .parquet import write_parquet
from .sources import path_of

FORMATS = ("parquet", "npz", "safetensors", "snapshot")


@checked_arguments("format", "progress", "state", "overwrite")
def export_snapshot(
    snapshot: Snapshot,
    path: str | Path,
    format: str,
    progress: ProgressCallback | None = None,
    *,
    tables: Sequence[int | str] | None = None,
    state: bool = True,
    overwrite: bool = False,
) -> int:
    """Write the rows of a snapshot of any kind to `path`, in bounded memory. Returns their number.

    format: "parquet", "npz" or "safetensors", a file with the columns of `columns.Columns` and the description, so that
    an import gives bit-identical rows; or "snapshot", a full snapshot. "npz" and "safetensors" store one column after
    the other: while such a file is written, temporary files next to `path` hold the columns as well.
    tables: ids or names of the tables to write, None for all. state: whether optimizer state is written; without it,
    rows are as a lookup returns them, of a table at step 0 that no optimizer has trained.
    overwrite: whether an existing file is replaced, atomically once the new one is durable; not for snapshots.
    progress: called with the number of rows of each chunk of the snapshot.

    The file is written under a temporary name and renamed when it is durable. If this raises, it leaves no file behind,
    or the error says so. Raises InputError for an invalid argument, SnapshotError if `path` exists or cannot be written
    or if the snapshot is damaged, OptionError if pyarrow is missing.
    """
    if not isinstance(snapshot, Snapshot):
        raise InputError(f"snapshot={snapshot!r}: give Snapshot.open(<store folder>/snapshots/<name>)")
    if format not in FORMATS:
        raise InputError(f"format={format!r}: give one of {', '.join(map(repr, FORMATS))}")
    if overwrite and format == "snapshot":
        raise InputError("overwrite=True, format='snapshot': only a file is overwritten; give another path")
    path = path_of(path, "path").absolute()
    if tables is not None:
        tables = _numbers_of(tables, names_in(snapshot.description))
    report = LoadReport()
    selection = Selection(tables, state=state)
    description = selection.description(snapshot.description)
    chunks = selection.rows_of(snapshot, report, progress)
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        replaceable = path.is_file() and format != "snapshot"
        remedy = ", or overwrite it with overwrite=True (--overwrite in a shell)" if replaceable else ""
        raise SnapshotError(f"{str(path)!r} exists: choose another path, or delete it first{remedy}")
    if format == "snapshot":
        write_snapshot(path, description, chunks)
        return report.rows
    temporary = temporary_path(path)
    try:
        make_folder(path.parent)
        temporary.unlink(missing_ok=True)  # left by a killed export
        columns, metadata, rows = Columns(description), json.dumps(description), (rows for _, rows in chunks)
        if format == "parquet":
            write_parquet(temporary, columns, rows, metadata)
        else:
            with spilled_columns(path.parent, columns, rows) as spilled:
                (write_npz if format == "npz" else write_safetensors)(temporary, spilled, metadata)
        fsync_file(temporary)
        put_in_place(temporary, path)
    except UnsyncedError as error:
        raise SnapshotError(f"snapshot {snapshot.name!r} was exported to {str(path)!r}: {error}") from error
    except OSError as error:
        raise SnapshotError(
            f"snapshot {snapshot.name!r} was not exported to {str(path)!r}: {error.strerror or error}; free space, "
            "or give a path in a folder that this user can write"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()  # missing once it was renamed
    return report.rows


def _numbers_of(tables: Any, names: Names) -> list[int]:
    """The numbers of tables given by number or name."""
    given = [table_number(table, names) for table in tables] if isinstance(tables, (list, tuple)) else [None]
    numbers = [number for number in given if number is not None]
    if len(numbers) < len(given):
        raise InputError(f"tables={tables!r}: give a list of table ids from {choices(names)}, or None for all")
    return numbers
