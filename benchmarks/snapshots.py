"""Time snapshots against what the disk does by itself, and gate the ratios.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/snapshots.py [--section NAME ...] [--quick] [--folder PATH] [--json FILE]

A section has figures only where what was loaded has the bits of what was saved. Exits with 1 if a bar is missed. See
README.md here.
"""

from __future__ import annotations

import sys

import snapshot_steps
from sections import measured, options, prepared
from tier_report import report

SECTIONS = {
    "full": snapshot_steps.full,
    "incremental": snapshot_steps.incremental,
    "checkpoint": snapshot_steps.checkpoint,
    "background": snapshot_steps.background,
    "verify": snapshot_steps.verify,
}


def main(arguments: list[str] | None = None) -> int:
    given = options(__doc__, SECTIONS).parse_args(arguments)
    about = prepared()
    sizes = snapshot_steps.QUICK if given.quick else snapshot_steps.Sizes()
    names = given.section or SECTIONS
    figures, failed = measured(names, given.folder, lambda name, folder: SECTIONS[name](folder, sizes))
    passed = report(figures, about, given.json)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
