"""The clean marker: a description of an open table's rows. It says that the live rows are complete and durable."""

from __future__ import annotations

from typing import Any

from ...engine.store.rocksdb import RocksDB
from ...engine.store.table_counts import TABLE_ROWS
from ...engine.table.table import OpenTable
from ...snapshots.files.format import LIVE_FILES, LIVE_VERSION, SHARD_FIELD
from ...snapshots.store.changed_keys import write_changed_keys
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.group import Member
from .recovery import RowsVersion


def make_clean_marker(
    table: OpenTable, folder: StoreFolder | None, member: Member | None, rows_version: RowsVersion | None
) -> dict[str, Any]:
    """Return the clean marker for the rows of `table`, after writing the keys of changed rows."""
    assert table.stack is not None
    bottom = table.stack.bottom
    fields: dict[str, Any] = {"live": "rows"}
    if isinstance(bottom, RocksDB):
        fields = {"live": "rocksdb", "shards": bottom.shards, LIVE_FILES: bottom.read_versions()}
    fields["rows"] = table.counts.num_rows
    if (counts := table.counts.known_table_counts) is not None:
        fields[TABLE_ROWS] = counts.tolist()
    if rows_version is not None:
        fields[SHARD_FIELD] = rows_version.make_marker_fields()
    elif member is not None:
        fields[LIVE_VERSION] = member.version
    changed = table.observers.list_changed_keys()
    if folder is not None and changed is not None and len(changed[1]):  # if no row changed, the record names a snapshot
        fields |= write_changed_keys(folder, *changed)
    return {**table.describe(), **fields}
