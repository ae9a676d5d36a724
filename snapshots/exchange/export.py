"""Exports snapshots to other programs' formats, in bounded memory. A killed export leaves no partial file."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ...engine.checks import validate_arguments
from ...engine.durable import UnsyncedError, fsync_file, make_folder, make_temporary_path, publish
from ...engine.errors import InputError, SnapshotError
from ...engine.options.table_names import Names, find_table, format_choices, read_table_names
from ..files.reader import Snapshot
from ..files.writer import ProgressCallback, write_snapshot
from ..store.selection import LoadReport, Selection
from .array_files import spill_columns, write_npz, write_safetensors
from .columns import Columns
from .parquet import write_parquet
from .sources import to_path

FORMATS = ("parquet", "npz", "safetensors", "snapshot")


@validate_arguments("format", "progress", "state", "overwrite")
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
    """Export a snapshot's rows, in bounded memory. Writes a file for other programs, or another full snapshot.

    A file is written under a temporary name and renamed once it is durable. If the export fails before the rename, no
    file is left. If it fails after the rename, the error says that the snapshot was exported, but not durably.

    Args:
        snapshot: A snapshot of any kind, from `Snapshot.open`.
        path: The file or snapshot folder to write.
        format: "parquet", "npz" or "safetensors" for a file, "snapshot" for a full snapshot. A file also stores the
            table's description, so an import restores bit-identical rows. `columns.Columns` lists a file's columns.
            For "npz" and "safetensors", the columns are first collected in temporary files.
        progress: Called with the number of rows in each chunk after it was read.
        tables: Ids or names of the tables to write, or None for all tables.
        state: True to write optimizer state. If False, rows are written as a lookup returns them, and the exported
            table counts as never trained.
        overwrite: Atomically replace an existing file once the new file is durable. A snapshot is never replaced.

    Returns:
        The number of rows written.

    Raises:
        InputError: If an argument is invalid.
        SnapshotError: If `path` exists or cannot be written, or if the snapshot is damaged.
        OptionError: If pyarrow is missing.
    """
    if not isinstance(snapshot, Snapshot):
        raise InputError(f"snapshot={snapshot!r}: give Snapshot.open(<store folder>/snapshots/<name>)")
    if format not in FORMATS:
        raise InputError(f"format={format!r}: give one of {', '.join(map(repr, FORMATS))}")
    if overwrite and format == "snapshot":
        raise InputError("overwrite=True, format='snapshot': a snapshot is never overwritten; give another path")
    path = to_path(path, "path").absolute()
    if tables is not None:
        tables = _find_table_ids(tables, read_table_names(snapshot.description))
    report = LoadReport()
    selection = Selection(tables, includes_state=state)
    description = selection.describe(snapshot.description)
    chunks = selection.read_rows(snapshot, report, progress)
    if os.path.lexists(path) and not (overwrite and path.is_file()):
        replaceable = path.is_file() and format != "snapshot"
        remedy = ", or overwrite it with overwrite=True (--overwrite in a shell)" if replaceable else ""
        raise SnapshotError(f"{str(path)!r} exists: choose another path, or delete it first{remedy}")
    if format == "snapshot":
        write_snapshot(path, description, chunks)
        return report.rows
    temporary = make_temporary_path(path)
    try:
        make_folder(path.parent)
        temporary.unlink(missing_ok=True)  # a killed export may have left this file
        columns, metadata, rows = Columns(description), json.dumps(description), (rows for _, rows in chunks)
        if format == "parquet":
            write_parquet(temporary, columns, rows, metadata)
        else:
            with spill_columns(path.parent, columns, rows) as spilled:
                (write_npz if format == "npz" else write_safetensors)(temporary, spilled, metadata)
        fsync_file(temporary)
        publish(temporary, path)
    except UnsyncedError as error:
        raise SnapshotError(f"{snapshot.name!r} was exported to {str(path)!r}, but not durably: {error}") from error
    except OSError as error:
        raise SnapshotError(
            f"snapshot {snapshot.name!r} was not exported to {str(path)!r}: {error.strerror or error}; free space, "
            "or give a path in a folder that this user can write"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()  # this fails after the file was renamed
    return report.rows


def _find_table_ids(tables: Any, names: Names) -> list[int]:
    resolved_ids = [find_table(table, names) for table in tables] if isinstance(tables, (list, tuple)) else [None]
    table_ids = [id for id in resolved_ids if id is not None]
    if len(table_ids) < len(resolved_ids):
        raise InputError(f"tables={tables!r}: give a list of table ids from {format_choices(names)}, or None for all")
    return table_ids
