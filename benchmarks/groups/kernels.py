"""Steps that only train rows: against peers and the memory floor, and by optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from contenders import CHECKED_STEPS, OPTIMIZERS, Fbgemm, Rows, Torch, check, find_tables
from floor import Floor
from report import Figure, is_intel
from timing import time_in_turns
from traces import BATCHES, Batch, Shape, hash_rows, make_batches
from workload import check_close, figure, workload

UNIFORM = Shape(26, 38_462, 16, 4096)
WIDE = replace(UNIFORM, dim=128)
ONE_ID = Shape(26, 100_000, 128, 2048, alpha=1.05, optimizer="rowwise_adagrad")
BAGS = Shape(32, 100_000, 128, 512, 20, optimizer="rowwise_adagrad")
TINY = {"tables": 3, "rows": 500, "batch": 64, "repeats": 2}


def step(folder: Path, peer: str, bar: float, repeats: int = 50, **fields: Any) -> Iterator[Figure]:
    """A step that only trains rows, against a peer and the memory floor."""
    shape = Shape(**fields)
    batches = make_batches(shape)
    ours, floor = Rows(shape, batches), Floor(shape, batches)
    sides = {"tierbed": ours, "floor": floor}
    if peer == "1 M rows":
        check(ours, [floor])
        small = replace(shape, rows=min(shape.rows, UNIFORM.rows))
        sides[peer] = Rows(small, make_batches(small))
    else:
        sides[peer] = {"FBGEMM": Fbgemm, "torch": Torch}[peer](shape, batches)
        check(ours, [floor, sides[peer]])
    times = time_in_turns({name: side.step for name, side in sides.items()}, repeats, BATCHES)
    yield figure(f"time, {peer} / tierbed", times.ratio(peer, "tierbed"), "x", bar=bar, notes=str(times))
    most = 1.8 if shape.dim == 16 else 1.6
    floors = times.ratio("tierbed", "floor")
    yield figure("time, tierbed / floor", floors, "x", bar=most, at_most=True, notes=floor.settings)


ON_FBGEMM = 2.0 if is_intel() else 1.3
for name, shape, peer, bar in (
    ("d16-uniform", UNIFORM, "FBGEMM", 3.0),
    ("d16-zipf", replace(UNIFORM, alpha=1.05), "FBGEMM", 3.0),
    ("d128-uniform", WIDE, "FBGEMM", 3.0),
    ("d128-zipf", replace(WIDE, alpha=1.05), "FBGEMM", 3.0),
    ("t26-l1-rowwise", ONE_ID, "FBGEMM", ON_FBGEMM),
    ("t32-l20-rowwise", BAGS, "FBGEMM", ON_FBGEMM),
    ("torch-adagrad", UNIFORM, "torch", 30.0),
    ("torch-sparseadam", replace(UNIFORM, optimizer="adam"), "torch", 30.0),
    ("d16-20m", replace(UNIFORM, rows=769_231), "1 M rows", 1 / 3),
):
    workload(TINY, passive=False, name=name, peer=peer, bar=bar, **asdict(shape))(step)


MAX_OF_ADAM = {"partial_rowwise_adam": 1.0, "lamb": 1.4}


@workload({"tables": 3, "rows": 500, "batch": 64, "repeats": 2}, passive=False)
def rules(
    folder: Path, tables: int = 26, rows: int = 38_462, dim: int = 64, batch: int = 4096, repeats: int = 40
) -> Iterator[Figure]:
    """A step with each optimizer, relative to Adam. Steps only train rows."""
    shape = Shape(tables, rows, dim, batch, optimizer="adam")
    batches = make_batches(shape)
    sides = {
        name: Rows(replace(shape, optimizer=name), batches, is_filled=False)
        for name in OPTIMIZERS
        if name != "sparse_adam"
    }
    for name, side in sides.items():
        check_dense(name, side, batches[0])
    times = time_in_turns({name: side.step for name, side in sides.items()}, repeats, BATCHES)
    for name in sides:
        notes = f"ms {times.ms(name):.2f}"
        ratio = times.ratio(name, "adam")
        yield figure(f"time, {name} / adam", ratio, "x", bar=MAX_OF_ADAM.get(name), at_most=True, notes=notes)


def check_dense(optimizer: str, side: Rows, batch: Batch) -> None:
    """Raise Mismatch unless rows that occur once in the batch are trained as by the dense optimizer."""
    keys = hash_rows(batch.flat) + find_tables(batch)
    unique, inverse, counts = keys.unique(return_inverse=True, return_counts=True)
    single = (counts == 1)[inverse]  # no gradient sums, so nothing is rounded differently
    del unique
    dense = torch.nn.Parameter(side.rows(0)[single])
    dense_optimizer = OPTIMIZERS[optimizer]([dense])
    dense.grad = batch.grad.transpose(0, 1).flatten(0, 1)[single].clone()
    for _ in range(CHECKED_STEPS):
        side.step(0)
        dense_optimizer.step()
    check_close(f"{optimizer}: rows and the dense optimizer's", side.rows(0)[single], dense.detach(), 1e-5)
