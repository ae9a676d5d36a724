"""The static graph: against eager loops, against its own parts, and how long its first call takes."""

from __future__ import annotations

import copy
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from contenders import OPTIMIZERS, make_embedding
from graph_bytecodes import COUNTED_ON, executed
from models import EagerStep, GraphStep, Model, Step, cycle, keyed, make_batches
from numpy.typing import NDArray
from report import Figure, listed
from timing import (
    Stopwatch,
    Turn,
    in_turns,
    is_matrix_product,
    one_thread,
    seconds_of,
    timed_ops,
    turn_of,
)
from torch import Tensor, nn
from workload import Mismatch, check_losses, check_same, figure, workload

from tierbed import Graph, make_device_mem_store_options

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MAX_CALLS, MAX_BYTECODES = 280, 3320  # 3 % over what a step with Adam executes
SMALL_STEP = Model(rows=10_000, tables=3, batch=64, hidden=(64,))
LARGE_STEP = Model(rows=38_462, tables=26, batch=4096, hidden=(512, 256), optimizer="adagrad")
TINY = {"rows": 200, "tables": 2, "batch": 16, "hidden": (8, 4)}
FEW = {**TINY, "batches": 2, "repeats": 3}
AHEAD = 8
ADDED_BYTES = 16  # the smallest object of Python, which a step could leave behind


def check_eager(what: str, model: Model, graph: GraphStep, batches: list[tuple[Tensor, ...]]) -> EagerStep:
    """An eager loop that has the rows of the graph. Mismatch unless their first losses agree to 1e-5."""
    eager = EagerStep(model, graph)
    some = [batches[number % len(batches)] for number in range(10)]
    theirs = [eager(*eager.prepared(batch)) for batch in some]
    check_losses(what, [graph(*batch) for batch in keyed(some)], theirs, 1e-5)
    return eager


@workload({**FEW, "hidden": (4,), "turn": 3}, passive=False, **asdict(SMALL_STEP))
def overhead(folder: Path, batches: int = 32, turn: int = 50, repeats: int = 40, **fields: Any) -> Iterator[Figure]:
    """A step of a small batch, of an eager one's time, and what the engine's own Python executes in it."""
    for optimizer, peer, bar in (
        ("sgd", "nn.Embedding and SGD", 0.8),
        ("adam", "nn.Embedding(sparse=True) and SparseAdam", 0.5),
    ):
        model = replace(Model(**fields), optimizer=optimizer)
        given = make_batches(model, batches)
        graph = GraphStep(model, folder)
        eager = check_eager(peer, model, graph, given)
        ours, theirs = cycle(graph, keyed(given)), cycle(eager, [eager.prepared(batch) for batch in given])

        def steps(step: Step, number: int) -> None:
            for each in range(number * turn, (number + 1) * turn):
                step(each)

        times = in_turns({"graph": partial(steps, ours), "eager": partial(steps, theirs)}, repeats, 1)
        notes = listed((name, f"{1e3 * times.ms(name) / turn:.0f} us") for name in times)
        yield figure(f"a step, of eager {peer}", times.ratio("graph", "eager"), bar=bar, at_most=True, notes=notes)
        counts = [executed(ours, number) for number in range(min(batches, 4))]
        if any(count != counts[0] for count in counts):
            raise Mismatch(f"{optimizer}: steps of one kind execute different Python: {counts}")
        most = MAX_BYTECODES if sys.version_info[:2] == COUNTED_ON else None
        yield figure(f"calls of the engine's Python, {optimizer}", counts[0].calls, bar=MAX_CALLS, at_most=True)
        yield figure(f"bytecodes of the same, {optimizer}", counts[0].bytecodes, bar=most, at_most=True)


@workload(FEW, **asdict(LARGE_STEP))
def dense_share(folder: Path, batches: int = 16, repeats: int = 150, **fields: Any) -> Iterator[Figure]:
    """What of a step of a large batch is not matrix products."""
    model = Model(**fields)
    graph, given = GraphStep(model, folder), make_batches(model, batches)
    check_eager("dense_share", model, graph, given)
    step, products = cycle(graph, keyed(given)), Stopwatch()
    samples: list[tuple[float, float]] = []
    with timed_ops(products, graph, is_matrix_product):
        for number in range(repeats):
            samples.append((seconds_of(partial(step, number)), products.lap()))
    whole, within = (1e3 * median(part) for part in zip(*samples, strict=True))
    share = 100 * median(1 - in_products / seconds for seconds, in_products in samples)
    notes = f"step {whole:.1f} ms, matrix products {within:.1f} ms"
    yield figure("all but matrix products", share, "% of a step", bar=20, at_most=True, notes=notes)


