"""Time a step of rows of 16 bits against the same step of float32 rows, and gate the ratios that have bars.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/narrow.py [--section NAME ...] [--repeats N] [--json FILE] [--quick]

Contenders take turns over the same batches; figures are ratios of medians. `memory`: 26 tables of 38,462 rows in
device_mem, 4096 ids of each, zipf 1.05. `ssd`: 1,000,000 rows of dim 128 in cached_ssd, buffered reads of files that
the page cache holds, and a cache of 10 % of the float32 rows, of the same MiB for all. There are figures only where
rows after three steps are those of float32 within what rounding by chance may have moved them.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from contenders import RowsOf
from report import machine
from tier_report import Figure, report
from tier_stores import Mismatch
from workloads import BATCHES, EPS, LR, Workload, make_batches

from tierbed import make_cached_ssd_store_options
from tierbed.engine.cache.memory_split import LINE_OVERHEAD_BYTES
from tierbed.engine.optim import RowWiseAdagrad
from tierbed.engine.row_format import line_bytes_of

FLOAT32 = torch.float32, torch.float32
TYPES = {  # of rows, and of the state that elements have
    "bfloat16": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, torch.float32),
    "bfloat16, state too": (torch.bfloat16, torch.bfloat16),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "rowwise_adagrad": lambda p: RowWiseAdagrad(p, LR, EPS),
    "adagrad": lambda p: torch.optim.Adagrad(p, LR, eps=EPS),
}
CHECKED_STEPS, CHECKED_ROWS = 3, 4096


def check(name: str, dtype: torch.dtype, rows: RowsOf, wide: RowsOf) -> None:
    """Raises Mismatch unless rows are those of float32, but for a rounding when they began and at each step."""
    ids = wide.batches[0].rows[:CHECKED_ROWS, 0, 0].unique()
    for _ in range(CHECKED_STEPS):
        rows.step(0)
        wide.step(0)
    expected = wide.of(ids)
    apart = float((rows.of(ids) - expected).abs().max())
    most = (CHECKED_STEPS + 2) * torch.finfo(dtype).eps * float(expected.abs().max())
    if not apart <= most:
        raise Mismatch(f"{name}: rows are {apart:.3g} from those of float32, more than {most:.3g}")


def timed(contenders: Mapping[str, RowsOf], repeats: int) -> dict[str, float]:
    """The median ms of a step of each."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    gc.collect()
    gc.disable()
    for turn in range(BATCHES + repeats):
        for name, rows in contenders.items():
            begin = perf_counter()
            out = rows.step(turn % BATCHES)
            times[name].append(1e3 * (perf_counter() - begin))
            del out
    gc.enable()
    return {name: median(taken[BATCHES:]) for name, taken in times.items()}


def memory(repeats: int, quick: bool) -> list[Figure]:
    figures = []
    for dim, rule, bars in (
        (128, "rowwise_adagrad", {"bfloat16": 1.1, "float16": 1.1}),
        (16, "adagrad", dict.fromkeys(TYPES, 1.3)),
    ):
        size = (3, 500, dim, 64) if quick else (26, 38_462, dim, 4096)
        work = Workload(f"narrow_d{dim}", *size, 1, 1.05, rule, "", 0)
        batches, make = make_batches(work), OPTIMIZERS[rule]
        contenders = {"float32": RowsOf(work, batches, make)}
        for name in bars:
            contenders[name] = RowsOf(work, batches, make, TYPES[name])
            check(name, TYPES[name][0], contenders[name], RowsOf(work, batches, make))
        took = timed(contenders, repeats)
        figures += [
            Figure("memory", f"D{dim} {rule}, {name}", took[name] / took["float32"], "x", bar, True, _ms(took, name))
            for name, bar in bars.items()
        ]
    return figures


def ssd(repeats: int, quick: bool) -> list[Figure]:
    rows, batch = (20_000, 512) if quick else (1_000_000, 16_384)
    work = Workload("narrow_ssd", 1, rows, 128, batch, 1, 1.05, "rowwise_adagrad", "", 0)
    batches, make = make_batches(work), OPTIMIZERS["rowwise_adagrad"]
    budget = rows // 10 * (line_bytes_of(129) + LINE_OVERHEAD_BYTES) / (1 << 20)
    contenders = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, types in {"float32": FLOAT32, "bfloat16": TYPES["bfloat16"], "float16": TYPES["float16"]}.items():
            store = make_cached_ssd_store_options(budget, Path(folder) / name)
            contenders[name] = made = RowsOf(work, batches, make, types, store)
            made.fill(rows)
            in_memory = RowsOf(work, batches, make)
            in_memory.fill(rows)
            check(name, types[0], made, in_memory)
        took = timed(contenders, repeats)
        for made in contenders.values():
            made.close()
    return [
        Figure("ssd", f"steps/s, {name}", took["float32"] / took[name], "x", bar, False, _ms(took, name))
        for name, bar in (("bfloat16", 1.4), ("float16", None))
    ]


SECTIONS = {"memory": memory, "ssd": ssd}


def _ms(took: Mapping[str, float], name: str) -> str:
    return f"ms {took[name]:.2f}, float32 {took['float32']:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="one of them; all, if left out")
    parser.add_argument("--repeats", type=int, default=40, help="timed steps of each contender (default: 40)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--quick", action="store_true", help="small tables: whether it runs, not how fast")
    given = parser.parse_args()
    torch.set_num_threads(2)
    figures = [one for name in given.section or SECTIONS for one in SECTIONS[name](given.repeats, given.quick)]
    return int(not report(figures, machine("tierbed", "torch", "numpy"), given.json) and not given.quick)


if __name__ == "__main__":
    sys.exit(main())
