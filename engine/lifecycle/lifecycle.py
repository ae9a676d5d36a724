"""The life of rows: which new rows are kept, and which rows leave at the capacity or with age.

The decisions are those of the ledger (`native/ledger.h`), taken in the order of steps from what was written. A row that
left is like a row that was never written.
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

SWEEPS = 16  # looks for rows past `ttl_steps`, in that many steps


class Lifecycle:
    """The life of the rows of one open table.

    Where the options ask for none of this, nothing is remembered, and `admit`, `written` and `expired` are not called.
    `stored_rows` of an earlier run stay even above the capacity, until new rows come and there are rows to evict.
    """

    def __init__(self, name: str, num_tables: int, options: StoreOptions, stored_rows: int, seed: int) -> None:
        self._name = name
        self._eviction, self._ttl = options.eviction, options.ttl_steps
        self._ledger: _core.Ledger | None = None
        self.remembers = False  # whether this object watches the capacity, and is told every written row
        self._admission = options.admission
        self.capacity = options.capacity
        self.counts = {"refused": 0, "evicted": 0, "expired": 0, "deleted": 0}
        self.gone = np.zeros(num_tables, np.int64)  # rows that were written and are not there, refused rows included
        if self.capacity is not None and options.eviction in ("none", "ttl") and stored_rows > self.capacity:
            log.warning(
                "embedding %r: %d stored rows are more than capacity=%d; all of them stay, and no new row comes until "
                "some are deleted, or capacity is raised",
                name,
                stored_rows,
                self.capacity,
            )
            self.capacity = stored_rows
        if (options.eviction, options.admission, options.ttl_steps) != ("none", None, None):
            self.remembers = True
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
        """Decide about a batch that is written at `step`. Returns the rows that must leave before, or None.

        Rows that training refuses get lines of the batch's own. Raises CapacityError, and nothing changes.
        """
        assert self._ledger is not None
        admitted = self._ledger.admit(batch, layout, step, training)
        if admitted.lacking:
            raise CapacityError(self._no_room(admitted.fresh, admitted.lacking))
        tables, keys = admitted.take_victims()
        return (tables, keys) if len(keys) else None

    def written(self, batch: Any, step: int) -> None:
        """Note that an admitted batch was written at `step`."""
        assert self._ledger is not None
        if len(batch.own_lines):
            refused = counted(batch.tables[batch.own_lines != 0], len(self.gone))
            self._left(refused, "refused")
        self._ledger.commit(batch, step)

    def expired(self, step: int) -> tuple[TableIds, Keys] | None:
        """Rows that leave after `step`. Of `ttl_steps` steps, 16 look for all rows older than that."""
        assert self._ledger is not None
        if self._ttl is None or self._eviction == "ttl" or step % max(1, self._ttl // SWEEPS):
            return None
        tables, keys = self._ledger.expired(step)
        return (tables, keys) if len(keys) else None

    def left(self, tables: TableIds, keys: Keys, there: Counts, cause: str) -> None:
        """Note that rows are no longer there. there: how many of each table were. cause: a name in `counts`."""
        if self._ledger is not None:
            self._ledger.erase(tables, keys)
        self._left(there, cause)

    def _left(self, rows: Counts, cause: str) -> None:
        self.gone += rows
        self.counts[cause] += int(rows.sum())

    def why_absent(self) -> str:
        """Why a row may not be there, for people: what befell any row, since the rows that left are not remembered."""
        befell = [cause for cause, count in self.counts.items() if count]
        causes = [f"refused by admission={self._admission}" if cause == "refused" else cause for cause in befell]
        return " or ".join(["not written since the table was opened", *causes])

    def remember(self, chunks: Chunks) -> Chunks:
        """Remember scanned rows that come into the table, and pass them on."""
        for bucket, rows in chunks:
            if self._ledger is not None:
                self._ledger.load(*(rows[field].copy() for field in ("table", "key", "updates", "step")))
            yield bucket, rows

    def _no_room(self, fresh: int, lacking: int) -> str:
        assert self.capacity is not None
        split = "raise capacity, or split the batch: its own rows stay"
        earlier = f"raise capacity, or evict rows earlier than after ttl_steps={self._ttl}"
        remedy = {
            "none": "raise capacity, let eviction make room, or leave unseen ids out",
            "ttl": split if fresh > self.capacity else earlier,
        }.get(self._eviction, split)
        return (
            f"capacity={self.capacity} of embedding {self._name!r}, eviction={self._eviction!r}: the batch has {fresh} "
            f"new rows and there is room for {max(fresh - lacking, 0)}; {remedy}. Nothing was changed"
        )
