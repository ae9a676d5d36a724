"""Train DLRM, DeepFM or DCNv2 to predict clicks, with embedding tables on the tier of your choice.

    python examples/ctr.py --model dlrm --store ssd
    python examples/ctr.py --model dcnv2 --data train.txt --rows 1000000
    python examples/ctr.py --model deepfm --data ml-100k

--data is Criteo's file or a MovieLens folder; without it the examples are synthetic. It ends with a snapshot that a
new embedding and model load and score to the same AUC.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ctr_data import Clicks, read_clicks
from ctr_models import DLRM, DCNv2, DeepFM
from movielens import STORES, hit_rates, positive
from movielens_data import PADDING, auc, split
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from tierbed import (
    Graph,
    MultiTableMultiColumnEmbedding,
    TierbedError,
    make_column_options,
    make_normal_initializer,
    make_table_options,
)

MODELS: dict[str, type[DLRM | DeepFM | DCNv2]] = {"dlrm": DLRM, "deepfm": DeepFM, "dcnv2": DCNv2}
EVALUATED = 4096  # examples at once


def make_embedding(
    columns: Sequence[int], fields: int, store_options: Any, seed: int = 0
) -> MultiTableMultiColumnEmbedding:
    """A table for each field, whose rows have the parts that the model wants."""
    normal = make_normal_initializer(0, 0.01)
    return MultiTableMultiColumnEmbedding(
        "ctr",
        columns,
        torch.float32,
        torch.int64,
        tables=[make_table_options([make_column_options(normal) for _ in columns]) for _ in range(fields)],
        store_options=store_options,
        padding_idx=PADDING,
        seed=seed,
    )


class TrainGraph(Graph):
    """One call is one training step: look up, forward, backward, update the rows and the dense parameters."""

    def __init__(self, embedding: nn.Module, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.embedding = embedding
        self.model = model
        # from 0, a row's first step would be lr times the sign of its gradient, however small that is
        self.add_optimizer(torch.optim.Adagrad(embedding.parameters(), lr=lr, initial_accumulator_value=1e-5))
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))

    def build(self, ids: Tensor, dense: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(self.embedding(ids), dense)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        return loss


class ScoreGraph(Graph):
    """Without `backward()` a graph is evaluation: it changes nothing, and unseen ids keep their initial rows."""

    def __init__(self, embedding: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.model = model

    def build(self, ids: Tensor, dense: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(self.embedding(ids), dense), labels


def loader(clicks: Clicks, rows: Tensor, size: int, shuffle: bool = False) -> DataLoader[Any]:
    """Batches of (ids, dense, labels), each taken from its tensors at once."""
    data = TensorDataset(clicks.ids[rows], clicks.dense[rows], clicks.labels[rows])
    order = RandomSampler(data) if shuffle else SequentialSampler(data)
    return DataLoader(data, batch_size=None, sampler=BatchSampler(order, size, drop_last=False))


def train_epoch(graph: TrainGraph, batches: Iterable[Any], label: str) -> Tensor:
    """The losses of the steps. While one computes, the rows of the next batches are brought up."""
    return torch.stack(list(graph.run(batches, progress=label)))


def evaluate(graph: ScoreGraph, batches: Iterable[Any]) -> float:
    """The AUC over the batches."""
    scores, labels = zip(*graph.run(batches), strict=True)
    return auc(torch.cat(labels), torch.cat(scores))


def make(args: argparse.Namespace, clicks: Clicks, folder: Path) -> tuple[nn.Module, MultiTableMultiColumnEmbedding]:
    """The model for these clicks, and its embedding. The folder's snapshots stay, and its rows do not."""
    options = replace(STORES[args.store](str(folder), args.cache_mb), open="fresh")
    fields, features = clicks.ids.shape[1], clicks.dense.shape[1]
    model = MODELS[args.model](fields, args.dim, features)
    return model, make_embedding(model.columns, fields, options, args.seed)


def train(name: str, args: argparse.Namespace, clicks: Clicks, folder: Path) -> float:
    """Train, save rows and dense parameters as snapshot `name`, and return the test AUC."""
    torch.manual_seed(args.seed)
    train_rows, validation_rows, test_rows = split(len(clicks.labels))
    batches = loader(clicks, train_rows, args.batch_size, shuffle=True)
    model, embedding = make(args, clicks, folder)
    with embedding:
        graph, score = TrainGraph(embedding, model, args.lr), ScoreGraph(embedding, model)
        for epoch in range(1, args.epochs + 1):
            loss = train_epoch(graph, batches, f"epoch {epoch}").mean().item()
            value = evaluate(score, loader(clicks, validation_rows, EVALUATED))
            print(f"epoch {epoch}: loss {loss:.6f}, validation AUC {value:.4f}", flush=True)
        print(f"{embedding.size():,} rows; {hit_rates(embedding.metrics())}")
        embedding.save_snapshot(name)
        torch.save(model.state_dict(), folder / f"{name}.pt")
        return evaluate(score, loader(clicks, test_rows, EVALUATED))


def evaluate_snapshot(name: str, args: argparse.Namespace, clicks: Clicks, folder: Path) -> float:
    """The test AUC of what `train` saved, in new objects and without an optimizer."""
    model, embedding = make(args, clicks, folder)
    model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    with embedding:
        embedding.load_snapshot(name)
        return evaluate(ScoreGraph(embedding, model), loader(clicks, split(len(clicks.labels))[2], EVALUATED))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dlrm")
    parser.add_argument("--data", type=Path, help="Criteo's file, or a folder that examples/movielens.py reads")
    parser.add_argument("--rows", type=positive, default=100_000, help="examples, save of MovieLens (default: 100000)")
    parser.add_argument("--store", choices=STORES, default="device", help="where the tables live (default: device)")
    parser.add_argument("--cache-mb", type=float, default=1, help="cache of cached_host and ssd (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of the store and its snapshots (default: a temporary one)")
    parser.add_argument("--epochs", type=positive, default=2)
    parser.add_argument("--batch-size", type=positive, default=512)
    parser.add_argument("--dim", type=positive, default=16, help="width of a field's vector (default: 16)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the rows (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> None:
    clicks = read_clicks(args.data, args.rows)
    print(clicks)
    folder.mkdir(parents=True, exist_ok=True)
    name = time.strftime(f"{args.model}-%Y%m%d-%H%M%S")
    value = train(name, args, clicks, folder)
    again = evaluate_snapshot(name, args, clicks, folder)
    if again != value:
        sys.exit(f"error: test AUC {value!r} after training, but {again!r} from snapshot {name}")
    print(f"snapshot {name} scores the same")
    print(f"test AUC {value!r}")


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(prefix="ctr-") as temporary:
        try:
            run(args, args.out or Path(temporary))
        except (OSError, ValueError, TierbedError) as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
