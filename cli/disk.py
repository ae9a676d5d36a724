"""What `tierbed doctor PATH` finds of a file system. Nothing here raises: what fails is a finding."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from .checks import Check
from .output import size

LITTLE = 1 << 30  # bytes; less room than this is reported

_NEEDED = "persistent_path must be on a file system that has it: a local one, such as ext4 or xfs"


def disk_checks(path: Path) -> Iterator[Check]:
    """The findings on a folder; where it is not there, on the nearest folder above it, and a finding says so."""
    folder = path.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        yield Check("folder", False, f"{folder} is no folder", "give a folder, or the path of a new one")
        return
    if folder != path.absolute():
        yield Check("folder", True, f"{path} is not there yet, so {folder} was looked at")
    free = shutil.disk_usage(folder).free
    yield Check("free space", free >= LITTLE, f"{size(free)} in {folder}", None if free >= LITTLE else "make room")
    try:
        place = tempfile.TemporaryDirectory(prefix=".tierbed-doctor-", dir=folder)
    except OSError as error:
        yield Check("writable", False, str(error), "give a folder that this user can write, or change its owner")
        return
    with place as name:
        for what, try_, remedy in (
            ("fsync", _fsync, _NEEDED),
            ("rename", _rename, _NEEDED),
            ("locks", _lock, _NEEDED),
            ("hard links", _link, "checkpoints copy RocksDB's files here, and take their room again"),
            ("direct reads", _direct, 'leave read_mode="buffered", the default'),
            ("sockets", _socket, "a running trainer cannot be asked to save here; save from it, or close it first"),
        ):
            yield _tried(what, try_, Path(name), remedy)


def _tried(what: str, work: Callable[[Path], str], folder: Path, remedy: str) -> Check:
    try:
        return Check(what, True, work(folder))
    except OSError as error:
        return Check(what, False, str(error), remedy)


def _fsync(folder: Path) -> str:
    times = []
    with open(folder / "file", "wb") as file:
        for _ in range(5):
            begin = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - begin)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return f"{1000 * sorted(times)[2]:.2g} ms"


def _rename(folder: Path) -> str:
    (folder / "a").mkdir()
    (folder / "a").rename(folder / "b")
    return "atomic"


def _lock(folder: Path) -> str:
    with open(folder / "lock", "w") as first, open(folder / "lock", "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise OSError("a file can be locked twice")
    return "exclusive"


def _link(folder: Path) -> str:
    (folder / "linked").write_bytes(b"")
    os.link(folder / "linked", folder / "link")
    return "supported"


def _direct(folder: Path) -> str:
    (folder / "direct").write_bytes(bytes(4096))
    os.close(os.open(folder / "direct", os.O_RDONLY | os.O_DIRECT))
    return "supported"


def _socket(folder: Path) -> str:
    # by a short path, as an address has 108 bytes
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"/proc/self/fd/{descriptor}/socket")
    finally:
        os.close(descriptor)
    return "supported"
