"""Metrics: every number that a store gives is documented, and Prometheus and TensorBoard get all of them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from support.embeddings import attach, make, train
from support.forked import in_process
from support.places import DOCS
from support.stores import STORES, options
from tierbed import EagerOptimizer, MetricsCollector, MultiTableEmbedding, prometheus_text, write_tensorboard
from tierbed.embedding.modules.metrics import METRICS, TABLE_METRICS
from tierbed.engine.errors import ClosedError, InputError, OptionError

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
    """The kind and the meaning of each metric."""
    rows = re.findall(r"^\| `(\w+)` (counter|gauge) \| (.+) \|$", text, re.M)
    return {name: (kind, meaning) for name, kind, meaning in rows}


def section(title: str) -> str:
    return DOCUMENTED.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


@every_store
def test_a_tier_has_what_the_page_says_of_it(store, tmp_path) -> None:
    with used(store, tmp_path) as embedding:
        metrics = embedding.metrics()
    tables = metrics.pop("tables")
    assert list(tables) == ["0", "1", "2"]
    for numbers in tables.values():
        assert list(numbers) == list(TABLE_METRICS)
        assert numbers.keys() == documented(section("Each table")).keys()
    tiers = {"device": ["device"], "host": ["host"], "cached_host": ["device", "host"], "ssd": ["device", "ssd"]}
    assert list(metrics) == ["table", *tiers.get(store, ["device", "host", "ssd"])]
    last = list(metrics)[-1]
    assert metrics.pop("table").keys() == documented(section("The table")).keys()
    for tier, numbers in metrics.items():
        kind = "RocksDB" if tier == "ssd" else None if tier == last else "Caches"
        titles = ["Every tier", *([kind] if kind else [])]
        assert numbers.keys() == documented("\n".join(map(section, titles))).keys()
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


def test_prometheus_parses_every_number(tmp_path) -> None:
    with used("ssd_host", tmp_path, "a") as first, used("device", tmp_path, "b") as second:
        metrics = {"a": first.metrics(), "b": second.metrics()}
        tables = {name: parts.pop("tables") for name, parts in metrics.items()}
        families = list(text_string_to_metric_families(prometheus_text(first, second)))
    types = {family.name: family.type for family in families}
    assert len(types) == len(families)
    assert all(family.documentation for family in families)
    found = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    assert len(found) == len(metrics) + sum(
        len(values) for of in (metrics, tables) for parts in of.values() for values in parts.values()
    )
    for embedding, of_tables in tables.items():
        for table, numbers in of_tables.items():
            for name, number in {"rows": "rows", "hits_total": "hits", "misses_total": "misses"}.items():
                assert found[f"tierbed_table_{name}", embedding, table] == numbers[number]
    assert tables["a"]["0"]["misses"] > tables["a"]["0"]["rows"] > tables["a"]["1"]["rows"] == 0
    assert found["tierbed_up", "a"] == found["tierbed_up", "b"] == 1
    for embedding, tiers in metrics.items():
        assert found["tierbed_rows", embedding, "table"] == tiers["table"]["rows"]
        assert found["tierbed_step", embedding, "table"] == 4
    for tier in ("device", "host"):
        assert found["tierbed_resident_rows", "a", tier] == metrics["a"][tier]["resident_rows"] > 0
        assert found["tierbed_fill_ratio", "a", tier] == metrics["a"][tier]["fill"] > 0
    ssd = metrics["a"]["ssd"]
    assert found["tierbed_hits_total", "a", "device"] == metrics["a"]["device"]["hits"]
    assert found["tierbed_in_bytes_total", "a", "ssd"] == ssd["bytes_in"] > 0
    assert found["tierbed_memory_bytes", "b", "device"] == metrics["b"]["device"]["bytes"]
    assert found["tierbed_fetch_seconds", "a", "0.9", "ssd"] == ssd["fetch_seconds_p90"] > 0
    assert found["tierbed_write_seconds", "a", "1", "ssd"] == ssd["write_seconds_max"]
    assert types["tierbed_hits"] == "counter"
    assert types["tierbed_fetch_seconds"] == types["tierbed_rows"] == "gauge"


def test_a_registered_embedding_is_served_while_its_store_is_open(tmp_path) -> None:
    embedding = make(options("device", tmp_path), "adagrad")
    registry = CollectorRegistry()
    registry.register(MetricsCollector(embedding))
    down = 'tierbed_up{embedding="rows"} 0.0'
    assert re.findall("^tierbed.*", generate_latest(registry).decode(), re.M) == [down]
    assert not embedding.is_open  # nobody opened it by looking
    assert not (tmp_path / "rows").exists()
    train(embedding, [1, 2, 3])
    text = generate_latest(registry).decode()
    assert 'tierbed_rows{embedding="rows",tier="table"} 3.0' in text
    assert 'tierbed_up{embedding="rows"} 1.0' in text
    embedding.close()
    assert re.findall("^tierbed.*", generate_latest(registry).decode(), re.M) == [down]
    with used("device", tmp_path, "other") as other:
        text = prometheus_text(embedding, other)
        assert text.count('embedding="rows"') == 1
        assert text.replace(f"{down}\n", "") == prometheus_text(other)


def of_a_child(path: Path) -> int:
    """A forked child's embedding raises StoreError. Returns the child's exit code."""
    with used("device", path, "a") as embedding:
        child = os.fork()
        if child == 0:
            with pytest.warns(RuntimeWarning, match="no metrics of embedding 'a'"):
                text = prometheus_text(embedding)
            os._exit(0 if 'tierbed_up{embedding="a"} 0.0' in text and "tierbed_rows" not in text else 1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_embedding_that_fails_is_down_with_a_warning(tmp_path) -> None:
    assert in_process(of_a_child, tmp_path) == 0


def test_what_has_no_metrics_is_refused(tmp_path, monkeypatch) -> None:
    one, same = make(options("device", tmp_path / "one")), make(options("device", tmp_path / "same"))
    for wrong in ([one], None, torch.nn.Linear(1, 1)):
        with pytest.raises(InputError, match=r"embeddings: got .+; give each embedding as a separate argument"):
            prometheus_text(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="2 have the name 'rows'"):
        MetricsCollector(one, same)
    with pytest.raises(InputError, match=r"writer=None: give a torch\.utils\.tensorboard\.SummaryWriter"):
        write_tensorboard(None, one)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    for use in (prometheus_text, MetricsCollector):
        with pytest.raises(OptionError, match=r"tierbed\[metrics\]"):  # what to install
            use()


def test_tensorboard_gets_every_number_of_what_is_not_closed(tmp_path) -> None:
    unused = make(options("device", tmp_path / "unused"), "adagrad", name="unused")
    with used("cached_host", tmp_path / "store") as embedding:
        with SummaryWriter(str(tmp_path / "runs")) as writer:
            write_tensorboard(writer, embedding)
            write_tensorboard(writer, embedding, step=77)
            write_tensorboard(writer, unused)
        metrics = embedding.metrics()
    assert not unused.is_open
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    metrics |= {f"tables/{table}": numbers for table, numbers in metrics.pop("tables").items()}
    wanted = {f"rows/{part}/{name}": value for part, values in metrics.items() for name, value in values.items()}
    assert set(events.Tags()["scalars"]) == set(wanted)
    for tag, value in wanted.items():
        points: list[Any] = events.Scalars(tag)
        assert [point.step for point in points] == [4, 77]
        assert points[0].value == pytest.approx(value)
    with pytest.raises(ClosedError, match="embedding 'rows' was closed; write its metrics before close"):
        write_tensorboard(writer, embedding)


@every_store
@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.rotated("loop")
def test_training_evaluation_and_unknown_rows_are_counted_apart(store, loop, tmp_path) -> None:
    """loop: whether lookups of a plain loop train, which are no evaluation."""
    with make(options(store, tmp_path / "rows", budget_mb=0.01), tables=1) as embedding:
        optimizer = EagerOptimizer(torch.optim.Adagrad(embedding.parameters(), lr=0.1), embedding)
        for ids in (range(400), range(400), range(400, 450)):
            if loop:
                optimizer.zero_grad()
                embedding(torch.tensor(ids)).sum().backward()
                optimizer.step()
            else:
                train(embedding, ids, 0)
        before = embedding.metrics()["table"]
        with torch.no_grad():
            (embedding if loop else embedding.get)(torch.arange(420))
        embedding.get(torch.arange(1000, 1100), 0)
        metrics = embedding.metrics()
    tiers = [counts for name, counts in metrics.items() if name not in ("table", "tables")]
    table, top, last = metrics["table"], tiers[0], tiers[-1]
    of_training = {name: count for name, count in table.items() if name.startswith("train_")}
    assert of_training == {name: count for name, count in before.items() if name.startswith("train_")}
    assert not any(count for name, count in before.items() if name.startswith("evaluate_"))
    assert table["evaluate_unknown"] == 100
    assert table["evaluate_hits"] + table["evaluate_misses"] == 420
    if loop:  # which looks rows up before it updates them
        assert table["train_unknown"] == 2 * 450
        return
    assert table["train_unknown"] == 450
    assert table["train_hits"] + table["train_misses"] == 400
    assert top["hits"] == table["train_hits"] + table["evaluate_hits"]
    assert last["misses"] == table["train_unknown"] + table["evaluate_unknown"]
    assert (table["train_misses"] == table["evaluate_misses"] == 0) == (store in ("device", "host"))
