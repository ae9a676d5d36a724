"""Describes metrics, and makes metric families of `prometheus_client`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

_QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99", "max": "1"}


class Metric(NamedTuple):
    """Describes one number of `metrics()`.

    kind: "counter", which grows from 0 while a store is open, or "gauge". exported_name: Prometheus name, if different.
    """

    kind: str
    meaning: str
    exported_name: str = ""


counter, gauge = partial(Metric, "counter"), partial(Metric, "gauge")


def make_latency_metrics(name: str) -> dict[str, Metric]:
    percentiles = {f"{name}_seconds_p{n}": gauge(f"{n}th percentile of {name} times") for n in (50, 90, 99)}
    return {**percentiles, f"{name}_seconds_max": gauge(f"the longest {name} time")}


class Families:
    """Metric families of `prometheus_client`, whose names start with `prefix`."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._by_name = prefix, dict[str, Any]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._by_name.values())

    def add(self, name: str, metric: Metric, value: float, **labels: str) -> None:
        """Add a number. Quantiles of a time become one family with the label `quantile`."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        latency, _, quantile = name.rpartition("_")
        if latency.endswith("seconds") and quantile in _QUANTILES:
            name, metric = latency, gauge("a share of the calls took no longer, in seconds")
            labels["quantile"] = _QUANTILES[quantile]
        name = metric.exported_name or name
        if name not in self._by_name:
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            self._by_name[name] = kind(self._prefix + name, metric.meaning, labels=list(labels))
        self._by_name[name].add_metric(list(labels.values()), value)
