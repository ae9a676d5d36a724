"""An embedding's steps over single-threaded ranks: against their parts alone and against TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from contenders import TOLERANCE, AccumulatedRows, BareExchange, Rows, TorchRec, check
from ranks import run_on_ranks, time_in_turns
from report import Figure
from traces import Batch, Shape, hash_rows, make_batches
from workload import figure, workload

from tierbed import plan
from tierbed.distributed import World

WIDE = Shape(8, 100_000, 32, 8192, alpha=1.05)  # batch: per rank
DEEP = replace(WIDE, batch=2048, dim=128)
SMALL = replace(WIDE, batch=2048)
TINY = {"batch": 16, "rows": 200, "tables": 3, "dim": 8, "repeats": 2}


def make_rank_workload(size: int, task: Callable[..., Figure]) -> Callable[..., list[Figure]]:
    """Return a workload that runs `task(shape, repeats)` on each of `size` ranks and yields rank 0's figure."""

    def measure(folder: Path, repeats: int = 64, **fields: Any) -> list[Figure]:
        return [run_on_ranks(size, task, Shape(**fields), repeats)]

    measure.__doc__, measure.__module__ = task.__doc__, __name__
    return measure


@contextmanager
def open_world(shape: Shape) -> Iterator[tuple[Rows, list[Batch], list[Batch]]]:
    """Yield sharded rows, the whole batches, and this rank's part of each."""
    with closing(World()) as world:
        batches = make_batches(replace(shape, batch=shape.batch * world.size))
        own = [batch.take_part(world.rank, world.size) for batch in batches]
        with closing(Rows(shape, own, "sharded", world=world, is_filled=False)) as rows:
            yield rows, batches, own


def count_sent_rows(shape: Shape, batch: Batch) -> Any:
    """Use `plan` to count the rows that rank i requests from rank j in a batch: int64 [ranks, ranks]."""
    ids, size = hash_rows(batch.rows.squeeze(2)), dist.get_world_size()
    planned = plan([ids], shape.dim, 0, tables=shape.tables, world_size=size).ranks
    assert planned is not None
    sent = planned.ids.copy()
    sent[range(size), range(size)] = 0  # own rows are not sent
    return sent


def compare_with_parts(shape: Shape, repeats: int) -> Figure:
    """A step over 2 ranks, relative to its parts: each rank's step alone plus a bare exchange of as many bytes."""
    with open_world(shape) as (rows, batches, own):
        alone = Rows(shape, own, "alone", is_filled=False)
        check(rows, [AccumulatedRows(shape, batches)], 0)
        exchange = BareExchange(shape, [count_sent_rows(shape, batch) for batch in batches])
        times = time_in_turns({"sharded": rows.step, "alone": alone.step, "bare exchange": exchange.step}, repeats)
    turns = zip(*times.values(), strict=True)
    ratio = median(whole / (alone + exchange) for whole, alone, exchange in turns)
    return figure("time, step / its parts", ratio, "x", bar=1.4, at_most=True, notes=str(times))


def compare_with_torchrec(shape: Shape, repeats: int) -> Figure:
    """TorchRec's row-wise EmbeddingCollection over 2 ranks, relative to ours."""
    with open_world(shape) as (rows, _, own):
        peer = TorchRec(shape, own)
        check(rows, [peer], TOLERANCE)
        times = time_in_turns({"sharded": rows.step, "TorchRec": peer.step}, repeats)
    ratio = times.ratio("TorchRec", "sharded")
    return figure("time, TorchRec / tierbed", ratio, "x", bar=2.0, notes=str(times))


def compare_group_of_one(shape: Shape, repeats: int) -> Figure:
    """A step in a process group with one rank, relative to a step without a group."""
    with open_world(shape) as (rows, _, own), closing(Rows(shape, own, "none", is_filled=False)) as none:
        times = time_in_turns({"group": rows.step, "none": none.step}, 4 * repeats)
    ratio = times.ratio("group", "none")
    return figure("time, group of one / no group", ratio, "x", bar=1.02, at_most=True, notes=str(times))


def samples(shape: Shape, repeats: int) -> Figure:
    """Samples/s of all ranks together."""
    with open_world(shape) as (rows, batches, _):
        ms = time_in_turns({"sharded": rows.step}, repeats).ms("sharded")
    count = len(batches[0].grad)
    return figure("all ranks", 1e3 * count / ms, "samples/s", notes=f"ms {ms:.2f} for {count} samples")


for name, ranks, task, shape in (
    ("parts-d32", 2, compare_with_parts, WIDE),
    ("parts-d128", 2, compare_with_parts, DEEP),
    ("torchrec", 2, compare_with_torchrec, WIDE),
    ("alone", 1, compare_group_of_one, SMALL),
    ("samples-1", 1, samples, SMALL),
    ("samples-2", 2, samples, SMALL),
    ("samples-4", 4, samples, SMALL),
):
    workload(TINY, name=name, **asdict(shape))(make_rank_workload(ranks, task))
