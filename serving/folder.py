"""The serving folder: its versions, the version that readers take, and the publisher's lock. See docs/serving.md."""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from typing import Any, TypeVar

from ..engine.checks import check_int
from ..engine.checksum import crc32
from ..engine.durable import (
    TEMPORARY_PREFIX,
    choose_remedy,
    fsync_dir,
    make_folder,
    open_regular,
    read_record_bytes,
    remove_folder,
    write_atomically,
)
from ..engine.errors import OptionError, ServingError, undo_on_error
from ..engine.threads import POLL_SECONDS
from ..snapshots.store.lock import FileLock, InUseError
from .version import Current, Pending, ServedFile, Version, seal_record, unseal_record

CURRENT, LOCK, PENDING = "CURRENT", "LOCK", "PENDING"
_FILE_NAME = re.compile(r".+-[0-9a-f]{16}\.(rows|safetensors)")  # no other file is removed
_VERSION_NAME = re.compile(r"([0-9]{6,})\.json")
_PIECE_BYTES = 1 << 24
_LOCK_SECONDS = 10.0  # how long to wait for another process's lock
_ATTEMPTS = 3  # how often to open the current version if the publisher may remove it meanwhile

T = TypeVar("T")


class MissingVersionError(ServingError):
    """No such version is in the folder."""


class LockedError(ServingError):
    """Another publisher changes the folder."""


