"""Steps of an embedding over ranks: against their parts done alone, and against TorchRec."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rank_contenders import Accumulated, BareExchange, Contender, Embedding, TorchRec
from rank_group import in_turns
from tier_report import Figure, listed
from tier_stores import Mismatch
from torch import Tensor
from workloads import Batch, Workload, make_batches

from tierbed.distributed import World

CHECKED_STEPS = 3
TOLERANCE = 2e-6  # of the largest magnitude, against another library
WIDE = Workload("", 8, 100_000, 32, 8192, 1, 1.05, "adagrad", "", 0)


@dataclass(frozen=True)
class Steps:
    """A step of `work` on each rank, `batch` samples each.

    bar: the most that a step may take of its parts' time. peer_bar: how many times faster than TorchRec it must be.
    """

    work: Workload
    bar: float | None
    peer_bar: float | None = None
    turns: int = 64

    @property
    def name(self) -> str:
        return f"{self.work.batch} x {self.work.tables} ids a rank, dim {self.work.dim}"


STEPS = (
    Steps(WIDE, 1.4, 2.0),
    Steps(replace(WIDE, batch=2048, dim=128), 1.4),
)


def quick(steps: Steps) -> Steps:
    return replace(steps, work=replace(steps.work, batch=16, rows=200, tables=3, dim=8), turns=2)


def drawn(work: Workload) -> list[Batch]:
    """Batches of all ranks."""
    return make_batches(replace(work, batch=work.batch * dist.get_world_size()))


def against_parts(steps: Steps) -> list[Figure]:
    """What a step takes of the time of its parts, which are a step alone and an exchange. Raises Mismatch."""
    with closing(World()) as world:
        batches = drawn(steps.work)
        sharded, alone = Embedding("sharded", steps.work, batches, world), Embedding("alone", steps.work, batches)
        reference = Accumulated(steps.work, batches)
        check(sharded, reference, batches, 0)
        reference.embedding.close()
        bare = BareExchange(steps.work, batches)
        gc.collect()
        taken = in_turns([each.step for each in (sharded, alone, bare)], len(batches), steps.turns)
        whole, private, exchange = map(median, taken)
        notes = listed([("ms", f"{whole:.2f}"), ("alone", f"{private:.2f}"), ("bare exchange", f"{exchange:.2f}")])
        ratio = whole / (private + exchange)
        for each in (sharded, alone):
            each.embedding.close()
        return [Figure("parts", f"time of its parts, {steps.name}", ratio, "x", steps.bar, True, notes)]


def against_torchrec(steps: Steps) -> list[Figure]:
    """How many times TorchRec's time is that of a step. Raises Mismatch."""
    with closing(World()) as world:
        batches = drawn(steps.work)
        sharded, peer = Embedding("sharded", steps.work, batches, world), TorchRec(steps.work, batches)
        check(sharded, peer, batches, TOLERANCE)
        gc.collect()
        ours, theirs = map(median, in_turns([sharded.step, peer.step], len(batches), steps.turns))
        notes = listed([("ms", f"{ours:.2f}"), ("torchrec", f"{theirs:.2f}")])
        sharded.embedding.close()
        return [Figure("torchrec", f"TorchRec's time, {steps.name}", theirs / ours, "x", steps.peer_bar, notes=notes)]


def check(ours: Contender, other: Contender, batches: Sequence[Batch], tolerance: float) -> None:
    """Raises Mismatch unless outputs of some steps, and the rows after them, are those of the other.

    tolerance: how far apart, as a share of the largest magnitude; 0 is to the bit.
    """
    for index in range(CHECKED_STEPS):
        same(f"outputs of step {index}", _whole(ours.step(index)), _whole(other.step(index)), tolerance)
    for table in range(batches[0].rows.shape[1]):
        keys = batches[0].rows[:, table].flatten().unique()
        same(f"rows of table {table}", ours.rows(keys, table), other.rows(keys, table), tolerance)


def _whole(out: Any) -> Tensor:
    return (torch.stack(out, 1) if isinstance(out, list) else out).detach()


def same(what: str, one: Tensor, other: Tensor, tolerance: float) -> None:
    apart = float((one - other).abs().max() / other.abs().max())
    if not apart <= tolerance:
        raise Mismatch(f"{what} are {apart} of the largest magnitude apart")
