"""A process whose memory and page cache together are held to a number of bytes, by a memory cgroup of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(limit: int | None) -> Iterator[Callable[[], None]]:
    """Yields what a child runs before anything else, for `preexec_fn`. None limits nothing.

    Raises OSError if this user may make no memory cgroup.
    """
    if limit is None:
        yield lambda: None
        return
    name, file = (_v1(), "memory.limit_in_bytes") if _is_v1() else (_v2(), "memory.max")
    group = name / f"tierbed-{os.getpid()}-{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / file).write_text(str(limit))
        for swap, most in (("memory.memsw.limit_in_bytes", str(limit)), ("memory.swap.max", "0")):
            if (group / swap).exists():
                (group / swap).write_text(most)
        yield lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        _remove(group)


def may_limit() -> str | None:
    """None if memory can be limited, else the reason why not."""
    try:
        with memory_limit(1 << 30):
            return None
    except OSError as error:
        return str(error)


def _is_v1() -> bool:
    return (_ROOT / "memory" / "cgroup.procs").exists()


def _own(controller: str) -> str:
    """This process's group of a controller; "" names the one of version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    raise OSError(f"this process is in no cgroup of {controller or 'version 2'}")


def _v1() -> Path:
    inside = _ROOT / "memory" / _own("memory")
    return inside if inside.is_dir() else _ROOT / "memory"  # in a container its own group may be the root


def _v2() -> Path:
    # a group with processes gives no controllers to groups in it, so the new one is a sibling of this process's
    inside = _ROOT / _own("")
    parent = inside.parent if inside != _ROOT else _ROOT
    if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        raise OSError(f"{parent}/cgroup.subtree_control has no memory")
    return parent


def _remove(group: Path) -> None:
    """A group goes a moment after the last of its processes."""
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    group.rmdir()
