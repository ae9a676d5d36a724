"""Forked and spawned workers of a `DataLoader` beside an open store: none hangs, none touches it, no row changes."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from support.embeddings import contents, make, train
from support.forked import in_process
from support.small_snapshots import files
from support.stores import options
from tierbed import MultiTableEmbedding

BATCH, COUNT = 64, 12


class Ids(Dataset[Tensor]):
    """Ids in a tail; a forked worker has the embedding in its memory, as a dataset of users may hold it."""

    def __init__(self, embedding: MultiTableEmbedding | None) -> None:
        self.embedding = embedding

    def __len__(self) -> int:
        return BATCH * COUNT

    def __getitem__(self, index: int) -> Tensor:
        return (torch.rand((), generator=torch.Generator().manual_seed(index)) ** 3 * 2000).to(torch.int64)


def loaded(embedding: MultiTableEmbedding, start: str) -> list[Tensor]:
    """What workers sent, which end in good order."""
    kept, workers = (embedding, 2) if start == "fork" else (None, 1)  # an embedding cannot be pickled
    iterator: Any = iter(DataLoader(Ids(kept), BATCH, num_workers=workers, multiprocessing_context=start))
    batches = list(iterator)
    for worker in iterator._workers:
        worker.join()
        assert worker.exitcode == 0
    return batches


def load_beside_training(path: Path, store: str, start: str, epochs: int) -> None:
    """Workers come and go while a thread trains, announces steps, and RocksDB works in the background."""
    embedding = make(options(store, path), "adam", tables=1)
    own = [torch.arange(step, step + 500) * 3 for step in range(40)]
    train(embedding, own[0])

    def work() -> None:
        for here, coming in zip(own[1:], [*own[2:], own[0]], strict=True):
            embedding.prefetch(coming)
            train(embedding, here)

    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(epochs):
        batches = loaded(embedding, start)
    worker.join()
    embedding.table_handle().table.flush()
    before = files(path)
    loaded(embedding, start)
    assert files(path) == before
    for ids in batches:
        train(embedding, ids)
    rows = contents(embedding).tobytes()
    embedding.close()
    with make(options("device"), "adam", tables=1) as plain:
        for ids in [*own, *batches]:
            train(plain, ids)
        assert contents(plain).tobytes() == rows
    with make(options(store, path, open="error"), "adam", tables=1) as again:
        assert contents(again).tobytes() == rows


@pytest.mark.parametrize("store", ["host", "ssd_host"])
def test_forked_workers_leave_the_store_alone(tmp_path: Path, store: str) -> None:
    in_process(load_beside_training, tmp_path, store, "fork", 4)


@pytest.mark.slow
def test_spawned_workers_leave_the_store_alone(tmp_path: Path) -> None:
    in_process(load_beside_training, tmp_path, "ssd_host", "spawn", 1)
