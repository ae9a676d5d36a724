"""Exports the metrics of a serving folder's readers to Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..engine.metric_families import Families, Metric, counter, gauge, make_latency_metrics

METRICS: dict[str, Metric] = {
    "version": gauge("number of the version that lookups take"),
    "step": gauge("step of this version's rows and dense weights"),
    "seconds_behind": gauge("age of this version in seconds", "age_seconds"),
    "held": gauge("1 while a rollback holds readers at this version"),
    "refreshes": counter("refreshes that took a newer version"),
    "failed_refreshes": counter("refreshes that failed, so that lookups stayed with their version"),
    # metrics of each embedding
    "lookups": counter("lookups"),
    "ids": counter("ids in lookups"),
    "unknown": counter("ids without a row", "unknown_ids"),
    "delta": counter("ids whose rows were in a delta", "delta_ids"),
    "dropped": counter("illegal ids that were dropped, if `bad_ids` is `drop`", "dropped_ids"),
    **make_latency_metrics("lookup"),
}


def collect(metrics: dict[str, Any], folder: str) -> Iterable[Any]:
    """Convert the result of `Served.metrics` to families, whose names start with `tierbed_serving_`.

    Labels are `folder`, and for embeddings `embedding`.
    """
    families = Families("tierbed_serving_")
    for name, value in metrics.items():
        if name != "embeddings":
            families.add(name, METRICS[name], value, folder=folder)
    for embedding, numbers in metrics["embeddings"].items():
        for name, value in numbers.items():
            families.add(name, METRICS[name], value, folder=folder, embedding=embedding)
    return families
