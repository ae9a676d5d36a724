"""Writes files that survive a crash (fsync, atomic replacement), and detects damaged files (checksums of records)."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterator
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import msgpack  # type: ignore[import-untyped]

from .checksum import crc32
from .errors import undo_on_error
from .signals import defer_signals

TEMPORARY_PREFIX = ".tmp-"  # name prefix of a file or folder that is being written
OPEN_FILES_REMEDY = "let this process open more files (ulimit -n)"
MAX_SEALED_BYTES = 1 << 24  # maximum bytes of a record, so that a foreign file cannot make its reader allocate more

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants from <fcntl.h> and <linux/fs.h>
_exchange_lock = Lock()  # `check_exchange` may run in several threads, since background saves call it


def choose_remedy(error: OSError, default: str) -> str:
    """Returns OPEN_FILES_REMEDY if the process ran out of file descriptors, and `default` for all other errors."""
    return OPEN_FILES_REMEDY if error.errno in (errno.EMFILE, errno.ENFILE) else default


def fsync_file(path: Path) -> None:
    """Make a file's content durable. For a folder, make the creation, renaming and removal of its files durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


fsync_dir = fsync_file


def make_folder(path: Path) -> None:
    """Durably create a folder and its missing parents."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def make_temporary_path(path: Path) -> Path:
    """Returns the path that a file or folder has while it is being written."""
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}")


class NewFolder:
    """A folder that is written as `temporary`, next to `path`, and is then renamed to `path`.

    The caller makes the files in `temporary` durable, and finally calls `drop`, after success and failure alike.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        """Create the parents and the temporary folder, after removing leftovers of a killed process. Raises OSError."""
        self.path, self.temporary, self._overwrite = path, make_temporary_path(path), overwrite
        with undo_on_error(self.drop):
            make_folder(path.parent)
            remove_temporary([self.temporary])
            self.temporary.mkdir()

    def publish(self) -> None:
        """Durably rename the folder to `path`. Renames an old folder at `path` to `temporary`; `drop` removes it."""
        publish(self.temporary, self.path, self._overwrite)

    def undo_publish(self) -> None:
        """Undo `publish`, ignoring errors."""
        with contextlib.suppress(OSError):
            if self.temporary.is_dir():
                swap_folders(self.temporary, self.path)
            else:
                self.path.rename(self.temporary)
            fsync_dir(self.path.parent)

    def drop(self) -> None:
        """Remove the temporary folder. Ignores errors, because the next `NewFolder` for this path removes leftovers."""
        with contextlib.suppress(OSError):
            remove_folder(self.temporary)


@contextlib.contextmanager
def atomic_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to `folder`, and durably rename it to `folder` when the block ends.

    The block must call fsync on each file that it writes. If the block raises, its files are removed. Creates missing
    parent folders. Removes the temporary folder of an earlier, killed process. With `overwrite`, the new folder
    replaces an old folder atomically, and the old folder is removed once the replacement is durable. Raises OSError.
    After NoExchangeError, the old folder is unchanged. After UnsyncedError, the new folder exists.
    """
    new_folder = NewFolder(folder, overwrite)
    try:
        yield new_folder.temporary
        fsync_dir(new_folder.temporary)
        with defer_signals():  # a signal between the swap and its sync must not remove the old folder
            new_folder.publish()
    except UnsyncedError:  # a power loss may restore the old folder, so keep it
        raise
    except BaseException:
        new_folder.drop()
        raise
    new_folder.drop()  # removes the old folder


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders that killed processes left in a folder, if the folder exists. Raises OSError."""
    remove_temporary(list(folder.glob(f"{TEMPORARY_PREFIX}*/")))


class UnsyncedError(OSError):
    """A file or folder was renamed and is complete, but it may not survive a power loss."""


class NoExchangeError(OSError):
    """The file system cannot swap two folders, so it cannot replace a folder atomically."""


