"""What benchmarks/gpu.py measures is checked as it says, here with small tables."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cuda_tables import on_devices

from tierbed.engine.ops.cuda.device import Device


@pytest.fixture(scope="module")
def gpu() -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("benchmark_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_devices
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("store", ["device_mem", "host_mem", "cached_host_mem"])
def test_steps(gpu: ModuleType, device: Device, store: str, optimizer: str) -> None:
    step = gpu.checked_step(device, store, optimizer, ids=40, rows=50, tables=3, dim=4)
    assert torch.isfinite(step(0)).all()


@on_devices
@pytest.mark.parametrize("load", [0.5, 0.95])
def test_finds(gpu: ModuleType, device: Device, load: float) -> None:
    find, rows = gpu.checked_find(device, slots=256, load=load, asked=100)
    assert find().shape == (rows, gpu.FIND_DIM)


@on_devices
def test_gathers(gpu: ModuleType, device: Device) -> None:
    gather, moved = gpu.checked_gather(device, rows=60, asked=100)
    assert moved == 2 * gather().nbytes


def test_a_wrong_output_has_no_figure(gpu: ModuleType) -> None:
    with pytest.raises(gpu.Mismatch, match="bits differ"):
        gpu._same(torch.zeros(2), torch.tensor([0.0, -0.0]))
