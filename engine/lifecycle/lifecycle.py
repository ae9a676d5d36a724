"""The lifecycle of rows: which new rows a table keeps, and which rows it deletes at capacity or with age.

The ledger (`native/ledger.h`) decides, in the order of steps, from the rows that were written. A removed row is like a
row that was never written.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from .. import _core
from ..errors import CapacityError
from ..options.store_options import StoreOptions
from ..row_format import Chunks, Keys, TableIds
from ..store.table_counts import Counts, counted

log = logging.getLogger("tierbed")

SCANS = 16  # for expired rows, in `ttl_steps` steps


class Lifecycle:
    """The lifecycle of the rows of one open table.

    Without such options there is no ledger, and `admit`, `note_written` and `expired` are not called. `stored_rows` of
    an earlier run may exceed the capacity, until there are new rows to admit and old ones to evict.
    """

    def __init__(self, name: str, num_tables: int, options: StoreOptions, stored_rows: int, seed: int) -> None:
        self._name = name
        self._eviction, self._ttl = options.eviction, options.ttl_steps
        self._ledger: _core.Ledger | None = None
        self.has_ledger = False  # whether this checks the capacity, and has to know every written row
        self._admission = options.admission
        self.capacity = options.capacity
        self.counts = {"refused": 0, "evicted": 0, "expired": 0, "deleted": 0}
        self.removed_counts = np.zeros(num_tables, np.int64)  # of rows that were written, refused rows included
        if self.capacity is not None and options.eviction in ("none", "ttl") and stored_rows > self.capacity:
            log.warning(
                "embedding %r: %d stored rows are more than capacity=%d; all of them stay, and no new row is inserted "
                "until some are deleted, or capacity is raised",
                name,
                stored_rows,
                self.capacity,
            )
            self.capacity = stored_rows
        if (options.eviction, options.admission, options.ttl_steps) != ("none", None, None):
            self.has_ledger = True
            self._ledger = _core.Ledger(
                eviction=options.eviction,
                capacity=self.capacity,
                ttl_steps=options.ttl_steps or 0,
                min_lookups=options.admission if isinstance(options.admission, int) else 0,
                chance=options.admission if isinstance(options.admission, float) else 1.0,
                seed=seed,
            )

    @property
    def metrics(self) -> dict[str, int]:
        """`counts`, and in `ledger_bytes` the memory of the ledger."""
        return {**self.counts, "ledger_bytes": 0 if self._ledger is None else self._ledger.bytes}

    def admit(self, batch: Any, layout: _core.Layout, step: int, training: bool) -> tuple[TableIds, Keys] | None:
        """Decide on a batch that is written at `step`. Returns the rows that must be erased first, or None.

        Rows that training refuses get lines in the batch. Raises CapacityError, and changes nothing.
        """
        assert self._ledger is not None
        admitted = self._ledger.admit(batch, layout, step, training)
        if admitted.lacking:
            raise CapacityError(self._capacity_text(admitted.fresh, admitted.lacking))
        tables, keys = admitted.take_victims()
        return (tables, keys) if len(keys) else None

    def note_written(self, batch: Any, step: int) -> None:
        """Note that an admitted batch was written at `step`."""
        assert self._ledger is not None
        if len(batch.own_lines):
            refused = counted(batch.tables[batch.own_lines != 0], len(self.removed_counts))
            self._count(refused, "refused")
        self._ledger.commit(batch, step)

    def expired(self, step: int) -> tuple[TableIds, Keys] | None:
        """Rows that expire after `step`. 16 of `ttl_steps` steps scan for rows older than that."""
        assert self._ledger is not None
        if self._ttl is None or self._eviction == "ttl" or step % max(1, self._ttl // SCANS):
            return None
        tables, keys = self._ledger.expired(step)
        return (tables, keys) if len(keys) else None

    def note_removed(self, tables: TableIds, keys: Keys, existing: Counts, cause: str) -> None:
        """Note that rows were removed. existing: how many of each table were written. cause: a name in `counts`."""
        if self._ledger is not None:
            self._ledger.erase(tables, keys)
        self._count(existing, cause)

    def _count(self, rows: Counts, cause: str) -> None:
        self.removed_counts += rows
        self.counts[cause] += int(rows.sum())

    def why_absent(self) -> str:
        """Why a row may be missing, for people: all causes so far, since removed rows are not remembered."""
        seen = [cause for cause, count in self.counts.items() if count]
        causes = [f"refused by admission={self._admission}" if cause == "refused" else cause for cause in seen]
        return " or ".join(["not written since the table was opened", *causes])

    def note_loaded(self, chunks: Chunks) -> Chunks:
        """Add scanned rows that are loaded into the table to the ledger, and pass them on."""
        for bucket, rows in chunks:
            if self._ledger is not None:
                self._ledger.load(*(rows[field].copy() for field in ("table", "key", "updates", "step")))
            yield bucket, rows

    def _capacity_text(self, fresh: int, lacking: int) -> str:
        assert self.capacity is not None
        split = "raise capacity, or split the batch: its own rows stay"
        earlier = f"raise capacity, or evict rows earlier than after ttl_steps={self._ttl}"
        remedy = {
            "none": "raise capacity, choose an eviction, or leave unseen ids out",
            "ttl": split if fresh > self.capacity else earlier,
        }.get(self._eviction, split)
        return (
            f"capacity={self.capacity} of embedding {self._name!r}, eviction={self._eviction!r}: the batch has {fresh} "
            f"new rows and there is room for {max(fresh - lacking, 0)}; {remedy}. Nothing was changed"
        )