def publish(temporary: Path, path: Path, overwrite: bool = False) -> None:
    """Durably rename a file or folder, whose content is already durable, to `path`. Raises OSError, UnsyncedError.

    With `overwrite`, `path` may exist. An old file is replaced; an old folder gets the name `temporary`. Raises
    NoExchangeError if the file system cannot swap two folders.
    """
    if overwrite and temporary.is_dir() and os.path.lexists(path):
        swap_folders(temporary, path)
    else:
        temporary.rename(path)
    try:
        fsync_dir(path.parent)
    except OSError as error:  # the rename stays, because undoing it might not be durable either
        raise UnsyncedError(f"the data is complete, but may not survive a power loss: {error}") from error


def swap_folders(first: Path, second: Path) -> None:
    """Swap two names on one file system atomically. Raises OSError, NoExchangeError."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        error_number = errno.ENOSYS
    elif renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE) == 0:
        return
    else:
        error_number = ctypes.get_errno()
    if error_number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
        raise NoExchangeError(error_number, "this file system cannot exchange two folders", str(second))
    raise OSError(error_number, os.strerror(error_number), str(first), None, str(second))


def check_exchange(folder: Path) -> None:
    """Raise NoExchangeError or OSError if `folder` could not be swapped with a folder next to it."""
    path = folder.parent / f"{TEMPORARY_PREFIX}.{folder.name}"  # the leading dot keeps users from choosing this name
    with _exchange_lock:
        try:
            remove_folder(path)
            for name in "12":
                (path / name).mkdir(parents=True)
            swap_folders(path / "1", path / "2")
        finally:
            with contextlib.suppress(OSError):
                remove_folder(path)


def remove_temporary(folders: Collection[Path]) -> None:
    """Remove leftover `folders` of killed processes. All have one parent. Skips missing folders. Raises OSError."""
    leftovers = [folder for folder in folders if os.path.lexists(folder)]
    if leftovers:  # a leftover may be the old folder after a swap, so make the swap durable first
        fsync_dir(leftovers[0].parent)
    for folder in leftovers:
        remove_folder(folder)


def remove_folder(path: Path) -> None:
    """Remove a folder with its contents, if it exists. For a link to a folder, remove only the link."""
    with defer_signals(), contextlib.suppress(FileNotFoundError):  # an interrupted rmtree leaks descriptors
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Replace a file atomically: readers see the complete old or new file. Allows one writer at a time."""
    temporary = make_temporary_path(path)
    try:
        with defer_signals(), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):  # an error here must not hide the first error
            temporary.unlink()
        raise
    fsync_dir(path.parent)


def seal(value: Any) -> bytes:
    """Returns a record: msgpack of `[payload, its crc32]`. The payload is msgpack of `value`. Raises ValueError."""
    try:
        payload = msgpack.packb(value)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"msgpack cannot hold this value: {error}") from error
    data: bytes = msgpack.packb([payload, crc32(payload)])
    if len(data) > MAX_SEALED_BYTES:
        raise ValueError(f"more than {MAX_SEALED_BYTES} bytes")
    unseal(data)  # never write a record that cannot be read
    return data


def unseal(data: bytes) -> Any:
    """Returns the value in a record made by `seal`. Raises ValueError for truncated, damaged or foreign data."""
    record = _unpack(data, max_array_len=2, max_map_len=0)
    if type(record) is not list or [type(item) for item in record] != [bytes, int]:
        raise ValueError("not a sealed record")
    payload, checksum = record
    if crc32(payload) != checksum:
        raise ValueError("the checksum does not match")
    return _unpack(payload, max_array_len=1 << 16, max_map_len=1 << 18)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError. Rejects pipes and devices, because reading them could block forever."""
    check_regular(path)
    return path.open("rb")


def check_regular(path: Path) -> None:
    """Raise OSError unless the path is a regular file, or a symbolic link to one."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{str(path)!r} is not a regular file: replace it by a file, or by a link to one")


def read_record_bytes(path: Path) -> bytes:
    """Return a record, still sealed. Raises OSError, or ValueError if the file exceeds MAX_SEALED_BYTES."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_SEALED_BYTES:
            raise ValueError(f"more than {MAX_SEALED_BYTES} bytes")
        return file.read(size)


def _unpack(data: bytes, **limits: int) -> Any:
    try:
        return msgpack.unpackb(data, **limits)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"not valid msgpack ({error or type(error).__name__})") from error
