"""A file that one process at a time can lock. A locked file contains the id of the process that locked it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

_locked: weakref.WeakSet[FileLock] = weakref.WeakSet()
# a forked child that outlives its parent must not keep the locks
os.register_at_fork(after_in_child=lambda: [*map(FileLock._close, list(_locked))])


class InUseError(Exception):
    """A process has already locked the file. holder: the process's id or "unknown". user: `FileLock.user` or ""."""

    def __init__(self, holder: str, user: str = "") -> None:
        super().__init__(holder)
        self.holder, self.user = holder or "unknown", user


class FileLock:
    """A file that stays locked until `release` or the end of this process. Raises InUseError, OSError."""

    def __init__(self, path: Path, user: str) -> None:
        self.path = path
        self.user = user  # the lock's owner, for error messages: for example, "embedding 'users'"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._descriptor: int | None = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            self._close()
            if isinstance(error, BlockingIOError):
                raise InUseError(holder, self._find_user(holder)) from None
            raise
        self._write_holder(b"%d" % os.getpid())
        _locked.add(self)

    def _find_user(self, holder: str) -> str:
        real_path = os.path.realpath(self.path)
        locks = (lock for lock in list(_locked) if lock.is_locked and os.path.realpath(lock.path) == real_path)
        return next((lock.user for lock in locks), "") if holder == str(os.getpid()) else ""

    @property
    def is_locked(self) -> bool:
        return self._descriptor is not None

    def matches(self, status: os.stat_result) -> bool:
        """True if `status` belongs to the locked file."""
        return self._descriptor is not None and os.path.samestat(status, os.fstat(self._descriptor))

    def release(self) -> None:
        """Release the lock, if it is still locked."""
        if self._descriptor is not None:
            self._write_holder(b"")
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked child may still hold a copy of the descriptor
            self._close()

    def _write_holder(self, process: bytes) -> None:
        """Overwrite the process id in the file. If the write fails, other processes report an unknown holder."""
        assert self._descriptor is not None
        with contextlib.suppress(OSError):
            os.pwrite(self._descriptor, process.rjust(20) + b"\n", 0)

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            self._close()
