"""The main job: MovieLens through every store, against plain PyTorch, and as the script that users run.

Runs on the real log where `TIERBED_DATA` names a folder that holds `ml-100k`, and on the synthetic log elsewhere.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from support import scripts
from support.places import EXAMPLES
from tierbed import make_device_mem_store_options

sys.path.insert(0, str(EXAMPLES))
import movielens
from movielens_data import FIELDS, PADDING, Log, auc, read_log, split
from movielens_synthetic import synthetic_log

DATA = Path(os.environ["TIERBED_DATA"]) / "ml-100k" if "TIERBED_DATA" in os.environ else None
DIM, LR, BATCH = 16, 0.08, 512
STEPS = 15  # of an epoch where bits are compared
CACHE_MB = 0.1  # about 700 rows: fewer than the table has, and fewer than a batch


@pytest.fixture(scope="module")
def log() -> Log:
    return read_log(DATA) if DATA else synthetic_log()


class Outcome(NamedTuple):
    """losses: of all steps. aucs, rows: after each epoch."""

    losses: list[float]
    aucs: list[float]
    rows: list[int]
    metrics: dict[str, dict[str, float]]


def train(log: Log, options: Any, epochs: int, steps: int | None = None) -> Outcome:
    """steps: of each epoch, if not all."""
    torch.manual_seed(0)
    train_rows, _, test_rows = split(len(log.labels))
    test_rows = test_rows[: steps and 1000]
    model = movielens.DeepFM(DIM)
    with movielens.make_embedding(options, DIM) as embedding:
        graph = movielens.TrainGraph(embedding, model, LR)
        score = movielens.ScoreGraph(embedding, model)
        losses, aucs, rows = list[float](), list[float](), list[int]()
        for _ in range(epochs):
            rows_of_epoch = train_rows[torch.randperm(len(train_rows))][: steps and steps * BATCH]
            losses += movielens.train_epoch(graph, log, rows_of_epoch, BATCH)
            aucs.append(movielens.evaluate(score, log, test_rows))
            rows.append(embedding.size())
        return Outcome(losses, aucs, rows, embedding.metrics())


@pytest.fixture(scope="module")
def on_device(log: Log, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return train(log, movielens.STORES["device"](str(tmp_path_factory.mktemp("device")), CACHE_MB), 2, STEPS)


@pytest.mark.parametrize("store", ["host", "cached_host", "ssd"])
def test_every_store_gives_the_same_bits(store: str, log: Log, on_device: Outcome, tmp_path: Path) -> None:
    outcome = train(log, movielens.STORES[store](str(tmp_path), CACHE_MB), 2, STEPS)
    assert outcome[:3] == on_device[:3]
    assert len(outcome.losses) == 2 * STEPS
    if store in ("cached_host", "ssd"):
        evicted = sum(tier.get("evictions_dirty", 0) for tier in outcome.metrics.values())
        assert evicted > outcome.rows[-1], "the cache was to be too small for the table"


@pytest.mark.slow
def test_the_model_learns_more_than_means(log: Log) -> None:
    aucs = train(log, make_device_mem_store_options(), 2).aucs
    assert aucs[-1] >= 0.76
    assert aucs[-1] > auc_of_means(log) + 0.01


def auc_of_means(log: Log) -> float:
    """Scores without a model: how often the item, and how often the user, was rated 4 or above in training."""
    train_rows, _, test_rows = split(len(log.labels))
    labels = log.labels.numpy()
    scores = np.zeros(len(labels))
    for field in ("user", "item"):
        _, index = np.unique(log.ids[:, FIELDS.index(field)].numpy(), return_inverse=True)
        positive = np.bincount(index[train_rows], labels[train_rows], index.max() + 1)
        count = np.bincount(index[train_rows], minlength=index.max() + 1)
        scores += ((positive + 5 * labels.mean()) / (count + 5))[index]
    return auc(labels[test_rows], scores[test_rows])


def test_training_equals_plain_pytorch(log: Log, tmp_path: Path) -> None:
    """Without dropout, whose random stream a graph need not share with eager mode."""
    torch.manual_seed(0)
    used = split(len(log.labels))[0][: 30 * 256]
    ids, labels = log.ids[used], log.labels[used]
    tables = log.table_ids.expand_as(ids)
    pairs, places = torch.stack([tables.flatten(), ids.flatten()], 1).unique(dim=0, return_inverse=True)
    places = places.view(ids.shape)
    has_row = pairs[:, 1] != PADDING
    dense, plain_dense = (movielens.DeepFM(DIM, dropout=0.0) for _ in range(2))
    plain_dense.load_state_dict(dense.state_dict())
    with movielens.make_embedding(make_device_mem_store_options(persistent_path=str(tmp_path)), DIM) as embedding:
        graph = movielens.TrainGraph(embedding, dense, LR)
        rows = torch.zeros(len(pairs), DIM)
        rows[has_row] = embedding.get(pairs[has_row, 1], pairs[has_row, 0])
        plain = nn.Embedding.from_pretrained(rows, freeze=False)
        optimizers = [
            torch.optim.Adagrad(plain.parameters(), lr=LR, initial_accumulator_value=1e-5),
            torch.optim.Adam(plain_dense.parameters(), lr=1e-3),
        ]
        for part in torch.arange(len(used)).split(256):
            loss = graph(ids[part], log.table_ids, labels[part])
            present = (ids[part] != PADDING).unsqueeze(2)
            logits = plain_dense(plain(places[part]) * present, ids[part])
            expected = nn.functional.binary_cross_entropy_with_logits(logits, labels[part])
            for optimizer in optimizers:
                optimizer.zero_grad()
            expected.backward()
            for optimizer in optimizers:
                optimizer.step()
            assert abs(loss.item() - expected.item()) < 1e-5
        trained = embedding.get(pairs[has_row, 1], pairs[has_row, 0])
        torch.testing.assert_close(trained, plain.weight.detach()[has_row], rtol=0, atol=1e-5)


def run_script(*arguments: str) -> list[str]:
    data = ["--data", str(DATA)] if DATA else []
    done = scripts.run_script(Path(movielens.__file__), *data, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_script_trains_on_ssd_and_a_fresh_process_agrees() -> None:
    first, *rest, same, last = run_script("--store", "ssd", "--cache-mb", str(CACHE_MB), "--epochs", "1")
    assert ("synthetic" in first) == (DATA is None)
    assert "ratings/s" in "".join(rest)
    assert "evicted" in "".join(rest)
    assert "a fresh process scores snapshot" in same
    assert last.startswith("test AUC ")
    assert float(last.split()[-1]) >= 0.76


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_starts_over(tmp_path: Path) -> None:
    config = tmp_path / "deploy.toml"
    config.write_text(f'[movielens]\nstore = "host_mem"\npersistent_path = "{tmp_path / "store"}"\n')
    arguments = ["--config", str(config), "--out", str(tmp_path / "out"), "--epochs", "1", "--steps", "20"]
    first, second = run_script(*arguments), run_script(*arguments)
    assert second[-1] == first[-1]
