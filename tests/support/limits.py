"""What a process may take of the system, limited for real while a block runs."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def descriptors(spare: int) -> Iterator[None]:
    """No more than `spare` files can be opened while the block runs."""
    gc.collect()  # which would close what garbage holds meanwhile
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = [os.open("/dev/null", os.O_RDONLY) for _ in range(spare)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    gaps: list[int] = []
    with contextlib.suppress(OSError):
        while True:
            gaps.append(os.open("/dev/null", os.O_RDONLY))
    for descriptor in kept:
        os.close(descriptor)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in gaps:
            os.close(descriptor)


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Writing beyond `size` bytes of a file fails, as on a full disk; Python leaves the signal for it ignored."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
