"""Time the static graph against eager loops and against its own parts, and gate the ratios.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/graph.py [--section NAME ...] [--quick] [--folder PATH] [--json FILE]

A section has figures only where both sides computed the same. Exits with 1 if a bar is missed. See README.md here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import graph_compile
import graph_dense
import graph_memory
import graph_overhead
import graph_pipeline
import graph_sharing
from sections import measured, options, prepared
from tier_report import Figure, report

Section = Callable[[Path, bool], list[Figure]]


def overhead(folder: Path, quick: bool) -> list[Figure]:
    return graph_overhead.measure(folder, graph_overhead.QUICK if quick else graph_overhead.Sizes())


def dense_share(folder: Path, quick: bool) -> list[Figure]:
    return graph_dense.measure(folder, graph_dense.QUICK if quick else graph_dense.Sizes())


def pipeline(folder: Path, quick: bool) -> list[Figure]:
    return graph_pipeline.measure(folder, graph_pipeline.QUICK if quick else graph_pipeline.Sizes())


def sharing(folder: Path, quick: bool) -> list[Figure]:
    return graph_sharing.measure(graph_sharing.QUICK if quick else graph_sharing.Sizes())


def compile_time(folder: Path, quick: bool) -> list[Figure]:
    return graph_compile.measure(graph_compile.QUICK if quick else graph_compile.Sizes())


def memory(folder: Path, quick: bool) -> list[Figure]:
    return graph_memory.measure(folder, graph_memory.QUICK if quick else graph_memory.Sizes())


SECTIONS: dict[str, Section] = {
    "overhead": overhead,
    "dense_share": dense_share,
    "pipeline": pipeline,
    "sharing": sharing,
    "compile": compile_time,
    "memory": memory,
}


def _busy() -> tuple[float, float]:
    """Seconds of all processors that were used since the start of the system, and of them by this and its children."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    user, nice, system, _, _, interrupts, soft, stolen = ticks[:8]
    own = os.times()
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK"), sum(own[:4])


def main(arguments: list[str] | None = None) -> int:
    given = options(__doc__, SECTIONS).parse_args(arguments)
    about = prepared()
    begin, before = time.perf_counter(), _busy()
    names = given.section or SECTIONS
    figures, failed = measured(names, given.folder, lambda name, folder: SECTIONS[name](folder, given.quick))
    used, own = (now - then for now, then in zip(_busy(), before, strict=True))
    about["others"] = f"{max(used - own, 0.0) / (time.perf_counter() - begin):.2f} cores"
    passed = report(figures, about, given.json)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