@workload({**TINY, "warm_up": 4, "turn": 4, "repeats": 2}, **asdict(replace(LARGE_STEP, rows=20_000)))
def pipeline(
    folder: Path,
    narrow: Sequence[int] = (64,),
    cached: float = 0.75,
    warm_up: int = 60,
    turn: int = 20,
    repeats: int = 4,
    **fields: Any,
) -> Iterator[Figure]:
    """A step of graph.run over cached_ssd on one thread, of the longer of dense work and fetch in a plain loop.

    `narrow`: widths of a second MLP, whose work is shorter than the fetch.
    """
    model = Model(**fields)
    with one_thread():
        for hidden, bar in ((model.hidden, 1.15), (tuple(narrow), None)):
            place = folder / str(len(hidden))
            yield from _pipeline(replace(model, hidden=hidden), place, cached, (warm_up, turn, repeats), bar)


def _pipeline(
    model: Model, folder: Path, cached: float, steps: tuple[int, int, int], bar: float | None
) -> Iterator[Figure]:
    warm_up, count, repeats = steps
    graph = GraphStep(model, folder, "cached_ssd", int(cached * model.rows * model.tables))
    memory = GraphStep(model, folder)
    turns: list[tuple[Turn, Turn]] = []
    with graph.embedding, memory.embedding:
        for batch in keyed(make_batches(model, warm_up)):
            check_same("losses of the warm-up", graph(*batch), memory(*batch))
        for first in range(warm_up, warm_up + 2 * count * repeats, 2 * count):
            batches = keyed(make_batches(model, 2 * count, first))
            # but the first step of each, whose rows nothing was done to fetch
            plain = turn_of(graph.embedding, (graph(*batch) for batch in batches[:count]), 1)
            run = turn_of(graph.embedding, graph.run(batches[count:], ahead=AHEAD), 1)
            check_losses("cached_ssd", plain.results + run.results, [memory(*batch) for batch in batches])
            turns.append((plain, run))
    what = f"MLP {'-'.join(map(str, (*model.hidden, 1)))}, of the longer of dense work and fetch"
    longer = [max(dense_of(plain), plain.parts["pin"]) for plain, _ in turns]
    for number, name in ((1, "graph.run"), (0, "the plain loop")):
        sides = [pair[number] for pair in turns]
        ratio = median(side.seconds / seconds for side, seconds in zip(sides, longer, strict=True))
        notes = _split(sides, count - 1)
        yield figure(f"a step of {name}, {what}", ratio, bar=bar if number else None, at_most=True, notes=notes)


def dense_of(turn: Turn) -> float:
    """Seconds of all but pin, gather and update."""
    return turn.seconds - sum(turn.parts.values())


def _split(turns: Sequence[Turn], steps: int) -> str:
    def ms(seconds: Iterable[float]) -> str:
        return f"{1e3 * median(seconds) / steps:.1f}"

    return listed(
        [
            ("ms: step", ms(turn.seconds for turn in turns)),
            ("dense", ms(dense_of(turn) for turn in turns)),
            ("pin", ms(turn.parts["pin"] for turn in turns)),
            ("gather and update", ms(turn.parts["gather"] + turn.parts["update"] for turn in turns)),
            ("hit rate", f"{median(turn.hit_rate for turn in turns):.1%}"),
        ]
    )


