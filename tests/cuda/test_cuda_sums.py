"""Sums of gradients, their squares, rows by owner and rows of a tensor on a device are those of the CPU's processor."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from support.cells import rotated
from support.cuda_tables import on_devices
from tierbed.engine.ops.batch import Gradients
from tierbed.engine.ops.cuda.device import Device
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.options.table_spec import TableSpec, table_spec
from tierbed.engine.processors.cpu import CpuProcessor
from tierbed.engine.processors.cuda import CudaProcessor
from tierbed.engine.processors.processor import by_owner

pytestmark = pytest.mark.op

DIM = 17
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
Names = list[tuple[int, int]]


def spec(dim: int = DIM) -> TableSpec:
    return table_spec("t", dim, torch.int64, [make_constant_initializer(0.0)] * 3, 2, 0)


def lookups(seed: int = 0) -> tuple[list[Lookup], list[Tensor | None]]:
    """Rows, some of which occur more often than a block of a sum has room, jagged means, bags of weights, features."""
    rng = np.random.default_rng(seed)
    ids = [torch.from_numpy(rng.zipf(1.2, n).astype(np.int64) % 90) for n in (900, 60, 40, 30)]
    tables = [torch.from_numpy(rng.integers(0, 3, n)) for n in (900, 9, 10, 2)]
    jagged = torch.from_numpy(np.cumsum([0, *rng.multinomial(60, np.ones(9) / 9)]))
    features = torch.from_numpy(np.cumsum([0, *rng.multinomial(30, np.ones(6) / 6)]))
    return [
        Lookup(ids[0], tables[0]),
        Lookup(ids[1], tables[1], jagged, "mean"),
        Lookup(ids[2].view(10, 4), tables[2], None, "sum"),
        Lookup(ids[3], tables[3], features, "mean", (1, -1, 0)),
    ], [None, None, torch.randn(10, 4), torch.randn(30)]


def moved(lookup: Lookup, device: torch.device) -> Lookup:
    parts = [None if part is None else part.to(device) for part in lookup.tensors]
    return Lookup(*parts, lookup.pooling, lookup.feature_columns)  # type: ignore[arg-type]


def misaligned(grad: Tensor, device: torch.device) -> Tensor:
    """It begins one number behind where memory does."""
    return torch.cat([grad.new_zeros(1), grad.flatten()]).to(device)[1:].view(grad.shape)


class Both:
    """The same lookups on the host and on a device, whose batches number their rows differently."""

    def __init__(self, device: Device, given: list[Lookup], dim: int = DIM) -> None:
        self.arguments, self.device = given, device.torch_device
        self.there_given = [moved(lookup, self.device) for lookup in given]
        self.here = CpuProcessor(spec(dim), RowState(), None)
        self.on_device = CudaProcessor(device, spec(dim), RowState(), None)
        self.host, self.batch = self.here.batch(given), self.on_device.batch(self.there_given)
        self.names = list(zip(self.host.tables.tolist(), self.host.keys.view(np.int64).tolist(), strict=True))
        tables, keys = self.batch.tables[: self.batch.unique].tolist(), self.batch.keys.tolist()
        self.there_names = list(zip(tables, keys, strict=True))
        assert sorted(self.names) == sorted(self.there_names)

    @property
    def from_host(self) -> list[int]:
        """Of each row there, its number on the host."""
        return [self.names.index(name) for name in self.there_names]


@on_devices
@pytest.mark.parametrize("dim", [DIM, 64, 128])  # a lane takes one column, two and four
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@rotated("dim")
def test_sums_of_rows(device: Device, dtype: torch.dtype, dim: int) -> None:
    given, weights = lookups()
    both = Both(device, given, dim)
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn((*lookup.shape, dim), generator=generator).to(dtype) for lookup in given]
    here = Gradients(given, grads, weights, dtype)
    wanted = both.here.sum_gradients(both.host, here)[both.from_host]
    scales = [None if w is None else w.to(both.device) for w in weights]
    there = Gradients(both.there_given, [misaligned(grad, both.device) for grad in grads], scales, dtype)
    assert torch.equal(both.on_device.sum_gradients(both.batch, there).cpu(), wanted)
    rows = len(wanted)
    squares = both.here.square_gradients(both.host, here)[both.from_host]
    assert torch.equal(both.on_device.square_gradients(both.batch, there)[:rows].cpu(), squares)
    places = np.random.default_rng(0).permutation(rows + 5)[:rows]
    out = torch.full((rows + 5, dim), 7.0, device=both.device)
    assert both.on_device.sum_gradients(both.batch, there, places, out) is out
    assert torch.equal(out.cpu()[places], wanted)
    assert (np.delete(out.cpu().numpy(), places, 0) == 7).all()


@on_devices
def test_nothing_to_sum_and_no_rows(device: Device) -> None:
    empty = Lookup(torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))
    for given in ([], [empty], [Lookup(torch.full((3,), 2), torch.zeros(3, dtype=torch.int64))]):
        both = Both(device, given)
        grads = [torch.zeros((*lookup.shape, DIM), device=both.device) for lookup in given]
        there = Gradients(both.there_given, grads, [None] * len(given), torch.float32)
        assert both.on_device.sum_gradients(both.batch, there).shape == (0, DIM)
        assert by_owner(both.on_device.unique_rows(both.batch), 3, 2).counts == [0, 0, 0]
        both.on_device.set_lines(both.batch, torch.zeros((0, DIM), device=both.device), np.zeros(0, np.int64))


@on_devices
@pytest.mark.parametrize("ranks", [1, 3, 1024])
def test_rows_by_owner(device: Device, ranks: int) -> None:
    both = Both(device, lookups()[0])
    pairs = ((both.here, both.host), (both.on_device, both.batch))
    here, there = (by_owner(p.unique_rows(b), ranks, ranks - 1) for p, b in pairs)
    assert there.counts == here.counts
    order = there.positions
    assert sorted(order.tolist()) == list(range(len(order)))
    assert there.keys[order].tolist() == [key for _, key in both.there_names]
    assert there.tables[order].tolist() == [table for table, _ in both.there_names]
    for begin, end in pairwise(np.cumsum([0, *here.counts]).tolist()):
        of_owner = [
            set(zip(by.tables[begin:end].tolist(), by.keys[begin:end].tolist(), strict=True)) for by in (here, there)
        ]
        assert of_owner[0] == of_owner[1]
        assert (order.argsort()[begin:end][1:] > order.argsort()[begin:end][:-1]).all()  # in the order of the batch


@on_devices
@pytest.mark.parametrize("dim", [8, DIM])
def test_lookups_take_rows_from_a_tensor(device: Device, dim: int) -> None:
    """Some of them are what another batch has."""
    given, weights = lookups()
    both = Both(device, given, dim)
    count = len(both.names)
    places = np.random.default_rng(0).permutation(count + 3)[:count]
    rows = torch.randn((count + 3, dim), generator=torch.Generator().manual_seed(0))
    both.here.set_lines(both.host, rows, places)
    here, ids = count // 2, torch.arange(2 + count + 3 - count // 2, device=both.device) + 10
    rest = both.on_device.batch([Lookup(ids, torch.zeros_like(ids))])
    of_rest = torch.zeros((len(ids), dim), device=both.device)
    of_rest[rest.inverse[2 : len(ids)].to(torch.int64)] = rows[here:].to(both.device)
    both.on_device.set_lines(rest, of_rest, np.arange(len(ids)))
    there = rows[:here].to(both.device, copy=True)
    both.on_device.set_lines(both.batch, there, places[both.from_host], (rest, 2))
    del there  # the batch keeps it
    for index, lookup in enumerate(given):
        for dtype in DTYPES:
            wanted = both.here.gather(both.host, index, lookup, weights[index], dtype)
            scales = None if weights[index] is None else weights[index].to(both.device)  # type: ignore[union-attr]
            out = torch.full_like(wanted, 7.0, device=both.device)
            found = both.on_device.gather(both.batch, index, both.there_given[index], scales, dtype, out)
            assert found is out
            assert torch.equal(out.cpu(), wanted)
