"""Train MLPerf's DCNv2 on multi-hot clicks in KeyedJaggedTensors, with tables on the tier of your choice.

    python examples/multihot.py --store ssd
    python examples/multihot.py --store ssd --loop
    python examples/multihot.py --dim 128 --rows 40000000 --store ssd --cache-mb 8192

The 26 features have as many ids per sample as MLPerf's, 214 in total. MLPerf's tables are cut to --rows. All widths
follow from --dim; with 128 they are MLPerf's. An EmbeddingBagCollection holds the tables in one embedding, since their
dims are equal. By default, a Graph trains. With --loop, a plain PyTorch loop trains and announces batches itself.
The results are bit-identical. Clicks are random, drawn with --seed from hidden effects of the ids.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from ctr_models import Cross, mlp
from movielens import STORES, hit_rates, positive
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from tierbed import EagerOptimizer, Graph, TierbedError
from tierbed.jagged import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

DENSE = 13
HOTS = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1]  # ids per sample
ROWS = [40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956, 405_282, 10, 2_209,
        11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36]  # fmt: skip
KEYS = [f"feature-{number}" for number in range(len(HOTS))]
AHEAD = 8  # how many batches ahead the plain loop announces


class Batch(NamedTuple):
    features: KeyedJaggedTensor
    dense: Tensor  # float32 [batch, DENSE]
    labels: Tensor  # float32 [batch], 0 or 1


class Clicks:
    """Random clicks that a model can learn.

    A feature's ids follow a power law over its table. The click probability is the logistic function of a sum: the
    weighted dense features, and an effect for each id.
    """

    def __init__(self, max_rows: int, seed: int) -> None:
        self.rows = [min(rows, max_rows) for rows in ROWS]
        self.generator = torch.Generator().manual_seed(seed)
        # scaled so that features have equal weight, whatever their number of ids
        self.effects = [
            torch.randn(n, generator=self.generator) * hot**-0.5 for n, hot in zip(self.rows, HOTS, strict=True)
        ]
        self.weights = torch.randn(DENSE, generator=self.generator)

    def batches(self, count: int, size: int) -> Iterator[Batch]:
        lengths = torch.tensor(HOTS).repeat_interleave(size)
        for _ in range(count):
            dense = torch.randn(size, DENSE, generator=self.generator)
            logits, values = 0.3 * dense @ self.weights, []
            for rows, hot, effects in zip(self.rows, HOTS, self.effects, strict=True):
                draws = torch.rand(size, hot, generator=self.generator, dtype=torch.float64)
                ids = (rows**draws).long() - 1  # ids from 0 to rows - 2; low ids are more frequent
                logits += 0.3 * effects[ids].sum(1)
                values.append(ids.flatten())
            clicked = torch.rand(size, generator=self.generator) < logits.sigmoid()
            yield Batch(KeyedJaggedTensor(KEYS, torch.cat(values), lengths=lengths), dense, clicked.float())


def make_collection(rows: list[int], dim: int, store_options: Any, seed: int = 0) -> EmbeddingBagCollection:
    """Make a table per feature, with sum pooling. New rows are uniform in +-1/sqrt(rows)."""
    tables = [
        EmbeddingBagConfig(n, dim, f"table-{key}", feature_names=[key]) for n, key in zip(rows, KEYS, strict=True)
    ]
    return EmbeddingBagCollection(tables, store_options, "multihot", seed=seed)


class DCNv2(nn.Module):
    """MLPerf's model: a bottom MLP for the dense features, three low-rank cross layers over its output and all pooled
    rows, and a top MLP that returns logits [batch]."""

    def __init__(self, ebc: EmbeddingBagCollection, dim: int) -> None:
        super().__init__()
        self.ebc = ebc
        width = (1 + len(HOTS)) * dim
        self.bottom = mlp(DENSE, 4 * dim, 2 * dim, dim)
        self.cross = nn.ModuleList(Cross(width, rank=4 * dim) for _ in range(3))
        self.top = mlp(width, 8 * dim, 8 * dim, 4 * dim, 2 * dim, last=True)

    def forward(self, features: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        x = x0 = torch.cat([self.bottom(dense), self.ebc(features).values()], 1)
        for layer in self.cross:
            x = layer(x0, x)
        return self.top(x).squeeze(1)


def make_optimizer(model: DCNv2, lr: float) -> torch.optim.Optimizer:
    """Make Adagrad for rows and dense parameters, as in MLPerf."""
    return torch.optim.Adagrad(model.parameters(), lr)


class TrainGraph(Graph):
    """A call runs one training step. `run` also prefetches the rows of later batches."""

    def __init__(self, model: DCNv2, lr: float) -> None:
        super().__init__()
        self.model = model
        self.add_optimizer(make_optimizer(model, lr))

    def build(self, features: KeyedJaggedTensor, dense: Tensor, labels: Tensor) -> Tensor:
        loss = binary_cross_entropy_with_logits(self.model(features, dense), labels)
        loss.backward()
        return loss


def train_by_loop(model: DCNv2, lr: float, batches: Iterable[Batch]) -> Iterator[Tensor]:
    """Train in a plain PyTorch loop, with the same steps as `TrainGraph`."""
    optimizer = EagerOptimizer(make_optimizer(model, lr), model)
    for features, dense, labels in announced(batches, model.ebc):
        loss = binary_cross_entropy_with_logits(model(features, dense), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def announced(batches: Iterable[Batch], ebc: EmbeddingBagCollection) -> Iterator[Batch]:
    """Yield the batches, each announced `AHEAD` steps before it is due."""
    waiting = deque[Batch]()
    for batch in batches:
        ebc.prefetch(batch.features)
        waiting.append(batch)
        if len(waiting) > AHEAD:
            yield waiting.popleft()
    yield from waiting


def train(model: DCNv2, lr: float, batches: Iterable[Batch], loop: bool) -> Iterator[Tensor]:
    """Train, and yield each step's loss."""
    return train_by_loop(model, lr, batches) if loop else TrainGraph(model, lr).run(batches)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=STORES, default="device", help="where the tables live (default: device)")
    parser.add_argument("--loop", action="store_true", help="train in a plain loop instead of a graph")
    parser.add_argument("--cache-mb", type=float, default=8, help="cache of cached_host and ssd (default: 8)")
    parser.add_argument("--rows", type=positive, default=20_000, help="maximum rows of a table (default: 20000)")
    parser.add_argument("--dim", type=positive, default=16, help="width of a row (default: 16)")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--batch-size", type=positive, default=512)
    parser.add_argument("--lr", type=float, default=0.005, help="learning rate (default: 0.005, as MLPerf's)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run(args: argparse.Namespace, folder: str) -> None:
    torch.manual_seed(args.seed)
    clicks = Clicks(args.rows, args.seed)
    options = replace(STORES[args.store](folder, args.cache_mb), open="fresh")
    with make_collection(clicks.rows, args.dim, options, args.seed) as ebc:
        model = DCNv2(ebc, args.dim)
        print(f"{len(HOTS)} tables of {sum(clicks.rows):,} rows, {sum(HOTS)} ids per sample")
        began, losses = time.perf_counter(), list[float]()
        for step, loss in enumerate(train(model, args.lr, clicks.batches(args.steps, args.batch_size), args.loop), 1):
            losses.append(loss.item())
            if step % 50 == 0 or step == args.steps:
                speed = step * args.batch_size / (time.perf_counter() - began)
                print(f"step {step}: loss {sum(losses) / len(losses)!r}, {speed:,.0f} samples/s", flush=True)
                losses.clear()
        for embedding in ebc.embeddings.values():
            print(f"{embedding.name}: {embedding.size():,} rows; {hit_rates(embedding.metrics())}")


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="multihot-") as temporary:
        try:
            run(args, temporary)
        except (OSError, TierbedError) as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
