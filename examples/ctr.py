"""Train DLRM, DeepFM or DCNv2 to predict clicks, with embedding tables on the tier of your choice.

    python examples/ctr.py --model dlrm --store ssd
    python examples/ctr.py --model dcnv2 --data train.txt --rows 1000000
    python examples/ctr.py --model deepfm --data ml-100k
    torchrun --nproc-per-node 2 examples/ctr.py --model dlrm --out store --wire 16

--data is Criteo's file or a MovieLens folder; without it the examples are synthetic. At the end it saves a snapshot,
loads the snapshot into a new embedding and model, and checks that the AUC is the same. With torchrun, ranks divide the
rows and each batch.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ctr_data import Clicks, read_clicks
from ctr_models import DLRM, DCNv2, DeepFM
from movielens import DTYPES, STORES, hit_rates, positive
from movielens_data import PADDING, auc, split
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

from tierbed import (
    Graph,
    MultiTableMultiColumnEmbedding,
    TierbedError,
    World,
    make_column_options,
    make_normal_initializer,
    make_table_options,
)

MODELS: dict[str, type[DLRM | DeepFM | DCNv2]] = {"dlrm": DLRM, "deepfm": DeepFM, "dcnv2": DCNv2}
WIRES = {32: (torch.float32, torch.float32), 16: (torch.float16, torch.bfloat16)}  # dtypes of sent rows and gradients
EVALUATED = 4096  # batch size of evaluation


def make_embedding(
    columns: Sequence[int],
    fields: int,
    store_options: Any,
    seed: int = 0,
    world: World | None = None,
    dtype: torch.dtype = torch.float32,
) -> MultiTableMultiColumnEmbedding:
    """Make a table for each field. columns: the widths of a row's parts, as the model defines them."""
    normal = make_normal_initializer(0, 0.01)
    return MultiTableMultiColumnEmbedding(
        "ctr",
        columns,
        dtype,
        torch.int64,
        tables=[make_table_options([make_column_options(normal) for _ in columns]) for _ in range(fields)],
        store_options=store_options,
        padding_idx=PADDING,
        seed=seed,
        world=world,
    )


