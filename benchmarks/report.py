"""How results are shown: the table, and the machine and versions that they hold for."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Time:
    """Milliseconds of a step: the median, and the best, which other load of the machine disturbed least."""

    median: float
    best: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.best:.2f})"


@dataclass(frozen=True)
class Result:
    """The figures of one workload; ratios are of medians."""

    workload: str
    peer_name: str
    peer_bar: float
    tierbed: Time
    peer: Time
    floor: Time
    floor_bar: float
    floor_settings: str

    @property
    def peer_ratio(self) -> float:
        """How many times the peer's time is ours."""
        return self.peer.median / self.tierbed.median

    @property
    def floor_ratio(self) -> float:
        return self.tierbed.median / self.floor.median

    @property
    def passed(self) -> bool:
        return self.peer_ratio >= self.peer_bar and self.floor_ratio <= self.floor_bar

    def as_dict(self) -> dict[str, Any]:
        ratios = {"peer_ratio": self.peer_ratio, "floor_ratio": self.floor_ratio}
        return {**asdict(self), **ratios, "passed": self.passed}


def machine(*packages: str) -> dict[str, str]:
    """CPU model, threads and the packages' versions."""
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    versions = {name: importlib.metadata.version(name) for name in packages}
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
        **versions,
    }


def is_intel() -> bool:
    """Whether the processor is one of Intel's."""
    return any(line.split()[-1] == "GenuineIntel" for line in _lines("/proc/cpuinfo") if line.startswith("vendor_id"))


def print_results(results: Sequence[Result], about: dict[str, str]) -> None:
    """Print the table of figures and bars."""
    table = Table(title="forward + backward + update: median (best) ms of a step", title_justify="left", box=box.SIMPLE)
    for column in ("workload", "tierbed", "peer", "", "floor", "peer/tierbed", "bar", "tierbed/floor", "bar", ""):
        table.add_column(column, justify="left" if column in ("workload", "peer") else "right", no_wrap=True)
    for result in results:
        table.add_row(
            result.workload,
            str(result.tierbed),
            result.peer_name,
            str(result.peer),
            str(result.floor),
            f"{result.peer_ratio:.2f}",
            f">={result.peer_bar:.2f}",
            f"{result.floor_ratio:.2f}",
            f"<={result.floor_bar:.2f}",
            "[green]pass" if result.passed else "[red]FAIL",
        )
    console = Console(width=140)
    console.print(table)
    for result in results:
        console.print(f"floor of {result.workload}: {result.floor_settings}", style="dim", highlight=False)
    console.print(", ".join(f"{name} {value}" for name, value in about.items()), highlight=False)


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
