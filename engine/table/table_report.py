"""Looking at an open table: its metrics, the place of one row, and its rows as of the last step."""

from __future__ import annotations

from typing import Any

from .. import _core
from ..ops.batch import rows_of
from ..options.lookup import Lookup
from ..row_format import Chunks
from ..store.table_counts import by_label
from .prefetch import NOTHING_ANNOUNCED
from .row_scan import line_addresses
from .table import OpenTable


def metrics(table: OpenTable) -> dict[str, dict[str, Any]]:
    """The metrics at one instant: of all rows (`table`), of each tier from the top, and of each table (`tables`)."""
    with table.lock:
        store = table.opened()
        table.check()
        announced = NOTHING_ANNOUNCED if table.prefetcher is None else table.prefetcher.counts
        counts = {**table.lifecycle.metrics, **announced}
        tiers, (hits, misses) = store.metrics(), store.asked().T
        next(iter(tiers.values())).update(hits=int(hits.sum()), misses=int(misses.sum()))
        table.small_caches.judge(tiers)
        by_table, dropped = table.counts.by_table(table.scan), table.processor.dropped
        return {
            "table": {"rows": table.counts.rows, "step": table.step, "dropped": int(dropped.sum()), **counts},
            **tiers,
            "tables": by_label(table.spec.labels, rows=by_table, hits=hits, misses=misses, dropped=dropped),
        }


def where(table: OpenTable, lookup: Lookup) -> tuple[list[dict[str, Any]], str | None]:
    """The places of the row of one id, as `TierBase.where`, and why it is not stored, or None. Changes nothing."""
    with table.lock:
        store = table.use()
        table.check()
        tables, keys = rows_of(table.spec, lookup)
        if not len(keys):
            return [], f"padding_idx={table.spec.padding_idx} is no row"
        tiers = store.where(int(tables[0]), int(keys[0]))
        if not tiers:
            return [], table.lifecycle.why_absent()
        return tiers, None if tiers[0]["updates"] else "brought up for a step that has not written it"


def new_rows(table: OpenTable, lookup: Lookup) -> int:
    """How many rows of ids without bags were never written."""
    tables, _ = rows_of(table.spec, lookup)
    return len(tables) - int(table.count_written(lookup).sum())


def settled(table: OpenTable) -> Chunks:
    """Scan every written row as it is after the last step: steps that its rule leaves due are taken in a copy."""
    for bucket, rows in table.scan():
        if rule := table.lagging:
            rows = rows.copy()
            with table.lock:
                _core.catch_up(table.layout, line_addresses(rows), rule, table.hyper_now(), table.step + 1)
        yield bucket, rows
