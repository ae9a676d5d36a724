"""Predict which films a user likes, with embedding tables on the tier that you choose.

    python examples/movielens.py --data ml-100k --store ssd
    python examples/movielens.py --data ml-100k --config examples/deploy.toml

Without --data, the script trains on a synthetic click log. At the end it saves a snapshot, loads it in a new process,
and checks that the AUC is the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from movielens_data import FIELDS, GENRE, PADDING, Log, auc, read_log, split
from movielens_synthetic import synthetic_log
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn

from tierbed import (
    Graph,
    MultiTableEmbedding,
    TierbedError,
    load_store_options,
    make_cached_host_mem_store_options,
    make_cached_ssd_store_options,
    make_device_mem_store_options,
    make_host_mem_store_options,
    make_normal_initializer,
    make_table_options,
)


def make_embedding(
    store_options: Any, dim: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> MultiTableEmbedding:
    """Make one table per field. Tables start empty and grow as keys arrive. Store options say where rows live."""
    return MultiTableEmbedding(
        "movielens",
        dim,
        dtype,
        torch.int64,
        tables=[make_table_options(make_normal_initializer(0, 0.01)) for _ in FIELDS],
        store_options=store_options,
        padding_idx=PADDING,
        seed=seed,
    )


class TrainGraph(Graph):
    """A call runs one training step: lookup, forward, backward, and the update of rows and dense parameters."""

    def __init__(self, embedding: MultiTableEmbedding, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.embedding = embedding
        self.model = model
        # with an initial value of 0, a row's first step would have size lr, however small the gradient
        self.add_optimizer(torch.optim.Adagrad(embedding.parameters(), lr=lr, initial_accumulator_value=1e-5))
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))

    def build(self, ids: torch.Tensor, table_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(self.embedding(ids, table_ids), ids)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        return loss


class ScoreGraph(Graph):
    """A graph without `backward()` only evaluates. It changes nothing, and unseen keys get their initial rows."""

    def __init__(self, embedding: MultiTableEmbedding, model: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.model = model

    def build(self, ids: torch.Tensor, table_ids: torch.Tensor) -> torch.Tensor:
        return self.model(self.embedding(ids, table_ids), ids)


class DeepFM(nn.Module):
    """Maps rows [batch, width, dim] to logits [batch]. A row's first column is a bias, the others are factors."""

    def __init__(self, dim: int, hidden: int = 64, dropout: float = 0.3) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(()))
        self.dropout = nn.Dropout(dropout)
        self.deep = nn.Sequential(
            nn.Linear(len(FIELDS) * (dim - 1), hidden), nn.SiLU(), nn.Dropout(dropout), nn.Linear(hidden, 1)
        )

    def forward(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        count = (ids[:, GENRE:] != PADDING).sum(1, keepdim=True).clamp(min=1)
        genre = rows[:, GENRE:].sum(1) / count  # mean of a film's genres; padding rows are zeros
        fields = torch.cat([rows[:, :GENRE], genre.unsqueeze(1)], 1)
        factors = self.dropout(fields[:, :, 1:])
        pairs = (factors.sum(1).square() - factors.square().sum(1)).sum(1) / 2  # dot products of all pairs of fields
        return self.bias + fields[:, :, 0].sum(1) + pairs + self.deep(factors.flatten(1)).squeeze(1)


STORES: dict[str, Callable[[str, float], Any]] = {
    "device": lambda path, cache_mb: make_device_mem_store_options(persistent_path=path),
    "host": lambda path, cache_mb: make_host_mem_store_options(persistent_path=path),
    "cached_host": lambda path, cache_mb: make_cached_host_mem_store_options(cache_mb, persistent_path=path),
    "ssd": lambda path, cache_mb: make_cached_ssd_store_options(cache_mb, persistent_path=path),
}


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def batches(log: Log, rows: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for part in rows.split(size):
        yield log.ids[part], log.table_ids, log.labels[part]


def train_epoch(graph: TrainGraph, log: Log, rows: torch.Tensor, size: int) -> Iterator[float]:
    """Train on `rows` in order, and yield each step's loss."""
    graph.model.train()
    for batch in batches(log, rows, size):
        yield graph(*batch).item()


def evaluate(graph: ScoreGraph, log: Log, rows: torch.Tensor, size: int = 4096) -> float:
    """Return the AUC over `rows`."""
    graph.model.eval()
    scores = [graph(ids, table_ids) for ids, table_ids, _ in batches(log, rows, size)]
    return auc(log.labels[rows], torch.cat(scores))


def train(name: str, args: argparse.Namespace, log: Log, options: Any, folder: Path) -> float:
    """Train, save rows and dense parameters as snapshot `name`, and return the test AUC."""
    torch.manual_seed(args.seed)
    train_rows, validation_rows, test_rows = split(len(log.labels))
    model = DeepFM(args.dim)
    with make_embedding(options, args.dim, args.seed, DTYPES[args.dtype]) as embedding:
        graph, score = TrainGraph(embedding, model, args.lr), ScoreGraph(embedding, model)
        for epoch in range(1, args.epochs + 1):
            rows = train_rows[torch.randperm(len(train_rows))][: args.steps and args.steps * args.batch_size]
            began, loss = time.perf_counter(), 0.0
            with progress_bar() as progress:
                task = progress.add_task(f"epoch {epoch}", total=len(rows), loss=0.0, speed=0.0)
                for step, loss in enumerate(train_epoch(graph, log, rows, args.batch_size), 1):
                    done = min(step * args.batch_size, len(rows))
                    progress.update(task, completed=done, loss=loss, speed=done / (time.perf_counter() - began))
            print(f"         validation AUC {evaluate(score, log, validation_rows):.4f}")
        print(f"{embedding.size():,} rows; {hit_rates(embedding.metrics())}")
        embedding.save_snapshot(name)
        torch.save(model.state_dict(), folder / f"{name}.pt")
        return evaluate(score, log, test_rows)


def evaluate_snapshot(name: str, args: argparse.Namespace, log: Log, options: Any, folder: Path) -> float:
    """Load rows and dense parameters from disk, as a serving process does, and return the test AUC."""
    model = DeepFM(args.dim)
    model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    with make_embedding(options, args.dim, args.seed, DTYPES[args.dtype]) as embedding:
        embedding.load_snapshot(name)
        return evaluate(ScoreGraph(embedding, model), log, split(len(log.labels))[2])


def progress_bar() -> Progress:
    numbers = TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} ratings/s")
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), numbers, TimeElapsedColumn())


