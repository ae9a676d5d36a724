"""Time the tiers against memory, and replacement against what is possible, and gate the ratios.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/tiers.py [--section NAME ...] [--quick] [--folder PATH] [--json FILE]

A section has figures only where stores computed the same bits. Exits with 1 if a bar is missed. See README.md here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import tier_counting
import tier_lookahead
import tier_steps
import tier_train
import torch
from report import machine
from tier_report import Figure, report
from tier_stores import Mismatch

THREADS = 2
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


SECTIONS: dict[str, Section] = {
    "train": train,
    "memory": memory,
    "scale": scale,
    "lookahead": lookahead,
    "counting": counting,
}


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; bars mean nothing")
    parser.add_argument("--folder", type=Path, help="where stores on disk live (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--draw", action="append", choices=tier_train.TRACES, help="train: how ids are drawn")
    parser.add_argument("--ahead", type=int, default=tier_train.AHEAD, help="train: steps announced ahead")
    parser.add_argument("--options", type=json.loads, help="train: of cached_ssd, as JSON; {} for defaults")
    parser.add_argument("--rows", type=int, help="scale: one table of so many rows instead, with its I/O")
    given = parser.parse_args(arguments)
    given.draw = given.draw or ["zipf"]
    torch.set_num_threads(THREADS)
    about = machine("tierbed", "torch", "numpy") | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set")}
    figures, failed = [], False
    for name in given.section or SECTIONS:
        gc.collect()
        with tempfile.TemporaryDirectory(dir=given.folder) as folder, _without_garbage_collection():
            try:
                figures += SECTIONS[name](Path(folder), given)
            except Mismatch as error:
                print(f"{name}: no figure, {error}", file=sys.stderr)
                failed = True
    passed = report(figures, about, given.json)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
