"""Files that outlive a crash and betray damage: fsync, atomic replacement, msgpack sealed with a checksum."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgpack  # type: ignore[import-untyped]

from ..interrupts import uninterrupted

TEMPORARY = ".tmp-"  # begins the name of what is being written
MORE_FILES = "let this process open more files (ulimit -n)"  # where there is no descriptor left
MAX_SEALED = 1 << 24  # bytes; bounds what reading a foreign file may allocate


def is_folder_name(name: Any) -> bool:
    """Whether it is 1 to 200 printable bytes of UTF-8, without separators and a leading dot."""
    plain = isinstance(name, str) and name.isprintable() and not name.startswith(".") and not set(name) & set("/\\")
    return plain and 1 <= len(name.encode()) <= 200


def remedy_for(error: OSError, otherwise: str) -> str:
    """What to do about an error of the system, `otherwise` where it depends on what was asked for."""
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


@contextlib.contextmanager
def made_aside(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` that becomes it, durably, where the block ends; where it raises, nothing is left.

    What the block puts there it makes durable. Parents are created; what a killed process left is removed. Raises
    OSError; UnsyncedError where it is there all the same.
    """
    temporary = folder.parent / f"{TEMPORARY}{folder.name}"
    try:
        make_folder(folder.parent)
        remove_folder(temporary)
        temporary.mkdir()
        yield temporary
        fsync_dir(temporary)
        put_in_place(temporary, folder)
    finally:
        with contextlib.suppress(OSError):  # what went wrong first is told
            remove_folder(temporary)  # gone already where the rename was reached


def remove_leftovers(folder: Path) -> None:
    """Remove what `made_aside` of killed processes left in a folder, if that is there. Raises OSError."""
    for leftover in folder.glob(f"{TEMPORARY}*/"):
        remove_folder(leftover)


class UnsyncedError(OSError):
    """What was asked for is there, whole; whether it outlives a power loss is not known."""


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename what is durable itself to `path`, which is not there, durably. Raises OSError, UnsyncedError."""
    temporary.rename(path)
    try:
        fsync_dir(path.parent)
    except OSError as error:  # nor would it be known of an undoing
        raise UnsyncedError(f"it is there, whole, but may not outlive a power loss: {error}") from error


def remove_folder(path: Path) -> None:
    """Remove a folder with all that is in it, if it is there; of a link to a folder, the link alone."""
    with uninterrupted(), contextlib.suppress(FileNotFoundError):  # shutil loses track of its descriptors otherwise
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that at any instant it is the old one or the new one, whole. One writer at a time."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
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
    """msgpack of `[msgpack of value, its crc32]`. Raises ValueError for a value that it cannot hold."""
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
    """The value of `seal`. Raises ValueError for anything else: truncated, damaged or foreign."""
    outer = _unpack(data, max_array_len=2, max_map_len=0)
    if type(outer) is not list or [type(item) for item in outer] != [bytes, int]:
        raise ValueError("not a sealed record")
    payload, checksum = outer
    if zlib.crc32(payload) != checksum:
        raise ValueError("the checksum does not match")
    return _unpack(payload, max_array_len=1 << 16, max_map_len=1 << 16)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also for a pipe or a device, which could block for ever."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{str(path)!r} is not a regular file")
    return path.open("rb")


def read_record(path: Path) -> bytes:
    """The content of a file to `unseal`. Raises OSError, or ValueError if it is too large to be one."""
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
