"""Metrics: every number that a store gives is documented, and Prometheus and TensorBoard get all of them."""

from __future__ import annotations

import os
import re
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from support.embeddings import attach, make, train
from support.forked import in_process
from support.places import DOCS
from support.stores import STORES, options
from tierbed import (
    ClosedError,
    EagerOptimizer,
    InputError,
    MetricsCollector,
    MultiTableEmbedding,
    OptionError,
    prometheus_text,
    write_tensorboard,
)
from tierbed.embedding.modules.metrics import METRICS, TABLE_METRICS

DOCUMENTED = DOCS / "metrics.md"

every_store = pytest.mark.parametrize("store", STORES)


def used(store: str, path: Path, name: str = "rows") -> MultiTableEmbedding:
    """After steps that fill small caches, an evaluation and a flush."""
    embedding = make(options(store, path, capacity=10_000), name=name)
    attach(embedding, "adagrad")
    for step in range(4):
        train(embedding, range(40 * step, 40 * step + 100))
    embedding.get([1, 2, 3_000], 0)
    embedding.save_snapshot("all")
    return embedding


def documented(text: str) -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `(\w+)` (counter|gauge) \| (.+) \|$", text, re.M)
    return {name: (kind, meaning) for name, kind, meaning in rows}


def section(title: str) -> str:
    return DOCUMENTED.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def of_section(title: str) -> set[str]:
    return set(documented(section(title)))


@every_store
def test_a_tier_has_what_the_page_says_of_it(store: str, tmp_path: Path) -> None:
    with used(store, tmp_path) as embedding:
        metrics = embedding.metrics()
    tables = metrics.pop("tables")
    assert list(tables) == ["0", "1", "2"]
    for numbers in tables.values():
        assert list(numbers) == list(TABLE_METRICS)
        assert set(numbers) == of_section("Each table")
    tiers = {"device": ["device"], "host": ["host"], "cached_host": ["device", "host"], "ssd": ["device", "ssd"]}
    assert list(metrics) == ["table", *tiers.get(store, ["device", "host", "ssd"])]
    last = list(metrics)[-1]
    assert set(metrics.pop("table")) == of_section("The table")
    every = of_section("Every tier")
    for tier, numbers in metrics.items():
        kind = "RocksDB" if tier == "ssd" else None if tier == last else "Caches"
        assert set(numbers) == every | (of_section(kind) if kind else set())
        assert all(isinstance(value, (int, float)) and value >= 0 for value in numbers.values())
        if kind == "Caches":
            assert numbers["fill"] == numbers["resident_rows"] / numbers["capacity"] > 0
        assert numbers["hits"] + numbers["misses"] > 0
        assert numbers["insertions"] > 0
        assert numbers["resident_rows"] > 0
        p50, p90, p99, most = (numbers[f"fetch_seconds_{part}"] for part in ("p50", "p90", "p99", "max"))
        assert p50 <= p90 <= p99 <= most


def test_the_page_has_every_metric_with_its_meaning() -> None:
    tables = section("Each table")
    for text, metrics in ((tables, TABLE_METRICS), (DOCUMENTED.read_text().replace(tables, ""), METRICS)):
        assert documented(text) == {name: (metric.kind, metric.meaning) for name, metric in metrics.items()}


