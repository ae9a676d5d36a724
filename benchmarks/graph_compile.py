"""How long the first call of a graph takes, that of examples/movielens.py, in a process of its own.

python benchmarks/graph_compile.py is that process: it prints what it measured as JSON.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from tier_report import Figure, listed
from tier_stores import Mismatch

from tierbed import make_device_mem_store_options

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SECTION = "compile"
BATCH, DIM, LR = 512, 16, 0.08  # those of the example


@dataclass(frozen=True)
class Sizes:
    processes: int = 5


QUICK = Sizes(processes=1)


def measure(sizes: Sizes) -> list[Figure]:
    command = [sys.executable, __file__]
    runs = [
        json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        for _ in range(sizes.processes)
    ]
    for run in runs:
        if run["loss"] != run["eager"]:
            raise Mismatch(f"loss {run['loss']} of the first call, {run['eager']} of the model called eagerly")
    seconds = {name: median(run[name] for run in runs) for name in ("first", "smaller", "next")}
    notes = listed(
        [
            ("next call", f"{1e3 * seconds['next']:.1f} ms"),
            ("first of a smaller batch", f"{seconds['smaller']:.2f} s"),
            ("slowest first", f"{max(run['first'] for run in runs):.2f} s"),
            ("processes that imported Inductor", f"{sum(run['inductor'] for run in runs)}"),
        ]
    )
    return [Figure(SECTION, "first call of examples/movielens.py", seconds["first"], "s", 3, at_most=True, notes=notes)]


def main() -> None:
    """The first call, the next, and the first with a smaller batch, as the last one of an epoch is."""
    sys.path.insert(0, str(EXAMPLES))
    from movielens import DeepFM, TrainGraph, make_embedding
    from movielens_synthetic import synthetic_log

    torch.set_num_threads(2)
    log = synthetic_log()
    torch.manual_seed(0)
    with make_embedding(make_device_mem_store_options(), DIM) as embedding:
        graph = TrainGraph(embedding, DeepFM(DIM), LR)
        model = copy.deepcopy(graph.model)
        measured: dict[str, float] = {}
        losses = []
        for name, size in (("first", BATCH), ("next", BATCH), ("smaller", BATCH // 2)):
            torch.manual_seed(1)  # the dropout
            begin = time.perf_counter()
            losses.append(graph(log.ids[:size], log.table_ids, log.labels[:size]))
            measured[name] = time.perf_counter() - begin
    inductor = "torch._inductor.compile_fx" in sys.modules
    with make_embedding(make_device_mem_store_options(), DIM) as untrained, torch.no_grad():
        torch.manual_seed(1)
        logits = model(untrained(log.ids[:BATCH], log.table_ids), log.ids[:BATCH])
        eager = torch.nn.functional.binary_cross_entropy_with_logits(logits, log.labels[:BATCH])
    print(json.dumps({**measured, "loss": losses[0].item(), "eager": eager.item(), "inductor": inductor}))


if __name__ == "__main__":
    main()
