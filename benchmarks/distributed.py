"""Time steps of an embedding over ranks: against their parts done alone, against TorchRec, and what goes between ranks.

    make peers
    python benchmarks/distributed.py [--section NAME ...] [--quick] [--folder DIR] [--json FILE]

Ranks are processes of one thread on this machine, 2 of them unless a figure says otherwise. There are figures only
where outputs and rows of both sides agree. Exits with 1 if a bar is missed. See README.md here.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from pathlib import Path

from rank_figures import SMALL, ahead, alone, bytes_of, narrow, of_ranks
from rank_group import on_ranks
from rank_stages import stages
from rank_steps import STEPS, Steps, against_parts, against_torchrec, quick
from sections import measured, options, prepared
from tier_report import Figure, report

RANKS = 2


def parts(given: Callable[[Steps], Steps], _: Path) -> list[Figure]:
    return [figure for steps in STEPS for figure in on_ranks(RANKS, against_parts, given(steps))]


def torchrec(given: Callable[[Steps], Steps], _: Path) -> list[Figure]:
    compared = [given(steps) for steps in STEPS if steps.peer_bar is not None]
    return [figure for steps in compared for figure in on_ranks(RANKS, against_torchrec, steps)]


def ranks(given: Callable[[Steps], Steps], _: Path) -> list[Figure]:
    return [figure for size in (1, 2, 4) for figure in on_ranks(size, of_ranks, given(SMALL))]


SECTIONS: dict[str, Callable[[Callable[[Steps], Steps], Path], list[Figure]]] = {
    "parts": parts,
    "stages": lambda given, _: [f for steps in STEPS for f in on_ranks(RANKS, stages, given(steps))],
    "torchrec": torchrec,
    "bytes": lambda given, _: on_ranks(RANKS, bytes_of, given(STEPS[0])),
    "alone": lambda given, _: on_ranks(1, alone, given(SMALL)),
    "ahead": lambda given, folder: on_ranks(RANKS, ahead, given(SMALL), folder),
    "wire": lambda given, _: on_ranks(RANKS, narrow, given(STEPS[1])),
    "ranks": ranks,
}


def main(arguments: list[str] | None = None) -> int:
    given = options(__doc__, SECTIONS).parse_args(arguments)
    about = prepared() | {name: importlib.metadata.version(name) for name in ("torchrec", "fbgemm-gpu-cpu")}
    size = quick if given.quick else lambda steps: steps
    names = given.section or list(SECTIONS)
    figures, failed = measured(names, given.folder, lambda name, folder: SECTIONS[name](size, folder))
    passed = report(figures, about, given.json)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
