"""What the tests of the CUDA path share: the devices that they run on, and tables there beside those of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from shutil import which
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.cells import rotated
from support.cuda_emulation import EmulatedDevice
from support.rows import Table
from tierbed.engine.ops.cuda import step
from tierbed.engine.ops.cuda.batch import Batch, LegalIds, LookupTensors
from tierbed.engine.ops.cuda.device import Device, cuda_device
from tierbed.engine.ops.cuda.layout import Layout
from tierbed.engine.options.initializers import InitialValues
from tierbed.engine.processors.cuda import make_cuda_factory
from tierbed.engine.store.cuda.full_table import CudaFullTable
from tierbed.engine.table.stack import PROCESSORS

NO_GPU = "no NVIDIA GPU" if not torch.cuda.is_available() else ""
# left out where no compiler makes its kernels, as under qemu (scripts/arm)
EMULATED = (
    []
    if which("g++") is None
    else [
        pytest.param(EmulatedDevice, id="emulated"),
        pytest.param(lambda: EmulatedDevice(seed=1), id="shuffled1"),
        pytest.param(lambda: EmulatedDevice(seed=2), id="shuffled2"),
    ]
)
# empty without a GPU; one skipped test reports that for all
GPU = [] if NO_GPU else [pytest.param(lambda: cuda_device(0), id="gpu", marks=pytest.mark.gpu)]

_each = pytest.mark.parametrize("device", [*EMULATED, *GPU], indirect=True)
_processors = [pytest.param(lambda: None, id="cpu"), *EMULATED[1:2], *GPU]
on_processors = pytest.mark.parametrize("device", _processors, indirect=True)
on_one_device = pytest.mark.parametrize("device", [*EMULATED[1:2], *GPU], indirect=True)  # for long runs


def on_devices(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test on a GPU, if there is one, and in emulation, with one order of threads for each other parameter."""
    return rotated("device")(_each(test))


def with_policies(policies: dict[str, dict[str, Any]]) -> pytest.MarkDecorator:
    """The test runs on each processor with a `policy` of none, and on the CPU, which alone has them, with each."""
    cells = [pytest.param(*one.values, {}, id=one.id, marks=one.marks) for one in _processors]
    cells += [pytest.param(*_processors[0].values, policy, id=name) for name, policy in policies.items()]
    return pytest.mark.parametrize(("device", "policy"), cells, indirect=["device"])


HostSegment = tuple[Sequence[int], Sequence[int] | None, int | Sequence[int] | None]


def tensor(device: Device, values: object, dtype: type[np.generic]) -> torch.Tensor:
    """On the device; unsigned numbers as signed ones of the same bits."""
    array = np.ascontiguousarray(values, dtype)
    return torch.from_numpy(array.view(f"i{array.itemsize}") if array.dtype.kind == "u" else array).to(
        device.torch_device
    )


def array(values: torch.Tensor, dtype: type[np.generic]) -> NDArray[np.generic]:
    """On the host, of the same bits."""
    return values.cpu().numpy().view(dtype)


@contextmanager
def tables_on(device: Device | None) -> Iterator[torch.device]:
    """Embeddings on the device of torch that this yields open their tables on `device`, None for the CPU."""
    if device is None:
        yield torch.device("cpu")
        return
    with pytest.MonkeyPatch.context() as patch:
        kind = device.torch_device.type
        patch.setitem(PROCESSORS, kind, lambda _, options: make_cuda_factory(device, options))
        yield device.torch_device


class DeviceTable:
    """The device's side of a `rows.Table`."""

    def __init__(self, device: Device, table: Table, capacity: int | None = None) -> None:
        self.device, self.table = device, table
        initial = InitialValues(
            table.states,
            table.state_widths,
            table.seed,
            table.columns,
            table.kinds,
            table.parameters,
            table.quantiles,
            *table.narrow,
        )
        self.layout = Layout(device, initial)
        self.faults = tensor(device, [0], np.uint32)
        self.written = tensor(device, [0] * table.tables, np.int64)
        self.step_params = step.allocate_step_params(device.torch_device)
        self.store = CudaFullTable(self.layout, capacity)

    def batch(self, segments: Sequence[HostSegment], padding: int | None = None) -> Batch:
        return Batch(self.device, self.segments(segments), LegalIds(self.table.tables, padding), self.faults)

    def segments(self, segments: Sequence[HostSegment]) -> list[LookupTensors]:
        return [
            LookupTensors(
                tensor(self.device, keys, np.uint64),
                None if tables is None else tensor(self.device, tables, np.int64),
                bags if bags is None or isinstance(bags, int) else tensor(self.device, bags, np.int64),
            )
            for keys, tables, bags in segments
        ]

    def pinned(self, segments: Sequence[HostSegment], padding: int | None = None) -> Batch:
        batch = self.batch(segments, padding)
        self.store.insert_missing(batch, self.store.find(batch))
        return batch

    def identities(self, batch: Batch) -> list[tuple[int, int]]:
        """(table, key) of each row."""
        tables = array(batch.tables[: batch.num_unique], np.uint32).tolist()
        return list(zip(tables, array(batch.keys, np.uint64).tolist(), strict=True))

    def read(self, lines: torch.Tensor) -> tuple[NDArray[np.float32], NDArray[np.uint32]]:
        """Numbers [n, dim and all states] and (updates, last step) [n, 2] of lines, copied to the host."""
        bytes_ = self.layout.line_bytes
        memory = torch.zeros(len(lines) * bytes_, dtype=torch.uint8, device=self.device.torch_device)
        to = memory.data_ptr() + bytes_ * torch.arange(len(lines), dtype=torch.int64, device=lines.device)
        step.copy_lines(self.layout, lines, to)
        rows = memory.cpu().numpy().reshape(len(lines), bytes_)
        numbers = self.table.decoded(rows[:, : 4 * self.layout.width])
        return numbers, np.ascontiguousarray(rows[:, 4 * self.layout.width :][:, :8]).view(np.uint32)

    def contents(self, batch: Batch) -> dict[tuple[int, int], tuple[bytes, bytes]]:
        """Each row of a batch by its identity: the bytes of its floats and record."""
        floats, records = self.read(batch.lines[: batch.num_unique])
        return {
            row: (values.tobytes(), record.tobytes())
            for row, values, record in zip(self.identities(batch), floats, records, strict=True)
        }
