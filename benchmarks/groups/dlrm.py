"""Whole steps of a DLRM: against TorchRec, torch's sparse embeddings and the dense part alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from models import DenseAlone, EagerStep, GraphStep, Model, TorchRecStep, hash_batches, make_batches
from report import Figure
from timing import Times, time_in_turns
from torch import Tensor
from workload import check_losses, figure, workload

ONE_ID = Model(100_000, 26, 2048, (256, 64), "adagrad", "sgd", features=13)
TINY = {"batch": 16, "tables": 3, "rows": 50, "hidden": (8,), "turn": 2, "repeats": 2}


def step(
    folder: Path,
    tolerance: float,
    share: float | None,
    whole: float | None,
    turn: int = 10,
    repeats: int = 10,
    **fields: Any,
) -> Iterator[Figure]:
    """Time of a DLRM step relative to TorchRec and torch. Also compares the time of the embeddings alone.

    tolerance: relative difference allowed between losses. Rounding alone causes up to a third of this difference. A
    row learning rate that is 1 % wrong causes a larger difference. share: bar for the embeddings alone. whole: bar for
    whole steps. turn: how many steps one side makes before the next side.
    """
    model = Model(**fields)
    plain, recommended = GraphStep(model, folder), GraphStep(model, folder)
    recommended.compile_dense()
    eager = {
        "TorchRec": TorchRecStep(model, plain),
        "TorchRec, dense part compiled": TorchRecStep(model, plain, compile_dense=True),
        "torch sparse": EagerStep(model, plain),
        "dense part alone": DenseAlone(model, plain),
    }
    rounds = 2 + repeats
    batches = make_batches(model, turn * rounds)
    inputs = {name: [side.prepare(batch) for batch in batches] for name, side in eager.items()}
    inputs["tierbed"] = inputs["as recommended"] = hash_batches(batches)
    runs: dict[str, Any] = {
        "tierbed": lambda batches: [plain(*batch) for batch in batches],
        "as recommended": lambda batches: list(recommended.run(batches, ahead=0)),
        **{name: lambda batches, side=side: [side(*batch) for batch in batches] for name, side in eager.items()},
    }
    sides = {
        name: lambda number, run=run, inputs=inputs[name]: run(inputs[number * turn : (number + 1) * turn])
        for name, run in runs.items()
    }
    times = time_in_turns(sides, repeats, 2, lambda losses: check_turn(losses, tolerance))
    notes = str(Times({name: [each / turn for each in seconds] for name, seconds in times.items()}))
    parts = zip(times["tierbed"], times["TorchRec"], times["dense part alone"], strict=True)
    ratio = median((ours - dense) / (peer - dense) for ours, peer, dense in parts)
    yield figure("time of the embeddings, tierbed / TorchRec", ratio, bar=share, at_most=True, notes=notes)
    for peer, bar in (("TorchRec", whole), ("TorchRec, dense part compiled", None), ("torch sparse", None)):
        yield figure(f"time, {peer} / as recommended", times.ratio(peer, "as recommended"), "x", bar=bar)


def check_turn(losses: dict[str, list[Tensor]], tolerance: float) -> None:
    """Raise Mismatch unless losses agree. The dense part alone is not compared."""
    for name, peer_losses in losses.items():
        if name != "dense part alone":
            check_losses(f"tierbed and {name}", losses["tierbed"], peer_losses, tolerance)


for name, batch, length, tolerance, share, whole, turn in (
    ("1-id", 2048, 1, 2e-5, 0.35, 1.8, 10),
    ("10-ids", 2048, 10, 5e-4, 0.5, 1.75, 6),
    ("batch-256", 256, 1, 2e-5, None, None, 40),
):
    shape = asdict(ONE_ID) | {"batch": batch, "length": length}
    workload(TINY, passive=False, name=name, tolerance=tolerance, share=share, whole=whole, turn=turn, **shape)(step)