def test_prometheus_parses_every_number(tmp_path: Path) -> None:
    with used("ssd_host", tmp_path, "a") as first, used("device", tmp_path, "b") as second:
        metrics = {"a": first.metrics(), "b": second.metrics()}
        tables = {name: parts.pop("tables") for name, parts in metrics.items()}
        families = list(text_string_to_metric_families(prometheus_text(first, second)))
    assert len({family.name for family in families}) == len(families)
    assert all(family.documentation for family in families)
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
        if "quantile" not in sample.labels
    }
    quantiles = {
        (sample.labels["embedding"], sample.labels["tier"], sample.name, sample.labels["quantile"]): sample.value
        for family in families
        for sample in family.samples
        if "quantile" in sample.labels
    }
    assert len(samples) + len(quantiles) == len(metrics) + sum(
        len(values) for of in (metrics, tables) for parts in of.values() for values in parts.values()
    )
    for embedding, of_tables in tables.items():
        for table, numbers in of_tables.items():
            assert samples["tierbed_table_rows", embedding, table] == numbers["rows"]
            assert samples["tierbed_table_hits_total", embedding, table] == numbers["hits"]
            assert samples["tierbed_table_misses_total", embedding, table] == numbers["misses"]
    assert tables["a"]["0"]["misses"] > tables["a"]["0"]["rows"] > tables["a"]["1"]["rows"] == 0
    assert samples["tierbed_up", "a"] == samples["tierbed_up", "b"] == 1
    for embedding, tiers in metrics.items():
        assert samples["tierbed_rows", embedding, "table"] == tiers["table"]["rows"]
        assert samples["tierbed_step", embedding, "table"] == 4
    for tier in ("device", "host"):
        assert samples["tierbed_resident_rows", "a", tier] == metrics["a"][tier]["resident_rows"] > 0
        assert samples["tierbed_fill_ratio", "a", tier] == metrics["a"][tier]["fill"] > 0
    assert samples["tierbed_hits_total", "a", "device"] == metrics["a"]["device"]["hits"]
    assert samples["tierbed_in_bytes_total", "a", "ssd"] == metrics["a"]["ssd"]["bytes_in"] > 0
    assert samples["tierbed_memory_bytes", "b", "device"] == metrics["b"]["device"]["bytes"]
    assert quantiles["a", "ssd", "tierbed_fetch_seconds", "0.9"] == metrics["a"]["ssd"]["fetch_seconds_p90"] > 0
    assert quantiles["a", "ssd", "tierbed_write_seconds", "1"] == metrics["a"]["ssd"]["write_seconds_max"]
    types = {family.name: family.type for family in families}
    assert types["tierbed_hits"] == "counter"
    assert types["tierbed_fetch_seconds"] == types["tierbed_rows"] == "gauge"


