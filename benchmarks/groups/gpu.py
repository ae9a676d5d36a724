"""Tables and graphs on an NVIDIA GPU: the figures of gpu.py and gpu_graph.py."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from report import Figure
from workload import Mismatch, NotMeasured, figure, workload

BENCHMARKS = Path(__file__).resolve().parents[1]


@workload({"repeats": 5})
def steps(folder: Path, repeats: int = 100) -> Iterator[Figure]:
    """Steps, finds, gathers and graphs of `gpu.py`, in a process of its own."""
    require_gpu()
    place = folder / "figures.json"
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--repeats", str(repeats), "--json", str(place)]
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    if not place.exists():
        raise Mismatch(done.stderr.strip().rpartition("\n")[2])
    for each in json.loads(place.read_text())["figures"]:
        at_most = each["bar"] is not None and each["passed"] != (each["figure"] >= each["bar"])
        yield figure(each["name"], each["figure"], each["unit"], bar=each["bar"], at_most=at_most)


@workload()
def graph(folder: Path) -> Iterator[Figure]:
    """`graph.run` over each store, of the plain loop's time, as `gpu_graph.py` has it."""
    require_gpu()
    import gpu_graph

    yield from gpu_graph.pipeline(torch.device("cuda", torch.cuda.current_device()), folder, gpu_graph.Sizes())


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotMeasured("there is no NVIDIA GPU")
