"""A `DataLoader` beside an open store: what its worker processes run, and the training that they feed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from support.embeddings import contents, make, train
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


def loader_of(embedding: MultiTableEmbedding, start: str) -> DataLoader[Tensor]:
    kept, workers = (embedding, 2) if start == "fork" else (None, 1)  # an embedding cannot be pickled
    return DataLoader(Ids(kept), BATCH, num_workers=workers, multiprocessing_context=start)


def batches_of(loader: DataLoader[Tensor]) -> tuple[list[Tensor], list[int]]:
    """What its workers sent, and their exit codes."""
    iterator: Any = iter(loader)
    batches = list(iterator)
    for worker in iterator._workers:
        worker.join()
    return batches, [worker.exitcode for worker in iterator._workers]


def load_beside_training(path: Path, store: str, start: str, epochs: int) -> dict[str, Any]:
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
    codes = []
    for _ in range(epochs):
        batches, ended = batches_of(loader_of(embedding, start))
        codes += ended
    worker.join()
    embedding.table_handle().table.flush()
    before = files(path)
    codes += batches_of(loader_of(embedding, start))[1]
    untouched = files(path) == before
    for ids in batches:
        train(embedding, ids)
    rows = contents(embedding).tobytes()
    embedding.close()
    with make(options("device"), "adam", tables=1) as plain:
        for ids in [*own, *batches]:
            train(plain, ids)
        same = contents(plain).tobytes() == rows
    with make(options(store, path, open="error"), "adam", tables=1) as again:
        return {"codes": codes, "untouched": untouched, "same": same, "again": contents(again).tobytes() == rows}
