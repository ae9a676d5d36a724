"""Measure tierbed and its peers, one workload after the other, and check the figures against their bars.

    make peers                                        # installs the peers
    python benchmarks/run.py                          # measures all workloads
    python benchmarks/run.py kernels tiers/train --repeats 5 --set ahead=4 --json figures.json --markdown figures.md

Each workload runs in its own process and reports figures only if all sides computed the same. Exits with 1 if a
figure misses its bar, if sides differ, or if a peer is not installed.
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
from report import Figure, describe_machine, write_report
from workload import WORKLOADS, Mismatch, NotMeasured, Workload

GROUPS = ("kernels", "bags", "dlrm", "graph", "jagged", "tiers", "rocksdb", "disk", "snapshots", "distributed", "gpu")
THREADS = 2
POLICY = "OMP_WAIT_POLICY"


def load_workloads() -> None:
    """Fill WORKLOADS by importing all groups."""
    for group in GROUPS:
        importlib.import_module(f"groups.{group}")


def measure(name: str, folder: Path | None, settings: Mapping[str, Any]) -> list[Figure]:
    """Measure a workload in this process."""
    load_workloads()
    torch.set_num_threads(THREADS)
    with tempfile.TemporaryDirectory(dir=folder) as path:
        return WORKLOADS[name].figures(Path(path), settings)


def measure_in_child(work: Workload, folder: Path | None, settings: Mapping[str, Any]) -> list[Figure]:
    """Measure a workload in a new process, with the workload's OMP_WAIT_POLICY."""
    before = os.environ.pop(POLICY, None)
    os.environ |= {POLICY: "PASSIVE"} if work.passive else {}
    try:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            return child.submit(measure, work.name, folder, settings).result()
    finally:
        os.environ.pop(POLICY, None)
        os.environ |= {} if before is None else {POLICY: before}


def select(names: Iterable[str]) -> list[Workload]:
    """Return the named workloads and groups, all of them by default. Raises ValueError for an unknown name."""
    selected: dict[str, Workload] = {}
    for name in names or GROUPS:
        matches = {full: work for full, work in WORKLOADS.items() if name in (full, full.partition("/")[0])}
        if not matches:
            raise ValueError(f"{name!r} is not a workload or a group. `--list` shows all of them")
        selected |= matches
    return list(selected.values())


def merge_settings(work: Workload, options: argparse.Namespace, changed: Mapping[str, Any]) -> dict[str, Any]:
    repeats = {} if options.repeats is None else {"repeats": options.repeats}
    changed = {name: value for name, value in {**repeats, **changed}.items() if name in work.settings}
    return {**work.settings, **(work.quick_settings if options.quick else {}), **changed}


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _read_cpu_seconds() -> tuple[float, float]:
    """Return processor seconds used by the whole system since boot, and by this process and its children."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:]]
    user, nice, system, _, _, interrupts, soft, stolen = ticks[:8]
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK"), sum(os.times()[:4])


def main(arguments: list[str] | None = None) -> int:
    load_workloads()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD|GROUP", help="default: all")
    parser.add_argument("--list", action="store_true", help="show the workloads and their settings, then exit")
    parser.add_argument("--repeats", type=int, help="number of timed turns")
    parser.add_argument("--set", action="append", type=_setting, default=[], metavar="NAME=JSON", help="set a setting")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; ignores bars")
    parser.add_argument("--folder", type=Path, help="where to put stores on disk (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table to this file")
    options = parser.parse_args(arguments)
    changed = dict(options.set)
    try:
        works = select(options.workloads)
    except ValueError as error:
        parser.error(str(error))
    for name in changed:
        if not any(name in work.settings for work in works):
            parser.error(f"--set {name}: none of these workloads has this setting. `--list` shows their settings")
    if options.list:
        for work in works:
            print(f"{work.name:28}{work.summary}\n{'':28}{json.dumps(work.settings)}")
        return 0
    torch.set_num_threads(THREADS)
    about = describe_machine()
    figures: list[Figure] = []
    missing: dict[str, str] = {}
    failed = False
    begin, before = time.perf_counter(), _read_cpu_seconds()
    for work in works:
        settings = merge_settings(work, options, changed)
        try:
            if options.quick:
                figures += measure(work.name, options.folder, settings)
            else:
                figures += measure_in_child(work, options.folder, settings)
        except NotMeasured as error:
            missing[work.name] = str(error)
        except ModuleNotFoundError as error:
            missing[work.name], failed = f"{error}: run `make peers` to install it", True
        except Exception as error:  # go on with the other workloads
            if not isinstance(error, Mismatch):
                traceback.print_exception(error)
            missing[work.name], failed = f"{type(error).__name__}: {error}", True
    used, own = (now - then for now, then in zip(_read_cpu_seconds(), before, strict=True))
    about["other processes"] = f"{max(used - own, 0.0) / (time.perf_counter() - begin):.2f} cores"
    passed = write_report(figures, about, options.json, options.markdown, missing)
    return int(failed or not (options.quick or passed))


if __name__ == "__main__":
    sys.exit(main())
