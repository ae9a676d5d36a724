"""Applies incremental snapshots to the rows of an open table, if these rows equal a parent of the increments.

Such a load reads only the increments, and changes rows in place. First it verifies the increments. A new OpenTable then
takes over the old one's tiers, so that every other value starts as after any load.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ...engine.optim.row_state import RowState
from ...engine.options.table_spec import TableSpec
from ...engine.row_format import Change, RowFormat, extract_row_keys
from ...engine.store.interfaces import InMemoryTier, TierBase
from ...engine.store.rocksdb import RocksDB
from ...engine.store.table_counts import Counts, count_by_table, read_counts
from ...engine.table.row_scan import locate_lines
from ...engine.table.table import OpenTable
from ...snapshots.files.reader import Snapshot, read_changes
from ...snapshots.store.group import Member
from ...snapshots.store.selection import Selection

_SMALL_BYTES = 1 << 25  # the changes of smaller increments stay in memory between the check and the load


def find_increments(table: OpenTable, snapshot: Snapshot, spec: TableSpec, selection: Selection) -> list[Snapshot]:
    """Return the snapshots that `table` lacks of the snapshot's chain, oldest first.

    Return an empty list if the rows must be loaded in the ordinary way: because they equal no parent of the snapshot,
    because the load may have to convert or leave out rows, or because something else reads the old rows. The caller
    must hold the table's lock. Raises SnapshotError if the chain is incomplete.
    """
    description, state = snapshot.description, table.state
    is_same_state = table.optimizer is not None or RowState.from_description(description) == state
    is_same_format = RowFormat.from_description(description).dtype == table.row_format.dtype
    limits = spec.read_id_limits(None)  # then no stored id is illegal, and there is nothing to remark
    has_legal_ids = spec.max_ids is None or (spec.read_id_limits(description) == limits and bool(description["step"]))
    if (
        not (selection.is_whole and is_same_state and is_same_format and has_legal_ids)
        or snapshot.shard is not None
        or spec.with_stored_seed(description) != spec
        or table.processor.defers_errors  # as on a GPU
        or table.stack is None
        or table.is_inconsistent
        or table.pending_erasure is not None
        or table.reader_error is not None
        or not table.lifecycle.can_pass_on_ledger(snapshot.manifest.rows)
        or table.observers.image is not None
        or table.num_scans
    ):
        return []
    changed = table.observers.list_changed_keys()
    if changed is None or len(changed[1]):
        return []
    chain = snapshot.chain
    ids = [parent.manifest.id for parent in chain]
    return chain[ids.index(changed[0]) + 1 :] if changed[0] in ids else []


def verify_increments(table: OpenTable, increments: Sequence[Snapshot]) -> tuple[Iterable[Change], Counts | None]:
    """Verify the increments without changing a row. Raises SnapshotError.

    Rows on disk are not counted, as this needs random reads: the last manifest's counts are used, if they are possible.
    Returns the changes, and each table's row count after the load (None if unknown).
    """
    assert table.stack is not None
    last, num_rows, old_counts = increments[-1], table.counts.num_rows, table.counts.known_table_counts
    counts, added = read_counts(vars(last.manifest), table.spec.num_tables), np.zeros(table.spec.num_tables, np.int64)
    reads_rows = counts is None or not isinstance(table.stack.bottom, RocksDB)
    is_small = sum(snapshot.manifest.total_bytes for snapshot in increments) <= _SMALL_BYTES
    changes = [*read_changes(increments)] if is_small else read_changes(increments)
    min_rows = max_rows = num_rows
    for _, rows, deleted in changes:
        min_rows, max_rows = min_rows - len(deleted), max_rows + len(rows)
        for keys, sign in ((extract_row_keys(rows), 1), (deleted, -1)) if reads_rows else ():
            old_rows = np.empty(len(keys), table.row_format.dtype)
            tables = keys["table"].copy()
            exists = table.stack.top.read(tables, keys["key"].copy(), locate_lines(old_rows), False)
            added += sign * count_by_table(tables[exists if sign < 0 else ~exists], len(added))
    if reads_rows:
        min_rows = max_rows = num_rows + int(added.sum())
        counts = counts if old_counts is None else old_counts + added
    last.check_count(min(max(last.manifest.rows, min_rows), max_rows))
    return changes if is_small else read_changes(increments), counts


def apply_changes(top: TierBase, bottom: RocksDB | InMemoryTier, changes: Iterable[Change]) -> Iterator[Change]:
    """Write and erase the rows of each change in a stack of tiers, and yield the change."""
    for bucket, rows, deleted in changes:
        erased = [deleted]
        if top is not bottom:  # rows are written below the caches, which must not keep the old ones
            erased.append(extract_row_keys(rows))
        for keys in erased:
            if len(keys):
                top.erase(keys["table"].copy(), keys["key"].copy())
        if len(rows):
            bottom.write(rows["table"].copy(), rows["key"].copy(), locate_lines(rows))
        yield bucket, rows, deleted


def take_over(
    old_table: OpenTable, table: OpenTable, changes: Iterable[Change], counts: Counts | None, member: Member | None
) -> None:
    """Let `table` use the tiers and the ledger of `old_table`, and apply `verify_increments`'s result to their rows.

    If this raises, some rows have changed, so neither table nor the training group may use them.
    """
    try:
        old_table.unpin_rows()
        old_table.stop_prefetch()
        table.lifecycle.inherit_ledger(old_table.lifecycle)
        assert table.stack is not None
        for _, rows, deleted in apply_changes(*table.stack, changes):
            table.lifecycle.replace_rows(rows, deleted)
        table.counts.set_initial_counts(counts)
        old_table.close(keeps_tiers=True)
    except BaseException as error:
        old_table.record_failure(error)
        if member is not None:
            member.mark_broken(
                f"embedding {table.spec.name!r}: a load failed in the middle of its changes ({error!r}). Load a "
                "snapshot, or create the embedding again: it then recovers its last snapshot"
            )
        raise
