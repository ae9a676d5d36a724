"""An embedding's steps over single-threaded ranks: against their parts alone and against TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
from contenders import TOLERANCE, Accumulated, BareExchange, Rows, TorchRec, check
from ranks import in_turns, on_ranks
from report import Figure
from traces import Batch, Shape, hashed, make_batches
from workload import figure, workload

from tierbed import plan
from tierbed.distributed import World

WIDE = Shape(8, 100_000, 32, 8192, alpha=1.05)  # batch: per rank
DEEP = replace(WIDE, batch=2048, dim=128)
SMALL = replace(WIDE, batch=2048)
TINY = {"batch": 16, "rows": 200, "tables": 3, "dim": 8, "repeats": 2}


def over_ranks(size: int, task: Callable[..., Figure]) -> Callable[..., list[Figure]]:
    """Return a workload that runs `task(shape, repeats)` on each of `size` ranks and yields rank 0's figure."""

    def measure(folder: Path, repeats: int = 64, **fields: Any) -> list[Figure]:
        return [on_ranks(size, task, Shape(**fields), repeats)]

    measure.__doc__, measure.__module__ = task.__doc__, __name__
    return measure


@contextmanager
def over_a_world(shape: Shape) -> Iterator[tuple[Rows, list[Batch], list[Batch]]]:
    """Yield sharded rows, the whole batches, and this rank's part of each."""
    with closing(World()) as world:
        batches = make_batches(replace(shape, batch=shape.batch * world.size))
        own = [batch.part(world.rank, world.size) for batch in batches]
        with closing(Rows(shape, own, "sharded", world=world, filled=False)) as rows:
            yield rows, batches, own


def sent_rows(shape: Shape, batch: Batch) -> Any:
    """Use `plan` to count the rows that rank i requests from rank j in a batch: int64 [ranks, ranks]."""
    ids, size = hashed(batch.rows.squeeze(2)), dist.get_world_size()
    planned = plan([ids], shape.dim, 0, tables=shape.tables, world_size=size).ranks
    assert planned is not None
    sent = planned.ids.copy()
    sent[range(size), range(size)] = 0  # own rows are not sent
    return sent


def against_parts(shape: Shape, repeats: int) -> Figure:
    """A step over 2 ranks, relative to its parts: each rank's step alone plus a bare exchange of as many bytes."""
    with over_a_world(shape) as (rows, batches, own):
        alone = Rows(shape, own, "alone", filled=False)
        check(rows, [Accumulated(shape, batches)], 0)
        exchange = BareExchange(shape, [sent_rows(shape, batch) for batch in batches])
        times = in_turns({"sharded": rows.step, "alone": alone.step, "bare exchange": exchange.step}, repeats)
    turns = zip(*times.values(), strict=True)
    ratio = median(whole / (alone + exchange) for whole, alone, exchange in turns)
    return figure("time, step / its parts", ratio, "x", bar=1.4, at_most=True, notes=str(times))


def against_torchrec(shape: Shape, repeats: int) -> Figure:
    """TorchRec's row-wise EmbeddingCollection over 2 ranks, relative to ours."""
    with over_a_world(shape) as (rows, _, own):
        peer = TorchRec(shape, own)
        check(rows, [peer], TOLERANCE)
        times = in_turns({"sharded": rows.step, "TorchRec": peer.step}, repeats)
    ratio = times.ratio("TorchRec", "sharded")
    return figure("time, TorchRec / tierbed", ratio, "x", bar=2.0, notes=str(times))


def group_of_one(shape: Shape, repeats: int) -> Figure:
    """A step in a process group with one rank, relative to a step without a group."""
    with over_a_world(shape) as (rows, _, own), closing(Rows(shape, own, "none", filled=False)) as none:
        times = in_turns({"group": rows.step, "none": none.step}, 4 * repeats)
    ratio = times.ratio("group", "none")
    return figure("time, group of one / no group", ratio, "x", bar=1.02, at_most=True, notes=str(times))


def samples(shape: Shape, repeats: int) -> Figure:
    """Samples/s of all ranks together."""
    with over_a_world(shape) as (rows, batches, _):
        ms = in_turns({"sharded": rows.step}, repeats).ms("sharded")
    count = len(batches[0].grad)
    return figure("all ranks", 1e3 * count / ms, "samples/s", notes=f"ms {ms:.2f} for {count} samples")


for name, ranks, task, shape in (
    ("parts-d32", 2, against_parts, WIDE),
    ("parts-d128", 2, against_parts, DEEP),
    ("torchrec", 2, against_torchrec, WIDE),
    ("alone", 1, group_of_one, SMALL),
    ("samples-1", 1, samples, SMALL),
    ("samples-2", 2, samples, SMALL),
    ("samples-4", 4, samples, SMALL),
):
    workload(TINY, name=name, **asdict(shape))(over_ranks(ranks, task))