class WideAndDeep(Graph):
    """Rows of 1 and of 16 columns, with next to nothing dense on them. One that does not share has equal ids."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.wide, self.deep = make_embedding(tables, dim=1, name="wide"), make_embedding(tables, name="deep")
        self.add_optimizer(OPTIMIZERS["adagrad"]([*self.wide.parameters(), *self.deep.parameters()]))

    def build(self, ids: Tensor, same: Tensor, labels: Tensor, shared: bool) -> Tensor:
        logits = self.wide(ids).sum((1, 2)) + self.deep(ids if shared else same).sum((1, 2))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        return loss


@workload(FEW, **asdict(replace(LARGE_STEP, hidden=())))
def sharing(folder: Path, batches: int = 16, repeats: int = 150, **fields: Any) -> Iterator[Figure]:
    """A step of two embeddings that look up the same ids: deduplicated once, of the time of once by each."""
    model = Model(**fields)
    given = [(ids, ids.clone(), labels) for ids, labels in keyed(make_batches(model, batches))]
    one, other = WideAndDeep(model.tables), WideAndDeep(model.tables)
    for batch in given:
        check_same("losses of a step that shares and of one that does not", one(*batch, True), other(*batch, False))
    sides = {
        "shared": lambda number: one(*given[number % batches], True),
        "by each": lambda number: one(*given[number % batches], False),
    }
    times = in_turns(sides, repeats, 1)  # the first traces
    ratio = times.ratio("shared", "by each")
    yield figure("two embeddings of the same ids, shared", ratio, bar=0.95, at_most=True, notes=str(times))


@workload({"repeats": 1}, name="compile")
def compile_time(folder: Path, batch: int = 512, dim: int = 16, repeats: int = 5) -> Iterator[Figure]:
    """How long the first call of the graph of examples/movielens.py takes, in a new process."""
    runs = []
    for _ in range(repeats):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            runs.append(child.submit(first_call, batch, dim).result())
    seconds = {name: median(run[name] for run in runs) for name in ("first", "next", "smaller")}
    notes = listed(
        [
            ("next call", f"{1e3 * seconds['next']:.1f} ms"),
            ("first of a smaller batch", f"{seconds['smaller']:.2f} s"),
            ("processes that imported Inductor", f"{sum(run['inductor'] for run in runs):.0f}"),
        ]
    )
    yield figure("first call of examples/movielens.py", seconds["first"], "s", bar=3, at_most=True, notes=notes)


def first_call(size: int, dim: int) -> dict[str, float]:
    """Seconds of the first call, the next, and the first with a smaller batch, as the last one of an epoch is.

    Raises Mismatch unless the first loss is that of the model called eagerly, bit for bit.
    """
    sys.path.insert(0, str(EXAMPLES))
    from movielens import DeepFM, TrainGraph, make_embedding
    from movielens_synthetic import synthetic_log

    torch.set_num_threads(2)
    log = synthetic_log()
    torch.manual_seed(0)
    with make_embedding(make_device_mem_store_options(), dim) as embedding:
        graph = TrainGraph(embedding, DeepFM(dim), 0.08)
        model = copy.deepcopy(graph.model)
        measured: dict[str, float] = {}
        losses = []
        for name, count in (("first", size), ("next", size), ("smaller", size // 2)):
            torch.manual_seed(1)  # the dropout
            begin = time.perf_counter()
            losses.append(graph(log.ids[:count], log.table_ids, log.labels[:count]))
            measured[name] = time.perf_counter() - begin
    measured["inductor"] = "torch._inductor.compile_fx" in sys.modules
    with make_embedding(make_device_mem_store_options(), dim) as untrained, torch.no_grad():
        torch.manual_seed(1)
        logits = model(untrained(log.ids[:size], log.table_ids), log.ids[:size])
        eager = nn.functional.binary_cross_entropy_with_logits(logits, log.labels[:size])
    check_same("losses of the first call and of the model called eagerly", losses[0], eager)
    return measured


@workload(
    {**TINY, "batch": 8, "hidden": (4,), "batches": 4, "warm_up": 5, "steps": 40, "every": 10},
    **asdict(replace(SMALL_STEP, optimizer="adam")),
)
def memory(
    folder: Path, batches: int = 500, warm_up: int = 1000, steps: int = 20_000, every: int = 100, **fields: Any
) -> Iterator[Figure]:
    """The slope of resident memory over many steps; `every`: steps between two samples."""
    model = Model(**fields)
    plain = GraphStep(model, folder)
    cached = GraphStep(model, folder, "cached_host_mem", cached=model.rows * model.tables // 2)
    some = keyed(make_batches(model, batches))
    given = [some[step % len(some)] for step in range(warm_up + steps)]
    losses = []
    with plain.embedding, cached.embedding:
        for what, results in (
            ("a plain loop on device_mem", (plain(*batch) for batch in given)),
            ("graph.run on cached_host_mem", cached.run(given)),
        ):
            resident, found = _resident(results, warm_up, steps, every)
            losses.append(found)
            slope, start = np.polyfit(every * np.arange(1, len(resident) + 1), resident, 1)
            notes = listed(
                [
                    ("resident at first", f"{start / 2**20:.1f} MiB"),
                    ("least to most", f"{(resident.max() - resident.min()) / 1024:.0f} KiB apart"),
                ]
            )
            unit = "bytes a step"
            yield figure(f"growth, {what}", float(slope), unit, bar=ADDED_BYTES, at_most=True, notes=notes)
    check_same("losses on device_mem and on cached_host_mem", *losses)


def _resident(results: Iterable[Tensor], warm_up: int, steps: int, every: int) -> tuple[NDArray[np.float64], Tensor]:
    """Bytes after every so often many steps, and the losses of all; the warm-up left out."""
    left = iter(results)
    for _ in islice(left, warm_up):
        pass
    losses, resident = torch.empty(steps), np.zeros(steps // every)
    for step, loss in enumerate(left):
        losses[step] = loss
        if (step + 1) % every == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            resident[step // every] = pages * os.sysconf("SC_PAGE_SIZE")
    return resident, losses
