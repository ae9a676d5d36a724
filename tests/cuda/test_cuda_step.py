"""Gathers, pooling and updates on a device have the bits of the CPU core, which its own tests hold to NumPy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet

from support.cells import rotated
from support.cuda_tables import NO_GPU, DeviceTable, HostSegment, contents_on_host, on_devices, tensor
from support.rows import SPECIAL_KEYS, Table
from tierbed.engine import _core
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Batch, Ids, Segment
from tierbed.engine.ops.cuda.device import Device, cuda_device
from tierbed.engine.optim.kernel import Kernel, declared

pytestmark = pytest.mark.op

DIM = 17  # where any would do: few shapes of a line are few programs to compile
RULES = {kernel.name: kernel for kernel in declared()}
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


class Both:
    """One table on the host and one on a device, given the same batches."""

    def __init__(self, device: Device, table: Table) -> None:
        self.table = table
        self.on_device = DeviceTable(device, table)
        self.here = _core.FullTable(table.layout)

    def pin(self, segments: list[HostSegment], padding: int | None = None) -> None:
        arrays = [
            (
                np.array(keys, np.uint64),
                None if tables is None else np.array(tables, np.uint32),
                bags if bags is None or isinstance(bags, int) else np.array(bags, np.int64),
            )
            for keys, tables, bags in segments
        ]
        self.host = _core.Batch(arrays, self.table.tables, padding)
        if self.here.find(self.host):
            self.here.insert_missing(self.host, self.table.layout)
        self.device = self.on_device.pinned(segments, padding)

    def tensor(self, values: np.ndarray) -> torch.Tensor:
        return tensor(self.on_device.device, values, values.dtype.type)

    def check(self) -> None:
        """The rows of the batch have the same bits on both sides."""
        assert self.on_device.contents(self.device) == contents_on_host(self.table, self.host)

    def update(
        self, kernel: Kernel, grads: list[np.ndarray], means: list[bool], weights: list[np.ndarray | None],
        hyper: list[float], step: int, dtype: str = "float32",
    ) -> None:  # fmt: skip
        arrays = [torch.from_numpy(grad).to(DTYPES[dtype]) for grad in grads]
        raw = [(a if dtype == "float32" else a.view(torch.uint16)).numpy() for a in arrays]
        args = (kernel.name, hyper, step, dtype)
        new = _core.update(self.host, self.table.layout, raw, means, weights, *args)
        before = int(self.on_device.written.sum())
        rule, numbers = (self.on_device.layout, kernel.name), self.on_device.numbers
        on_device = [a.to(self.on_device.device.torch_device) for a in arrays]
        scales = [None if w is None else self.tensor(w) for w in weights]
        written, faults = self.on_device.written, self.on_device.faults
        cuda.write_hyper(*rule, hyper, step, 1.0, numbers)
        cuda.update(*rule, self.device, (on_device, means, scales), numbers, written, faults)
        assert int(self.on_device.written.sum()) - before == new


ROWS = [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")]  # embedding, states


def both_of(device: Device, kernel: Kernel, dim: int, types: tuple[str, str] = ROWS[0]) -> Both:
    widths = [dim] * len(kernel.element_states) + [1] * len(kernel.row_states)
    narrow = len(kernel.element_states) if types[1] != "float32" else 0
    types = types[0], types[1] if narrow else "float32"
    initial = [0.1 * (k + 1) for k in range(len(widths))]
    return Both(device, Table([dim], initial, state_widths=widths, types=types, narrow_states=narrow))


def random_hyper(kernel: Kernel, rng: np.random.Generator, limits: list[float]) -> list[float]:
    values = rng.uniform(0.05, 0.95, len(kernel.all_hypers))
    limit = kernel.catch_up.limit if kernel.catch_up else None
    flags = {"maximize": 1.0, "nesterov": 0.0, limit: 3.0}
    past = [2.0, 1.0, 0.3, 6.0, 0.9] if kernel.catch_up and len(limits) == 3 else []  # knots of learning rates
    return (
        [flags.get(name, value) for name, value in zip(kernel.all_hypers, values.tolist(), strict=True)] + limits + past
    )


def random_keys(rng: np.random.Generator, count: int) -> list[int]:
    return [int(key) for key in rng.choice(np.array([*SPECIAL_KEYS, *range(40, 80)], np.uint64), count)]


def cells(rules: Iterable[str]) -> list[ParameterSet]:
    """A rule and types of rows, each pair a program to compile: each rule with one of the types, the others slow."""
    return [
        pytest.param(rule, types, marks=() if number % len(ROWS) == turn else pytest.mark.slow, id=f"{rule}-{types[1]}")
        for number, rule in enumerate(rules)
        for turn, types in enumerate(ROWS)
    ]


@on_devices
@pytest.mark.parametrize("limits", [[0.0, 0.0], [0.5, 1.0, 0.7]], ids=str)
@pytest.mark.parametrize(("rule", "types"), cells(RULES))
@rotated("limits")
def test_steps_of_every_rule(device: Device, rule: str, types: tuple[str, str], limits: list[float]) -> None:
    kernel = RULES[rule]
    rng = np.random.default_rng(1)
    both = both_of(device, kernel, DIM, types)
    hyper = random_hyper(kernel, rng, limits)
    for step in (1, 2, 3, 9, 10):  # rows that miss steps catch up where the rule does
        both.pin([(random_keys(rng, 70), rng.integers(0, 5, 70).tolist(), None)], padding=3)
        scale = np.float32(10.0) ** rng.integers(-42, 3, (70, 1)).astype(np.float32)  # some are denormal
        grads = rng.standard_normal((70, DIM), np.float32) * scale
        both.update(kernel, [grads], [False], [None], hyper, step)
        both.check()


@on_devices
@pytest.mark.parametrize("rule", ["adagrad", "adam", "adamw"])
def test_without_eps_a_gradient_of_zero_makes_no_nan(device: Device, rule: str) -> None:
    kernel = RULES[rule]
    rng = np.random.default_rng(2)
    both = Both(device, Table([5], [0.0] * len(kernel.element_states), state_widths=[5] * len(kernel.element_states)))
    hyper = random_hyper(kernel, rng, [0.0, 0.0])
    hyper[kernel.all_hypers.index("eps")] = 0.0
    if "weight_decay" in kernel.all_hypers:
        hyper[kernel.all_hypers.index("weight_decay")] = 0.0
    grads = np.array([[0, -0.0, 1e-30, 1, -2]] * 3, np.float32)  # the square of 1e-30 is 0
    for step in (1, 2):
        both.pin([([1, 2, 3], None, None)])
        both.update(kernel, [grads], [False], [None], hyper, step)
        both.check()
    assert np.isfinite(both.table.values(both.host.lines)).all()


@on_devices
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("rule", "types"), cells(["adam", "catch_up_adam", "partial_rowwise_lamb", "rowwise_adagrad", "sgd"])
)
@rotated("dim")
def test_lanes_of_several_columns(device: Device, dim: int, rule: str, types: tuple[str, str]) -> None:
    rng = np.random.default_rng(dim)
    kernel = RULES[rule]
    both = both_of(device, kernel, dim, types)
    hyper = random_hyper(kernel, rng, [0.0, 0.0])
    for step in (1, 2, 9):
        keys = [7] * 700 + random_keys(rng, 60)  # more of one row than a block of a sum has room for
        both.pin([(keys, None, None)])
        grads = rng.standard_normal((760, dim), np.float32)
        both.update(kernel, [grads], [False], [None], hyper, step)
        both.check()


@on_devices
@pytest.mark.parametrize("dim", [1, 5, 64, 130])
def test_dims(device: Device, dim: int) -> None:
    rng = np.random.default_rng(dim)
    both = both_of(device, RULES["adam"], dim)
    for step in (1, 2):
        both.pin([(random_keys(rng, 60), None, None)])
        grads = rng.standard_normal((60, dim), np.float32)
        both.update(RULES["adam"], [grads], [False], [None], random_hyper(RULES["adam"], rng, [0.0, 0.5]), step)
        both.check()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("repeats", [[255, 256, 257, 1], [1, 700, 3, 512, 513, 2], [1500]], ids=str)
def test_rows_with_many_occurrences_are_summed_in_blocks(device: Device, repeats: list[int], dtype: str) -> None:
    rng = np.random.default_rng(0)
    both = both_of(device, RULES["adagrad"], DIM)
    keys = rng.permutation(np.repeat(np.arange(len(repeats)), repeats)).tolist() + [99] * 7
    n = len(keys)
    for step in (1, 2):
        both.pin([(keys, [0] * n, None)], padding=99)
        grads = rng.standard_normal((n, DIM), np.float32)
        both.update(RULES["adagrad"], [grads], [False], [None], [0.1, 0.01, 0.0, 1e-3, 0.0, 0.0], step, dtype)
        both.check()


@on_devices
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.pairs
def test_pooling_and_its_gradients(device: Device, weighted: bool, mean: bool, dtype: str) -> None:
    rng = np.random.default_rng(3)
    both = both_of(device, RULES["adagrad"], DIM)
    keys = random_keys(rng, 90)
    segments: list[HostSegment] = [
        (keys[:30], rng.integers(0, 5, 10).tolist(), 3),
        (keys[30:80], None, [0, 0, 7, 30, 31, 50]),
        (keys[80:] + [3] * 4, None, 2),
        (keys[:20], None, None),
    ]
    for step in (1, 2):
        both.pin(segments, padding=3)
        grads, means, weights = [], [], []
        for index, (ids, _, bags) in enumerate(segments):
            pooled = bags is not None
            means.append(mean and pooled)
            weights.append(rng.standard_normal(len(ids), np.float32) if weighted and pooled else None)
            outputs = both.device.lookups[index].bags
            out = np.empty((outputs, DIM), np.float32 if dtype == "float32" else np.uint16)
            _core.gather(both.host, both.table.layout, index, out, means[-1], weights[-1], dtype)
            there = torch.empty((outputs, DIM), dtype=DTYPES[dtype], device=device.torch_device)
            scale = None if weights[-1] is None else both.tensor(weights[-1])
            cuda.gather(both.device, both.on_device.layout, index, there, means[-1], scale)
            assert there.view(torch.uint8).cpu().numpy().tobytes() == out.tobytes()
            grads.append(rng.standard_normal((outputs, DIM), np.float32))
            if pooled and dtype == "float32":
                wanted = np.empty(len(ids), np.float32)
                _core.weights_grad(both.host, both.table.layout, index, grads[-1], wanted, means[-1])
                actual = torch.empty(len(ids), dtype=torch.float32, device=device.torch_device)
                cuda.weights_grad(both.device, both.on_device.layout, index, both.tensor(grads[-1]), actual, means[-1])
                assert actual.cpu().numpy().tobytes() == wanted.tobytes()
        hyper = [0.1, 0.01, 0.0, 1e-3, 0.0, 0.0]
        both.update(RULES["adagrad"], grads, means, weights, hyper, step, dtype)
        both.check()


@on_devices
def test_more_lookups_than_a_kernel_takes_gradients_of(device: Device) -> None:
    rng = np.random.default_rng(4)
    both = both_of(device, RULES["sgd"], DIM)
    segments: list[HostSegment] = [(random_keys(rng, 5), None, None) for _ in range(cuda.MAX_SOURCES + 2)]
    both.pin(segments)
    grads = [rng.standard_normal((5, DIM), np.float32) for _ in segments]
    nothing = [None] * len(segments)
    both.update(RULES["sgd"], grads, [False] * len(segments), nothing, [0.1, 0.0, 0.0, 0.0, 0.0], 1)
    both.check()


@on_devices
def test_gather_gives_zeros_for_padding_and_every_dtype(device: Device) -> None:
    rng = np.random.default_rng(5)
    for dim in (8, 5):
        both = both_of(device, RULES["sgd"], dim)
        both.pin([(random_keys(rng, 200), rng.integers(0, 5, 200).tolist(), None)], padding=2)
        for name, dtype in DTYPES.items():
            out = np.empty((200, dim), np.float32 if name == "float32" else np.uint16)
            _core.gather(both.host, both.table.layout, 0, out, dtype=name)
            assert (out == 0).all(1).any()
            there = torch.empty((200, dim), dtype=dtype, device=device.torch_device)
            cuda.gather(both.device, both.on_device.layout, 0, there)
            assert there.view(torch.uint8).cpu().numpy().tobytes() == out.tobytes()


@on_devices
def test_assign_keeps_the_last_occurrence_and_the_state(device: Device) -> None:
    rng = np.random.default_rng(6)
    both = both_of(device, RULES["adagrad"], DIM)
    for step in (4, 9):
        both.pin([(random_keys(rng, 80), [0] * 80, None)], padding=3)
        values = rng.standard_normal((80, DIM), np.float32)
        new = _core.assign(both.host, both.table.layout, values, step)
        before, there = int(both.on_device.written.sum()), both.on_device
        cuda.assign(both.device, there.layout, both.tensor(values), step, there.written, there.faults)
        assert int(there.written.sum()) - before == new
        both.check()


@on_devices
def test_nothing_is_written_after_a_fault(device: Device) -> None:
    both = both_of(device, RULES["sgd"], DIM)
    both.pin([([1, 2, 3], None, None)])
    there, before = both.on_device, both.on_device.contents(both.device)
    ones = both.tensor(np.ones((3, DIM), np.float32))
    there.faults.fill_(2)
    rule = there.layout, "sgd"
    cuda.write_hyper(*rule, [0.1, 0, 0, 0, 0], 1, 1.0, there.numbers)
    cuda.update(*rule, both.device, ([ones], [False], [None]), there.numbers, there.written, there.faults)
    cuda.assign(both.device, there.layout, ones, 1, there.written, there.faults)
    more = there.pinned([([8, 9], None, None)])
    assert not any(values.any() for values in there.read(more.lines))
    assert there.contents(both.device) == before
    assert int(there.written.sum()) == 0


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_a_step_with_a_capacity_is_captured_in_a_cuda_graph() -> None:
    device, rng = cuda_device(0), np.random.default_rng(7)
    host = Table([8], tables=1)
    table = DeviceTable(device, host, capacity=500)
    rule = table.layout, "sgd"
    cuda.write_hyper(*rule, [0.5, 0.0, 0.0, 0.0, 0.0], 1, 1.0, table.numbers)
    ids = torch.zeros(100, dtype=torch.int64, device=device.torch_device)
    grads = torch.ones(100, 8, device=device.torch_device)
    out = torch.empty_like(grads)

    def step() -> None:
        batch = Batch(device, [Segment(ids)], Ids(1), table.faults)
        table.store.insert_missing(batch, table.store.find(batch))
        cuda.gather(batch, table.layout, 0, out)
        cuda.update(*rule, batch, ([grads], [False], [None]), table.numbers, table.written, table.faults)

    step()  # compiles
    ids.fill_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    written: dict[int, int] = {}
    for _ in range(5):
        keys = rng.choice(300, 100, replace=False)
        ids.copy_(torch.from_numpy(keys))
        graph.replay()
        initial = host.initial(np.zeros(100, np.uint32), keys.astype(np.uint64))
        for key, row, values in zip(keys.tolist(), out.cpu().numpy(), initial, strict=True):
            for _ in range(written.get(key, 0)):
                values -= np.float32(0.5)
            if key:  # 0 was updated by the step that compiled
                np.testing.assert_array_equal(row, values)
            written[key] = written.get(key, 0) + 1
    assert int(table.faults) == 0
