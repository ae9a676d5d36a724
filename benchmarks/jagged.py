"""Time TorchRec's modules on tierbed against FBGEMM's CPU operators, and what jagged arguments cost a graph.

    make peers
    python benchmarks/jagged.py [--section NAME ...] [--quick] [--json FILE]

There are figures only where outputs, rows and gradients of both sides agree. Exits with 1 if a bar is missed.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable

import jagged_sizes
from jagged_regroup import regroup_figures
from jagged_steps import against_fbgemm, against_plain
from sections import measured, options, prepared
from tier_report import Figure, report

SECTIONS: dict[str, Callable[[bool], list[Figure]]] = {
    "steps": against_fbgemm,
    "plain": against_plain,
    "sizes": lambda quick: jagged_sizes.measure(jagged_sizes.QUICK if quick else jagged_sizes.Sizes()),
    "regroup": regroup_figures,
}


def main(arguments: list[str] | None = None) -> int:
    given = options(__doc__, SECTIONS).parse_args(arguments)
    about = prepared() | {"fbgemm-gpu-cpu": importlib.metadata.version("fbgemm-gpu-cpu")}
    names = given.section or list(SECTIONS)
    figures, failed = measured(names, given.folder, lambda name, _: SECTIONS[name](given.quick))
    passed = report(figures, about, given.json)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
