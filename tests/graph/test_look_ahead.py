"""A run over SSD chooses how far it looks ahead by the rows that its cache misses, and its results stay the same."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.embeddings import contents, make
from support.graph_runs import LABELS, Rating
from support.stores import options
from tierbed.graph.run import look_ahead

SIZE = LABELS.shape[1]


def train(path: Path | None, batches: list[tuple[Tensor, Tensor]], start: int = 0) -> tuple[list[int], Tensor, bytes]:
    """The depth at each step, the losses and the rows. `start` is the depth of an earlier run. None: rows in memory."""
    store = "device" if path is None else "ssd"
    graph = Rating(make(options(store, path, 0.03, **({} if path is None else {"overflow_mb": 0.02})), None, tables=2))
    graph.rows.look_ahead = start
    torch.manual_seed(2)
    run = graph.run(batches)
    depths, losses = [], []
    for loss in run:
        losses.append(loss)
        depths.append(run._look_ahead.depth)
    found = contents(graph.rows).tobytes()
    graph.rows.close()
    return depths, torch.stack(losses), found


def test_a_run_deepens_while_that_saves_misses_and_results_stay_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.arange(SIZE * 2 * 13).view(13, SIZE, 2)  # each batch comes again after 13
    batches = [(each, LABELS[0]) for each in ids] * 20
    with caplog.at_level(logging.INFO, "tierbed"):
        depths, losses, rows = train(tmp_path / "free", batches)
    assert (depths[0], max(depths[:40])) == (0, 8)
    assert depths[-1] > 8
    assert "looks 15 batches ahead, because caches miss" in caplog.text
    expected = train(None, batches)
    assert torch.equal(losses, expected[1])
    assert rows == expected[2]
    monkeypatch.setattr(look_ahead, "ID_BYTES", 1 << 30)
    assert max(train(tmp_path / "bounded", batches)[0]) == 8


def test_a_run_looks_less_far_ahead_if_that_misses_as_few_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ahead, "PAUSE_CHECKS", 0)
    ids = torch.arange(SIZE * 2 * 200).view(200, SIZE, 2)  # no id comes again, so every row is missed
    with caplog.at_level(logging.INFO, "tierbed"):
        depths = train(tmp_path, [(each, LABELS[0]) for each in ids], start=31)[0]
    assert (depths[0], depths[-1]) == (31, 8)
    assert "looks 15 batches ahead, because caches miss 100.0 % of the rows instead of 100.0 % with 31" in caplog.text
