"""Files that survive a crash and whose damage is found: fsync, atomic replace, msgpack sealed with a checksum."""

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
MORE_FILES = "let this process open more files (ulimit -n)"  # the remedy if no descriptor is left
MAX_SEALED = 1 << 24  # bytes; limits the memory that reading a foreign file allocates

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of <fcntl.h> and <linux/fs.h>
_trying = Lock()  # one `check_exchange` at a time: a save in the background calls it as well


def remedy_for(error: OSError, otherwise: str) -> str:
    """What to do about an error of the system; `otherwise` if that depends on the call that failed."""
    return MORE_FILES if error.errno in (errno.EMFILE, errno.ENFILE) else otherwise


def fsync_file(path: Path) -> None:
    """Make the content of a file durable, or the names in a folder: files created, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


fsync_dir = fsync_file


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    fsync_dir(path.parent)


def temporary_path(path: Path) -> Path:
    """The name of a file or folder while it is being written."""
    return path.with_name(f"{TEMPORARY}{path.name}")


class NewFolder:
    """A folder that is written under a temporary name next to `path`, and then gets that name.

    The writer makes durable what it puts into `temporary`, and ends with `drop`.
    """

    def __init__(self, path: Path, overwrite: bool = False) -> None:
        """Create the parents and the temporary folder. Leftovers of a killed process are removed. Raises OSError."""
        self.path, self.temporary, self._overwrite = path, temporary_path(path), overwrite
        try:
            make_folder(path.parent)
            remove_temporary([self.temporary])
            self.temporary.mkdir()
        except BaseException:
            self.drop()
            raise

    def put_in_place(self) -> None:
        """Give the folder its name, durably. An old one has the temporary name until `drop`.

        Raises as the function `put_in_place`.
        """
        put_in_place(self.temporary, self.path, self._overwrite)

    def take_back(self) -> None:
        """Undo `put_in_place`, as far as possible."""
        with contextlib.suppress(OSError):
            if self.temporary.is_dir():
                swap_folders(self.temporary, self.path)
            else:
                self.path.rename(self.temporary)
            fsync_dir(self.path.parent)

    def drop(self) -> None:
        """Remove what has the temporary name, as far as possible: the next call for this path removes the rest."""
        with contextlib.suppress(OSError):
            remove_folder(self.temporary)


@contextlib.contextmanager
def atomic_folder(folder: Path, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder next to `folder`, which is durably renamed to `folder` when the block ends.

    If the block raises, no files are left. The block makes durable what it puts into the temporary folder. Parents are
    created; leftovers of a killed process are removed. With `overwrite` the new folder replaces an old one atomically,
    and the old one is removed when that is durable. Raises OSError; NoExchangeError, and the old folder is unchanged;
    UnsyncedError, and the new folder exists.
    """
    new = NewFolder(folder, overwrite)
    try:
        yield new.temporary
        fsync_dir(new.temporary)
        with uninterrupted():  # between the swap and its sync the old one must not be removed
            new.put_in_place()
    except UnsyncedError:  # a power loss may restore the old folder, so keep it
        raise
    except BaseException:
        new.drop()
        raise
    new.drop()  # the old folder


def remove_leftovers(folder: Path) -> None:
    """Remove the leftovers of `atomic_folder` of killed processes from a folder, if it exists. Raises OSError."""
    remove_temporary(list(folder.glob(f"{TEMPORARY}*/")))


class UnsyncedError(OSError):
    """A file or folder was renamed and is complete; whether it survives a power loss is not known."""


class NoExchangeError(OSError):
    """The file system cannot exchange two folders, so no folder can be replaced atomically."""


def put_in_place(temporary: Path, path: Path, overwrite: bool = False) -> None:
    """Rename a durable file or folder to `path`, durably. Raises OSError, UnsyncedError.

    overwrite: whether `path` may exist. An old file is replaced; an old folder gets the name `temporary`, or
    NoExchangeError is raised.
    """
    if overwrite and temporary.is_dir() and os.path.lexists(path):
        swap_folders(temporary, path)
    else:
        temporary.rename(path)
    try:
        fsync_dir(path.parent)
    except OSError as error:  # whether undoing it is durable would not be known either
        raise UnsyncedError(f"it is complete, but may not survive a power loss: {error}") from error


def swap_folders(one: Path, other: Path) -> None:
    """Swap two names on one file system atomically. Raises OSError, NoExchangeError."""
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
    """Raises NoExchangeError or OSError if a folder next to `folder` could not replace it."""
    path = folder.parent / f"{TEMPORARY}.{folder.name}"  # no name that a user gave: those have no leading dot
    with _trying:
        try:
            remove_folder(path)
            for name in "12":
                (path / name).mkdir(parents=True)
            swap_folders(path / "1", path / "2")
        finally:
            with contextlib.suppress(OSError):
                remove_folder(path)


def remove_temporary(folders: Collection[Path]) -> None:
    """Remove those of the folders that exist: leftovers of killed processes, all in one parent. Raises OSError.

    One of them may be an old folder after a swap, so the swap is made durable first.
    """
    existing = [folder for folder in folders if os.path.lexists(folder)]
    if existing:
        fsync_dir(existing[0].parent)
    for folder in existing:
        remove_folder(folder)


def remove_folder(path: Path) -> None:
    """Remove a folder with its contents, if it exists. Of a link to a folder, only the link is removed."""
    with uninterrupted(), contextlib.suppress(FileNotFoundError):  # otherwise shutil leaks descriptors
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file atomically: readers see the old file or the new one, complete. One writer at a time."""
    temporary = temporary_path(path)
    try:
        with uninterrupted(), temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is raised
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
    unseal(data)  # so that a record that cannot be read is never written
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
    """Open a file for reading. Raises OSError; also for a pipe or a device, since they could block forever."""
    check_regular(path)
    return path.open("rb")


def check_regular(path: Path) -> None:
    """Raises OSError for anything but a file, and for a symbolic link to anything else."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(f"{str(path)!r} is not a regular file: replace it by a file, or by a link to one")


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
