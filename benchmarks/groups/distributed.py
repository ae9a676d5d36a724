"""Steps of an embedding over ranks, processes of one thread each: against their parts alone, and against TorchRec."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
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

WIDE = Shape(8, 100_000, 32, 8192, alpha=1.05)  # batch: of each rank
DEEP = replace(WIDE, batch=2048, dim=128)
SMALL = replace(WIDE, batch=2048)
TINY = {"batch": 16, "rows": 200, "tables": 3, "dim": 8, "repeats": 2}


def over_ranks(size: int, task: Callable[..., list[Figure]]) -> Callable[..., list[Figure]]:
    """A workload whose `task(shape, repeats, folder)` each of `size` ranks runs; the figures are those of rank 0."""

    def measure(folder: Path, repeats: int = 64, **fields: Any) -> list[Figure]:
        figures: list[Figure] = on_ranks(size, task, Shape(**fields), repeats, folder)
        return figures

    measure.__doc__, measure.__module__, measure.__name__ = task.__doc__, __name__, task.__name__
    return measure


def drawn(shape: Shape) -> tuple[list[Batch], list[Batch]]:
    """Batches of all ranks together, and this rank's part of each."""
    size = dist.get_world_size()
    batches = make_batches(replace(shape, batch=shape.batch * size))
    return batches, [batch.part(dist.get_rank(), size) for batch in batches]


def planned(shape: Shape, batch: Batch) -> Any:
    """What `plan` says of the rows and bytes that ranks send each other for a batch of all ranks."""
    ids, size = hashed(batch.rows.squeeze(2)), dist.get_world_size()
    found = plan([ids], shape.dim, 0, tables=shape.tables, world_size=size).ranks
    assert found is not None
    return found


def against_parts(shape: Shape, repeats: int, folder: Path, bar: float = 1.4) -> list[Figure]:
    """A step over 2 ranks, of its parts' time: a step of each rank alone, and a bare exchange of the same bytes."""
    with closing(World()) as world:
        batches, own = drawn(shape)
        sharded = Rows(shape, own, "sharded", world=world, filled=False)
        alone = Rows(shape, own, "alone", filled=False)
        check(sharded, [Accumulated(shape, batches)], 0)
        sent = [planned(shape, batch).ids.copy() for batch in batches]
        for matrix in sent:
            matrix[range(world.size), range(world.size)] = 0  # a rank's own
        sides = {"sharded": sharded.step, "alone": alone.step, "bare exchange": BareExchange(shape, sent).step}
        times = in_turns(sides, repeats)
        sharded.close()
    turns = zip(*times.values(), strict=True)
    ratio = median(whole / (private + exchange) for whole, private, exchange in turns)
    return [figure("time of its parts", ratio, "x", bar=bar, at_most=True, notes=str(times))]


def against_torchrec(shape: Shape, repeats: int, folder: Path) -> list[Figure]:
    """TorchRec's row-wise EmbeddingCollection over 2 ranks, of the time of a step."""
    with closing(World()) as world:
        _, own = drawn(shape)
        sharded, peer = Rows(shape, own, "sharded", world=world, filled=False), TorchRec(shape, own)
        check(sharded, [peer], TOLERANCE)
        times = in_turns({"sharded": sharded.step, "TorchRec": peer.step}, repeats)
        sharded.close()
    ratio = times.ratio("TorchRec", "sharded")
    return [figure("time of TorchRec, of ours", ratio, "x", bar=2.0, notes=str(times))]


def group_of_one(shape: Shape, repeats: int, folder: Path) -> list[Figure]:
    """A step with a group of one rank, of the time of one without a group."""
    with closing(World()) as world:
        _, own = drawn(shape)
        sides = [Rows(shape, own, name, world=of, filled=False) for name, of in (("group", world), ("none", None))]
        times = in_turns({side.name: side.step for side in sides}, 4 * repeats)
        for side in sides:
            side.close()
    ratio = times.ratio("group", "none")
    return [figure("time of no group, a group of one", ratio, "x", bar=1.02, at_most=True, notes=str(times))]


def samples(shape: Shape, repeats: int, folder: Path) -> list[Figure]:
    """Samples/s of all ranks together."""
    with closing(World()) as world:
        _, own = drawn(shape)
        sharded = Rows(shape, own, "sharded", world=world, filled=False)
        ms = in_turns({"sharded": sharded.step}, repeats).ms("sharded")
        sharded.close()
        count = shape.batch * world.size
        return [figure(f"ranks: {world.size}", 1e3 * count / ms, "samples/s", notes=f"ms {ms:.2f} of {count} samples")]


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
