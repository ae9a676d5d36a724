"""What ranks send, what a group of one costs, what looking ahead finds, and what more ranks and a narrow wire give."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from rank_contenders import Embedding
from rank_group import in_turns
from rank_steps import WIDE, Steps, drawn
from tier_report import Figure, listed
from torch import Tensor
from workloads import Batch, Workload

from tierbed import make_cached_ssd_store_options, plan
from tierbed.distributed import World

HEADERS = 1024  # bytes that a pair of ranks may send in a step beside ids, rows and gradients
TURNS, TURN = 8, 16  # of `ahead`: turns of each, the first of which warms up, and the steps of one


class Counted(World):
    """Counts the bytes that it sends to each rank."""

    def __init__(self) -> None:
        self.sent = torch.zeros(dist.get_world_size(), dtype=torch.int64)
        super().__init__()

    def start(self, op: str, out: Tensor, given: Tensor, out_sizes: Sequence[int], given_sizes: Sequence[int]) -> Any:
        self.sent += torch.tensor(given_sizes) * given.itemsize
        return super().start(op, out, given, out_sizes, given_sizes)


def bytes_of(steps: Steps) -> list[Figure]:
    """How many bytes more than planned go from one rank to another, in the step and pair that have most of them."""
    with closing(Counted()) as world:
        return [_beside(replace(steps.work, tables=tables), world) for tables in (1, steps.work.tables)]


def _beside(work: Workload, world: Counted) -> Figure:
    batches = drawn(work)
    sharded = Embedding(f"counted-{work.tables}", work, batches, world)
    sharded.step(0)  # opens the embedding
    most, whole = 0, 0
    for index, batch in enumerate(batches):
        world.sent.zero_()
        sharded.step(index)
        sent = [torch.zeros_like(world.sent) for _ in range(world.size)]
        dist.all_gather(sent, world.sent)
        planned = torch.from_numpy(_planned(work, batch, world.size))
        beside = torch.stack(sent) - planned
        beside.fill_diagonal_(0)  # what a rank has itself does not travel
        if beside.min() < 0:
            raise AssertionError(f"fewer bytes than planned: {beside.tolist()}")
        most, whole = max(most, int(beside.max())), whole + int(planned.sum())
    sharded.embedding.close()
    what = f"bytes beside those planned, a pair and step, {work.tables} table{'s' if work.tables > 1 else ''}"
    notes = f"planned MB a step {whole / len(batches) / 1e6:.2f}"
    return Figure("bytes", what, most, "bytes", HEADERS, True, notes)


def _planned(work: Workload, batch: Batch, size: int) -> Any:
    ranks = plan([batch.rows.squeeze(2)], work.dim, 0, tables=work.tables, world_size=size).ranks
    assert ranks is not None
    return ranks.bytes()


def alone(steps: Steps) -> list[Figure]:
    """What a step with a group of one takes of the time of one without a group."""
    with closing(World()) as world:
        batches = drawn(steps.work)
        both = [Embedding("group", steps.work, batches, world), Embedding("none", steps.work, batches)]
        one, none = map(median, in_turns([each.step for each in both], len(batches), 4 * steps.turns))
        for each in both:
            each.embedding.close()
        notes = listed([("ms", f"{one:.2f}"), ("without", f"{none:.2f}")])
        return [Figure("alone", "time of no group, a group of one", one / none, "x", 1.02, True, notes)]


def ahead(steps: Steps, folder: Path) -> list[Figure]:
    """On cached_ssd: how many steps found nothing announced to who has the rows, and what looking ahead gives."""
    with closing(World()) as world:
        batches = drawn(steps.work)
        shown = {}
        for far in (8, 0):
            cache = make_cached_ssd_store_options(16, folder / f"{far}")
            shown[far] = Embedding(f"ahead-{far}", steps.work, batches, world, cache)
        taken: dict[int, list[float]] = {far: [] for far in shown}
        missed = 0
        turns, turn = (2, 4) if steps.turns < TURNS else (TURNS, TURN)
        for number in range(turns):
            for far, each in sorted(shown.items(), reverse=number % 2 == 0):
                before = each.embedding.metrics()["table"]["prefetch_hits"]
                dist.barrier()
                begin = perf_counter()
                for _ in each.graph.run((each.part(step % len(batches)) for step in range(turn)), ahead=far):
                    pass
                taken[far].append(perf_counter() - begin)
                if far:
                    hits = each.embedding.metrics()["table"]["prefetch_hits"] - before
                    missed = max(missed, turn - hits)
        most = world.gather(torch.tensor([missed])).max().item()
        slowest = torch.tensor([taken[8][1:], taken[0][1:]])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        far_ahead, not_ahead = (1e3 * median(row) / turn for row in slowest.tolist())
        for each in shown.values():
            each.embedding.close()
        notes = listed([("ms", f"{far_ahead:.2f}"), ("ahead=0", f"{not_ahead:.2f}")])
        return [
            Figure("ahead", "steps of a run that found nothing announced", most, "", 1, True, f"of {turn}"),
            Figure("ahead", "steps/s of ahead=0, by ahead=8", not_ahead / far_ahead, "x", 1.0, notes=notes),
        ]


def narrow(steps: Steps) -> list[Figure]:
    """Milliseconds of a step by the dtypes that rows and gradients travel in. Each wire is a process group."""
    wires = {"float32": (torch.float32, torch.float32), "16 bits": (torch.bfloat16, torch.float16)}
    batches = drawn(steps.work)
    worlds = [World(rows=rows, grads=grads) for rows, grads in wires.values()]
    each = [Embedding(f"wire-{i}", steps.work, batches, world) for i, world in enumerate(worlds)]
    taken = map(median, in_turns([one.step for one in each], len(batches), steps.turns))
    for one, world in zip(each, worlds, strict=True):
        one.embedding.close()
        world.close()
    return [
        Figure("wire", f"a step, {name}", value, "ms", notes=steps.name)
        for name, value in zip(wires, taken, strict=True)
    ]


def of_ranks(steps: Steps) -> list[Figure]:
    """Samples/s of all ranks together."""
    with closing(World()) as world:
        batches = drawn(steps.work)
        sharded = Embedding("ranks", steps.work, batches, world)
        (taken,) = in_turns([sharded.step], len(batches), steps.turns)
        sharded.embedding.close()
        value, samples = median(taken), steps.work.batch * world.size
        notes = f"ms {value:.2f} of {samples} samples, a thread each"
        ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
        return [Figure("ranks", ranks, 1e3 * samples / value, "samples/s", notes=notes)]


SMALL = Steps(replace(WIDE, batch=2048), None)
