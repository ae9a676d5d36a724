"""Time tables on an NVIDIA GPU, in device and host memory: whole steps, finds, gathers and graphs.

    python benchmarks/gpu.py [--repeats N] [--json FILE]      same as the workload gpu/steps of run.py

A figure is reported only if the results equal the CPU core's bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np
import torch
from models import GraphStep, Model, cycle, hash_batches, make_batches
from report import Figure
from torch import Tensor
from traces import Zipf, draw_ids
from workload import Mismatch, figure

from tierbed.engine import _core
from tierbed.engine.cache.cuda.cache import CacheSets
from tierbed.engine.cache.cuda.table_cache import CudaTableCache
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Batch, Faults, LegalIds, LookupTensors
from tierbed.engine.ops.cuda.device import Device, cuda_device
from tierbed.engine.ops.cuda.layout import InitialValues, Layout
from tierbed.engine.optim.kernel import load_kernels
from tierbed.engine.optim.row_optimizer import row_optimizer
from tierbed.engine.options.initializers import as_arrays, make_table_options, make_uniform_initializer
from tierbed.engine.store.cuda.full_table import CudaFullTable
from tierbed.engine.store.cuda.full_tier import CudaFullTier

TABLES, IDS, ROWS, DIM = 10, 104_857, 1 << 20, 128
STEP_BARS = {"sgd": 0.9, "adam": 1.2}  # ms; FBGEMM published 0.96 and 1.35 on an H100
STORES = ("device_mem", "host_mem", "cached_host_mem")
CACHED_BAR = 0.9  # steps/s relative to device_mem; the cache holds nearly all rows
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
FIND_DIM, FIND_SLOTS, FIND_BAR = 8, 1 << 25, 4.0  # 10^9 rows a second
LOADS = (0.5, 0.75, 0.95)
GATHER_BAR = 0.7  # relative to the copy bandwidth
GRAPH_BATCHES = (64, 4096)  # kernel launches dominate the small batch; kernels dominate the large one
BATCHES, CHECKED = 4, 3


class Tables:
    """Tables with uniform initial rows on a device, and the same tables in the CPU core."""

    def __init__(self, device: Device, tables: int, dim: int, optimizer: str) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        attached = OPTIMIZERS[optimizer]([parameter], lr=0.01)
        self.optimizer = row_optimizer(attached, attached.param_groups[0])
        states, widths = self.optimizer.initial_values, load_kernels()[optimizer].state_widths(dim)
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
        self.rule = self.layout, self.optimizer.rule
        self.params = cuda.allocate_step_params(device.torch_device)
        self.steps = 0

    def store(self, kind: str, capacity: int) -> CudaFullTier | CudaTableCache:
        """Make a store. A cache has room for all rows, though single sets may overflow."""
        if kind == "device_mem":
            return CudaFullTier(self.layout, self.host_layout, capacity, self.faults, "device")
        host = CudaFullTier(self.layout, self.host_layout, capacity, self.faults, "host")
        if kind == "host_mem":
            return host
        cache = CacheSets(self.layout, 2 * capacity * self.layout.line_bytes)
        return CudaTableCache(self.layout, host, cache, self.faults)

    def table(self, capacity: int, load: float = 0.75) -> CudaFullTable:
        return CudaFullTable(self.layout, capacity, load)

    def batch(self, ids: Tensor) -> Batch:
        return Batch(self.device, [LookupTensors(ids.reshape(-1))], LegalIds(self.tables), self.faults.word)

    def step(self, store: CudaFullTier | CudaTableCache, ids: Tensor, grads: Tensor) -> Tensor:
        """Run one step on the device. ids [n, tables], grads [n * tables, dim]. Returns the looked-up rows."""
        self.steps += 1
        batch = self.batch(ids)
        store.pin(batch, None)
        out = torch.empty_like(grads)
        cuda.gather(batch, self.layout, 0, out)
        cuda.write_step_params(*self.rule, self.optimizer.compute_hyperparams(self.steps), self.steps, 1.0, self.params)
        cuda.update(*self.rule, batch, ([grads], [False], [None]), self.params, self.written, self.faults.word)
        store.unpin(batch, is_dirty=True)
        return out

    def step_on_host(self, ids: Tensor, grads: Tensor) -> Tensor:
        """Run the same step in the CPU core. Call it after `step`: it reuses the step number."""
        keys = ids.reshape(-1).cpu().numpy().view(np.uint64)
        batch = _core.Batch([(keys, None, None)], self.tables, None)
        if self.host.look_up_rows(batch):
            self.host.insert_missing(batch, self.host_layout)
        out = np.empty(grads.shape, np.float32)
        _core.gather(batch, self.host_layout, 0, out)
        rule, hyperparams = self.optimizer.rule, self.optimizer.compute_hyperparams(self.steps)
        _core.update(batch, self.host_layout, [grads.cpu().numpy()], [False], [None], rule, hyperparams, self.steps)
        return torch.from_numpy(out)

    def initial(self, keys: Tensor) -> Tensor:
        """Return the initial rows for keys of the first table, as the CPU core computes them."""
        out = np.empty((len(keys), self.dim), np.float32)
        numbers = keys.cpu().numpy().view(np.uint64)
        batch = _core.Batch([(numbers, np.zeros(len(keys), np.uint32), None)], self.tables, None)
        _core.initialise_missing(batch, self.host_layout)
        _core.gather(batch, self.host_layout, 0, out)
        return torch.from_numpy(out)


def make_step(
    device: Device, kind: str, optimizer: str, count: int, rows: int, tables: int, dim: int
) -> Callable[[int], Tensor]:
    """Return a step on batch `i % BATCHES`. Raises Mismatch if the first outputs differ from the CPU core's."""
    torch_device, trace = device.torch_device, Zipf(tables, rows, count)
    batches = [draw_ids(trace, step).to(torch_device) for step in range(BATCHES)]
    grads = torch.randn(count * tables, dim, generator=torch.Generator().manual_seed(0)).to(torch_device)
    both = Tables(device, tables, dim, optimizer)
    store = both.store(kind, rows * tables)
    for index in range(CHECKED):
        inputs = batches[index % 2], grads  # the third step reads rows that the first updated
        _check_bits(both.step(store, *inputs), both.step_on_host(*inputs))
    _check_no_fault(both)
    return lambda index: both.step(store, batches[index % BATCHES], grads)


