"""Computes how much host memory a process may still use, given the machine and its cgroup limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class FreeMemory(NamedTuple):
    """An amount of free memory. Messages use `location` to say where this memory is."""

    bytes: int
    location: str


def read_free_host_memory(root: Path = ROOT) -> FreeMemory | None:
    """Returns the free memory of the machine or of this process's memory cgroups, whichever is least.

    The machine's free memory is MemAvailable. A cgroup's free memory is its limit (`memory.max` and `memory.high` in
    version 2, `memory.limit_in_bytes` in version 1) minus the memory in use. The limits of parent cgroups also apply.
    Cached files do not count as memory in use, since the system can free them. `root` is the folder with proc and sys.
    Returns None if /proc/meminfo is missing.
    """
    available = _read_numbers(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        return None
    machine = FreeMemory(available << 10, "on this machine")
    return min([machine, *_read_cgroups(root)], key=lambda free: free.bytes)


def _read_cgroups(root: Path) -> Iterator[FreeMemory]:
    cgroup_root = root / "sys/fs/cgroup"
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, cgroup = rest.partition(":")
        if not controllers:
            yield from _read_cgroup(cgroup_root, cgroup, ("memory.max", "memory.high"), "memory.current", "")
        elif "memory" in controllers.split(","):
            limits, usage = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
            yield from _read_cgroup(cgroup_root / "memory", cgroup, limits, usage, "total_")


def _read_cgroup(top: Path, cgroup: str, limit_files: tuple[str, ...], usage: str, prefix: str) -> Iterator[FreeMemory]:
    """Yield the free memory of a cgroup and of its parents. Skips cgroups that are not visible in a container."""
    path = PurePosixPath("/", cgroup)
    cgroups = [PurePosixPath("/")] if ".." in path.parts else [path, *path.parents]
    for path in cgroups:
        folder = top / path.relative_to("/")
        limits = [int(text) for file in limit_files if (text := _read_text(folder / file).strip()).isdecimal()]
        used = _read_text(folder / usage).strip()
        if limits and used.isdecimal():
            stat = _read_numbers(folder / "memory.stat")
            files = sum(stat.get(f"{prefix}{part}_file", 0) for part in ("active", "inactive"))
            yield FreeMemory(max(min(limits) - max(int(used) - files, 0), 0), f"in the memory cgroup {str(path)!r}")


def _read_numbers(path: Path) -> dict[str, int]:
    """Read a file with a name and a number on each line."""
    words = [line.split() for line in _read_text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