class ServingFolder:
    """A folder that a publisher fills with versions, and that readers open. Only a publish or a pull creates it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
            raise OptionError(f"folder={path!r}: give the path of a serving folder")
        self.path = Path(path).expanduser().absolute()
        self._versions, self.files = self.path / "versions", self.path / "files"

    def find_file(self, file: ServedFile) -> Path:
        """Returns the path of a version's file."""
        return self.files / file.name

    def list_versions(self) -> list[int]:
        """Returns the numbers of all versions, ascending."""
        with self.convert_errors("list"):
            try:
                names = os.listdir(self._versions)
            except FileNotFoundError:
                return []
        return sorted(int(match[1]) for name in names if (match := _VERSION_NAME.fullmatch(name)))

    def read_current(self) -> Current:
        """Returns the version that readers take. Raises ServingError if none was published."""
        current = self.find_current()
        if current.version == 0:
            raise self._make_missing_error(f"file {CURRENT}")
        return current

    def find_current(self) -> Current:
        """As `read_current`, but returns version 0 if none was published."""
        return self._read(self.path / CURRENT, Current) or Current(0)

    def use_current(self, use: Callable[[Current], T]) -> T:
        """Call `use` with the version that readers take, and again if its files were removed. Raises ServingError."""
        for attempt in range(_ATTEMPTS):
            current = self.read_current()
            try:
                return use(current)
            except ServingError:  # if the publisher removed the version, CURRENT names another one
                if attempt + 1 == _ATTEMPTS or self.read_current() == current:
                    raise
        raise AssertionError

    def read_version(self, version: int) -> Version:
        """Returns a version. Raises ServingError if it does not exist or its description is damaged."""
        result = self._read(self._find_version(version), Version)
        if result is None or result.version != version:
            numbers = ", ".join(map(str, self.list_versions())) or "none"
            raise MissingVersionError(f"{str(self.path)!r} has no version {version}; it has: {numbers}")
        return result

    def read_latest(self) -> Version | None:
        """Returns the version with the highest number, or None. Readers may still use an older one."""
        versions = self.list_versions()
        return self.read_version(versions[-1]) if versions else None

    def read_pending(self) -> Pending:
        """Returns the bases that were written for the next version. Raises ServingError."""
        return self._read(self.path / PENDING, Pending) or Pending()

    def write_pending(self, pending: Pending) -> None:
        """Remember bases for the next version. Raises ServingError."""
        self._write(self.path / PENDING, pending)

    def write_version(self, version: Version) -> None:
        """Write a version's description. All its files must be durable. Readers do not take it yet."""
        path = self._find_version(version.version)
        remove = partial(path.unlink, missing_ok=True)
        with nullcontext() if path.exists() else undo_on_error(remove, True):  # its files may be removed then
            self._write(path, version)

    def write_current(self, current: Current) -> None:
        """Make readers take a version. Raises ServingError."""
        self._write(self.path / CURRENT, current)

    @contextmanager
    def lock(self, user: str, create: bool = False) -> Iterator[None]:
        """Lock the folder against other publishers. Raises ServingError.

        create: True for a caller that will write files: create the folder if it is missing, and remove unnamed files.
        """
        if not create and not self._versions.is_dir():
            raise self._make_missing_error("versions")
        with self.convert_errors("open"):
            for path in (self._versions, self.files):
                make_folder(path)
            lock = self._wait_for_lock(user)
        try:
            with self.convert_errors("sync"):
                for path in (self._versions, self.path):  # a killed process may have changed them just before
                    fsync_dir(path)
            if create:
                self.clean()  # a killed publisher may have left files
            self._is_locked = True
            yield
        finally:
            lock.release()

    def _wait_for_lock(self, user: str) -> FileLock:
        """Lock the file, once no other process has. Raises LockedError after `_LOCK_SECONDS`."""
        end = monotonic() + _LOCK_SECONDS
        while True:
            try:
                return FileLock(self.path / LOCK, user)
            except InUseError as error:
                if error.user or monotonic() > end:
                    holder = f"{error.user}, in this process" if error.user else f"process {error.holder}"
                    raise LockedError(
                        f"{str(self.path)!r} is locked by {holder}: wait until it is done; one publisher at a time "
                        "may change a serving folder"
                    ) from None
            sleep(POLL_SECONDS)

    def rollback(self, version: int) -> None:
        """Make readers take an older version, and hold them there until `release`. Raises ServingError."""
        with self.lock("a rollback"):
            if damaged := self.verify(version):
                raise ServingError(f"version {version} is damaged: {'; '.join(damaged)}. Roll back to another version")
            self.write_current(Current(version, True, self.read_version(version).created))

    def release(self) -> Version:
        """End a rollback: make readers take the latest version again. Returns that version. Raises ServingError."""
        with self.lock("a release"):
            latest = self.read_latest()
            if latest is None:
                raise self._make_missing_error("versions")
            self.write_current(Current(latest.version, created=latest.created))
            return latest

    def prune(self, keep: int) -> list[int]:
        """Remove all versions but the `keep` latest and the one that readers take, and files that no version names.

        Returns the removed versions' numbers. Raises OptionError, ServingError.
        """
        check_int("keep", keep, "how many versions to keep, 1 or more", 1)
        with self.lock("a prune"):
            return self.remove_old(keep)

    def remove_old(self, keep: int) -> list[int]:
        """As `prune`, for a caller that has locked the folder."""
        current = self.find_current().version
        removed = [version for version in self.list_versions()[:-keep] if version != current]
        self.clean(removed)
        return removed

    def clean(self, versions: Sequence[int] = ()) -> None:
        """Remove these versions, and files that no version names. Call with the folder locked. Raises ServingError."""
        with self.convert_errors("clean"):
            for version in versions:
                self._find_version(version).unlink()
            if versions:  # a version must never outlive its files
                fsync_dir(self._versions)
            named = {file.name for file in self.read_pending().files}
            named.update(file.name for version in self.list_versions() for file in self.read_version(version).files)
            unfinished = [
                path for folder in (self.path, self._versions) for path in folder.glob(f"{TEMPORARY_PREFIX}*")
            ]
            unnamed = [self.files / name for name in set(os.listdir(self.files)) - named if _FILE_NAME.fullmatch(name)]
            for path in (*unfinished, *unnamed):
                remove_folder(path) if path.is_dir() else path.unlink()

    def make_parts_folder(self, names: Sequence[str]) -> Path:
        """Make a folder, with others in it, for rows on their way to a version. `clean` removes it.

        Raises ServingError.
        """
        folder = self.path / f"{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        with self.convert_errors("write to"):
            for name in names:
                (folder / name).mkdir(parents=True)
        return folder

    def verify(self, version: int) -> list[str]:
        """Read all files of a version. Returns a text for each file that is missing or damaged."""
        return [problem for file in self.read_version(version).files if (problem := self.check_file(file))]

    def check_file(self, file: ServedFile) -> str:
        """Read a file. Returns what is wrong with it, or ""."""
        try:
            for _ in self.read_file(file):
                pass
        except ServingError as error:
            return str(error)
        return ""

    def read_file(self, file: ServedFile) -> Iterator[bytes]:
        """Yields a file's bytes in pieces. Raises ServingError, at the end if the size or the checksum is wrong."""
        path, size, checksum = self.find_file(file), 0, 0
        try:
            with open_regular(path) as opened:
                while data := opened.read(_PIECE_BYTES):
                    size, checksum = size + len(data), crc32(data, checksum)
                    yield data
        except OSError as error:
            raise ServingError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
        if size != file.bytes:
            raise ServingError(f"{str(path)!r} is damaged: it has {size} bytes instead of {file.bytes}")
        if checksum != file.crc32:
            raise ServingError(f"{str(path)!r} is damaged: its checksum does not match")

    def _make_missing_error(self, what: str) -> MissingVersionError:
        remedy = "publish a version there first, or give the folder of a publisher"
        return MissingVersionError(f"{str(self.path)!r} has no {what}: {remedy}")

    def _find_version(self, version: int) -> Path:
        return self._versions / f"{version:06d}.json"

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """Returns the record in a file, or None if the file is missing. Raises ServingError."""
        try:
            return unseal_record(kind, read_record_bytes(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            remedy = "check that it is a serving folder, and its permissions"
            raise ServingError(f"{str(path)!r} cannot be read: {error}; {remedy}") from error
        except (ValueError, TypeError, RecursionError) as error:
            remedy = "Restore it from a copy, or delete it and publish again"
            raise ServingError(f"{str(path)!r} is damaged or foreign: {error}. {remedy}") from error

    def _write(self, path: Path, record: Any) -> None:
        with self.convert_errors("write to"):
            write_atomically(path, seal_record(record))

    @contextmanager
    def convert_errors(self, action: str) -> Iterator[None]:
        """Turn an OSError in the block into a ServingError. action: what the block does, with a preposition."""
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = choose_remedy(error, "free space on its disk" if is_full else "check the path and its permissions")
            raise ServingError(f"cannot {action} serving folder {str(self.path)!r}: {error}; {remedy}") from error
