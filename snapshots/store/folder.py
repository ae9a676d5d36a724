"""The folder of a store: its lock, its live rows, and whether these are clean."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...engine.durable import (
    fsync_dir,
    make_folder,
    remove_folder,
    remove_leftovers,
    seal,
    write_atomically,
)
from ...engine.errors import ClosedError, StoreError
from ...engine.signals import uninterrupted
from ..files.format import FILES, snapshot_id
from ..files.versions import GroupRecord
from .folder_state import LOCK, FolderState, link_to
from .mark import LIVE_FOLDERS, Mark, RanksRecord, RecoveryCandidate

_locked: weakref.WeakSet[StoreFolder] = weakref.WeakSet()


def _close_after_fork() -> None:
    # a forked child that outlives its parent must not keep the lock
    for folder in list(_locked):
        folder._close_descriptor()


os.register_at_fork(after_in_child=_close_after_fork)


class StoreFolder(FolderState):
    """A store folder, `<persistent_path>/<embedding name>`, locked until `release` or the end of the process.

    `path` and its parents are created. The folder holds:

    - `LOCK`: locked by the lock holder, with its process id as content;
    - `SOCKET`: the control socket of the lock holder; dead if that was killed;
    - `MARK`: the recovery snapshot, and the clean marker, which describes the live rows if all of them are at one step
      and durable. It is cleared before a run writes the first row;
    - `STEP`: the step of live rows without a clean marker;
    - `live` or `live-2`, as MARK says: the live rows, which are never served without a clean marker;
    - `incoming`: live rows being prepared; remains of killed processes are removed here;
    - `snapshots`: a folder for each snapshot, or a link to the folder that has them; remains of killed saves are
      removed here.

    `user`: what in this process has locked the folder, for error messages. `snapshots`: the folder for snapshots,
    `<snapshot_path>/<embedding name>/snapshots`, whose parent becomes a store folder that is locked like this one. None
    leaves them where they are. Raises StoreError if the path or a parent is a file or cannot be written, or if another
    process has the lock.
    """

    remedy = "persistent_path must be a folder that this user can write, on a device with free space"

    snapshot_store: StoreFolder

    def __init__(self, path: Path, user: str = "a StoreFolder", snapshots: Path | None = None) -> None:
        self.user = user
        self._lock: int | None = None
        self._step_file: int | None = None
        super().__init__(Path(path).absolute())  # the working directory may change
        self.snapshot_store = self
        self.incoming = self.path / "incoming"
        with self._errors("open"), uninterrupted():
            make_folder(self.path)
            self._lock = self._acquire()
        _locked.add(self)
        try:
            self.check()
            self._lock_snapshot_store(snapshots)
            self.clear_incoming()
            with contextlib.suppress(OSError):  # the next save tries again, and raises if it cannot
                self.clear_snapshots()
            self._forget_unwritten_snapshot()
        except StoreError:
            self.release()
            raise

    def _lock_snapshot_store(self, snapshots: Path | None) -> None:
        """Lock the store folder that has the snapshots, if it is another one."""
        path = FolderState(self.path).snapshot_store.path if snapshots is None else snapshots.parent
        if os.path.realpath(path) == os.path.realpath(self.path):
            return
        self.snapshot_store = StoreFolder(path, self.user)
        if snapshots is not None:
            with self._errors("link to other snapshots from"), uninterrupted():
                link_to(self.snapshots, snapshots)

    def _acquire(self) -> int:
        descriptor = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _note_holder(descriptor, b"%d" % os.getpid())
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise StoreError(self._in_use(holder)) from None
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _in_use(self, holder: str) -> str:
        used = f"store folder {str(self.path)!r} is in use by process {holder or 'unknown'}"
        path = os.path.realpath(self.path)
        for other in list(_locked) if holder == str(os.getpid()) else ():
            if other._lock is not None and os.path.realpath(other.path) == path:
                return f"{used}, this one, where {other.user} has it open: close that first"
        return f"{used}: close the embedding there, or end that process, or choose another persistent_path or name"

    def release(self) -> None:
        """Release the lock. Files are unchanged. May be called again."""
        if self.snapshot_store is not self:
            self.snapshot_store.release()
        if self._lock is not None:
            _note_holder(self._lock, b"")
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # explicitly: a child that is being forked may have a copy
            self._close_descriptor()

    def check(self) -> None:
        """StoreError if the folder was removed since it was opened, or replaced. ClosedError after `release`."""
        if self._lock is None:
            raise ClosedError(f"{self.user} was closed; create it again")
        with self._errors("find"):
            try:
                lock = os.stat(self.path / LOCK)
            except (FileNotFoundError, NotADirectoryError):
                lock = None
        if lock is None or not os.path.samestat(lock, os.fstat(self._lock)):
            raise StoreError(
                f"store folder {str(self.path)!r} was {'removed' if lock is None else 'replaced by another'} while "
                "it was open: nothing is written there any more, and its rows are lost except copied snapshots; "
                "create the embedding again"
            )

    def __del__(self) -> None:
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        for descriptor in (self._lock, self._step_file):
            if descriptor is not None:
                os.close(descriptor)
        self._lock = self._step_file = None

    def __enter__(self) -> StoreFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def clear_incoming(self) -> None:
        """Remove `incoming` and its temporary folder. Raises StoreError."""
        with self._errors("prepare"):
            remove_folder(self.incoming)
            remove_leftovers(self.path)

    def clear_snapshots(self) -> None:
        """Remove the remains of killed or failed saves. Raises OSError."""
        remove_leftovers(self.snapshots)

    def change(self, **fields: Any) -> None:
        """Replace fields of MARK, atomically and durably. Raises StoreError."""
        mark = replace(self.mark, exists=True, **fields)
        try:
            data = seal(mark.plain())
        except ValueError as error:
            raise StoreError(f"MARK of {str(self.path)!r} cannot store the description: {error}") from error
        self.check()
        with self._errors("write MARK of"):
            if self._mark_file.exists() and Mark.parse(data) == self.mark:
                fsync_dir(self.path)  # a full disk has no space to write the same content again
            else:
                write_atomically(self._mark_file, data)
        self.mark = Mark.parse(data)

    def write_clean_marker(self, description: dict[str, Any], **fields: Any) -> None:
        """Write the clean marker, and change other fields of MARK. The live rows must be durable. Raises StoreError.

        description: of the live rows; `live` is their kind.
        """
        self.change(clean_marker=description, ranks=None, **fields)
        self._forget_step()

    def clear_clean_marker(self, **fields: Any) -> None:
        """Clear the clean marker durably, and change other fields of MARK. Called before any live row is written.

        Raises StoreError.
        """
        self.change(**{"clean_marker": None, "ranks": None, "at": self.mark.load, **fields})

    def note_step(self, step: int) -> None:
        """Store the step of the live rows, for messages after a kill. Costs a write to the page cache."""
        with contextlib.suppress(OSError):
            if self._step_file is None:
                self._step_file = os.open(self.path / "STEP", os.O_WRONLY | os.O_CREAT, 0o644)
            os.pwrite(self._step_file, b"%20d\n" % step, 0)

    def _forget_step(self) -> None:
        descriptor, self._step_file = self._step_file, None
        if descriptor is not None:
            os.close(descriptor)
        with contextlib.suppress(OSError):
            (self.path / "STEP").unlink()

    def drop_clean_markers(self) -> None:
        """Clear the clean marker and the version of a recovery in `at`. Raises StoreError."""
        ranks = self.mark.ranks and self.mark.ranks._replace(run=secrets.token_hex(8))  # no shard is from this run
        self.change(clean_marker=None, ranks=ranks, at=self.mark.load)

    def set_recovery_snapshot(self, name: str, **fields: Any) -> None:
        """Make `name` the recovery snapshot, "" for none, and change other fields of MARK. Raises StoreError."""
        self.change(candidates=(RecoveryCandidate(name),), **fields)

    def expect_recovery_snapshot(self, name: str, record: GroupRecord | None = None) -> None:
        """Make `name` the recovery snapshot once it is written. Called before that. Raises StoreError.

        If a snapshot of that name exists, it counts once it has been replaced. record: of the store's group, if any.
        """
        folder = self.snapshots / name
        expected = RecoveryCandidate(name, snapshot_id(folder) if os.path.lexists(folder) else None)
        existing = self._existing_candidates()
        parent = next((at for at, one in enumerate(existing) if not one.of_state), len(existing))
        current = [one if one.of_state else RecoveryCandidate(one.name) for one in existing[: parent + 1]]
        self.change(candidates=(expected, *current), group=record or self.mark.group)

    def note_state(self, name: str) -> None:
        """Make `name`, which a `state_dict()` made, the recovery snapshot until the next save or load. StoreError."""
        own = [one for one in self.mark.candidates or () if not one.of_state]
        self.change(candidates=(RecoveryCandidate(name, of_state=True), *own))

    def begin_ranks(self, ranks: int, run: str, recovery_snapshot: str) -> None:
        """Make the live rows shards of ranks, with a recovery snapshot, "" for none. Raises StoreError."""
        record = RanksRecord(ranks, run, 0, recovery_snapshot)
        self.set_recovery_snapshot(recovery_snapshot, clean_marker=None, live=LIVE_FOLDERS[0], ranks=record)

    def note_saved(self, writes: int, run: str | None = None) -> None:
        """Store that the recovery snapshot has the shards after that many writes. run: a new one. Raises StoreError."""
        if (record := self.mark.ranks) is not None:
            snapshot = self.recovery_snapshot or ""
            self.change(ranks=record._replace(run=run or record.run, saved=writes, snapshot=snapshot))

    def begin_empty(self) -> None:
        """Make the live rows those of one process, without recovery snapshot. Raises StoreError."""
        self.set_recovery_snapshot("", clean_marker=None, ranks=None)

    def end_ranks(self) -> None:
        """Make the live rows those of one process. Raises StoreError."""
        if self.mark.ranks is not None:
            self.change(ranks=None)

    def _existing_candidates(self) -> list[RecoveryCandidate]:
        return [one for one in self.mark.candidates or () if self._exists(one)]

    def _forget_unwritten_snapshot(self) -> None:
        """Drop the name of a snapshot that a killed save did not write, since a later save may use it."""
        existing = tuple(one if one.of_state else RecoveryCandidate(one.name) for one in self._existing_candidates())
        if existing and existing != self.mark.candidates:
            with contextlib.suppress(StoreError):  # on a full disk, rows can still be read
                self.change(candidates=existing)

    def forget(self) -> None:
        """Make the folder new again: remove MARK and the live rows. Raises StoreError."""
        with self._errors("empty"):
            for name in LIVE_FOLDERS:
                remove_folder(self.path / name)
            self._mark_file.unlink(missing_ok=True)
            self.mark = Mark(exists=False)
            self._forget_step()

    def discard_live(self) -> None:
        """Clear the clean marker and remove the live rows. Raises StoreError."""
        self.check()
        if self.mark.clean_marker is not None:  # else nothing is written: the disk may be full
            self.clear_clean_marker()
        with self._errors("remove the live rows of"):
            for name in LIVE_FOLDERS:
                remove_folder(self.path / name)
            fsync_dir(self.path)

    def replace_live(
        self,
        new: Path,
        description: dict[str, Any],
        recovery_snapshot: str | None = None,
        **fields: Any,
    ) -> None:
        """Make a durable folder of the same file system the live rows, with a clean marker.

        A kill leaves the old rows with the old marker, or the new rows with the new one. recovery_snapshot: the new
        one, None for the present one. fields: others of MARK that change. Raises StoreError.
        """
        self.check()
        old = self.live
        name = next(name for name in LIVE_FOLDERS if name != old.name) if old.exists() else old.name
        with self._errors("replace the live rows of"):
            remove_folder(self.path / name)
            new.rename(self.path / name)
            fsync_dir(self.path)
        id = snapshot_id(self.path / name) if description["live"] == "rows" else ""
        of_files = {FILES: id} if id else {}
        if recovery_snapshot is not None:
            fields["candidates"] = (RecoveryCandidate(recovery_snapshot),)
        self.change(clean_marker={**description, **of_files}, ranks=None, live=name, **fields)
        self._forget_step()
        if name != old.name:
            with self._errors("remove the replaced rows of"):
                remove_folder(old)


def _note_holder(lock: int, process: bytes) -> None:
    """Overwrite the process id of the lock holder, which takes no disk space. If it fails, the holder is unknown."""
    with contextlib.suppress(OSError):
        os.pwrite(lock, process.rjust(20) + b"\n", 0)
