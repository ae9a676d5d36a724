"""Tasks in processes of their own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import traceback
from collections.abc import Callable, Iterator
from functools import wraps
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

import pytest

from support.warm import Child
from support.warm_server import leave

CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000
MS_RDONLY, MS_REMOUNT, MS_REC, MS_PRIVATE = 1, 32, 1 << 14, 1 << 18


def in_process(task: Callable[..., Any], *arguments: Any) -> Any:
    """What `task(*arguments)` returns in a new process. One that fails fails here."""
    child, pipe = with_pipe(_answer, task, *arguments)
    with child, pipe:
        try:
            answer = pipe.recv()
        except EOFError:
            answer = None
        code = child.wait()
    if answer is None or code != 0:
        pytest.fail(f"{task.__name__} came to {answer and answer[1]} and ended with {code}")
    passed, value = answer
    if not passed:
        pytest.fail(value)
    return value


def in_own_process(test: Callable[..., None]) -> Callable[..., None]:
    """The test runs in a new process."""

    @wraps(test)
    def ordered(**given: Any) -> None:
        in_process(_call, ordered, given)

    return ordered


def _call(ordered: Any, given: dict[str, Any]) -> None:
    ordered.__wrapped__(**given)


def with_pipe(task: Callable[..., Any], *arguments: Any, whole: bool = False) -> tuple[Child, Connection]:
    """A process that calls `task(*arguments, pipe)`, and the other end of its pipe.

    whole: whether it frees at its end what it and torch hold, as a script does.
    """
    ours, theirs = Pipe()
    with theirs:
        return Child(_with_pipe, whole, task, *arguments, files=[theirs.fileno()]), ours


def _with_pipe(whole: bool, task: Callable[..., Any], *given: Any) -> None:
    *arguments, file = given
    with Connection(file) as pipe:
        task(*arguments, pipe)
    if not whole:
        leave()


def _answer(task: Callable[..., Any], *given: Any) -> None:
    *arguments, pipe = given
    try:
        pipe.send((True, task(*arguments)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))


def system(name: str, *arguments: Any) -> None:
    """Call a function of the C library; OSError where it does not return 0."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def _mount(path: Path, flags: int, data: str) -> None:
    system("mount", b"tmpfs", os.fsencode(path), b"tmpfs", ctypes.c_ulong(flags), data.encode())


def own_namespaces(kinds: int) -> None:
    """Leave the namespaces of these kinds for new ones, in which this process, of one thread, may do what root does."""
    user, group = os.getuid(), os.getgid()
    system("unshare", CLONE_NEWUSER | kinds)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")


def _own_mounts() -> None:
    own_namespaces(CLONE_NEWNS)
    system("mount", None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None)


def _try_to_mount(path: Path) -> str:
    with contextlib.suppress(OSError):
        _own_mounts()
        _mount(path, 0, "size=64k")
        return "can"
    return "cannot"


@pytest.fixture(scope="module")
def disk_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to mount a `Disk` on in a process of `in_process`; skips where users may not mount."""
    path = tmp_path_factory.mktemp("disk")
    if in_process(_try_to_mount, path) == "cannot":
        pytest.skip("this system lets no user mount a filesystem in a namespace of their own")
    return path


class Disk:
    """A real filesystem of `size` bytes, seen by this process alone, which mounts nothing else."""

    def __init__(self, path: Path, size: int) -> None:
        _own_mounts()
        self.path = path
        _mount(path, 0, f"size={size}")

    @contextlib.contextmanager
    def full(self) -> Iterator[None]:
        """Not one byte is left while the block runs."""
        filler = self.path / "filler"
        with filler.open("wb", buffering=0) as file:
            for size in (1 << 20, 4096):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        try:
            yield
        finally:
            filler.unlink()

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be written while the block runs. Nothing may be open for writing when it begins."""
        _mount(self.path, MS_REMOUNT | MS_RDONLY, "")
        try:
            yield
        finally:
            _mount(self.path, MS_REMOUNT, "")
