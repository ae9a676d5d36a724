"""Reads one row from a closed store or a snapshot, without reading all rows."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.errors import InputError, StoreError
from ...engine.options.table_names import describe_table, find_table, format_choices, read_table_names
from ...engine.row_format import ROW_KEY_DTYPE, Chunks, RowFormat
from ...engine.store.interfaces import Tier, TopTier
from ..exchange.columns import EMBEDDING, KEY, STEP, TABLE, UPDATES, Columns
from ..files.format import SHARD_FIELD, is_deletion, make_bucket_name, make_deleted_name
from ..files.reader import Snapshot
from ..store.closed_store import require_clean_marker
from ..store.folder import StoreFolder
from ..store.folder_state import locate_shard

Row = NDArray[np.void]  # an array [1] with the dtype `RowFormat.dtype`


def read_live_row(store: StoreFolder, table: int | str, key: int) -> tuple[Row | None, dict[str, Any]]:
    """Read a live row of a cleanly closed store. Returns the row (None if never written) and the table's description.

    key: the id that users pass. Raises InputError for an invalid table or key, and StoreError or SnapshotError if the
    rows cannot be read or another rank owns the row.
    """
    marker = require_clean_marker(store)
    table_id, stored_key = resolve_row_key(marker, table, key)
    if SHARD_FIELD in marker:
        rank, ranks = marker[SHARD_FIELD]["rank"], marker[SHARD_FIELD]["ranks"]
        owner = int(_core.find_owners(np.array([table_id], np.uint32), np.array([stored_key], np.uint64), ranks)[0])
        if owner != rank:
            folder = locate_shard(store.path.parent.parent, owner, ranks)
            raise StoreError(f"rank {owner} of {ranks} owns this row: give that rank's shard, {str(folder)!r}")
    if marker["live"] == "rows":
        return _find_row(Snapshot.open(store.live_path), table_id, stored_key), marker
    from ...engine.store.rocksdb import RocksDB  # needs RocksDB

    row_format = RowFormat.from_description(marker)
    with closing(RocksDB(store.live_path, row_format.width, marker["shards"], read_only=True)) as tier:
        return read_row(tier, row_format, table_id, stored_key), marker


def read_snapshot_row(snapshot: Snapshot, table: int | str, key: int) -> Row | None:
    """Read a row from a snapshot. Returns None if the snapshot lacks the row. Raises errors like `read_live_row`."""
    return _find_row(snapshot, *resolve_row_key(snapshot.description, table, key))


def resolve_row_key(description: dict[str, Any], table: int | str, key: int) -> tuple[int, int]:
    """Convert a table's number or name to its number, and a key to 64 bits. Raises InputError if one is invalid."""
    names = read_table_names(description)
    table_id = find_table(table, names)
    if table_id is None:
        raise InputError(f"table {table}: give one from {format_choices(names)}")
    limits = np.iinfo(Columns(description).key_dtype)
    if not limits.min <= key <= limits.max:
        raise InputError(f"key {key}: keys are {limits.dtype}; give one from {limits.min} to {limits.max}")
    return table_id, key % (1 << 64)


def to_plain_row(row: Any, description: dict[str, Any]) -> dict[str, Any]:
    """Returns a row as a dict of plain values, for JSON. The key `table_name` is there only if tables have names."""
    columns = {name: column[0] for name, column in Columns(description).split(np.array([row])).items()}
    return {
        **describe_table(int(columns[TABLE]), read_table_names(description)),
        "key": int(columns[KEY]),
        "embedding": to_plain_floats(columns[EMBEDDING]),
        "states": {name: to_plain_floats(columns[name]) for name in description["states"]},
        "updates": int(columns[UPDATES]),
        "step": int(columns[STEP]),
    }


def to_plain_floats(values: NDArray[np.float32]) -> list[float | str]:
    """Convert float32 numbers to their shortest decimals. NaN and infinities become text, because JSON lacks them."""
    return [float(str(value)) if np.isfinite(value) else str(value) for value in values]


def _find_row(snapshot: Snapshot, table: int, key: int) -> Row | None:
    """Search a chain for a row, latest snapshot first. Returns None if the key was deleted or never written."""
    row_key = np.array([table], np.uint32), np.array([key], np.uint64)
    bucket = int(_core.buckets(*row_key)[0])
    for member in reversed(snapshot.chain):
        if member.manifest.rocksdb is not None:
            return _find_in_chunks(member.read_rows_and_deletions()[0], table, key)
        num_shards = member.manifest.num_shards
        shard = None if num_shards is None else int(_core.find_owners(*row_key, num_shards)[0])
        for file in (make_bucket_name(bucket, shard), make_deleted_name(bucket, shard)):
            entry = member.manifest.files.get(file)
            row = None if entry is None else _find_in_chunks(member.read_files({file: entry}), table, key)
            if row is not None:
                return None if is_deletion(file) else row
    return None


def _find_in_chunks(chunks: Chunks, table: int, key: int) -> NDArray[np.void] | None:
    """Find the row with this table and key in the chunks. Returns None if the chunks lack it."""
    row = None
    for _, rows in chunks:  # reads all chunks, because damage may be detected only at the end
        matches = rows[(rows["table"] == table) & (rows["key"] == key)]
        if len(matches):
            row = matches.copy()
    return row


def read_row(tier: Tier | TopTier[Any], row_format: RowFormat, table: int, key: int) -> Row | None:
    """Read a row from a tier or a stack of tiers. Returns None if the row was never written."""
    row = np.zeros(1, row_format.dtype)
    row["table"], row["key"] = table, key
    line = np.array([row.ctypes.data + ROW_KEY_DTYPE.itemsize], np.uint64)  # the address of the row's values
    return row if tier.read(row["table"].copy(), row["key"].copy(), line, should_touch=False)[0] else None
