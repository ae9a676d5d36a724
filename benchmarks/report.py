"""Report figures and their bars as a Markdown table and as JSON, with a description of the machine."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("tierbed", "torch", "numpy", "fbgemm-gpu-cpu", "torchrec", "rocksdict")


@dataclass(frozen=True)
class Figure:
    """One measured number.

    bar: the least acceptable value, or the largest if `at_most`; None if the figure is only reported. notes: details.
    """

    section: str
    what: str
    value: float
    unit: str = ""
    bar: float | None = None
    at_most: bool = False
    notes: str = ""

    @property
    def meets_bar(self) -> bool:
        if self.bar is None:
            return True
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.meets_bar}


def markdown(figures: Sequence[Figure]) -> str:
    """Format the table. A figure that misses its bar is bold."""
    rows = [("workload", "what", "figure", "bar", "notes")]
    for figure in figures:
        value = f"{_number(figure.value)} {figure.unit}".strip()
        bar = "" if figure.bar is None else f"{'<=' if figure.at_most else '>='} {_number(figure.bar)} {figure.unit}"
        rows.append((figure.section, figure.what, value if figure.meets_bar else f"**{value}**", bar, figure.notes))
    lines = [f"| {' | '.join(cell.strip() for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def write_report(
    figures: Sequence[Figure],
    about: Mapping[str, str],
    json_file: Path | None,
    markdown_file: Path | None = None,
    missing: Mapping[str, str] | None = None,
) -> bool:
    """Print and write the table, the machine and reasons for missing figures. Returns True if all bars are met."""
    reasons = [f"{name}: no figure, {reason}" for name, reason in (missing or {}).items()]
    text = "\n".join([markdown(figures), "", join_pairs(about.items()), *reasons])
    print(text)
    if json_file is not None:
        content = {"machine": dict(about), "figures": [each.as_dict() for each in figures], "missing": missing or {}}
        json_file.write_text(json.dumps(content, indent=2) + "\n")
    if markdown_file is not None:
        markdown_file.write_text(text + "\n")
    return all(figure.meets_bar for figure in figures)


def join_pairs(parts: Iterable[tuple[str, str]]) -> str:
    """Join (name, value) pairs to a text for `notes`."""
    return ", ".join(f"{name} {value}" for name, value in parts)


def describe_machine() -> dict[str, str]:
    """Return the processor, the current load and the versions of installed packages."""
    models = [line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    about = {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            about[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            about[package] = "not installed"
    return about


def is_intel() -> bool:
    """True if the processor is from Intel."""
    return any(line.split()[-1] == "GenuineIntel" for line in _cpuinfo() if line.startswith("vendor_id"))


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
