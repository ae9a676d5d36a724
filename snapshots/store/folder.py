"""A store folder that this process has locked: the lock, the live rows, and the live rows' clean marker."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path
from threading import RLock
from typing import Any

from ...engine.durable import fsync_dir, make_folder, remove_folder, remove_leftovers, seal, unseal, write_atomically
from ...engine.errors import ClosedError, SnapshotError, StoreError, undo_on_error
from ...engine.signals import defer_signals
from ..files.format import LIVE_FILES, read_snapshot_id
from .folder_state import LOCK, FolderState, symlink_snapshots
from .lock import FileLock, InUseError
from .mark import LIVE_FOLDERS, Mark


class StoreFolder(FolderState, contextlib.AbstractContextManager["StoreFolder"]):
    """A store folder, `<persistent_path>/<embedding name>`. Stays locked until `unlock` is called or the process ends.

    Creates `path` and its parents, and removes files that killed processes left. docs/snapshots.md lists the files in
    the folder. MARK contains a clean marker while the live rows are durable and all at one step. A run clears the clean
    marker before it writes the first row. Without a clean marker, live rows are never used.

    user: the folder's user, for error messages, such as "embedding 'users'". snapshots: the folder for snapshots,
    `<snapshot_path>/<embedding name>/snapshots`. The parent of this folder becomes a store folder and is locked. If
    None, snapshots stay in place. Raises StoreError if a path cannot be written or another process has locked a folder.
    """

    remedy = "persistent_path must be a folder that this user can write, on a device with free space"

    snapshot_store: StoreFolder
    _step_file: int | None = None

    def __init__(self, path: Path, user: str = "a StoreFolder", snapshots: Path | None = None) -> None:
        self.user = user
        self._lock: FileLock | None = None
        self._change_lock = RLock()
        super().__init__(Path(path).absolute())  # the working directory may change
        self.snapshot_store = self
        self.incoming = self.path / "incoming"
        with self._convert_errors("open"), defer_signals():
            make_folder(self.path)
            self._lock = self._acquire()
        with undo_on_error(self.unlock):
            self.check()
            path = FolderState(self.path).snapshot_store.path if snapshots is None else snapshots.parent
            if os.path.realpath(path) != os.path.realpath(self.path):
                self.snapshot_store = StoreFolder(path, self.user)
                if snapshots is not None:
                    with self._convert_errors("link to other snapshots from"), defer_signals():
                        symlink_snapshots(self.snapshots_path, snapshots)
            self.clear_incoming()
            with contextlib.suppress(SnapshotError):  # the next save tries again, and then raises the error
                self.clear_snapshots()

    def _acquire(self) -> FileLock:
        try:
            return FileLock(self.path / LOCK, self.user)
        except InUseError as error:
            problem = f"store folder {str(self.path)!r} is in use by process {error.holder}"
            if error.user:
                raise StoreError(f"{problem} (this process). Close {error.user} first") from None
            raise StoreError(
                f"{problem}: close the embedding there, or end that process, or choose another persistent_path or name"
            ) from None

    def unlock(self) -> None:
        """Release the lock, if it is still locked, and change no files."""
        if self.snapshot_store is not self:
            self.snapshot_store.unlock()
        if self._lock is not None:
            self._lock.release()
        self._close_step_file()

    def check(self) -> None:
        """Raises StoreError if the folder was removed or replaced while it was open, ClosedError after `unlock`."""
        if self._lock is None or not self._lock.is_locked:
            raise ClosedError(f"{self.user} was closed; create it again")
        with self._convert_errors("find"):
            try:
                lock = os.stat(self.path / LOCK)
            except (FileNotFoundError, NotADirectoryError):
                lock = None
        if lock is None or not self._lock.matches(lock):
            raise StoreError(
                f"store folder {str(self.path)!r} was {'removed' if lock is None else 'replaced by another'} while "
                "it was open. tierbed writes nothing more there. All rows are lost, except in copied snapshots. "
                "Create the embedding again"
            )

    def __exit__(self, *_: object) -> None:
        self.unlock()

    def clear_incoming(self) -> None:
        """Remove the folder `incoming`, where loads write new rows, and its temporary folder. Raises StoreError."""
        with self._convert_errors("prepare"):
            remove_folder(self.incoming)
            remove_leftovers(self.path)

    def clear_snapshots(self) -> None:
        """Remove files that killed or failed saves left. Call this only while no save runs. Raises SnapshotError."""
        try:
            remove_leftovers(self.snapshots_path)
        except OSError as error:
            problem = f"{str(self.snapshots_path)!r} cannot be cleared of unfinished snapshots: {error}"
            raise SnapshotError(problem) from error

    def change(self, **fields: Any) -> None:
        """Replace fields of MARK, atomically and durably. Raises StoreError."""
        with self._change_lock:  # a background save records its snapshot while a step clears the clean marker
            mark = replace(self.mark, exists=True, **fields)
            try:
                data = seal(mark.to_plain())
            except ValueError as error:
                raise StoreError(f"MARK in {str(self.path)!r} cannot store the description: {error}") from error
            self.check()
            mark = Mark.parse(unseal(data))
            with self._convert_errors("write MARK of"):
                if self._mark_file.exists() and mark == self.mark:
                    fsync_dir(self.path)  # the content is the same, and a full disk may lack space to rewrite the file
                else:
                    write_atomically(self._mark_file, data)
            self.mark = mark

    def write_clean_marker(self, description: dict[str, Any]) -> None:
        """Write the clean marker, once live rows are durable. `live` says how rows are stored. Raises StoreError."""
        self.change(clean_marker=description, num_ranks=0)
        self._remove_step_file()

    def clear_clean_marker(self) -> None:
        """Clear the clean marker durably. Must be called before any live row is written. Raises StoreError."""
        self.change(clean_marker=None, num_ranks=0)

    def store_step(self, step: int) -> None:
        """Store the live rows' step, for messages after a kill. The cost is one write to the page cache."""
        with contextlib.suppress(OSError):
            if self._step_file is None:
                self._step_file = os.open(self.path / "STEP", os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(self._step_file, b"%20d\n" % step, 0)

    def _close_step_file(self) -> None:
        descriptor, self._step_file = self._step_file, None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        self._close_step_file()

    def _remove_step_file(self) -> None:
        self._close_step_file()
        with contextlib.suppress(OSError):
            (self.path / "STEP").unlink()

    def reset(self) -> None:
        """Make the folder new again: remove MARK and the live rows. Raises StoreError."""
        with self._convert_errors("empty"):
            for name in LIVE_FOLDERS:
                remove_folder(self.path / name)
            self._mark_file.unlink(missing_ok=True)
            self.mark = Mark(exists=False)
            self._remove_step_file()

    def discard_live_rows(self) -> None:
        """Clear the clean marker and remove the live rows. Raises StoreError."""
        self.check()
        if self.mark.clean_marker is not None:  # else write nothing, because the disk may be full
            self.clear_clean_marker()
        with self._convert_errors("remove the live rows of"):
            for name in LIVE_FOLDERS:
                remove_folder(self.path / name)
            fsync_dir(self.path)

    def replace_live_rows(self, new: Path, description: dict[str, Any]) -> None:
        """Replace the live rows by the durable folder `new` on the same file system, and write a clean marker.

        After a kill, the store has either the old rows with the old marker, or the new rows with the new marker.
        Raises StoreError.
        """
        self.check()
        old = self.live_path
        name = next(name for name in LIVE_FOLDERS if name != old.name) if old.exists() else old.name
        with self._convert_errors("replace the live rows of"):
            remove_folder(self.path / name)
            new.rename(self.path / name)
            fsync_dir(self.path)
        files_field = {LIVE_FILES: read_snapshot_id(self.path / name)} if description["live"] == "rows" else {}
        self.change(clean_marker={**description, **files_field}, num_ranks=0, live_folder_name=name)
        self._remove_step_file()
        if name != old.name:
            with self._convert_errors("remove the replaced rows of"):
                remove_folder(old)
