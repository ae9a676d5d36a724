"""Copies the version that readers of a serving folder take to another folder, for example from a network disk."""

from __future__ import annotations

import os

from ..engine.durable import fsync_dir, make_temporary_path
from ..engine.errors import OptionError, ServingError, undo_on_error
from .folder import PENDING, ServingFolder
from .version import Current, ServedFile, Version


def pull(source: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Version:
    """Copy the version that readers of `source` take, and make readers of `folder` take it.

    Only files that `folder` lacks are copied. Readers see the version once all its files are durable and their
    checksums were compared. So they see the whole version or nothing of it. They also follow a rollback of `source`.
    `folder` keeps this version and the one before.

    Args:
        source: A serving folder. It is only read.
        folder: The copy. It is created if it does not exist. Nothing else may publish to it.

    Returns:
        The version.

    Raises:
        OptionError: If `folder` is `source`.
        ServingError: If `source` has no version or is damaged, or `folder` is locked or unwritable.
    """
    origin, target = ServingFolder(source), ServingFolder(folder)
    if origin.path.resolve() == target.path.resolve():
        raise OptionError(f"folder={str(folder)!r} is the source: give the path of the copy")
    origin.read_current()  # before the copy's folder is made
    if (target.path / PENDING).exists():
        remedy = "give a publisher's folder first, and the folder of the copy second"
        raise ServingError(f"{str(target.path)!r} is the folder of a publisher: {remedy}")

    def copy(current: Current) -> tuple[Current, Version]:
        version = origin.read_version(current.version)
        for file in version.files:
            _copy_file(origin, target, file)
        with target.convert_errors("sync"):
            fsync_dir(target.files)
        return current, version

    with target.lock("a pull", create=True):
        current, version = origin.use_current(copy)
        before = target.find_current()
        if before != current:
            target.write_version(version)
            target.write_current(current)
            kept = before.version, version.version  # a reader may be about to open the version before
            target.clean([number for number in target.list_versions() if number not in kept])
    return version


def _copy_file(origin: ServingFolder, target: ServingFolder, file: ServedFile) -> None:
    """Copy a file that is missing, and make its contents durable. Raises ServingError."""
    path = target.find_file(file)
    if path.exists():  # complete, since only complete files get such a name, and names are not used twice
        return
    temporary = make_temporary_path(path)
    with target.convert_errors("write to"), undo_on_error(temporary.unlink, True):
        with temporary.open("wb") as copy:
            copy.writelines(origin.read_file(file))
            copy.flush()
            os.fsync(copy.fileno())
        temporary.rename(path)
