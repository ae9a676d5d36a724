"""What benchmarks/gpu.py and gpu_graph.py measure is checked as they say, here with small tables."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from support.cuda_tables import on_one_device, tables_on
from support.places import BENCHMARKS
from tierbed.engine.ops.cuda.device import Device

sys.path.insert(0, str(BENCHMARKS))
import gpu
import gpu_graph
from models import Model
from workload import Mismatch


@on_one_device
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("store", ["device_mem", "host_mem", "cached_host_mem"])
@pytest.mark.pairs
def test_steps(device: Device, store: str, optimizer: str) -> None:
    step = gpu.make_step(device, store, optimizer, count=40, rows=50, tables=3, dim=5)
    assert torch.isfinite(step(0)).all()


@on_one_device
def test_finds_gathers_and_graphs(device: Device) -> None:
    for load in (0.5, 0.95):
        find, rows = gpu.make_find(device, slots=256, load=load, count=100)
        assert find().shape == (rows, gpu.FIND_DIM)
    gather, moved = gpu.make_gather(device, rows=60, count=100)
    assert moved == 2 * gather().nbytes
    with tables_on(device) as place:
        steps = gpu.make_graph_steps(place, batch=5, rows=40, tables=2, dim=5)
        assert torch.equal(steps["recorded"](1), steps["plain"](1))


def test_a_wrong_output_has_no_figure() -> None:
    with pytest.raises(gpu.Mismatch, match="bits differ"):
        gpu._check_bits(torch.zeros(2), torch.tensor([0.0, -0.0]))


SMALL = gpu_graph.Sizes(Model(rows=300, tables=2, batch=16, hidden=(4,), optimizer="adagrad"), 0.5, 2, 3, 1)


@on_one_device
@pytest.mark.slow
def test_runs_over_a_loader(tmp_path: Path, device: Device) -> None:
    with tables_on(device) as place:
        figures = list(gpu_graph.figures(place, tmp_path, SMALL))
    assert [figure.what.split()[-1] for figure in figures] == ["device_mem", "cached_host_mem", "cached_ssd"]
    assert all(figure.value > 0 for figure in figures)


@on_one_device
def test_stores_that_differ_have_no_figure(tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = gpu_graph._time_turns

    def differ(*given: object) -> tuple[list[torch.Tensor], float, str]:
        losses, ratio, shown = turns(*given)
        return [loss + len(list(tmp_path.iterdir())) for loss in losses], ratio, shown

    monkeypatch.setattr(gpu_graph, "_time_turns", differ)
    with tables_on(device) as place, pytest.raises(Mismatch, match="losses on"):
        list(gpu_graph.figures(place, tmp_path, SMALL))
