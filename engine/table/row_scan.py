"""Functions that check scanned rows, load rows into a table, catch rows up, or read rows under a lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from threading import RLock
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _core
from ..errors import SnapshotError, StoreError, undo_on_error
from ..optim.row_state import RowState
from ..optim.rule import needs_catch_up
from ..options.initializers import make_constant_initializer, make_table_options
from ..options.table_spec import TableSpec
from ..row_format import ROW_KEY_DTYPE, Chunks
from ..signals import defer_signals
from ..store.full_tier import CpuFullTier
from ..store.rocksdb import RocksDB
from ..store.table_counts import count_by_table, count_chunk_rows, read_counts

T = TypeVar("T")


def check_rows(chunks: Chunks, num_tables: int) -> Chunks:
    """Yield stored rows unchanged. Raises SnapshotError for an unwritten row or a table id >= `num_tables`."""
    for bucket, rows in chunks:
        if len(rows) and (table := rows["table"].max()) >= num_tables:
            raise SnapshotError(f"there are rows of table {table}, but the embedding has {num_tables} tables")
        if (rows["updates"] == 0).any():
            raise SnapshotError("there are rows with updates=0, although snapshots hold only rows that were written")
        yield bucket, rows


def scan_table(table: Any) -> Chunks:
    """Yield all written rows of an OpenTable; see `OpenTable.scan`."""
    top_tier = table.prepare_top_tier()
    can_keep_scanning = table.stack is not None and isinstance(table.stack.bottom, CpuFullTier)
    check = (lambda: table.is_replaced or table.prepare_top_tier()) if can_keep_scanning else table.finish_erasures
    table.num_scans += 1
    try:
        yield from table.row_format.view_words(iterate_locked(top_tier.scan(), table.lock, check))
    finally:
        table.num_scans -= 1


def fill_table(table: Any, description: Mapping[str, Any], chunks: Chunks) -> int:
    """Load scanned rows into an empty table. Rows without optimizer state get initial state. Returns the row count.

    table: an OpenTable, whose module imports this one. description: describes the scanned rows. Raises StoreError.
    """
    spec = table.spec
    if table.state.names and not description["states"]:
        chunks = table.state.add_initial_state(chunks, spec.dim, spec.dtype)
    counts, bottom, dtype = np.zeros(spec.num_tables, np.int64), table.stack.bottom, table.row_format.dtype
    with bottom.load() if isinstance(bottom, RocksDB) else nullcontext():
        for _, rows in table.lifecycle.record_loaded_chunks(check_rows(chunks, spec.num_tables)):
            if rows.dtype != dtype or not rows.flags.c_contiguous:
                raise StoreError(f"rows of {rows.dtype} cannot be loaded as rows of {dtype}")
            tables = rows["table"].copy()
            bottom.write(tables, rows["key"].copy(), locate_lines(rows))
            counts += count_by_table(tables, spec.num_tables)
    table.counts.set_initial_counts(counts)
    return int(counts.sum())


def restore_rows(table: Any, description: Mapping[str, Any]) -> None:
    """Count the rows of a table that opens with stored rows, and enter them into its ledger, if there is one.

    table: an OpenTable. description: describes the rows, which are in RocksDB. Raises StoreError, SnapshotError.
    """
    num_tables = table.spec.num_tables
    table.counts.set_initial_counts(read_counts(description, num_tables))
    if table.lifecycle.has_ledger:
        with undo_on_error(table.close):
            remembered = table.lifecycle.record_loaded_chunks(check_rows(table.scan(), num_tables))
            table.counts.set_initial_counts(count_chunk_rows(remembered, num_tables))


def locate_lines(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """Returns the addresses of the lines in scanned rows [n]. A row is its row key followed by its line."""
    start = rows.ctypes.data + ROW_KEY_DTYPE.itemsize
    return np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.dtype.itemsize) + np.uint64(start)


def catch_up_rows(stored: Mapping[str, Any], chunks: Chunks) -> Chunks:
    """Yield stored rows after applying the steps that they missed. `stored` describes the rows."""
    rule, hyperparams = stored["optimizer"], stored["hyper"]
    if not (hyperparams and needs_catch_up(rule)):
        yield from chunks
        return
    constant = make_table_options(make_constant_initializer(0.0))  # unused, because no row is new
    spec = TableSpec(stored["name"], tuple(stored["columns"]), torch.int64, (constant,), None, 0, stored["dtype"])
    layout = spec.make_layout(RowState.from_description(stored))
    for bucket, rows in chunks:
        rows = rows.copy()
        _core.catch_up(layout, locate_lines(rows), rule, hyperparams, stored["step"] + 1)
        yield bucket, rows


def iterate_locked(items: Iterator[T], lock: RLock, check: Callable[[], object]) -> Iterator[T]:
    """Yield items, reading each under the table's lock. `check` raises if the table can no longer be used."""
    while True:
        with lock, defer_signals():
            check()
            item = next(items, None)
        if item is None:
            return
        yield item
