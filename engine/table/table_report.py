"""Reports on an open table: its metrics, where one row is stored, and all rows as of the last step."""

from __future__ import annotations

from contextlib import suppress
from copy import deepcopy
from typing import Any

from .. import _core
from ..errors import TierbedError
from ..ops.batch import find_unique_rows
from ..options.lookup import Lookup
from ..row_format import Chunks
from ..store.table_counts import label_counts
from .prefetch import ZERO_COUNTS
from .row_scan import locate_lines
from .table import OpenTable

LOCK_TIMEOUT = 0.01  # how long `read_metrics` waits if another thread uses the table


def read_metrics(table: OpenTable, timeout: float = LOCK_TIMEOUT) -> dict[str, dict[str, Any]]:
    """Returns metrics from one step. Keys: "table" for all rows, tier names (top first), "tables" for each table."""
    if not table.lock.acquire(timeout=timeout):  # another thread uses the table, for example to load a snapshot
        if table.last_metrics is not None:
            return _update_without_lock(table, deepcopy(table.last_metrics))
        table.lock.acquire()
    try:
        table.require_top_tier()
        table.raise_deferred_error()
        table.last_metrics = _collect_metrics(table)
        return deepcopy(table.last_metrics)
    finally:
        table.lock.release()


def _update_without_lock(table: OpenTable, metrics: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Update old metrics: replace `step` and the row counts by current values. Reading these needs no lock."""
    metrics["table"]["step"] = table.step
    if not table.processor.defers_errors and (rows := table.counts.known_table_counts) is not None:  # a GPU would wait
        metrics["table"]["rows"] = int(rows.sum())
        for label, count in zip(table.spec.labels, rows.tolist(), strict=True):
            metrics["tables"][label]["rows"] = count
    return metrics


def cache_metrics(table: OpenTable) -> None:
    """Read the metrics before a long call, for other threads to report. Does nothing if counting rows needs a scan."""
    if table.counts.known_table_counts is not None:
        with suppress(TierbedError):  # the long call itself will raise this error
            table.last_metrics = _collect_metrics(table)


def _collect_metrics(table: OpenTable) -> dict[str, dict[str, Any]]:
    with table.lock:
        top_tier = table.require_top_tier()
        prefetch_counts = ZERO_COUNTS if table.prefetcher is None else table.prefetcher.counts
        counts: dict[str, float] = {**table.lifecycle.metrics, **prefetch_counts}
        tiers, (hits, misses) = top_tier.metrics(), top_tier.hit_counts().T
        top, last = next(iter(tiers.values())), next(reversed(tiers.values()))
        top.update(hits=int(hits.sum()), misses=int(misses.sum()))
        # how many of the requested rows were in the top tier, in a lower tier, and in no tier
        requested = {"hits": top["hits"], "misses": top["misses"] - last["misses"], "unknown": last["misses"]}
        peek_counts = dict(zip(requested, top_tier.peek_counts(), strict=True))
        counts |= {f"train_{name}": count - peek_counts[name] for name, count in requested.items()}
        counts |= {f"evaluate_{name}": count for name, count in peek_counts.items()}
        sizes = [tier.get(name, 0) for tier in tiers.values() for name in ("bytes", "overflow_bytes", "window_bytes")]
        counts["changed_keys_bytes"] = sum(tracker.bytes for tracker in table.observers.trackers.values())
        counts["total_bytes"] = sum(sizes) + counts["ledger_bytes"] + counts["changed_keys_bytes"]
        table.small_cache_detector.check(tiers)
        table_counts, dropped = table.counts.read_table_counts(table.scan), table.processor.dropped_counts
        return {
            "table": {"rows": table.counts.num_rows, "step": table.step, "dropped": int(dropped.sum()), **counts},
            **tiers,
            "tables": label_counts(table.spec.labels, rows=table_counts, hits=hits, misses=misses, dropped=dropped),
        }


def locate_row(table: OpenTable, lookup: Lookup) -> tuple[list[dict[str, Any]], str | None]:
    """Find one id's row. Returns `TierBase.locate`'s list, and why the row is not stored (None if it is stored)."""
    with table.lock:
        top_tier = table.prepare_top_tier()
        table.raise_deferred_error()
        tables, keys = find_unique_rows(table.spec, lookup)
        if not len(keys):
            return [], f"padding_idx={table.spec.padding_idx} has no row"
        tiers = top_tier.locate(int(tables[0]), int(keys[0]))
        if not tiers:
            return [], table.lifecycle.explain_absence()
        return tiers, None if tiers[0]["updates"] else "fetched for a step that has not written it"


def count_new_rows(table: OpenTable, lookup: Lookup) -> int:
    """Returns how many rows of a lookup without bags were never written."""
    tables, _ = find_unique_rows(table.spec, lookup)
    return len(tables) - int(table.count_written(lookup).sum())


def scan_with_catch_up(table: OpenTable) -> Chunks:
    """Scan all written rows. Missed steps are applied to a copy of the rows."""
    for bucket, rows in table.scan():
        if rule := table.catch_up_rule:
            rows = rows.copy()
            with table.lock:
                _core.catch_up(table.layout, locate_lines(rows), rule, table.compute_hyperparams(), table.step + 1)
        yield bucket, rows
