"""What steps on a device alone may meet: rows without room, faults, and CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from support.cuda_tables import NO_GPU, DeviceTable, on_devices, tensor
from support.rows import Table
from tierbed.engine.ops.cuda import step as cuda
from tierbed.engine.ops.cuda.batch import Batch, LegalIds, LookupTensors
from tierbed.engine.ops.cuda.device import Device, cuda_device

pytestmark = pytest.mark.op

FAULT_NO_ROOM, FAULT_BAD_OFFSETS = 1, 4


@on_devices
@pytest.mark.parametrize("capacity", [1, 3, 64, 100])
def test_a_full_table_takes_nothing_of_a_batch_that_does_not_fit(device: Device, capacity: int) -> None:
    table = DeviceTable(device, Table([5], tables=1), capacity)
    size = table.store.bytes
    table.pinned([(list(range(capacity)), None, None)])
    assert int(table.faults) == 0
    batch = table.pinned([(list(range(1, capacity + 1)), None, None)])
    assert int(table.faults) == FAULT_NO_ROOM
    assert table.read(batch.lines)[0].any(axis=1).tolist() == [True] * (capacity - 1) + [False]
    assert table.store.read_counts()["resident_rows"] == capacity
    table.faults.zero_()  # raised
    table.pinned([(list(range(capacity)), None, None)])
    assert int(table.faults) == 0
    assert table.store.bytes == size


@on_devices
@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 1, 2, 5], [0, -5, 2, 4], [0, 9, 4, 4]])
def test_bad_offsets_set_a_fault_and_are_safe_to_follow(device: Device, offsets: list[int]) -> None:
    table = DeviceTable(device, Table([2], tables=1))
    batch = table.batch([([7, 8, 9, 7], None, offsets)])
    assert int(table.faults) == FAULT_BAD_OFFSETS
    bag_offsets = batch.lookups[0].bag_offsets
    assert bag_offsets is not None
    assert all(0 <= begin <= 4 for begin in bag_offsets.tolist())


@on_devices
def test_nothing_is_written_after_a_fault(device: Device) -> None:
    table = DeviceTable(device, Table([17]))
    batch = table.pinned([([1, 2, 3], None, None)])
    before, ones = table.contents(batch), tensor(device, np.ones((3, 17)), np.float32)
    table.faults.fill_(2)
    rule = table.layout, "sgd"
    cuda.write_step_params(*rule, [0.1, 0, 0, 0, 0], 1, 1.0, table.step_params)
    cuda.update(*rule, batch, ([ones], [False], [None]), table.step_params, table.written, table.faults)
    cuda.assign(batch, table.layout, ones, 1, table.written, table.faults)
    more = table.pinned([([8, 9], None, None)])
    assert not any(values.any() for values in table.read(more.lines))
    assert table.contents(batch) == before
    assert int(table.written.sum()) == 0


@pytest.mark.gpu
@pytest.mark.skipif(bool(NO_GPU), reason=NO_GPU)
def test_a_step_with_a_capacity_is_captured_in_a_cuda_graph() -> None:
    device, host = cuda_device(0), Table([8], tables=1)
    table = DeviceTable(device, host, capacity=500)
    rule = table.layout, "sgd"
    cuda.write_step_params(*rule, [0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 1, 1.0, table.step_params)
    ids = torch.zeros(100, dtype=torch.int64, device=device.torch_device)
    grads = torch.ones(100, 8, device=device.torch_device)
    out = torch.empty_like(grads)

    def step() -> None:
        batch = Batch(device, [LookupTensors(ids)], LegalIds(1), table.faults)
        table.store.insert_missing(batch, table.store.find(batch))
        cuda.gather(batch, table.layout, 0, out)
        cuda.update(*rule, batch, ([grads], [False], [None]), table.step_params, table.written, table.faults)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn in range(5):  # half of the rows are those of the turn before
        keys = np.arange(50 * turn + 1, 50 * turn + 101, dtype=np.uint64)
        ids.copy_(torch.from_numpy(keys.view(np.int64)))
        graph.replay()
        expected = host.initial(np.zeros(100, np.uint32), keys)
        expected[:50] -= np.float32(0.5 if turn else 0.0)
        np.testing.assert_array_equal(out.cpu().numpy(), expected)
    assert int(table.faults) == 0
