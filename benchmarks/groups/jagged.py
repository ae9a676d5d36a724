"""TorchRec's modules on tierbed: against FBGEMM's CPU operators, and what jagged arguments cost a graph."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from contenders import Collection, Fbgemm, Plain, check
from report import Figure
from timing import in_turns
from torch import Tensor
from traces import BATCHES, Shape, make_batches
from workload import check_close, figure, workload

from tierbed.jagged import KeyedTensor, multi_remap_to_groups

MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # MLPerf's DLRM
T32 = Shape(32, 100_000, 128, 512, 20, optimizer="rowwise_adagrad")
T26 = Shape(26, 100_000, 128, 2048, alpha=1.05, optimizer="rowwise_adagrad")
TINY = {"tables": 3, "rows": 50, "dim": 8, "batch": 8, "length": 2, "repeats": 2}


def step(folder: Path, peer: str, bar: float, repeats: int = 40, **fields: Any) -> Iterator[Figure]:
    """A step of an EmbeddingBagCollection from a KeyedJaggedTensor, of FBGEMM's time, or of plain tensors' time."""
    shape = Shape(**fields)
    batches = make_batches(shape)
    ours, other = Collection(shape, batches), (Fbgemm if peer == "FBGEMM" else Plain)(shape, batches)
    check(ours, [other])
    times = in_turns({"tierbed": ours.step, other.name: other.step}, repeats, BATCHES)
    if peer == "FBGEMM":
        yield figure("time of FBGEMM, of ours", times.ratio(peer, "tierbed"), "x", bar=bar, notes=str(times))
    else:
        ratio = times.ratio("tierbed", other.name)
        yield figure("time of plain tensors", ratio, "x", bar=bar, at_most=True, notes=str(times))


for name, shape, peer, bar, repeats in (
    ("t32-l20", T32, "FBGEMM", 1.0, 40),
    ("t26-l1", T26, "FBGEMM", 1.2, 40),
    ("multi-hot", Shape(26, 38_462, 16, 512, MULTI_HOT), "FBGEMM", 1.5, 40),
    ("plain-b64", replace(T26, length=2, dim=16, batch=64), "plain", 1.3, 400),
    ("plain-b2048", replace(T26, length=2, dim=16), "plain", 1.05, 40),
):
    workload(TINY, name=name, peer=peer, bar=bar, repeats=repeats, **asdict(shape))(step)


@dataclass(frozen=True)
class Regroup:
    """keys, lengths: of each input tensor. groups: of each output."""

    keys: list[list[str]]
    lengths: list[list[int]]
    groups: list[list[str]]

    def ours(self, values: Sequence[Tensor]) -> list[Tensor]:
        given = zip(self.keys, self.lengths, values, strict=True)
        return KeyedTensor.regroup([KeyedTensor(*each) for each in given], self.groups)


def shuffled(features: int, width: int) -> Regroup:
    """Two tensors of half of the features each, which go to four groups at random."""
    names = [f"f{number}" for number in range(features)]
    order = random.Random(0).sample(names, features)
    half = features // 2
    keys = [names[:half], names[half:]]
    return Regroup(keys, [[width] * len(each) for each in keys], [order[number::4] for number in range(4)])


REGROUPS = {
    "6 features of 96 to 1024": Regroup(
        [["f1", "f2"], ["f3", "f4", "f5"], ["f6"]],
        [[96, 256], [512, 128, 768], [1024]],
        [["f1", "f3"], ["f2"], ["f4", "f1", "f6"], ["f1", "f5"]],
    ),
    "320 features of 64": shuffled(320, 64),
}


def regroup(folder: Path, case: str, bar: float, batch: int, repeats: int = 27) -> Iterator[Figure]:
    """KeyedTensor.regroup, forward and backward, of the time of FBGEMM's op, whose arguments are made before."""
    import fbgemm_gpu  # noqa: F401  registers its ops

    given = REGROUPS[case]
    permutes, in_lengths, out_lengths = multi_remap_to_groups(given.keys, given.lengths, given.groups)
    widths = out_lengths.tolist()
    values = [torch.randn(batch, sum(each), requires_grad=True) for each in given.lengths]
    with torch.no_grad():
        gradients = [torch.randn_like(output) for output in given.ours(values)]

    def ours(_: int) -> list[Tensor]:
        return outputs_and_gradients(given.ours(values))

    def fbgemm(_: int) -> list[Tensor]:
        op = torch.ops.fbgemm.permute_multi_embedding
        return outputs_and_gradients(op(list(values), permutes, in_lengths, out_lengths, widths))

    def outputs_and_gradients(outputs: list[Tensor]) -> list[Tensor]:
        found = torch.autograd.grad(outputs, values, gradients)
        return [*(output.detach() for output in outputs), *found]

    for number, (one, other) in enumerate(zip(ours(0), fbgemm(0), strict=True)):
        check_close(f"{case}: tensor {number} of both", one, other, 2e-6)
    times = in_turns({"tierbed": ours, "FBGEMM": fbgemm}, repeats, 3)
    ratio = times.ratio("tierbed", "FBGEMM")
    yield figure(f"time of FBGEMM, {case}", ratio, "x", bar=bar, at_most=True, notes=str(times))


for name, case, bar, batch in (
    ("regroup-6", "6 features of 96 to 1024", 0.25, 2048),
    ("regroup-320", "320 features of 64", 0.2, 1024),
):
    workload({"batch": 8, "repeats": 2}, name=name, case=case, bar=bar, batch=batch)(regroup)
