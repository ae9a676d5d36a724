"""A file that one process at a time has locked, and that says which."""

from __future__ import annotations

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

_locked: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _close_after_fork() -> None:
    # a forked child that outlives its parent must not keep the lock
    for lock in list(_locked):
        lock._close()


os.register_at_fork(after_in_child=_close_after_fork)


class InUseError(Exception):
    """The file is locked. holder: the id of the process, "unknown" if the disk was full. user: what locked it, here."""

    def __init__(self, holder: str, user: str = "") -> None:
        super().__init__(holder)
        self.holder, self.user = holder or "unknown", user


class FileLock:
    """A file that this process has locked, until `release` or the end of the process. Raises InUseError, OSError.

    user: what in this process has locked it, for messages.
    """

    def __init__(self, path: Path, user: str) -> None:
        self.path, self.user = path, user
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._descriptor: int | None = descriptor
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            self._close()
            if isinstance(error, BlockingIOError):
                raise InUseError(holder, self._user_here(holder)) from None
            raise
        self._note(b"%d" % os.getpid())
        _locked.add(self)

    def _user_here(self, holder: str) -> str:
        same = os.path.realpath(self.path)
        here = (one for one in list(_locked) if one.is_locked and os.path.realpath(one.path) == same)
        return next((one.user for one in here), "") if holder == str(os.getpid()) else ""

    @property
    def is_locked(self) -> bool:
        return self._descriptor is not None

    def has(self, status: os.stat_result) -> bool:
        """Whether a file is the one that is locked."""
        return self._descriptor is not None and os.path.samestat(status, os.fstat(self._descriptor))

    def release(self) -> None:
        """May be called again."""
        if self._descriptor is not None:
            self._note(b"")
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a child that is being forked may have a copy
            self._close()

    def _note(self, process: bytes) -> None:
        """Overwrite the process id, which takes no disk space. If it fails, the holder is unknown."""
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
