"""Tables and graphs on an NVIDIA GPU; the measurements are in gpu.py and gpu_graph.py."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import gpu
import gpu_graph
import torch
from report import Figure
from workload import NotMeasured, workload


@workload({"repeats": 5}, passive=False)
def steps(folder: Path, repeats: int = 100) -> Iterable[Figure]:
    """Steps, finds, gathers and recorded graphs."""
    require_gpu()
    return gpu.figures(repeats)


@workload({"repeats": 1}, passive=False)
def graph(folder: Path, repeats: int = 5) -> Iterable[Figure]:
    """`graph.run` on each store, relative to the plain loop."""
    require_gpu()
    return gpu_graph.figures(
        torch.device("cuda", torch.cuda.current_device()), folder, gpu_graph.Sizes(repeats=repeats)
    )


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise NotMeasured("there is no NVIDIA GPU")