def hit_rates(metrics: dict[str, dict[str, float]]) -> str:
    """Format each tier's hit rate and evictions."""
    parts = []
    for tier, counts in metrics.items():
        probes = counts.get("hits", 0) + counts.get("misses", 0)
        evicted = counts.get("evictions_clean", 0) + counts.get("evictions_dirty", 0)
        if probes:
            parts.append(
                f"{tier} {counts['hits'] / probes:.1%} of {probes:,} hit" + f", {evicted:,} evicted" * bool(evicted)
            )
    return "; ".join(parts)


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with u.data, ratings.dat or one *.inter file")
    store = parser.add_mutually_exclusive_group()
    store.add_argument("--store", choices=STORES, default="device", help="where the tables live (default: device)")
    store.add_argument("--config", type=Path, help='TOML file with the store options in its section "movielens"')
    parser.add_argument("--cache-mb", type=float, default=0.25, help="cache of cached_host and ssd (default: 0.25)")
    parser.add_argument("--out", type=Path, help="folder of the store and its snapshots (default: a temporary one)")
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--steps", type=positive, help="stop each epoch after this many steps")
    parser.add_argument("--batch-size", type=positive, default=512)
    parser.add_argument("--dim", type=int, default=16, help="columns of a row: a bias and dim - 1 factors")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the rows (default: float32)")
    parser.add_argument("--lr", type=float, default=0.08, help="learning rate of the rows (default: 0.08)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate", metavar="SNAPSHOT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dim < 2:
        parser.error(f"argument --dim: {args.dim} leaves no column besides the bias")
    return args


def run(args: argparse.Namespace, log: Log, folder: Path) -> None:
    if args.config:
        options = load_store_options(args.config, "movielens")
        folder = args.out or Path(options.persistent_path or folder)
    else:
        options = STORES[args.store](str(folder), args.cache_mb)
    folder.mkdir(parents=True, exist_ok=True)
    if args.evaluate:
        print(f"test AUC {evaluate_snapshot(args.evaluate, args, log, options, folder)!r}")
        return
    options = replace(options, open="fresh")  # start over instead of resuming from the folder's rows
    print(log)
    name = time.strftime("run-%Y%m%d-%H%M%S")
    value = train(name, args, log, options, folder)
    command = [sys.executable, __file__, *sys.argv[1:], "--out", str(folder), "--evaluate", name]
    fresh = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1]
    if fresh != f"test AUC {value!r}":
        sys.exit(f"error: this process has test AUC {value!r}, but a fresh one prints {fresh!r} for the snapshot")
    print(f"a fresh process scores snapshot {name} the same")
    print(f"test AUC {value!r}")


def main() -> None:
    args = parse()
    try:
        log = read_log(args.data) if args.data else synthetic_log()
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    with tempfile.TemporaryDirectory(prefix="movielens-") as temporary:
        try:
            run(args, log, args.out or Path(temporary))
        except (OSError, TierbedError) as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