def make_find(device: Device, slots: int, load: float, count: int) -> tuple[Callable[[], Tensor], int]:
    """Return a function that finds up to `count` rows and copies their values, and return the row count.

    The index is filled to `load`. Raises Mismatch if the function does not return the initial rows.
    """
    rows = int(slots * load)
    both = Tables(device, 1, FIND_DIM, "sgd")
    table = both.table(rows, load)
    torch_device, part = device.torch_device, min(rows, 1 << 22)
    keys = torch.arange(rows, dtype=torch.int64, device=torch_device) * 0x1E3779B97F4A7C15
    for begin in range(0, rows, part):
        batch = both.batch(keys[begin : begin + part, None])
        table.insert_missing(batch, table.find(batch))
    generator = torch.Generator(device=torch_device).manual_seed(0)
    selected = keys[torch.randperm(rows, generator=generator, device=torch_device)[:count]]
    batch = both.batch(selected[:, None])
    out = torch.empty((len(selected), FIND_DIM), dtype=torch.float32, device=torch_device)

    def find() -> Tensor:
        table.find(batch)
        cuda.gather(batch, both.layout, 0, out)
        return out

    _check_bits(find(), both.initial(selected))
    _check_no_fault(both)
    return find, len(selected)


def make_gather(device: Device, rows: int, count: int) -> tuple[Callable[[], Tensor], int]:
    """Return a function that gathers `count` random rows of DIM columns, and the number of bytes it moves.

    Raises Mismatch if the function does not return the initial rows.
    """
    both = Tables(device, 1, DIM, "sgd")
    table = both.table(rows)
    torch_device = device.torch_device
    keys = torch.randint(0, rows, (count, 1), device=torch_device)
    batch = both.batch(keys)
    table.insert_missing(batch, table.find(batch))
    out = torch.empty((count, DIM), dtype=torch.float32, device=torch_device)

    def gather() -> Tensor:
        cuda.gather(batch, both.layout, 0, out)
        return out

    _check_bits(gather(), both.initial(keys.flatten()))
    return gather, 2 * out.nbytes


