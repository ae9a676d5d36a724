"""Time the tiers against memory, and replacement against what is possible, and gate the ratios.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/tiers.py [--section NAME ...] [--quick] [--folder PATH] [--json FILE]

A section has figures only where stores computed the same bits. Exits with 1 if a bar is missed. See README.md here.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tier_counting
import tier_lookahead
import tier_steps
import tier_train
from disk import section as disk_section
from sections import measured, options, prepared
from tier_report import Figure, report

Section = Callable[[Path, argparse.Namespace], list[Figure]]


def train(folder: Path, given: argparse.Namespace) -> list[Figure]:
    sizes = tier_train.QUICK if given.quick else tier_train.Sizes()
    return [
        figure for draw in given.draw for figure in tier_train.measure(folder, sizes, draw, given.ahead, given.options)
    ]


def memory(folder: Path, given: argparse.Namespace) -> list[Figure]:
    return tier_steps.memory(folder, tier_steps.MEMORY_QUICK if given.quick else tier_steps.MemorySizes())


def scale(folder: Path, given: argparse.Namespace) -> list[Figure]:
    sizes = tier_steps.SCALE_QUICK if given.quick else tier_steps.ScaleSizes()
    if given.rows is not None:
        return tier_steps.once(folder, given.rows, sizes)
    return tier_steps.scale(folder, sizes)


def lookahead(folder: Path, given: argparse.Namespace) -> list[Figure]:
    return tier_lookahead.measure(folder, tier_lookahead.QUICK if given.quick else tier_lookahead.Sizes())


def counting(folder: Path, given: argparse.Namespace) -> list[Figure]:
    return tier_counting.measure(folder, tier_counting.QUICK if given.quick else tier_counting.Sizes())


def disk(folder: Path, given: argparse.Namespace) -> list[Figure]:
    return disk_section.disk(folder, disk_section.QUICK if given.quick else disk_section.Sizes())


def page_cache(folder: Path, given: argparse.Namespace) -> list[Figure]:
    return disk_section.page_cache(folder, disk_section.QUICK if given.quick else disk_section.Sizes())


SECTIONS: dict[str, Section] = {
    "train": train,
    "memory": memory,
    "scale": scale,
    "lookahead": lookahead,
    "counting": counting,
    "disk": disk,
    "page_cache": page_cache,
}


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(arguments: list[str] | None = None) -> int:
    parser = options(__doc__, SECTIONS)
    parser.add_argument("--draw", action="append", choices=tier_train.TRACES, help="train: how ids are drawn")
    parser.add_argument("--ahead", type=int, default=tier_train.AHEAD, help="train: steps announced ahead")
    parser.add_argument("--options", type=json.loads, help="train: of cached_ssd, as JSON; {} for defaults")
    parser.add_argument("--rows", type=int, help="scale: one table of so many rows instead, with its I/O")
    given = parser.parse_args(arguments)
    given.draw = given.draw or ["zipf"]
    about = prepared()
    names = given.section or SECTIONS
    figures, failed = measured(
        names, given.folder, lambda name, folder: SECTIONS[name](folder, given), _without_garbage_collection
    )
    passed = report(figures, about, given.json)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
