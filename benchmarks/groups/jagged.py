"""TorchRec's modules on tierbed, against FBGEMM's CPU operators."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contenders import Collection, Fbgemm, check
from report import Figure
from timing import time_in_turns
from traces import BATCHES, Shape, make_batches
from workload import figure, workload

from .kernels import BAGS, ONE_ID

MULTI_HOT = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)  # MLPerf's DLRM
TINY = {"tables": 3, "rows": 50, "dim": 8, "batch": 8, "length": 2, "repeats": 2}


def step(folder: Path, bar: float, repeats: int = 40, **fields: Any) -> Iterator[Figure]:
    """Time of FBGEMM relative to an EmbeddingBagCollection called with a KeyedJaggedTensor."""
    shape = Shape(**fields)
    batches = make_batches(shape)
    ours, peer = Collection(shape, batches), Fbgemm(shape, batches)
    check(ours, [peer])
    times = time_in_turns({side.name: side.step for side in (ours, peer)}, repeats, BATCHES)
    yield figure("time, FBGEMM / tierbed", times.ratio(peer.name, ours.name), "x", bar=bar, notes=str(times))


for name, shape, bar in (
    ("t32-l20", BAGS, 1.0),
    ("t26-l1", ONE_ID, 1.2),
    ("multi-hot", Shape(26, 38_462, 16, 512, MULTI_HOT), 1.5),
):
    workload(TINY, name=name, bar=bar, **asdict(shape))(step)
