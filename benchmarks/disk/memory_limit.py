"""Limit a process's memory, including its page cache, with a new memory cgroup."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")


@contextmanager
def memory_limit(limit: int | None) -> Iterator[Callable[[], None]]:
    """Yield a function that a child process calls first (`preexec_fn`) to limit its memory to `limit` bytes.

    None sets no limit. Raises OSError if this user may not create memory cgroups.
    """
    if limit is None:
        yield lambda: None
        return
    parent, file = (_find_v1_parent(), "memory.limit_in_bytes") if _is_v1() else (_find_v2_parent(), "memory.max")
    cgroup = parent / f"tierbed-{os.getpid()}-{time.monotonic_ns()}"
    cgroup.mkdir()
    try:
        (cgroup / file).write_text(str(limit))
        for swap, maximum in (("memory.memsw.limit_in_bytes", str(limit)), ("memory.swap.max", "0")):
            if (cgroup / swap).exists():
                (cgroup / swap).write_text(maximum)
        yield lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())) and None
    finally:
        _remove(cgroup)


def find_limit_problem() -> str | None:
    """Return None if memory can be limited, otherwise the reason why not."""
    try:
        with memory_limit(1 << 30):
            return None
    except OSError as error:
        return str(error)


def _is_v1() -> bool:
    return (_ROOT / "memory" / "cgroup.procs").exists()


def _find_own_cgroup(controller: str) -> str:
    """Return the path of this process's cgroup for a controller; "" means cgroup version 2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    raise OSError(f"this process has no cgroup for {controller or 'version 2'}")


def _find_v1_parent() -> Path:
    own_cgroup = _ROOT / "memory" / _find_own_cgroup("memory")
    return own_cgroup if own_cgroup.is_dir() else _ROOT / "memory"  # a container may mount its cgroup as the root


def _find_v2_parent() -> Path:
    # a cgroup that has processes cannot have children with controllers, so make a sibling of this process's cgroup
    own_cgroup = _ROOT / _find_own_cgroup("")
    parent = own_cgroup.parent if own_cgroup != _ROOT else _ROOT
    if "memory" not in (parent / "cgroup.subtree_control").read_text().split():
        raise OSError(f"{parent}/cgroup.subtree_control lacks the memory controller")
    return parent


def _remove(cgroup: Path) -> None:
    """Remove a cgroup. Retries, because the kernel releases it shortly after its last process ended."""
    for _ in range(100):
        try:
            cgroup.rmdir()
            return
        except OSError:
            time.sleep(0.05)
    cgroup.rmdir()