def served(registry: CollectorRegistry) -> str:
    server, thread = start_http_server(0, "127.0.0.1", registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text: str = answer.read().decode()
            return text
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_registered_embedding_is_served_while_its_store_is_open(tmp_path: Path) -> None:
    embedding = make(options("device", tmp_path), "adagrad")
    registry = CollectorRegistry()
    registry.register(MetricsCollector(embedding))
    down = 'tierbed_up{embedding="rows"} 0.0'
    assert re.findall("^tierbed.*", served(registry), re.M) == [down]
    assert not embedding.is_open  # nobody opened it by looking
    assert not (tmp_path / "rows").exists()
    train(embedding, [1, 2, 3])
    assert 'tierbed_rows{embedding="rows",tier="table"} 3.0' in served(registry)
    assert 'tierbed_up{embedding="rows"} 1.0' in served(registry)
    embedding.close()
    assert re.findall("^tierbed.*", served(registry), re.M) == [down]


def test_a_closed_embedding_leaves_the_others(tmp_path: Path) -> None:
    older = make(options("device", tmp_path), "adagrad")
    train(older, [1])
    older.close()
    with used("device", tmp_path, "other") as other:
        text = prometheus_text(older, other)
        assert 'tierbed_up{embedding="rows"} 0.0' in text
        assert text.count('embedding="rows"') == 1
        assert text.replace('tierbed_up{embedding="rows"} 0.0\n', "") == prometheus_text(other)


def _seen_by_a_child(path: Path) -> int:
    """A forked child's embedding raises StoreError. Returns the child's exit code."""
    with used("device", path, "a") as embedding:
        child = os.fork()
        if child == 0:
            with pytest.warns(RuntimeWarning, match="no metrics of embedding 'a'"):
                text = prometheus_text(embedding)
            os._exit(0 if 'tierbed_up{embedding="a"} 0.0' in text and "tierbed_rows" not in text else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_embedding_that_fails_is_down_with_a_warning(tmp_path: Path) -> None:
    assert in_process(_seen_by_a_child, tmp_path) == 0


def test_what_has_no_metrics_is_refused(tmp_path: Path) -> None:
    one, same = make(options("device", tmp_path / "one")), make(options("device", tmp_path / "same"))
    for wrong in ([one], None, torch.nn.Linear(1, 1)):
        with pytest.raises(InputError, match=r"embeddings: got .+; give each embedding as a separate argument"):
            prometheus_text(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="2 have the name 'rows'"):
        MetricsCollector(one, same)
    with pytest.raises(InputError, match=r"writer=None: give a torch\.utils\.tensorboard\.SummaryWriter"):
        write_tensorboard(None, one)


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    with used("cached_host", tmp_path / "store") as embedding:
        with SummaryWriter(str(tmp_path / "runs")) as writer:
            write_tensorboard(writer, embedding)
            write_tensorboard(writer, embedding, step=77)
        metrics = embedding.metrics()
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    metrics |= {f"tables/{table}": numbers for table, numbers in metrics.pop("tables").items()}
    wanted = {f"rows/{part}/{name}": value for part, values in metrics.items() for name, value in values.items()}
    assert set(events.Tags()["scalars"]) == set(wanted)
    for tag, value in wanted.items():
        points: list[Any] = events.Scalars(tag)
        assert [point.step for point in points] == [4, 77]
        assert points[0].value == pytest.approx(value)


def test_tensorboard_tells_a_closed_embedding_from_an_unused_one(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "runs")) as writer:
        embedding = make(options("device", tmp_path / "store"), "adagrad")
        write_tensorboard(writer, embedding)
        assert not embedding.is_open
        train(embedding, [1])
        embedding.close()
        with pytest.raises(ClosedError, match="embedding 'rows' was closed; write its metrics before close"):
            write_tensorboard(writer, embedding)


def test_without_prometheus_client_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(OptionError, match=r"tierbed\[metrics\]"):
        prometheus_text()
    with pytest.raises(OptionError, match=r"tierbed\[metrics\]"):
        MetricsCollector()


@every_store
@pytest.mark.parametrize("forward", ["lookup", "get"])
def test_lookups_of_a_plain_loop_are_no_evaluation(store: str, forward: str, tmp_path: Path) -> None:
    with make(options(store, tmp_path / "rows", budget_mb=0.01), name="rows", tables=1) as embedding:
        optimizer = EagerOptimizer(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding)
        for first in (0, 50):
            embedding(torch.arange(first, first + 100)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        counted = embedding.metrics()["table"]
        assert not any(count for name, count in counted.items() if name.startswith("evaluate_"))
        with torch.no_grad():
            (embedding if forward == "lookup" else embedding.get)(torch.arange(200))
        table = embedding.metrics()["table"]
    assert table["evaluate_hits"] + table["evaluate_misses"] == 150
    assert table["evaluate_unknown"] == 50
    assert table["train_unknown"] == 2 * 150


@every_store
def test_training_evaluation_and_unknown_rows_are_counted_apart(store: str, tmp_path: Path) -> None:
    with make(options(store, tmp_path / "rows", budget_mb=0.01), name="rows", tables=1) as embedding:
        attach(embedding, "adagrad")
        for _ in range(2):
            train(embedding, range(400), 0)
        train(embedding, range(400, 450), 0)
        before = embedding.metrics()["table"]
        embedding.get(torch.arange(420), 0)
        embedding.get(torch.arange(1000, 1100), 0)
        metrics = embedding.metrics()
    tiers = [counts for name, counts in metrics.items() if name not in ("table", "tables")]
    table, top, last = metrics["table"], tiers[0], tiers[-1]
    train_ = {name: count for name, count in table.items() if name.startswith("train_")}
    assert train_ == {name: count for name, count in before.items() if name.startswith("train_")}
    assert train_["train_unknown"] == 450
    assert train_["train_hits"] + train_["train_misses"] == 400
    assert not any(count for name, count in before.items() if name.startswith("evaluate_"))
    assert table["evaluate_unknown"] == 100
    assert table["evaluate_hits"] + table["evaluate_misses"] == 420
    assert top["hits"] == table["train_hits"] + table["evaluate_hits"]
    assert last["misses"] == table["train_unknown"] + table["evaluate_unknown"]
    if store in ("device", "host"):
        assert table["train_misses"] == table["evaluate_misses"] == 0
    else:
        assert table["evaluate_misses"] > 0
