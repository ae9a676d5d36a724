"""Steps of rows in bags of dense ids, against FBGEMM on the same tables, by dim, bag and number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median

from contenders import Collection, Fbgemm, check
from report import Figure
from timing import in_turns
from traces import ALPHA, Shape, make_batches
from workload import figure, workload

ONE_HOT, BAGS, ALL = 1.0, 1.2, 1.3  # the least times of FBGEMM's step, of ours: the worst of each, the median


TINY = {"dims": [8], "lengths": [1, 3], "rows": [500], "tables": 3, "ids": 200, "repeats": 2, "calls": 2}


@workload(TINY, passive=False)
def rowwise(
    folder: Path,
    dims: Sequence[int] = (16, 32, 64, 128),
    lengths: Sequence[int] = (1, 10, 40),
    rows: Sequence[int] = (100_000, 1_000_000),
    alphas: Sequence[float | None] = (None, ALPHA),
    tables: int = 8,
    ids: int = 10_240,
    optimizer: str = "rowwise_adagrad",
    repeats: int = 12,
    calls: int = 12,
) -> Iterator[Figure]:
    """A step of an EmbeddingBagCollection under row-wise Adagrad, of the time of FBGEMM's, which is the same rule.

    lengths: ids in a bag, on average. ids: of a table in a batch, about. alphas: of zipf laws, None for uniform ids.
    calls: steps of a turn.
    """
    ratios: dict[int, list[float]] = {length: [] for length in lengths}
    for dim, length, count, alpha in product(dims, lengths, rows, alphas):
        shape = Shape(tables, count, dim, max(1, ids // length), length, alpha, optimizer, ragged=length > 1)
        batches = make_batches(shape)
        ours, peer = Collection(shape, batches), Fbgemm(shape, batches)
        check(ours, [peer])
        times = in_turns({side.name: side.step for side in (ours, peer)}, repeats, 1, calls=calls)
        ratios[length].append(times.ratio(peer.name, ours.name))
        law = "uniform" if alpha is None else f"zipf {alpha}"
        what = f"time of FBGEMM, of ours: D={dim}, {length} ids, {count:,} rows, {law}"
        yield figure(what, ratios[length][-1], "x", notes=str(times))
    one_hot = ratios.get(1, [])
    bags = [ratio for length, of_length in ratios.items() if length > 1 for ratio in of_length]
    for what, worst, bar in (("one id", one_hot, ONE_HOT), ("bags", bags, BAGS)):
        if worst:
            yield figure(f"worst of {what}", min(worst), "x", bar=bar)
    yield figure("median of all", median(one_hot + bags), "x", bar=ALL)