def make_graph_steps(
    device: torch.device, batch: int, rows: int, tables: int, dim: int
) -> dict[str, Callable[[int], Tensor]]:
    """Return plain steps, and the same steps recorded as a CUDA graph. Raises Mismatch if their losses differ."""
    model = Model(rows, tables, batch, (256,), "adam", dim=dim)
    batches = [(keys.to(device), labels.to(device)) for keys, labels in hash_batches(make_batches(model, BATCHES))]
    graphs = {kind: GraphStep(model, Path(), capacity=rows * tables).to(device) for kind in ("plain", "recorded")}
    graphs["recorded"].cuda_graph()
    steps = {kind: cycle(graph, batches) for kind, graph in graphs.items()}
    plain, recorded = (torch.stack([step(number) for number in range(2 * BATCHES)]) for step in steps.values())
    _check_bits(recorded, plain.cpu())
    for one, other in zip(*(graph.embedding.chunks() for graph in graphs.values()), strict=True):
        _check_bits(other[2], one[2])
    return steps


def _check_bits(actual: Tensor, expected: Tensor) -> None:
    if not torch.equal(actual.cpu().view(torch.int32), expected.view(torch.int32)):
        raise Mismatch("the device's bits differ from the CPU core's")


def _check_no_fault(tables: Tables) -> None:
    if fault := int(tables.faults.word):
        raise Mismatch(f"the device reported fault {fault}")


def measure_ms(run: Callable[[int], object], repeats: int) -> float:
    """Return the median time on the device, after BATCHES warm-up runs."""
    times = []
    for index in range(BATCHES + repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run(index)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times[BATCHES:])


def figures(repeats: int) -> Iterator[Figure]:
    device = cuda_device(torch.cuda.current_device())
    for optimizer, bar in STEP_BARS.items():
        times = {}
        for kind in STORES:
            step = make_step(device, kind, optimizer, IDS, ROWS, TABLES, DIM)
            times[kind] = measure_ms(step, repeats)
            most = bar if kind == "device_mem" else None
            yield figure(f"step {optimizer} {kind}", times[kind], "ms", bar=most, at_most=True)
            del step
        ratio = times["device_mem"] / times["cached_host_mem"]
        yield figure(f"steps/s, cached_host_mem / device_mem, {optimizer}", ratio, bar=CACHED_BAR)
    for load in LOADS:
        find, rows = make_find(device, FIND_SLOTS, load, 1 << 22)
        rate = rows / measure_ms(lambda _, find=find: find(), repeats) / 1e6
        yield figure(f"find with copy, load {load}", rate, "10^9 rows/s", bar=FIND_BAR)
    for batch in GRAPH_BATCHES:
        for kind, step in make_graph_steps(device.torch_device, batch, ROWS, TABLES, 16).items():
            yield figure(f"graph of {batch}, {kind}", measure_ms(step, repeats), "ms")
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    copied = 2 * source.nbytes / measure_ms(lambda _: target.copy_(source), repeats) / 1e6
    yield figure("copy", copied, "GB/s", notes=describe_gpu())
    gather, moved = make_gather(device, 1 << 22, 1 << 20)
    ratio = moved / measure_ms(lambda _: gather(), repeats) / 1e6 / copied
    yield figure(f"bandwidth, gather of {DIM} columns / copy", ratio, bar=GATHER_BAR)


def describe_gpu() -> str:
    """Return the device's name with the driver, CuPy and CUDA runtime versions."""
    import cupy  # type: ignore[import-not-found]

    driver, runtime = cupy.cuda.runtime.driverGetVersion(), cupy.cuda.runtime.runtimeGetVersion()
    return f"{torch.cuda.get_device_name()}; CUDA driver {driver}, CuPy {cupy.__version__}, CUDA runtime {runtime}"


if __name__ == "__main__":
    import run

    sys.exit(run.main(["gpu/steps", *sys.argv[1:]]))
