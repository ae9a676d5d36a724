"""The folder of a live store: who holds it, whether its rows are consistent, and where they are."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import weakref
from pathlib import Path
from types import TracebackType
from typing import Any

from ...engine.durable import (
    TEMPORARY,
    fsync_dir,
    make_folder,
    put_in_place,
    remove_folder,
    remove_leftovers,
    remove_temporary,
    seal,
    unseal,
    write_atomically,
)
from ...engine.errors import StoreError
from ...engine.signals import uninterrupted
from ..files.format import OWN, saved_with, snapshot_id
from ..files.versions import AT, GROUP, At, GroupRecord
from .folder_state import LOCK, PLACES, FolderState, RanksRecord, link_to

_held: weakref.WeakSet[StoreFolder] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    # a child that outlives its parent must not keep the parent's lock
    for folder in list(_held):
        folder._close_descriptor()


os.register_at_fork(after_in_child=_let_go_after_fork)


class StoreFolder(FolderState):
    """A store folder, `<persistent_path>/<embedding name>`, held exclusively until `release` or the end of the process.

    `path` is created, parents included. The folder holds:

    - `LOCK`: locked by the holder, with its process id inside;
    - `SOCKET`: where other processes ask the holder for snapshots while it trains; dead where it was killed;
    - `MARK`: the mark. It describes the live rows while they are all of one step; once a run has begun to write them,
      it names the snapshot to go back to;
    - `STEP`: the step that the live rows came to, while they carry no mark;
    - `live` or `live-2`, as the mark says: the rows of the running table, scratch without the mark;
    - `incoming`: live rows being prepared; what a killed process left there is removed here;
    - `snapshots`: a folder for each snapshot, or a link to where these are; what killed saves left there is removed
      here.

    `user`: who in this process holds the folder; error messages name it. `snapshots`: the folder that snapshots are to
    be in, `<snapshot_path>/<embedding name>/snapshots`; it becomes a store folder's as well, held like this one. None
    leaves them where they are. Raises StoreError if the path or a parent is a file, cannot be written, or has another
    holder.
    """

    remedy = "persistent_path must be a folder that this user can write, with room on its device"

    def __init__(self, path: Path, user: str = "a StoreFolder", snapshots: Path | None = None) -> None:
        self.user = user
        self.shared: StoreFolder | None = None  # the holder of the snapshots, where they are elsewhere
        self._lock: int | None = None
        self._step_file: int | None = None
        super().__init__(Path(path).absolute())  # since the working directory may change
        self.incoming = self.path / "incoming"
        with self._errors("open"), uninterrupted():
            make_folder(self.path)
            self._lock = self._acquire()
        _held.add(self)
        try:
            self.check()
            self._share(snapshots)
            self.clear_incoming()
            with contextlib.suppress(OSError):  # the next save tries again, and says why it cannot
                self.clear_snapshots()
            self._settle_base()
        except StoreError:
            self.release()
            raise

    def _share(self, snapshots: Path | None) -> None:
        """Hold the store folder that the snapshots are in, where it is another one."""
        place = FolderState(self.path).keeper.path if snapshots is None else snapshots.parent
        if os.path.realpath(place) == os.path.realpath(self.path):
            return
        self.shared = StoreFolder(place, self.user)
        if snapshots is not None:
            with self._errors("lead to other snapshots from"), uninterrupted():
                link_to(self.snapshots, snapshots)

    @property
    def keeper(self) -> StoreFolder:
        return self if self.shared is None else self.shared

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
        place = os.path.realpath(self.path)
        for other in list(_held) if holder == str(os.getpid()) else ():
            if other._lock is not None and os.path.realpath(other.path) == place:
                return f"{used}, this one, where {other.user} has it open: close that first"
        return f"{used}: close the embedding there, or end that process, or choose another persistent_path or name"

    def release(self) -> None:
        """Let the folder go. The files stay as they are. May be called again."""
        if self.shared is not None:
            self.shared.release()
        if self._lock is not None:
            _note_holder(self._lock, b"")
            fcntl.flock(self._lock, fcntl.LOCK_UN)  # a child that is just being forked may have a copy
            self._close_descriptor()

    def check(self) -> None:
        """Raises StoreError where the folder was removed since it was opened, even if another is in its place."""
        assert self._lock is not None
        with self._errors("find"):
            try:
                there = os.stat(self.path / LOCK)
            except (FileNotFoundError, NotADirectoryError):
                there = None
        if there is None or not os.path.samestat(there, os.fstat(self._lock)):
            raise StoreError(
                f"store folder {str(self.path)!r} was {'removed' if there is None else 'replaced by another'} while "
                "it was open: nothing more is written there, and its rows are lost but for copies of its snapshots; "
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def clear_incoming(self) -> None:
        """Remove `incoming`, and what was being written to become it. Raises StoreError."""
        with self._errors("prepare"):
            remove_folder(self.incoming)
            remove_leftovers(self.path)

    def clear_snapshots(self) -> None:
        """Remove what killed or failed saves left, but for what a save of several stores has yet to put in place.

        The snapshots of such a save are there, all of them, once the first of them is: `Saved.first`. Where the store
        of that is not to be found, they wait. OSError.
        """
        for place in self.snapshots.glob(f"{TEMPORARY}[!.]*/"):
            folder = self.snapshots / place.name.removeprefix(TEMPORARY)
            saved, sequence = saved_with(place)
            if saved is None or saved.first is None or sequence <= saved_with(folder)[1]:  # no such, or a replaced one
                remove_temporary([place])
                continue
            peer, name, identity = saved.first
            stores = [store for store in map(FolderState, peer.places(self.path)) if store.path.is_dir()]
            if any(snapshot_id(store.snapshots / name) == identity for store in stores):
                put_in_place(place, folder, overwrite=True)
                remove_temporary([place])
            elif stores:
                remove_temporary([place])
        remove_temporary(list(self.snapshots.glob(f"{TEMPORARY}.*/")))

    def note_group(self, record: GroupRecord | None, **more: Any) -> None:
        """Note the group, and fields of MARK beside it; None takes a field away. Raises StoreError."""
        noted = {GROUP: record and record.plain(), **more}
        content = self._read() | noted
        self._write({field: value for field, value in content.items() if value is not None or field not in noted})

    def set_mark(self, description: dict[str, Any], closed: bool = False) -> None:
        """Declare the live rows consistent. They must be durable already. `live` says how they are kept. StoreError.

        closed: by the close of the store, after which they are no more `at` a version.
        """
        self._write({**description, **self._own(closed)})
        self._forget_step()

    def clear_mark(self, record: GroupRecord | None = None) -> None:
        """Declare the live rows scratch, durably. Called before any of them is written. Raises StoreError.

        record: of the group, if the rows are about to be written, and are no longer `at` a version.
        """
        self._write(self._own_scratch() if record is None else {**self._own(closed=True), GROUP: record.plain()})

    def note_step(self, step: int) -> None:
        """Remember the step that the live rows came to, for messages after a kill. Costs a write of the page cache."""
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

    def drop_marks(self) -> None:
        """Declare the live rows scratch, and let them be no more `at` the version of a recovery. Raises StoreError."""
        own = self._own_scratch()
        if (ranks := self.of_ranks) is not None:
            own["ranks"] = ranks._replace(run=secrets.token_hex(8))  # no share is of this run
        self._write(own)

    def set_base(self, name: str, at: At | None = None, record: GroupRecord | None = None) -> None:
        """Let the live rows go back to snapshot `name` from here on, or to nothing for "". Raises StoreError.

        at, record: of a store in a group, noted at the same instant.
        """
        of_group = {} if at is None or record is None else {GROUP: record.plain(), AT: at.plain()}
        self._write({**self._read(), "base": [name], **of_group})

    def expect_base(self, name: str, record: GroupRecord | None = None) -> None:
        """Let the live rows go back to snapshot `name` once it is written. Called before that. Raises StoreError.

        record: of the group of the store, where it has one.

        Where a snapshot of that name is there already, they go back to it once it has been replaced.
        """
        current, place = self.base, self.snapshots / name
        expected = [name, snapshot_id(place)] if os.path.lexists(place) else name
        of_group = {} if record is None else {GROUP: record.plain()}
        self._write({**self._read(), "base": [expected] if current is None else [expected, current], **of_group})

    def begin_ranks(self, ranks: int, run: str, base: str) -> None:
        """Let the live rows be those of ranks, from snapshot `base` or from none for "", to go back to. StoreError."""
        self._write({**self._of_group(), "base": [base], "ranks": RanksRecord(ranks, run, 0, base)})

    def note_saved(self, writes: int, run: str | None = None) -> None:
        """The snapshot to go back to has the rows of ranks after so many writes. StoreError. run: a new one of them."""
        content = self._read()
        if (record := self.of_ranks) is not None:
            noted = record._replace(run=run or record.run, saved=writes, snapshot=self.base or "")
            self._write({**content, "ranks": noted})

    def begin_empty(self) -> None:
        """Let the live rows be those of one process, with no snapshot to go back to. Raises StoreError."""
        self._write({**self._own(), "base": [""]})

    def end_ranks(self) -> None:
        """Let the live rows be those of one process from here on. Raises StoreError."""
        content = self._read()
        if content.pop("ranks", None) is not None:
            self._write(content)

    def _settle_base(self) -> None:
        """Forget the snapshot that a killed save did not write: rows never go back to a later one of its name."""
        there = [name for name, replaced in self._bases() if self._is_there(name, replaced)]
        if there and there != self._read().get("base"):
            with contextlib.suppress(StoreError):  # on a full disk, rows can still be read
                self._write({**self._read(), "base": there})

    def forget(self) -> None:
        """Make the folder new again: no mark, no live rows. Raises StoreError."""
        with self._errors("empty"):
            for place in PLACES:
                remove_folder(self.path / place)
            self._mark.unlink(missing_ok=True)
            self._forget_step()

    def discard_live(self) -> None:
        """Clear the mark and remove the live rows. Raises StoreError."""
        self.check()
        if self.read_mark() is not None:  # without a mark nothing is written: a full disk has no room
            self.clear_mark()
        with self._errors("remove the live rows of"):
            for place in PLACES:
                remove_folder(self.path / place)
            fsync_dir(self.path)

    def replace_live(
        self,
        new: Path,
        description: dict[str, Any],
        base: str | None = None,
        closed: bool = False,
        of_group: dict[str, Any] | None = None,
    ) -> None:
        """Let a durable folder of the same filesystem be the live rows, and mark them as `set_mark` does.

        With `base`, the live rows go back to that snapshot from here on. A kill at any instant leaves the old rows with
        the old mark, or the new rows with the new mark. of_group: the fields of the group, where these change. Raises
        StoreError.
        """
        self.check()
        old = self.live
        place = next(place for place in PLACES if place != old.name) if old.exists() else old.name
        with self._errors("replace the live rows of"):
            remove_folder(self.path / place)
            new.rename(self.path / place)
            fsync_dir(self.path)
        own = self._own(closed) if base is None else {"base": [base], **self._of_group()}
        if of_group is not None:
            own = {field: value for field, value in own.items() if field not in (GROUP, AT)} | of_group
        self._write({**description, **own, "place": place})
        self._forget_step()
        if place != old.name:
            with self._errors("remove the replaced rows of"):
                remove_folder(old)

    def _of_group(self) -> dict[str, Any]:
        return {field: value for field, value in self._read().items() if field in (GROUP, AT)}

    def _own_scratch(self) -> dict[str, Any]:
        return self._own(closed=self.at is not None and self.at.by == "recovery")

    def _own(self, closed: bool = False) -> dict[str, Any]:
        content = self._read()
        return {field: content[field] for field in content if field in OWN and not (closed and field == AT)}

    def _write(self, content: dict[str, Any]) -> None:
        try:
            data = seal(content)
        except ValueError as error:
            raise StoreError(f"the mark of {str(self.path)!r} cannot hold the description: {error}") from error
        self.check()
        with self._errors("mark"):
            if self._mark.exists() and unseal(data) == self._read():
                fsync_dir(self.path)  # a full disk has no room to write the same mark again
            else:
                write_atomically(self._mark, data)


def _note_holder(lock: int, process: bytes) -> None:
    """Write the holder's process id in place, which takes no room on a disk; without room the holder stays unknown."""
    with contextlib.suppress(OSError):
        os.pwrite(lock, process.rjust(20) + b"\n", 0)
