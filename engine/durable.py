"""Files that survive a crash and show damage: fsync, atomic replacement, msgpack sealed with a checksum."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import msgpack  # type: ignore[import-untyped]

from .signals import uninterrupted

TEMPORARY = ".tmp-"  # begins the name of a file or folder that is being written
MORE_FILES = "let this process open more files (ulimit -n)"  # the remedy where there is no descriptor left
MAX_SEALED = 1 << 24  # bytes; bounds what reading a foreign file may allocate

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of <fcntl.h> and <linux/fs.h>
_trying = Lock()  # one `check_exchange` at a time: a save in the background calls it as well


def remedy_for(error: OSError, otherwise: str) -> str:
    """What to do about an error of the system; `otherwise` where that depends on the call that failed."""
    return MORE_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else otherwise


def fsync_file(path: Path) -> None:
    """Make the content of a file durable."""
    _fsync(path, os.O_RDONLY)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable: files created, renamed or removed in it."""
    _fsync(path, os.O_RDONLY | os.O_DIRECTORY)


def make_folder(path: Path) -> None:
    """Create a folder and its parents where they are missing, durably."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def temporary_path(path: Path) -> Path:
    """The name of a file or folder while it is being written."""
    return path.with_name(f"{TEMPORARY}{path.name}")


class Commit:
    """Lets several folders be there at once, or none. Each is made aside, and waits in `wait` until all are durable."""

    def wait(self) -> None:
        """Return when the folder is to have its name. What it raises undoes the folder."""

    @property
    def is_made(self) -> bool:
        """Whether one of the folders has its name, so that the others are to get theirs, whatever happens."""
        raise NotImplementedError


@contextlib.contextmanager
def atomic_folder(folder: Path, overwrite: bool = False, commit: Commit | None = None) -> Iterator[Path]:
    """A temporary folder beside `folder`, which gets the name `folder`, durably, when the block ends.

    If the block raises, nothing is left. The block makes durable what it puts into the temporary folder. Parents are
    created; what a killed process left is removed. With `overwrite` the new folder takes the place of an old one at one
    instant, and the old one is removed when that is durable. commit: of a folder that is made with others. Raises
    OSError; NoExchangeError, and the old folder is untouched; UnsyncedError, and the new folder is there.
    """
    temporary = temporary_path(folder)
    try:
        make_folder(folder.parent)
        remove_temporary([temporary])
        temporary.mkdir()
        yield temporary
        fsync_dir(temporary)
        if commit is not None:
            fsync_dir(folder.parent)  # the name by which it is found when another has committed it
            commit.wait()
        with uninterrupted():  # between the exchange and its sync the old one must not be removed
            put_in_place(temporary, folder, overwrite)
    except UnsyncedError:  # a power loss may bring the old folder back, so that stays
        raise
    except BaseException:
        if commit is None or not commit.is_made:
            with contextlib.suppress(OSError):  # what went wrong first is told
                remove_folder(temporary)
        raise
    with contextlib.suppress(OSError):  # the next call removes it
        remove_folder(temporary)  # the old folder


def remove_leftovers(folder: Path) -> None:
    """Remove what `atomic_folder` of killed processes left in a folder, if the folder is there. Raises OSError."""
    remove_temporary(list(folder.glob(f"{TEMPORARY}*/")))


class UnsyncedError(OSError):
    """A file or folder was put in place, whole; whether it survives a power loss is not known."""


class NoExchangeError(OSError):
    """The file system cannot exchange two folders, so no folder can be replaced at one instant."""


def put_in_place(temporary: Path, path: Path, overwrite: bool = False) -> None:
    """Rename a durable file or folder to `path`, durably; nothing has that name. Raises OSError, UnsyncedError.

    With `overwrite` `path` may be there: an old folder gets the name `temporary`, or NoExchangeError is raised; an old
    file is replaced.
    """
    if overwrite and temporary.is_dir() and os.path.lexists(path):
        exchange(temporary, path)
    else:
        temporary.rename(path)
    try:
        fsync_dir(path.parent)
    except OSError as error:  # whether an undoing is durable would not be known either
        raise UnsyncedError(f"it is there, whole, but may not outlive a power loss: {error}") from error


def exchange(one: Path, other: Path) -> None:
    """Exchange two names of one file system at one instant. Raises OSError, NoExchangeError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        number = errno.ENOSYS
    elif renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return
    else:
        number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise NoExchangeError(number, "this file system cannot exchange two folders", str(other))
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def check_exchange(folder: Path) -> None:
    """Raises NoExchangeError or OSError where a folder made beside `folder` could not take its place."""
    place = folder.parent / f"{TEMPORARY}.{folder.name}"  # no name of a user: those have no leading dot
    with _trying:
        try:
            remove_folder(place)
            for name in "12":
                (place / name).mkdir(parents=True)
            exchange(place / "1", place / "2")
        finally:
            with contextlib.suppress(OSError):
                remove_folder(place)


def remove_temporary(folders: Collection[Path]) -> None:
    """Remove folders that killed processes left, all in one parent, where they are there. Raises OSError.

    One of them may be an old folder after an exchange, so the exchange is made durable first.
    """
    there = [folder for folder in folders if os.path.lexists(folder)]
    if there:
        fsync_dir(there[0].parent)
    for folder in there:
        remove_folder(folder)


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it, if it is there. Of a link to a folder, only the link is removed."""
    with uninterrupted(), contextlib.suppress(FileNotFoundError):  # shutil loses track of its descriptors otherwise
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at any instant the old file or the new file is there, whole. One writer at a time."""
    temporary = temporary_path(path)
    try:
        with uninterrupted(), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):  # what went wrong first is told
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def seal(value: Any) -> bytes:
    """msgpack of `[msgpack of value, its crc32]`. Raises ValueError for a value that msgpack cannot hold."""
    try:
        payload = msgpack.packb(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"msgpack cannot hold this value: {error}") from error
    data: bytes = msgpack.packb([payload, zlib.crc32(payload)])
    if len(data) > MAX_SEALED:
        raise ValueError(f"more than {MAX_SEALED} bytes")
    unseal(data)  # a record that could not be read back is never written
    return data


def unseal(data: bytes) -> Any:
    """The value that was given to `seal`. Raises ValueError for truncated, damaged and foreign data."""
    outer = _unpack(data, max_array_len=2, max_map_len=0)
    if type(outer) is not list or [type(item) for item in outer] != [bytes, int]:
        raise ValueError("not a sealed record")
    payload, checksum = outer
    if zlib.crc32(payload) != checksum:
        raise ValueError("the checksum does not match")
    return _unpack(payload, max_array_len=1 << 16, max_map_len=1 << 18)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError; also for a pipe or a device, since they could block for ever."""
    check_regular(path)
    return path.open("rb")


def check_regular(path: Path) -> None:
    """Raises OSError for anything but a file, and for a symbolic link to anything else."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{str(path)!r} is not a regular file: put a file, or a link to one, in its place")


def read_record(path: Path) -> bytes:
    """The content of a file, for `unseal`. Raises OSError, and ValueError for more than MAX_SEALED bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_SEALED:
            raise ValueError(f"more than {MAX_SEALED} bytes")
        return file.read(size)


def _unpack(data: bytes, **limits: int) -> Any:
    try:
        return msgpack.unpackb(data, **limits)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not valid msgpack ({error or type(error).__name__})") from error
