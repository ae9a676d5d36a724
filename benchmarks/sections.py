"""What the benchmarks that have sections share: their options, and the run of the chosen ones."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from report import machine
from tier_report import Figure
from tier_stores import Mismatch

THREADS = 2


def options(description: str | None, sections: Iterable[str]) -> argparse.ArgumentParser:
    """With the options of all of them."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=list(sections), help="default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; bars mean nothing")
    parser.add_argument("--folder", type=Path, help="where stores on disk live (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    return parser


def prepared() -> dict[str, str]:
    """Gives torch its threads; what is said about the machine."""
    torch.set_num_threads(THREADS)
    return machine() | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set")}


def measured(
    names: Iterable[str],
    folder: Path | None,
    measure: Callable[[str, Path], list[Figure]],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> tuple[list[Figure], bool]:
    """The figures of sections, each measured in a new folder, and whether one of them had none by a `Mismatch`."""
    figures: list[Figure] = []
    failed = False
    for name in names:
        gc.collect()
        with tempfile.TemporaryDirectory(dir=folder) as place, around():
            try:
                figures += measure(name, Path(place))
            except Mismatch as error:
                print(f"{name}: no figure, {error}", file=sys.stderr)
                failed = True
    return figures, failed
