"""What a process may still take of the host's memory, from files laid out as /proc and /sys/fs/cgroup are."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.places import BENCHMARKS, environment
from tierbed.engine.host_memory import FreeMemory, free_host_memory

sys.path.insert(0, str(BENCHMARKS))
from disk.memory_limit import may_limit, memory_limit

MACHINE = {
    "proc/meminfo": "MemTotal:       8000 kB\nMemFree:         100 kB\nMemAvailable:   4000 kB\nHugePages_Total:  0\n"
}
V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
OF_MACHINE = FreeMemory(4000 << 10, "on this machine")
UNLIMITED_V1 = "9223372036854771712\n"


def laid_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, limit: str, used: int, files: int = 0) -> dict[str, str]:
    stat = f"anon 5\nfile 7\nactive_file {files}\ninactive_file {2 * files}\n"
    return {
        f"{V2}/{group}memory.max": f"{limit}\n",
        f"{V2}/{group}memory.current": f"{used}\n",
        f"{V2}/{group}memory.stat": stat,
    }


def v1(group: str, limit: str, used: int, files: int = 0) -> dict[str, str]:
    stat = f"cache 9\nactive_file 1\ntotal_cache 7\ntotal_active_file {files}\ntotal_inactive_file {2 * files}\n"
    return {
        f"{V1}/{group}memory.limit_in_bytes": f"{limit}\n",
        f"{V1}/{group}memory.usage_in_bytes": f"{used}\n",
        f"{V1}/{group}memory.stat": stat,
    }


def own(*lines: str) -> dict[str, str]:
    return {"proc/self/cgroup": "".join(f"{line}\n" for line in lines)}


LAYOUTS = {  # files, free bytes, and of which group; None of the machine
    "no cgroup": ({}, None, None),
    "a group without a limit": ({**own("0::/a"), **v2("a/", "max", 10)}, None, None),
    "a limit beyond the machine": ({**own("0::/a"), **v2("a/", str(1 << 40), 10)}, None, None),
    "a limit, pages of files given back": ({**own("0::/a"), **v2("a/", "100000", 70000, files=10000)}, 60000, "/a"),
    "the limit of a group around it": (
        {**own("0::/a/b/c"), **v2("a/b/c/", "max", 10), **v2("a/b/", "900000", 100), **v2("a/", "9000", 2000)},
        7000, "/a",
    ),
    "its own limit, below that around it": (
        {**own("0::/a/b"), **v2("a/b/", "5000", 1000), **v2("a/", "9000", 2000)}, 4000, "/a/b",
    ),
    "a container, whose root is its group": ({**own("0::/"), **v2("", "8000", 500)}, 7500, "/"),
    "a group outside of the container": ({**own("0::/../../other"), **v2("", "8000", 500)}, 7500, "/"),
    "memory.high, which slows a process down": (
        {**own("0::/a"), **v2("a/", "9000", 500), f"{V2}/a/memory.high": "6000\n"}, 5500, "/a",
    ),
    "more in use than the limit": ({**own("0::/a"), **v2("a/", "9000", 10000)}, 0, "/a"),
    "version 1": (
        {**own("5:cpu,cpuacct:/x", "4:memory:/a/b", "0::/"), **v1("a/b/", "70000", 60000, files=5000)}, 25000, "/a/b",
    ),
    "version 1, the limit of a group around it": (
        {**own("4:memory:/a/b"), **v1("a/b/", UNLIMITED_V1, 6), **v1("a/", "7000", 4000), **v1("", UNLIMITED_V1, 7)},
        3000, "/a",
    ),
    "version 1, a container that shows its group as the root": (
        {**own("4:memory:/docker/0123"), **v1("", "7000", 4000)}, 3000, "/",
    ),
    "both versions, memory in version 1": (
        {**own("4:memory:/a", "1:name=systemd:/s:x", "0::/a"), **v1("a/", "7000", 4000),
         f"{V2}/unified/a/pids.max": "max\n"},
        3000, "/a",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "free", "group"), LAYOUTS.values(), ids=LAYOUTS)
def test_the_least_of_the_machine_and_its_groups_is_free(
    tmp_path: Path, files: dict[str, str], free: int | None, group: str | None
) -> None:
    expected = OF_MACHINE if free is None else FreeMemory(free, f"in the memory cgroup '{group}'")
    assert free_host_memory(laid_out(tmp_path, {**MACHINE, **files})) == expected


@pytest.mark.parametrize("files", [{}, {"proc/meminfo": "MemTotal: 8000 kB\n"}, {**own("0::/a"), **v2("a/", "9", 1)}])
def test_where_proc_does_not_tell_nothing_is_known(tmp_path: Path, files: dict[str, str]) -> None:
    assert free_host_memory(laid_out(tmp_path, files)) is None


def test_this_process_in_a_group_of_its_own_has_what_the_limit_leaves() -> None:
    if reason := may_limit():
        pytest.skip(f"this user may make no memory cgroup: {reason}")
    code = "from tierbed.engine.host_memory import free_host_memory as f; free = f(); print(free.bytes, free.where)"
    limit = 192 << 20
    with memory_limit(limit) as enter:
        done = subprocess.run(
            [sys.executable, "-c", code],
            preexec_fn=enter,
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
    free, _, where = done.stdout.partition(" ")
    assert limit / 2 < int(free) < limit
    assert where.startswith("in the memory cgroup '/")
