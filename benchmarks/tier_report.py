"""Figures of a benchmark and their bars, as a table in Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One measured number.

    bar: what it must at least be, or with `at_most` at most be; None where it is only reported. notes: what it was
    made of. at: where on the section's curve it is, if it is one of its points.
    """

    section: str
    what: str
    value: float
    unit: str = ""
    bar: float | None = None
    at_most: bool = False
    notes: str = ""
    at: float | None = None

    @property
    def passed(self) -> bool:
        if self.bar is None:
            return True
        return self.value <= self.bar if self.at_most else self.value >= self.bar

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}


def markdown(figures: Sequence[Figure]) -> str:
    """The table; figures that miss their bar are bold."""
    rows = [("section", "what", "figure", "bar", "notes")]
    for figure in figures:
        shown = f"{_number(figure.value)} {figure.unit}".strip()
        bar = "" if figure.bar is None else f"{'<=' if figure.at_most else '>='} {_number(figure.bar)} {figure.unit}"
        rows.append((figure.section, figure.what, shown if figure.passed else f"**{shown}**", bar, figure.notes))
    lines = [f"| {' | '.join(cell.strip() for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def report(figures: Sequence[Figure], about: dict[str, str], place: Path | None) -> bool:
    """Print the table and what is said about the machine, and write both to `place` as JSON. Whether bars are met."""
    print(markdown(figures))
    print(listed(about.items()))
    if place is not None:
        shown = {"machine": about, "figures": [figure.as_dict() for figure in figures]}
        place.write_text(json.dumps(shown, indent=2) + "\n")
    return all(figure.passed for figure in figures)


def listed(parts: Iterable[tuple[str, str]]) -> str:
    """Notes: each part behind its name."""
    return ", ".join(f"{name} {value}" for name, value in parts)


def _number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
