"""Reads one row of a closed store or of a snapshot, without the others."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.errors import InputError, StoreError
from ...engine.options.table_names import choices, names_in, table_number, with_table_name
from ...engine.row_format import KEY as ROW_NAME
from ...engine.row_format import Chunks, RowForm
from ...engine.store.contract import Tier, TopTier
from ..exchange.columns import EMBEDDING, KEY, STEP, TABLE, UPDATES, Columns
from ..files.format import SHARE, bucket_file, deleted_file, is_deleted
from ..files.reader import Snapshot
from ..store.closed_store import require_clean_marker
from ..store.folder import StoreFolder
from ..store.folder_state import shard_folder

Row = NDArray[np.void]  # [1] of the `RowForm.dtype` of its description


def live_row(store: StoreFolder, table: int | str, key: int) -> tuple[Row | None, dict[str, Any]]:
    """A live row of a store that was closed cleanly, None if it was never written, and the description.

    key: as users pass it. Raises StoreError, SnapshotError if the rows cannot be read or if another rank owns the row,
    InputError for a key that the store cannot have.
    """
    marker = require_clean_marker(store)
    number, bits = row_key_of(marker, table, key)
    if SHARE in marker:
        rank, ranks = marker[SHARE]["rank"], marker[SHARE]["ranks"]
        owner = int(_core.owners(np.array([number], np.uint32), np.array([bits], np.uint64), ranks)[0])
        if owner != rank:
            place = shard_folder(store.path.parent.parent, owner, ranks)
            raise StoreError(f"rank {owner} of {ranks} owns that row: give its shard, {str(place)!r}")
    if marker["live"] == "rows":
        return _find(Snapshot.open(store.live), number, bits), marker
    from ...engine.store.rocksdb import RocksDB  # only if RocksDB has the rows

    form = RowForm.described(marker)
    with closing(RocksDB(store.live, form.width, marker["shards"], read_only=True)) as tier:
        return read_row(tier, form, number, bits), marker


def snapshot_row(snapshot: Snapshot, table: int | str, key: int) -> Row | None:
    """The row in a snapshot, None if the snapshot lacks it. Raises as `live_row`."""
    return _find(snapshot, *row_key_of(snapshot.description, table, key))


def row_key_of(description: dict[str, Any], table: int | str, key: int) -> tuple[int, int]:
    """The number of a table, given by number or name, and the 64 bits of a key. InputError if there is no such one."""
    names = names_in(description)
    number = table_number(table, names)
    if number is None:
        raise InputError(f"table {table}: give one from {choices(names)}")
    limits = np.iinfo(Columns(description).key_dtype)
    if not limits.min <= key <= limits.max:
        raise InputError(f"key {key}: keys are {limits.dtype}; give one from {limits.min} to {limits.max}")
    return number, key % (1 << 64)


def plain_row(row: Any, description: dict[str, Any]) -> dict[str, Any]:
    """A row as plain values: `table`, any name of it, `key`, `embedding`, `states` by name, `updates`, `step`."""
    parts = {name: column[0] for name, column in Columns(description).split(np.array([row])).items()}
    return {
        **with_table_name(int(parts[TABLE]), names_in(description)),
        "key": int(parts[KEY]),
        "embedding": plain_floats(parts[EMBEDDING]),
        "states": {name: plain_floats(parts[name]) for name in description["states"]},
        "updates": int(parts[UPDATES]),
        "step": int(parts[STEP]),
    }


def plain_floats(values: NDArray[np.float32]) -> list[float | str]:
    """The shortest decimals that give these float32 numbers. NaN and infinities are text, since JSON has none."""
    return [float(str(value)) if np.isfinite(value) else str(value) for value in values]


def _find(snapshot: Snapshot, table: int, key: int) -> Row | None:
    """The row in the file of the key's bucket, in the latest snapshot of the chain that has the key."""
    name = np.array([table], np.uint32), np.array([key], np.uint64)
    bucket = int(_core.buckets(*name)[0])
    for one in reversed(snapshot.chain):
        if one.manifest.rocksdb is not None:
            return _among(one.parts()[0], table, key)
        parts = one.manifest.parts
        shard = None if parts is None else int(_core.owners(*name, parts)[0])
        for file in (bucket_file(bucket, shard), deleted_file(bucket, shard)):
            entry = one.manifest.files.get(file)
            found = None if entry is None else _among(one.read_files({file: entry}), table, key)
            if found is not None:
                return None if is_deleted(file) else found
    return None


def _among(chunks: Chunks, table: int, key: int) -> NDArray[np.void] | None:
    """The row of the key among chunks, or None."""
    found = None
    for _, rows in chunks:  # to the end: damage may be detected only there
        matches = rows[(rows["table"] == table) & (rows["key"] == key)]
        if len(matches):
            found = matches.copy()
    return found


def read_row(tier: Tier | TopTier[Any], form: RowForm, table: int, key: int) -> Row | None:
    """The row of a tier, or of a stack of tiers, with rows of that form; None if it was never written."""
    row = np.zeros(1, form.dtype)
    row["table"], row["key"] = table, key
    line = np.array([row.ctypes.data + ROW_NAME.itemsize], np.uint64)  # its address
    return row if tier.read(row["table"].copy(), row["key"].copy(), line, touch=False)[0] else None
