"""Steps of an embedding over ranks, processes of one thread each: against their parts alone, and against TorchRec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from contenders import TOLERANCE, Accumulated, BareExchange, Rows, TorchRec, check
from ranks import in_turns, on_ranks
from report import Figure
from traces import Batch, Shape, hashed, make_batches
from workload import figure, workload

from tierbed import make_cached_ssd_store_options, plan
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


class Counted(World):
    """Counts the bytes that it sends to each rank."""

    def __init__(self) -> None:
        self.sent = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        super().__init__()

    def start(self, op: str, out: Any, given: Any, out_sizes: Sequence[int], given_sizes: Sequence[int]) -> Any:
        self.sent += torch.tensor(given_sizes) * given.itemsize
        return super().start(op, out, given, out_sizes, given_sizes)


def bytes_sent(shape: Shape, repeats: int, folder: Path) -> list[Figure]:
    """How many bytes more than planned go between 2 ranks, in the step and pair that have most of them."""
    figures = []
    with closing(Counted()) as world:
        for tables in (1, shape.tables):
            of = replace(shape, tables=tables)
            batches, own = drawn(of)
            sharded = Rows(of, own, f"counted-{tables}", world=world, filled=False)
            sharded.step(0)  # opens the embedding
            most, whole = 0, 0
            for index, batch in enumerate(batches):
                world.sent.zero_()
                sharded.step(index)
                sent = [torch.zeros_like(world.sent) for _ in range(world.size)]
                dist.all_gather(sent, world.sent)
                expected = torch.from_numpy(planned(of, batch).bytes())
                more = torch.stack(sent) - expected
                more.fill_diagonal_(0)  # a rank does not send itself its rows
                if more.min() < 0:
                    raise AssertionError(f"fewer bytes than planned: {more.tolist()}")
                most, whole = max(most, int(more.max())), whole + int(expected.sum())
            sharded.close()
            what = f"bytes more than planned, a pair and step, {tables} table{'s' if tables > 1 else ''}"
            notes = f"planned MB a step {whole / len(batches) / 1e6:.2f}"
            figures.append(figure(what, most, "bytes", bar=1024, at_most=True, notes=notes))
    return figures


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


def looking_ahead(shape: Shape, repeats: int, folder: Path) -> list[Figure]:
    """graph.run(ahead=8) over cached_ssd and 2 ranks: steps that found nothing announced, and steps/s of ahead=0."""
    turns, turn = (8, 16) if repeats > 8 else (2, 4)  # turns of each, the first of which warms up, and steps of one
    with closing(World()) as world:
        _, own = drawn(shape)
        sides = {}
        for far in (8, 0):
            cache = make_cached_ssd_store_options(16, folder / f"{far}")
            sides[far] = Rows(shape, own, f"ahead-{far}", cache, world=world, filled=False)
        taken: dict[int, list[float]] = {far: [] for far in sides}
        missed = 0
        for number in range(turns):
            for far, side in sorted(sides.items(), reverse=number % 2 == 0):
                before = side.embedding.metrics()["table"]["prefetch_hits"]
                dist.barrier()
                begin = perf_counter()
                for _ in side.graph.run((side.call(step) for step in range(turn)), ahead=far):
                    pass
                taken[far].append(perf_counter() - begin)
                if far:
                    missed = max(missed, turn - side.embedding.metrics()["table"]["prefetch_hits"] + before)
        most = world.gather(torch.tensor([missed])).max().item()
        slowest = torch.tensor([taken[8][1:], taken[0][1:]])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        far_ahead, not_ahead = (1e3 * median(row) / turn for row in slowest.tolist())
        for side in sides.values():
            side.close()
    notes = f"ms {far_ahead:.2f}, ahead=0 {not_ahead:.2f}"
    return [
        figure("steps of a run that found nothing announced", most, bar=1, at_most=True, notes=f"of {turn}"),
        figure("steps/s of ahead=0, by ahead=8", not_ahead / far_ahead, "x", bar=1.0, notes=notes),
    ]


def wire(shape: Shape, repeats: int, folder: Path) -> list[Figure]:
    """Milliseconds of a step over 2 ranks by the dtypes in which rows and gradients are sent."""
    wires = {"float32": (torch.float32, torch.float32), "16 bits": (torch.bfloat16, torch.float16)}
    _, own = drawn(shape)
    worlds = {name: World(rows=rows, grads=grads) for name, (rows, grads) in wires.items()}
    sides = {name: Rows(shape, own, f"wire {name}", world=world, filled=False) for name, world in worlds.items()}
    times = in_turns({name: side.step for name, side in sides.items()}, repeats)
    for name, world in worlds.items():
        sides[name].close()
        world.close()
    return [figure(f"a step, {name}", times.ms(name), "ms") for name in times]


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
    ("bytes", 2, bytes_sent, WIDE),
    ("alone", 1, group_of_one, SMALL),
    ("ahead", 2, looking_ahead, SMALL),
    ("wire", 2, wire, DEEP),
    ("samples-1", 1, samples, SMALL),
    ("samples-2", 2, samples, SMALL),
    ("samples-4", 4, samples, SMALL),
):
    workload(TINY, name=name, **asdict(shape))(over_ranks(ranks, task))
