"""Draw the curve of memory limits that `run.py disk/beyond-memory --json RESULT` measured.

    python benchmarks/disk/plot.py RESULT.json CURVE.svg

Samples a second over memory as a share of the table, and next to them what the reads that each step down adds explain.
Needs matplotlib, of the extra `plot`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def curves(result: dict[str, Any]) -> tuple[dict[float, float], dict[float, float]]:
    """Samples a second by share of the table: measured, and explained by the reads since the share above."""
    figures = [figure for figure in result["figures"] if figure.get("at") is not None]
    measured = {figure["at"]: figure["value"] for figure in figures if figure["unit"] == "/s"}
    # a step of 1.1 times what its reads explain makes 1.1 times fewer samples than they do
    explained = {figure["at"]: figure["value"] * measured[figure["at"]] for figure in figures if figure["unit"] == "x"}
    return measured, explained


def draw(result: dict[str, Any], place: Path) -> None:
    """The ending of `place` is one of matplotlib's formats; the same result makes the same bytes of SVG."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"a plot needs matplotlib: pip install 'tierbed[plot]' ({error})") from None
    measured, explained = curves(result)
    if not measured:
        raise SystemExit("the result has no curve: measure disk/beyond-memory where memory can be limited")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(measured.keys(), measured.values(), "o-", color="black", label="measured", gid="measured")
    axes.plot(
        explained.keys(), explained.values(), "x--", color="tab:blue", label="what its reads explain", gid="explained"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(measured), [f"{share:g}" for share in measured])
    axes.minorticks_off()
    axes.set(xlabel="memory and page cache, as a share of the table", ylabel="samples/s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    with rc_context({"svg.hashsalt": "tierbed"}):
        figure.savefig(place, metadata={"Date": None} if place.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="what --json wrote")
    parser.add_argument("curve", type=Path, help="the picture")
    given = parser.parse_args()
    draw(json.loads(given.result.read_text()), given.curve)


if __name__ == "__main__":
    main()
