"""Regrouping of keyed tensors, forward and backward, against FBGEMM's op for it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import fbgemm_gpu  # noqa: F401  registers its ops
import torch
from tier_report import Figure
from tier_stores import Mismatch
from torch import Tensor

from tierbed.jagged import KeyedTensor, multi_remap_to_groups

SECTION = "regroup"
TOLERANCE = 2e-6  # of the largest magnitude
Regroup = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Workload:
    """keys, lengths: of each input tensor. groups: of each output. bar: the most of FBGEMM's time."""

    name: str
    batch: int
    keys: list[list[str]]
    lengths: list[list[int]]
    groups: list[list[str]]
    bar: float
    turns: int = 30


def shuffled(features: int, width: int, batch: int, bar: float) -> Workload:
    """Two tensors of half of the features each, which go to four groups at random."""
    names = [f"f{number}" for number in range(features)]
    order = random.Random(0).sample(names, features)
    half = features // 2
    keys = [names[:half], names[half:]]
    lengths = [[width] * len(each) for each in keys]
    groups = [order[number::4] for number in range(4)]
    return Workload(f"{features} features of {width}, batch {batch}", batch, keys, lengths, groups, bar)


WORKLOADS = [
    Workload(
        "6 features of 96 to 1024 in 4 groups, batch 2048",
        2048,
        [["f1", "f2"], ["f3", "f4", "f5"], ["f6"]],
        [[96, 256], [512, 128, 768], [1024]],
        [["f1", "f3"], ["f2"], ["f4", "f1", "f6"], ["f1", "f5"]],
        0.25,
    ),
    shuffled(320, 64, 1024, 0.2),
]


def regroup_figures(quick: bool = False) -> list[Figure]:
    """The figures of all workloads. Raises Mismatch."""
    return [_measured(replace(each, batch=8, turns=2) if quick else each) for each in WORKLOADS]


def _measured(workload: Workload) -> Figure:
    values = [torch.randn(workload.batch, sum(each), requires_grad=True) for each in workload.lengths]
    ours, theirs = _ours(workload), _theirs(workload)
    with torch.no_grad():
        gradients = [torch.randn_like(output) for output in ours(values)]
    _check(workload, _step(ours, values, gradients), _step(theirs, values, gradients))
    seconds: list[tuple[float, float]] = []
    for _ in range(workload.turns):
        mine, peer = (_seconds(each, values, gradients) for each in (ours, theirs))
        seconds.append((mine, peer))
    warm = seconds[len(seconds) // 10 :]
    mine, peer = (1000 * median(each) for each in zip(*warm, strict=True))
    ratio = median(mine / peer for mine, peer in warm)
    notes = f"{mine:.2f} ms, FBGEMM {peer:.2f} ms"
    return Figure(SECTION, f"FBGEMM's time, {workload.name}", ratio, "", workload.bar, True, notes)


def _ours(workload: Workload) -> Regroup:
    def regroup(values: Sequence[Tensor]) -> list[Tensor]:
        given = zip(workload.keys, workload.lengths, values, strict=True)
        return KeyedTensor.regroup([KeyedTensor(*each) for each in given], workload.groups)

    return regroup


def _theirs(workload: Workload) -> Regroup:
    """FBGEMM's op; its arguments are made outside the clock."""
    permutes, in_lengths, out_lengths = multi_remap_to_groups(workload.keys, workload.lengths, workload.groups)
    widths = out_lengths.tolist()

    def regroup(values: Sequence[Tensor]) -> list[Tensor]:
        made: list[Tensor] = torch.ops.fbgemm.permute_multi_embedding(
            list(values), permutes, in_lengths, out_lengths, widths
        )
        return made

    return regroup


def _step(regroup: Regroup, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of values."""
    outputs = regroup(values)
    found = torch.autograd.grad(outputs, values, gradients)
    return [*(output.detach() for output in outputs), *found]


def _seconds(regroup: Regroup, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> float:
    begin = time.perf_counter()
    _step(regroup, values, gradients)
    return time.perf_counter() - begin


def _check(workload: Workload, mine: Sequence[Tensor], peer: Sequence[Tensor]) -> None:
    for number, (one, other) in enumerate(zip(mine, peer, strict=True)):
        apart = float((one - other).abs().max() / other.abs().max())
        if not apart <= TOLERANCE:
            raise Mismatch(f"{workload.name}: tensor {number} is {apart} of its largest magnitude apart from FBGEMM's")
