"""Makes errors for failed reads of a snapshot. An error says that a file is damaged, or that it may be intact."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ...engine.durable import OPEN_FILES_REMEDY
from ...engine.errors import SnapshotError as SnapshotError  # exported by tierbed.snapshots

_PROCESS_REMEDIES = {
    errno.EMFILE: OPEN_FILES_REMEDY,
    errno.ENFILE: OPEN_FILES_REMEDY,
    errno.EAGAIN: "let this user start more processes (ulimit -u)",
    errno.ENOMEM: "free memory",
    errno.ECHILD: "free memory",
}
_SYSTEM_REMEDIES = {
    **_PROCESS_REMEDIES,
    errno.ENOSPC: "free space on the disk",
    errno.EACCES: "run as a user that may read it",
    errno.EPERM: "run as a user that may read it",
    errno.EIO: "check the disk",
}
_FILE_ERRORS = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


class ReadIOError(SnapshotError):
    """Raised if a read failed but the snapshot may be intact: a resource was lacking, or the snapshot was replaced."""


def make_read_error(path: Path, error: OSError, folder: Path) -> SnapshotError:
    """Returns the error for a snapshot's file that could not be read. folder: the snapshot's folder."""
    if error.errno is None:  # `check_regular` raised this; the text names the path
        return SnapshotError(f"{error}. {make_remedy(folder)}")
    problem = str(error.strerror if error.filename == str(path) else error)
    if error.errno in _FILE_ERRORS:
        return make_damage_error(path, problem, folder)
    remedy = _SYSTEM_REMEDIES.get(error.errno, "check the disk")
    kind = ReadIOError if error.errno in _PROCESS_REMEDIES else SnapshotError
    return kind(f"{str(path)!r} cannot be read: {problem}. The snapshot may be intact. First {remedy}. Then try again")


def make_damage_error(path: Path, problem: str, folder: Path) -> SnapshotError:
    """Returns the error for a damaged or missing file of a snapshot. folder: the snapshot's folder."""
    return SnapshotError(f"{str(path)!r} is damaged: {problem}. {make_remedy(folder)}")


def make_remedy(folder: Path) -> str:
    """Returns the text that tells users what to do about a damaged snapshot."""
    return f"Restore the folder {str(folder)!r} from a copy, or delete it and use another snapshot"


def find_os_error(error: Exception | str) -> OSError | None:
    """Search the text of a library's error for a system error's message. Returns that system error, or None."""
    return next(
        (OSError(code, os.strerror(code)) for code in _SYSTEM_REMEDIES if os.strerror(code) in str(error)), None
    )
