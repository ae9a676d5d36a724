"""Decides which new rows a table keeps, and which rows it deletes because they expired or the table is full.

The ledger (`native/ledger.h`) makes both decisions. It admits a new row by a probability, or by how many steps looked
the row up. It deletes rows by write count and the time since the last write. A deleted row that returns is new.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from .. import _core
from ..errors import CapacityError
from ..options.store_options import StoreOptions
from ..row_format import Chunks, Keys, RowArray, TableIds
from ..store.table_counts import Counts, count_by_table

log = logging.getLogger("tierbed")

SCANS_PER_TTL = 16  # how many scans for expired rows there are in `ttl_steps` steps


class Lifecycle:
    """The lifecycle of an open table's rows.

    Without `eviction`, `admission` and `ttl_steps`, no ledger exists, and nobody calls `admit`, `record_write` and
    `find_expired`. If an earlier run stored more rows than the capacity, admitting new rows evicts the excess.
    """

    def __init__(self, name: str, num_tables: int, options: StoreOptions, num_stored_rows: int, seed: int) -> None:
        self._name, self.capacity, self._capacity_option = name, options.capacity, options.capacity
        self._eviction, self._admission, self._ttl_steps = options.eviction, options.admission, options.ttl_steps
        self._ledger: _core.Ledger | None = None
        self.has_ledger = False  # if True, this class checks the capacity and must know every written row
        self.counts = {"refused": 0, "evicted": 0, "expired": 0, "deleted": 0}
        self.removed_counts = np.zeros(num_tables, np.int64)  # per table, since opening: removed and refused rows
        if self.capacity is not None and options.eviction in ("none", "ttl") and num_stored_rows > self.capacity:
            log.warning(
                "embedding %r: %d stored rows exceed capacity=%d; all of them stay, but no new row is inserted until "
                "rows are deleted or capacity is raised",
                name, num_stored_rows, self.capacity,
            )  # fmt: skip
            self.capacity = num_stored_rows
        if (options.eviction, options.admission, options.ttl_steps) != ("none", None, None):
            self.has_ledger = True
            self._ledger = _core.Ledger(
                eviction=options.eviction,
                capacity=self.capacity,
                ttl_steps=options.ttl_steps or 0,
                min_lookups=options.admission if isinstance(options.admission, int) else 0,
                probability=options.admission if isinstance(options.admission, float) else 1.0,
                seed=seed,
            )

    def can_pass_on_ledger(self, num_rows: int) -> bool:
        """True if another object for `num_rows` stored rows can use this ledger, which must not count lookups."""
        is_same_capacity = self.capacity in (None, self._capacity_option) and num_rows <= (self.capacity or num_rows)
        return self._ledger is None or (is_same_capacity and not isinstance(self._admission, int))

    @property
    def metrics(self) -> dict[str, int]:
        """The numbers in `counts`, and the ledger's memory as `ledger_bytes`."""
        return {**self.counts, "ledger_bytes": 0 if self._ledger is None else self._ledger.bytes}

    def admit(self, batch: Any, layout: _core.Layout, step: int, is_training: bool) -> tuple[TableIds, Keys] | None:
        """Before `step` writes the batch, decide which new rows to keep. Returns the rows to erase first, or None."""
        assert self._ledger is not None
        admission = self._ledger.admit(batch, layout, step, is_training)  # refused rows get lines in the batch itself
        if admission.num_excess:  # the ledger has changed no row and no count
            raise CapacityError(self._format_capacity_error(admission.num_new, admission.num_excess))
        tables, keys = admission.take_victims()
        return (tables, keys) if len(keys) else None

    def record_write(self, batch: Any, step: int) -> None:
        """Record that an admitted batch was written at `step`."""
        assert self._ledger is not None
        if len(batch.refused_lines):
            refused = count_by_table(batch.tables[batch.refused_lines != 0], len(self.removed_counts))
            self._count_removed(refused, "refused")
        self._ledger.record_write(batch, step)

    def find_expired(self, step: int) -> tuple[TableIds, Keys] | None:
        """Returns the rows that expire after `step`, or None. Scans every `ttl_steps` / `SCANS_PER_TTL` steps."""
        assert self._ledger is not None
        if self._ttl_steps is None or self._eviction == "ttl" or step % max(1, self._ttl_steps // SCANS_PER_TTL):
            return None
        tables, keys = self._ledger.find_expired(step)
        return (tables, keys) if len(keys) else None

    def record_removal(self, tables: TableIds, keys: Keys, existing_counts: Counts, cause: str) -> None:
        """Record removed rows. `existing_counts` counts the written rows per table; `cause` is a key in `counts`."""
        if self._ledger is not None:
            self._ledger.erase(tables, keys)
        self._count_removed(existing_counts, cause)

    def _count_removed(self, rows: Counts, cause: str) -> None:
        self.removed_counts += rows
        self.counts[cause] += int(rows.sum())

    def explain_absence(self) -> str:
        """Returns a text with all causes that may explain a missing row, since no record names the removed rows."""
        seen_causes = [cause for cause, count in self.counts.items() if count]
        causes = [f"refused by admission={self._admission}" if cause == "refused" else cause for cause in seen_causes]
        return " or ".join(["not written since the table was opened", *causes])

    def inherit_ledger(self, other: Lifecycle) -> None:
        """Take over the ledger of `other`; see `can_pass_on_ledger`."""
        self._ledger = other._ledger

    def replace_rows(self, rows: RowArray, deleted: RowArray) -> None:
        """Record rows that a load has replaced, and rows that it has deleted. Their counts do not change."""
        if self._ledger is not None:
            self._ledger.erase(deleted["table"].copy(), deleted["key"].copy())
            for _ in self.record_loaded_chunks(iter([(0, rows)] if len(rows) else [])):
                pass

    def record_loaded_chunks(self, chunks: Chunks) -> Chunks:
        """Yield rows that are being loaded into the table, and add these rows to the ledger."""
        for bucket, rows in chunks:
            if self._ledger is not None:
                self._ledger.add_rows(*(rows[field].copy() for field in ("table", "key", "updates", "step")))
            yield bucket, rows

    def _format_capacity_error(self, num_new: int, num_excess: int) -> str:
        assert self.capacity is not None
        remedy = "raise capacity, or split the batch, whose own rows are never evicted"
        if self._eviction == "none":
            remedy = "raise capacity, choose an eviction, or leave new ids out"
        elif self._eviction == "ttl" and num_new <= self.capacity:
            remedy = f"raise capacity, or lower ttl_steps={self._ttl_steps}"
        return (
            f"capacity={self.capacity} of embedding {self._name!r}, eviction={self._eviction!r}: the batch has "
            f"{num_new} new rows, but there is room for {max(num_new - num_excess, 0)}; {remedy}. Nothing was changed"
        )
