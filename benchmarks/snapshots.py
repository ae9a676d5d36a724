"""Time snapshots against what the disk does by itself, and gate the ratios.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/snapshots.py [--section NAME ...] [--quick] [--folder PATH] [--json FILE]

A section has figures only where what was loaded has the bits of what was saved. Exits with 1 if a bar is missed. See
README.md here.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
from pathlib import Path

import snapshot_steps
import torch
from report import machine
from tier_report import Figure, report
from tier_stores import Mismatch

THREADS = 2
SECTIONS = {
    "full": snapshot_steps.full,
    "incremental": snapshot_steps.incremental,
    "checkpoint": snapshot_steps.checkpoint,
    "background": snapshot_steps.background,
    "verify": snapshot_steps.verify,
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; bars mean nothing")
    parser.add_argument("--folder", type=Path, help="where stores live, on the disk to measure (default: temporary)")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    given = parser.parse_args(arguments)
    torch.set_num_threads(THREADS)
    about = machine("tierbed", "torch", "numpy") | {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set")}
    sizes = snapshot_steps.QUICK if given.quick else snapshot_steps.Sizes()
    figures: list[Figure] = []
    failed = False
    for name in given.section or SECTIONS:
        gc.collect()
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            try:
                figures += SECTIONS[name](Path(folder), sizes)
            except Mismatch as error:
                print(f"{name}: no figure, {error}", file=sys.stderr)
                failed = True
    passed = report(figures, about, given.json)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