class TrainGraph(Graph):
    """A call runs one training step: lookup, forward, backward, and the update of rows and dense parameters."""

    def __init__(self, embedding: nn.Module, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.embedding = embedding
        self.model = model
        # with an initial value of 0, a row's first step would have size lr, however small the gradient
        self.add_optimizer(torch.optim.Adagrad(embedding.parameters(), lr=lr, initial_accumulator_value=1e-5))
        self.add_optimizer(torch.optim.Adam(model.parameters(), lr=1e-3))

    def build(self, ids: Tensor, dense: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(self.embedding(ids), dense)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        return loss


class ScoreGraph(Graph):
    """A graph without `backward()` only evaluates. It changes nothing, and unseen ids get their initial rows."""

    def __init__(self, embedding: nn.Module, model: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.model = model

    def build(self, ids: Tensor, dense: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(self.embedding(ids), dense), labels


class Parts(BatchSampler):
    """Samples one rank's part of each batch. All ranks draw the same batches, from torch's generator."""

    def __init__(self, order: Any, size: int, world: World | None, training: bool) -> None:
        self.rank, self.ranks = (0, 1) if world is None else (world.rank, world.size)
        super().__init__(order, size, drop_last=training and self.ranks > 1)  # an empty part's mean loss is undefined

    def __iter__(self) -> Iterator[list[int]]:
        return (batch[self.rank :: self.ranks] for batch in super().__iter__())


def loader(
    clicks: Clicks, rows: Tensor, size: int, shuffle: bool = False, world: World | None = None
) -> DataLoader[Any]:
    """Return batches of (ids, dense, labels). Each batch is one indexing operation, not a list of samples."""
    data = TensorDataset(clicks.ids[rows], clicks.dense[rows], clicks.labels[rows])
    order = RandomSampler(data) if shuffle else SequentialSampler(data)
    return DataLoader(data, batch_size=None, sampler=Parts(order, size, world, shuffle))


def train_epoch(graph: TrainGraph, batches: Iterable[Any], label: str) -> Tensor:
    """Train one epoch, and return the steps' losses. While a step computes, the next batches' rows are fetched."""
    return torch.stack(list(graph.run(batches, progress=label)))


def evaluate(graph: ScoreGraph, batches: Iterable[Any], world: World) -> float:
    """Return the AUC over all ranks' batches."""
    scores, labels = zip(*graph.run(batches), strict=True)
    return auc(world.gather(torch.cat(labels)), world.gather(torch.cat(scores)))


def make(
    args: argparse.Namespace, clicks: Clicks, folder: Path, world: World
) -> tuple[nn.Module, MultiTableMultiColumnEmbedding]:
    """Make a model and an embedding for these clicks. Deletes the folder's rows, but not its snapshots."""
    options = replace(STORES[args.store](str(folder), args.cache_mb), open="fresh")
    fields, features = clicks.ids.shape[1], clicks.dense.shape[1]
    model = MODELS[args.model](fields, args.dim, features)
    return model, make_embedding(model.columns, fields, options, args.seed, world, DTYPES[args.dtype])


def train(name: str, args: argparse.Namespace, clicks: Clicks, folder: Path, world: World) -> float:
    """Train, save rows and dense parameters as snapshot `name`, and return the test AUC."""
    torch.manual_seed(args.seed)
    train_rows, validation_rows, test_rows = split(len(clicks.labels))
    batches = loader(clicks, train_rows, args.batch_size, shuffle=True, world=world)
    model, embedding = make(args, clicks, folder, world)
    with embedding:
        graph, score = TrainGraph(embedding, model, args.lr), ScoreGraph(embedding, model)
        for epoch in range(1, args.epochs + 1):
            loss = world.gather(train_epoch(graph, batches, f"epoch {epoch}" if world.rank == 0 else "")).mean().item()
            value = evaluate(score, loader(clicks, validation_rows, EVALUATED, world=world), world)
            say(world, f"epoch {epoch}: loss {loss:.6f}, validation AUC {value:.4f}")
        say(world, f"{embedding.size():,} rows; {hit_rates(embedding.metrics())}")
        embedding.save_snapshot(name)
        if world.rank == 0:
            torch.save(model.state_dict(), folder / f"{name}.pt")
        return evaluate(score, loader(clicks, test_rows, EVALUATED, world=world), world)


def evaluate_snapshot(name: str, args: argparse.Namespace, clicks: Clicks, folder: Path, world: World) -> float:
    """Load the rows and dense parameters that `train` saved, without an optimizer. Return the test AUC."""
    model, embedding = make(args, clicks, folder, world)
    model.load_state_dict(torch.load(folder / f"{name}.pt", weights_only=True))
    with embedding:
        embedding.load_snapshot(name)
        rows = split(len(clicks.labels))[2]
        return evaluate(ScoreGraph(embedding, model), loader(clicks, rows, EVALUATED, world=world), world)


def say(world: World, text: str) -> None:
    """Print on rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="dlrm")
    parser.add_argument("--data", type=Path, help="Criteo's file, or a folder that examples/movielens.py reads")
    parser.add_argument("--rows", type=positive, default=100_000, help="examples; MovieLens uses all (default: 100000)")
    parser.add_argument("--store", choices=STORES, default="device", help="where the tables live (default: device)")
    parser.add_argument("--cache-mb", type=float, default=1, help="cache of cached_host and ssd (default: 1)")
    parser.add_argument("--out", type=Path, help="folder of the store and its snapshots (default: a temporary one)")
    parser.add_argument("--epochs", type=positive, default=2)
    parser.add_argument("--batch-size", type=positive, default=512)
    parser.add_argument("--dim", type=positive, default=16, help="width of a field's vector (default: 16)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the rows (default: float32)")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of the rows (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--wire", type=int, choices=WIRES, default=32, help="bits per exchanged number (default: 32)")
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path, world: World) -> None:
    clicks = read_clicks(args.data, args.rows)
    say(world, str(clicks))
    folder.mkdir(parents=True, exist_ok=True)
    started = world.gather(torch.tensor([int(time.time())]))[0].item()  # by the clock of rank 0
    name = time.strftime(f"{args.model}-%Y%m%d-%H%M%S", time.localtime(started))
    value = train(name, args, clicks, folder, world)
    reloaded = evaluate_snapshot(name, args, clicks, folder, world)
    if reloaded != value:
        sys.exit(f"error: test AUC {value!r} after training, but {reloaded!r} from snapshot {name}")
    say(world, f"snapshot {name} scores the same")
    say(world, f"test AUC {value!r}")


def main() -> None:
    args = parse()
    wire = WIRES[args.wire]
    world = World.from_env(rows=wire[0], grads=wire[1])
    if world.size > 1 and args.out is None:
        sys.exit("error: --out: give a folder that all ranks can access")
    with tempfile.TemporaryDirectory(prefix="ctr-") as temporary:
        try:
            run(args, args.out or Path(temporary), world)
        except (OSError, ValueError, TierbedError) as error:
            sys.exit(f"error: {error}")
    world.close()


if __name__ == "__main__":
    main()
