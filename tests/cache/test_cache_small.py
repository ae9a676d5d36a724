"""A cache with less room than a batch has rows works in its overflow, and says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.embeddings import make, train
from support.graphs import graph_of
from support.killed import remarks
from support.stores import ONE_SET_MB, options
from tierbed import MultiTableEmbedding

STORES = ["cached_host", "ssd"]
TOO_SMALL = "embedding 'rows': cache_budget_mb is too small: "


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", "tierbed")


def go_round(embedding: MultiTableEmbedding, steps: range) -> None:
    """Steps of 40 rows of 400."""
    for step in steps:
        train(embedding, range(40 * (step % 10), 40 * (step % 10) + 40))


@pytest.mark.parametrize("store", STORES)
def test_a_batch_of_more_rows_than_the_cache_is_told_once_with_numbers(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        train(embedding, range(64))
        assert remarks(caplog) == []
        for _ in range(3):
            train(embedding, range(1000))
        room = int(embedding.metrics()["device"]["capacity"])
    said, *others = remarks(caplog)
    assert all("cache_budget_mb is too small" in other for other in others)  # as `metrics` looked
    found = re.search(r"room for (\d+) rows, but a batch has (\d+) distinct rows. Now (\d+) .* at least (\S+),", said)
    assert found is not None
    assert said.startswith(f"embedding 'rows': cache_budget_mb={ONE_SET_MB} has room for")
    assert (int(found[1]), found[2]) == (room, "1000")
    assert int(found[3]) >= 1000 - room
    enough = float(found[4])
    with make(options(store, tmp_path / "more", enough), "adagrad") as embedding:
        train(embedding, range(1000))
    assert remarks(caplog) == []


@pytest.mark.parametrize("store", [*STORES, "ssd_host"])
def test_a_cache_that_evicts_what_it_needs_again_is_named_once_with_the_remedy(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(options(store, tmp_path), "adagrad") as embedding:
        go_round(embedding, range(63))
        assert remarks(caplog) == []  # counters are read as the 64th step ended
        go_round(embedding, range(63, 70))
        (said,) = remarks(caplog)
        metrics = embedding.metrics()
        assert metrics["device"]["too_small"] == 1
        if store == "ssd_host":  # which has all rows, in its overflow as well
            assert metrics["host"]["too_small"] == 0
    found = re.search(r"(\d+) % of (\d+) looked-up rows .* evicted (\d+) rows \((\d+) of them dirty\)", said)
    assert said.startswith(TOO_SMALL)
    assert "tierbed.plan(trace)" in said
    assert found is not None
    assert (int(found[1]) < 50, int(found[2])) == (True, 64 * 40)
    assert int(found[4]) > 64 * 20
    assert remarks(caplog) == []


def test_a_cache_is_not_called_small_while_it_fills_or_for_rows_that_it_could_not_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(options("cached_host", tmp_path), "adagrad") as embedding:
        for step in range(70):
            train(embedding, range(step, step + 2))
        embedding.get(range(10_000, 20_000), 0)
        device = embedding.metrics()["device"]
        assert device["hits"] < device["misses"] / 100
        assert device["too_small"] == 0
    with make(options("cached_host"), "adagrad") as embedding:
        for step in range(70):
            train(embedding, range(40 * step, 40 * step + 40))  # ids that come once
        device = embedding.metrics()["device"]
        assert (device["hits"], device["too_small"]) == (0, 0)
        assert device["evictions_dirty"] > 1000
    assert remarks(caplog) == []


def test_metrics_name_a_small_cache_before_the_step_that_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with make(options("cached_host", tmp_path), "adagrad") as embedding:
        go_round(embedding, range(30))
        assert embedding.metrics()["device"]["too_small"] == 1
        assert len(remarks(caplog)) == 1


@pytest.mark.parametrize("store", STORES)
def test_a_small_cache_is_named_where_the_loop_prefetches(
    store: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    generator = torch.Generator().manual_seed(0)
    # more rows than the sets have room for: some are evicted from the overflow area, however far the thread is ahead
    batches = [(torch.randint(0, 2000, (200,), generator=generator),) for _ in range(60)]
    with make(options(store, tmp_path, overflow_mb=0.02), tables=1) as rows:
        optimizer = torch.optim.SGD(rows.parameters(), lr=0.1)
        graph = graph_of(lambda graph, ids: graph.model(ids).sum().backward(), optimizer, model=rows)
        for _ in graph.run(batches, ahead=8):
            pass
        device = rows.metrics()["device"]
        *_, said = remarks(caplog)
    assert device["too_small"] == 1
    assert device["overflow_evictions"] > 0
    assert said.startswith(TOO_SMALL)
