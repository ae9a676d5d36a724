"""Measures tierbed and its peers, one workload after the other, and gates the figures that have bars.

    make peers
    python benchmarks/run.py                          # all; or groups and workloads: kernels tiers/train
    python benchmarks/run.py tiers/train --repeats 5 --set ahead=4 --json figures.json --markdown figures.md

Each workload runs in its own process. It has figures only if all sides computed the same. Exits with 1 if a bar is
missed, if sides differ, or if a peer is not installed. See README.md here.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from report import Figure, machine, report
from workload import WORKLOADS, Mismatch, NotMeasured, Workload

GROUPS = ("kernels", "bags", "dlrm", "graph", "jagged", "tiers", "rocksdb", "disk", "snapshots", "distributed", "gpu")
THREADS = 2
POLICY = "OMP_WAIT_POLICY"


def load() -> None:
    """Fills WORKLOADS."""
    for group in GROUPS:
        importlib.import_module(f"groups.{group}")


def measured(name: str, folder: Path | None, settings: Mapping[str, Any]) -> list[Figure]:
    """The figures of a workload, in this process."""
    load()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        return WORKLOADS[name].figures(Path(place), settings)


def apart(work: Workload, folder: Path | None, settings: Mapping[str, Any]) -> list[Figure]:
    """The same in a new process, whose threads wait as the workload says."""
    before = os.environ.pop(POLICY, None)
    os.environ |= {POLICY: "PASSIVE"} if work.passive else {}
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            return child.submit(measured, work.name, folder, settings).result()
    finally:
        os.environ.pop(POLICY, None)
        os.environ |= {} if before is None else {POLICY: before}


def chosen(names: Iterable[str]) -> list[Workload]:
    """Of workloads and groups; all if none is named. Raises ValueError for another name."""
    found: dict[str, Workload] = {}
    for name in names or GROUPS:
        of_name = {full: work for full, work in WORKLOADS.items() if name in (full, full.partition("/")[0])}
        if not of_name:
            raise ValueError(f"{name!r} is no workload and no group: `--list` shows all of them")
        found |= of_name
    return list(found.values())


def settings_of(work: Workload, given: argparse.Namespace, changed: Mapping[str, Any]) -> dict[str, Any]:
    repeats = {} if given.repeats is None else {"repeats": given.repeats}
    changed = {name: value for name, value in {**repeats, **changed}.items() if name in work.settings}
    return {**work.settings, **(work.quick if given.quick else {}), **changed}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _busy() -> tuple[float, float]:
    """Seconds of all processors that were used since the start of the system, and by this process and its children."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    user, nice, system, _, _, interrupts, soft, stolen = ticks[:8]
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def main(arguments: list[str] | None = None) -> int:
    load()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD|GROUP", help="default: all")
    parser.add_argument("--list", action="store_true", help="show the workloads and their settings, and measure none")
    parser.add_argument("--repeats", type=int, help="timed turns of each side")
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=JSON", help="a setting")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; bars mean nothing")
    parser.add_argument("--folder", type=Path, help="where stores on disk live (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table here, too")
    given = parser.parse_args(arguments)
    changed = dict(given.set)
    try:
        works = chosen(given.workloads)
    except ValueError as error:
        parser.error(str(error))
    for name in changed:
        if not any(name in work.settings for work in works):
            parser.error(f"--set {name}: none of these workloads has such a setting, see --list")
    if given.list:
        for work in works:
            print(f"{work.name:28}{work.summary}\n{'':28}{json.dumps(work.settings)}")
        return 0
    torch.set_num_threads(THREADS)
    about = machine()
    figures: list[Figure] = []
    missing: dict[str, str] = {}
    failed = False
    begin, before = time.perf_counter(), _busy()
    for work in works:
        settings = settings_of(work, given, changed)
        try:
            run = measured(work.name, given.folder, settings) if given.quick else apart(work, given.folder, settings)
            figures += run
        except NotMeasured as error:
            missing[work.name] = str(error)
        except ModuleNotFoundError as error:
            missing[work.name], failed = f"{error}: `make peers` installs what is compared with", True
        except Exception as error:  # the workloads after it are measured all the same
            if not isinstance(error, Mismatch):
                traceback.print_exception(error)
            missing[work.name], failed = f"{type(error).__name__}: {error}", True
    used, own = (now - then for now, then in zip(_busy(), before, strict=True))
    about["other processes"] = f"{max(used - own, 0.0) / (time.perf_counter() - begin):.2f} cores"
    passed = report(figures, about, given.json, given.markdown, missing)
    return int(failed or not (given.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
