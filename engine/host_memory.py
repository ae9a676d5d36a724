"""How much memory of the host a process may still take, by the machine and by the limits of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path("/")


class FreeMemory(NamedTuple):
    """So many bytes are free. `where`: what holds them, in words."""

    bytes: int
    where: str


def free_host_memory(root: Path = ROOT) -> FreeMemory | None:
    """The least of what the machine and each memory cgroup of this process have free. None where /proc tells nothing.

    Of the machine it is MemAvailable. Of a cgroup, and of each that it is in, it is the limit (`memory.max` and
    `memory.high` in version 2, `memory.limit_in_bytes` in version 1) less what is in use, without the pages of files,
    which give way. root: the folder that proc and sys are in.
    """
    available = _named(root / "proc/meminfo").get("MemAvailable:")
    if available is None:
        return None
    machine = FreeMemory(available << 10, "on this machine")
    return min([machine, *_left_in_groups(root)], key=lambda free: free.bytes)


def _left_in_groups(root: Path) -> Iterator[FreeMemory]:
    hierarchies = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, named = line.partition(":")
        controllers, _, own = named.partition(":")
        if not controllers:
            yield from _left(hierarchies, own, ("memory.max", "memory.high"), "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _left(hierarchies / "memory", own, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_")


def _left(top: Path, own: str, limits: tuple[str, ...], usage: str, prefix: str) -> Iterator[FreeMemory]:
    """What the group `own` and those around it have left. Groups that a container does not show are passed over."""
    path = PurePosixPath("/", own)
    groups = [PurePosixPath("/")] if ".." in path.parts else [path, *path.parents]
    for group in groups:
        folder = top / group.relative_to("/")
        known = [int(text) for file in limits if (text := _text(folder / file).strip()).isdecimal()]
        used = _text(folder / usage).strip()
        if known and used.isdecimal():
            stat = _named(folder / "memory.stat")
            files = sum(stat.get(f"{prefix}{part}_file", 0) for part in ("active", "inactive"))
            yield FreeMemory(max(min(known) - max(int(used) - files, 0), 0), f"in the memory cgroup {str(group)!r}")


def _named(path: Path) -> dict[str, int]:
    """The numbers of a file that has a name and a number on each line."""
    words = [line.split() for line in _text(path).splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1 and line[1].isdecimal()}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
