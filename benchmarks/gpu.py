"""Time tables of an NVIDIA GPU, in its memory and in the host's: whole steps, finds, gathers, graphs; README.md here.

    python benchmarks/gpu.py [--repeats N] [--json FILE]

A figure is printed only where the device gives the bits of the CPU core. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tierbed import Graph, MultiTableEmbedding, make_device_mem_store_options
from tierbed.engine import _core
from tierbed.engine.cache.cuda.cache import Cache
from tierbed.engine.cache.cuda.cached_table import CachedTable
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Batch, Faults, Ids, Segment
from tierbed.engine.ops.cuda.device import Device, cuda_device
from tierbed.engine.ops.cuda.layout import InitialValues, Layout
from tierbed.engine.optim.row_optimizer import row_optimizer
from tierbed.engine.optim.rule import rule_named
from tierbed.engine.options.initializers import as_arrays, make_table_options, make_uniform_initializer
from tierbed.engine.store.cuda.full import CudaFullStore
from tierbed.engine.store.cuda.full_table import CudaFullTable

TABLES, IDS, ROWS, DIM, ALPHA = 10, 104_857, 1 << 20, 128, 1.05
STEP_BARS = {"sgd": 0.9, "adam": 1.2}  # ms; published on an H100: FBGEMM 0.96 and 1.35
STORES = ("device_mem", "host_mem", "cached_host_mem")
CACHED_BAR = 0.9  # of the steps a second of device_mem, where the cache holds nearly all that steps need
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
FIND_DIM, FIND_SLOTS, FIND_BAR = 8, 1 << 25, 4.0  # 10^9 rows a second
LOADS = (0.5, 0.75, 0.95)
GATHER_BAR = 0.7  # of the copy bandwidth
GRAPH_BATCHES = (64, 4096)  # where launching takes the time, and where kernels do
BATCHES, CHECKED = 4, 3


class Mismatch(Exception):
    """The device does not give what the CPU core gives: there is nothing to time."""


class Tables:
    """Tables of uniform rows on a device and, for comparison, in the CPU core."""

    def __init__(self, device: Device, tables: int, dim: int, optimizer: str) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        attached = OPTIMIZERS[optimizer]([parameter], lr=0.01)
        self.optimizer = row_optimizer(attached, attached.param_groups[0])
        states, widths = self.optimizer.initial, rule_named(optimizer).kernel.state_widths(dim)
        kinds, parameters, quantiles = as_arrays(
            [make_table_options(make_uniform_initializer(-0.1, 0.1))] * tables, [dim]
        )
        self.tables, self.dim, self.device = tables, dim, device
        self.host_layout = _core.Layout(dim, states, list(widths), 0, [dim], kinds, parameters, quantiles)
        self.host = _core.FullTable(self.host_layout)
        initial = InitialValues(states, widths, 0, [dim], kinds, parameters, quantiles)
        self.layout = Layout(device, initial)
        self.faults = Faults(device, "benchmark", tables, None)
        self.written = torch.zeros(tables, dtype=torch.int64, device=device.torch_device)
        self.rule = cuda.RuleKernels(self.layout, self.optimizer.rule)
        self.numbers = cuda.new_numbers(device.torch_device)
        self.steps = 0

    def store(self, kind: str, capacity: int) -> CudaFullStore | CachedTable:
        """Of STORES; the cache has room for all rows, though sets may overflow."""
        if kind == "device_mem":
            return CudaFullStore(self.layout, self.host_layout, capacity, self.faults, "device")
        host = CudaFullStore(self.layout, self.host_layout, capacity, self.faults, "host")
        if kind == "host_mem":
            return host
        cache = Cache(self.layout, 2 * capacity * self.layout.line_bytes)
        return CachedTable(self.layout, host, cache, self.faults)

    def table(self, capacity: int, load: float = 0.75) -> CudaFullTable:
        return CudaFullTable(self.layout, capacity, load)

    def batch(self, ids: Tensor) -> Batch:
        return Batch(self.device, [Segment(ids.reshape(-1))], Ids(self.tables), self.faults.word)

    def step(self, store: CudaFullStore | CachedTable, ids: Tensor, grads: Tensor) -> Tensor:
        """Forward, backward and update on the device; ids [n, tables], grads [n * tables, dim]. What was looked up."""
        self.steps += 1
        batch = self.batch(ids)
        store.pin(batch, None)
        out = torch.empty_like(grads)
        cuda.gather(batch, self.layout, 0, out)
        self.rule.write_numbers(self.optimizer.hyper(self.steps), self.steps, 1.0, self.numbers)
        self.rule.update(batch, [grads], [False], [None], self.numbers, self.written, self.faults.word)
        store.unpin(batch, dirty=True)
        return out

    def step_on_host(self, ids: Tensor, grads: Tensor) -> Tensor:
        """The same in the CPU core; after `step`, whose number it takes."""
        keys = ids.reshape(-1).cpu().numpy().view(np.uint64)
        batch = _core.Batch([(keys, None, None)], self.tables, None)
        if self.host.find(batch):
            self.host.insert_missing(batch, self.host_layout)
        out = np.empty(grads.shape, np.float32)
        _core.gather(batch, self.host_layout, 0, out)
        rule, hyper = self.optimizer.rule, self.optimizer.hyper(self.steps)
        _core.update(batch, self.host_layout, [grads.cpu().numpy()], [False], [None], rule, hyper, self.steps)
        return torch.from_numpy(out)


def power_law(rng: np.random.Generator, count: int, rows: int, tables: int) -> NDArray[np.int64]:
    """[count, tables] keys of 64 bits; key of rank r (from 1) is drawn in proportion to r ** -ALPHA."""
    shares = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -ALPHA)
    ranks = np.searchsorted(shares, rng.random((count, tables)) * shares[-1])
    return (ranks.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).view(np.int64)


def checked_step(
    device: Device, kind: str, optimizer: str, ids: int, rows: int, tables: int, dim: int
) -> Callable[[int], Tensor]:
    """A step of batch `i % BATCHES`, after outputs of some steps had the bits of the CPU core. Mismatch."""
    rng = np.random.default_rng(0)
    place = device.torch_device
    batches = [torch.from_numpy(power_law(rng, ids, rows, tables)).to(place) for _ in range(BATCHES)]
    grads = torch.from_numpy(rng.standard_normal((ids * tables, dim), np.float32)).to(place)
    both = Tables(device, tables, dim, optimizer)
    store = both.store(kind, rows * tables)
    for index in range(CHECKED):
        given = batches[index % 2], grads  # rows of the third step were updated in the first
        _same(both.step(store, *given), both.step_on_host(*given))
    _no_fault(both)
    return lambda index: both.step(store, batches[index % BATCHES], grads)


def checked_find(device: Device, slots: int, load: float, asked: int) -> tuple[Callable[[], Tensor], int]:
    """A find of `asked` rows that copies their values, in an index filled to `load`, after it gave the initial bits."""
    rows = int(slots * load)
    both = Tables(device, 1, FIND_DIM, "sgd")
    table = both.table(rows, load)
    place, part = device.torch_device, min(rows, 1 << 22)
    keys = torch.arange(rows, dtype=torch.int64, device=place) * 0x1E3779B97F4A7C15
    for begin in range(0, rows, part):
        batch = both.batch(keys[begin : begin + part, None])
        table.insert_missing(batch, table.find(batch))
    generator = torch.Generator(device=place).manual_seed(0)
    wanted = keys[torch.randperm(rows, generator=generator, device=place)[:asked]]
    batch = both.batch(wanted[:, None])
    out = torch.empty((len(wanted), FIND_DIM), dtype=torch.float32, device=place)

    def find() -> Tensor:
        table.find(batch)
        cuda.gather(batch, both.layout, 0, out)
        return out

    expected = np.empty((len(wanted), FIND_DIM), np.float32)
    _core.initialise(both.host_layout, np.zeros(len(wanted), np.uint32), wanted.cpu().numpy().view(np.uint64), expected)
    _same(find(), torch.from_numpy(expected))
    _no_fault(both)
    return find, len(wanted)


def checked_gather(device: Device, rows: int, asked: int) -> tuple[Callable[[], Tensor], int]:
    """A gather of DIM columns of random rows, after it had the initial bits; and the bytes that it moves."""
    both = Tables(device, 1, DIM, "sgd")
    table = both.table(rows)
    place = device.torch_device
    keys = torch.randint(0, rows, (asked, 1), device=place)
    batch = both.batch(keys)
    table.insert_missing(batch, table.find(batch))
    out = torch.empty((asked, DIM), dtype=torch.float32, device=place)
    expected = np.empty((asked, DIM), np.float32)
    _core.initialise(
        both.host_layout, np.zeros(asked, np.uint32), keys.view(-1).cpu().numpy().view(np.uint64), expected
    )

    def gather() -> Tensor:
        cuda.gather(batch, both.layout, 0, out)
        return out

    _same(gather(), torch.from_numpy(expected))
    return gather, 2 * out.nbytes


class Scores(Graph):
    """A training step: rows of several tables, an MLP, Adam."""

    def __init__(self, place: torch.device, rows: int, tables: int, dim: int) -> None:
        super().__init__()
        options = [make_table_options(make_uniform_initializer(-0.1, 0.1))] * tables
        where = make_device_mem_store_options(capacity=rows * tables)
        self.rows = MultiTableEmbedding("rows", dim, torch.float32, torch.int64, options, where)
        self.mlp = torch.nn.Sequential(torch.nn.Linear(tables * dim, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
        self.to(place)
        self.add_optimizer(torch.optim.Adam(self.parameters()))

    def build(self, ids: Tensor) -> Tensor:
        loss: Tensor = self.mlp(self.rows(ids).flatten(1)).square().mean()
        loss.backward()
        return loss


def checked_graphs(
    place: torch.device, batch: int, rows: int, tables: int, dim: int
) -> dict[str, Callable[[int], Tensor]]:
    """Steps on batch `i % BATCHES`, plain and recorded as a CUDA graph, after both gave the same bits. Mismatch."""
    rng = np.random.default_rng(0)
    ids = [torch.from_numpy(power_law(rng, batch, rows, tables)).to(place) for _ in range(BATCHES)]
    graphs, losses = {}, []
    for kind in ("plain", "recorded"):
        torch.manual_seed(0)
        graphs[kind] = Scores(place, rows, tables, dim)
        graphs[kind].cuda_graph(kind == "recorded")
        losses.append(torch.stack([graphs[kind](ids[i % BATCHES]) for i in range(2 * BATCHES)]))
    _same(losses[1], losses[0].cpu())
    for one, other in zip(*(graph.rows.chunks() for graph in graphs.values()), strict=True):
        _same(other[2], one[2])
    return {kind: lambda i, graph=graph: graph(ids[i % BATCHES]) for kind, graph in graphs.items()}


def _same(actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual.cpu().view(torch.int32), expected.view(torch.int32)):
        raise Mismatch("the device's bits differ from those of the CPU core")


def _no_fault(tables: Tables) -> None:
    if fault := int(tables.faults.word):
        raise Mismatch(f"the device found fault {fault}")


def milliseconds(run: Callable[[int], object], repeats: int) -> float:
    """The median time on the device; the first runs only warm up."""
    times = []
    for index in range(BATCHES + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(index)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[BATCHES:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    arguments = parser.parse_args()
    repeats = arguments.repeats
    if not torch.cuda.is_available():
        print("no NVIDIA GPU: nothing to measure", file=sys.stderr)
        return 2
    device = cuda_device(torch.cuda.current_device())
    about, figures = machine(), []
    print(about)

    def report(name: str, figure: float, unit: str, bar: float | None, below: bool) -> None:
        good = bar is None or (figure <= bar if below else figure >= bar)
        figures.append({"name": name, "figure": figure, "unit": unit, "bar": bar, "passed": good})
        against = "" if bar is None else f"bar {bar:g}  {'ok' if good else 'MISSED'}"
        print(f"{name:32} {figure:10.3f} {unit:12} {against}")

    for optimizer, bar in STEP_BARS.items():
        times = {}
        for kind in STORES:
            step = checked_step(device, kind, optimizer, IDS, ROWS, TABLES, DIM)
            times[kind] = milliseconds(step, repeats)
            report(f"step {optimizer} {kind}", times[kind], "ms", bar if kind == "device_mem" else None, below=True)
            del step
        share = times["device_mem"] / times["cached_host_mem"]
        report(f"cached_host_mem {optimizer}", share, "of device_mem", CACHED_BAR, below=False)
    for load in LOADS:
        find, rows = checked_find(device, FIND_SLOTS, load, 1 << 22)
        rate = rows / milliseconds(lambda _, find=find: find(), repeats) / 1e6
        report(f"find with copy, load {load}", rate, "10^9 rows/s", FIND_BAR, below=False)
    for batch in GRAPH_BATCHES:
        for kind, step in checked_graphs(device.torch_device, batch, ROWS, TABLES, 16).items():
            report(f"graph of {batch}, {kind}", milliseconds(step, repeats), "ms", None, below=True)
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / milliseconds(lambda _: target.copy_(source), repeats) / 1e6
    print(f"{'copy':32} {copied:10.1f} GB/s")
    gather, moved = checked_gather(device, 1 << 22, 1 << 20)
    share = moved / milliseconds(lambda _: gather(), repeats) / 1e6 / copied
    report(f"gather of {DIM} columns", share, "of the copy", GATHER_BAR, below=False)
    if arguments.json is not None:
        content = {"machine": about, "copy_gb_per_s": copied, "figures": figures}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")
    return int(not all(figure["passed"] for figure in figures))


def machine() -> str:
    """The device, its driver, and versions."""
    import cupy  # type: ignore[import-not-found]

    name = torch.cuda.get_device_name()
    driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    versions = f"torch {torch.__version__}, CuPy {cupy.__version__}"
    return f"{name}; CUDA driver {driver}, CuPy's runtime {runtime}; {versions}"


if __name__ == "__main__":
    sys.exit(main())
