"""Saving and loading the rows of several stores that are trained together: all of them, or none."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

from ..distributed.world import World, catch
from ..engine.errors import OptionError, SnapshotError, StoreError
from ..engine.table.background_save import BackgroundSave, SaveHandle
from ..engine.threads import POLL_SECONDS
from ..snapshots.files.format import snapshot_id
from ..snapshots.files.reader import Snapshot
from ..snapshots.files.versions import Instant
from ..snapshots.files.writer import ProgressCallback
from ..snapshots.store.all_or_none import Decided, OfAll
from ..snapshots.store.instants import check_one_instant, rows_of
from ..snapshots.store.retention import drop_replaced
from ..snapshots.store.selection import LoadReport
from .sharded_save import BackgroundShardedSave, ShardedSave, commit_together
from .training_group import Membership, between_steps

log = logging.getLogger("tierbed")

Tables = Sequence[Any]  # of LocalTableHandle or ShardedTableHandle, whose files import this one


def save_together(
    world: World,
    tables: Tables,
    name: str,
    kind: str = "full",
    overwrite: bool = False,
    background: bool = False,
    progress: ProgressCallback | None = None,
) -> SaveHandle | None:
    """Save the rows of all as snapshot `name`, in each store folder, between two steps: all or none.

    An incremental one is full in a store that has no snapshot to be based on. background: return at once, while threads
    save the rows as they are now. progress: called with the rows of each chunk that this process writes.
    Raises SnapshotError, StoreError, OptionError, and then none of the snapshots exists. All ranks call it.
    """
    if world.size > 1:
        return _save_on_ranks(world, tables, name, kind, overwrite, background, progress)
    for table in tables:
        table.checked_store()
    if background:
        return _save_in_background(tables, name, kind, overwrite)
    members = _members(tables)
    if len(tables) == 1 or any(member.record is None for member in members):  # they are not trained together
        for table in tables:
            table.save_snapshot(name, _kind(table, kind), overwrite, progress)
        return None
    first, id = members[0].folder.snapshots / name, secrets.token_hex(16)
    for table in tables:
        table.local_table.flush_ahead()
    with ExitStack() as locks, ExitStack() as ends:
        locks.enter_context(between_steps(members, waits=True))
        _check(tables, name, kind, overwrite)
        saves: list[Callable[[], object]] = [lambda: None]  # each calls the one before it, then gets its name
        kinds = [_kind(table, kind) for table in tables]
        for table, its_kind in zip(tables, kinds, strict=True):
            of_all = OfAll(name, members[0].store, Decided(first, id, saves[-1]))
            if table.saves_image(its_kind):
                save = table.begin_save(name, overwrite, progress, of_all)
                ends.callback(save.end)
                saves.append(save.run)
            else:
                saves.append(partial(table.save_locked, name, its_kind, overwrite, progress, of_all))
        if all(table.saves_image(its_kind) for table, its_kind in zip(tables, kinds, strict=True)):
            locks.close()  # images have the rows of this step, and other threads may go on
        saves[-1]()
        for member in members:
            drop_replaced(member.folder)
    return None


def _save_in_background(tables: Tables, name: str, kind: str, overwrite: bool) -> SavingAll:
    members = _members(tables)
    apart = any(member.record is None for member in members)
    with between_steps(members, waits=True):
        _check(tables, name, kind, overwrite)
        saving = SavingAll(f"snapshot {name!r} of {len(tables)} embeddings", members[0].folder.snapshots / name)
        try:
            for number, table in enumerate(tables):
                commit = Decided(saving.first, saving.id, saving.others if number == 0 else saving.until_made)
                of_all = None if apart else OfAll(name, members[0].store, commit, len(tables))
                saving.saves.append(table.save_in_background(name, kind, overwrite, of_all))
            saving.all_started.set()
        except BaseException:
            saving.given_up = True
            saving.all_started.set()
            raise
    return saving


class SavingAll:
    """Snapshots of several stores that are being saved in the background: a `SaveHandle` of all of them."""

    def __init__(self, what: str, first: Path) -> None:
        self.what, self.first, self.id = what, first, secrets.token_hex(16)
        self.saves: list[BackgroundSave] = []
        self.all_started, self.given_up = Event(), False
        self._written = 0

    @property
    def done(self) -> bool:
        return all(save.done for save in self.saves)

    def wait(self, timeout: float | None = None) -> bool:
        """As `BackgroundSave.wait`: until all have ended, for `timeout` seconds at most. Raises the error of a save."""
        end = None if timeout is None else monotonic() + timeout
        for save in self.saves:
            save.hurry()
        done, error = True, None
        for save in self.saves:
            try:
                done &= save.wait(None if end is None else max(end - monotonic(), 0))
            except Exception as wrong:  # raised when the others have ended too, which remove what they wrote
                error = error or wrong
        if error is not None:
            raise error
        return done

    def others(self) -> None:
        """Called in the thread of the first: return when all others are durable."""
        self.all_started.wait()
        if self.given_up:
            raise StoreError(f"{self.what}: that of another embedding was not saved")
        while self._written < len(self.saves) - 1:
            self._look(self.saves[1:])

    def until_made(self) -> None:
        """Called in the threads of the others: return when the first has its name."""
        self.all_started.wait()
        self._written += 1
        while snapshot_id(self.first) != self.id:
            self._look(self.saves[:1])

    def _look(self, saves: Sequence[BackgroundSave]) -> None:
        # none ends without an error before the first has its name
        if self.given_up or any(save.done for save in saves):
            if snapshot_id(self.first) == self.id:
                return
            for save in saves:
                save.wait(0)  # raises why it was not saved
            raise StoreError(f"{self.what}: that of another embedding was not saved")
        Event().wait(POLL_SECONDS)


def load_together(world: World, tables: Tables, name: str) -> list[LoadReport]:
    """Replace all rows of each by those of its snapshot `name`. All are verified before a row is replaced.

    Raises SnapshotError, also if they were saved at different steps, StoreError, OptimizerError. If it raises during
    the loads, the stores can neither be written nor saved until each is loaded. All ranks call it.
    """
    op = f"loading snapshot {name!r} of {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with _locked(tables):
        snapshots: list[Snapshot] = world.call_on_all_ranks(op, lambda: [table.snapshot(name) for table in tables])
        world.call_on_all_ranks(op, lambda: check_one_instant([table.name for table in tables], snapshots))
        for table, snapshot in zip(tables, snapshots, strict=True):
            table.check_snapshot(snapshot)
        return _load(world, op, tables, snapshots)


def load_rows_together(world: World, tables: Tables, places: Sequence[Path]) -> None:
    """Load the snapshots `places`, which `check_rows` has checked, and which the store folders get too."""
    op = f"loading {len(tables)} embeddings"
    _finish_saving(world, op, tables)
    with _locked(tables), ExitStack() as linking:
        ours = [table.link_in(place, linking) for table, place in zip(tables, places, strict=True)]
        _load(world, op, tables, world.call_on_all_ranks(op, lambda: [Snapshot.open(place) for place in ours]))


def _finish_saving(world: World, op: str, tables: Tables) -> None:
    """Wait for all snapshots in the background before the locks are taken: one that is completed may be loaded."""
    world.call_on_all_ranks(op, lambda: [table.local_table for table in tables])  # ClosedError
    for table in tables:
        table.finish_saving()


@contextmanager
def _locked(tables: Tables) -> Iterator[None]:
    """A block in which no other thread of this process writes to these tables, or prunes what is being read."""
    with between_steps(_members(tables)), ExitStack() as locks:
        for table in tables:
            locks.enter_context(table.local_table.lock)
        yield


def _load(world: World, op: str, tables: Tables, snapshots: Sequence[Snapshot]) -> list[LoadReport]:
    """Load verified snapshots. A kill between two of them is finished by the next run: `Group.target`."""
    members = _members(tables)
    together = world.call_on_all_ranks(op, lambda: instant_of(members, snapshots))
    both = zip(tables, snapshots, strict=True)
    return load_all(members, [partial(table.load_from, snapshot, together) for table, snapshot in both])


def load_all(members: Sequence[Membership], loads: Sequence[Callable[[], LoadReport]]) -> list[LoadReport]:
    """Load several embeddings. members: of their stores, which are torn if it raises during the loads."""
    reports = []
    try:
        for load in loads:
            reports.append(load())
    except BaseException as error:
        if reports and members:
            members[0].tear(f"a load of {len(loads)} embeddings raised during its changes ({error!r})")
        raise
    return reports


def instant_of(members: Sequence[Membership], snapshots: Sequence[Snapshot]) -> Instant | None:
    """The instant to which a load of these snapshots moves the stores; None if they are trained apart."""
    if not members or members[0].record is None:
        return None
    now = members[0].instant()
    loaded = zip((member.id for member in members), (rows_of(snapshot).now for snapshot in snapshots), strict=True)
    return Instant(now.number, {**now.versions, **dict(loaded)})


def _members(tables: Tables) -> list[Membership]:
    """What the stores know of each other; nothing on ranks other than rank 0."""
    return [table.membership for table in tables if table.membership is not None]


def _kind(table: Any, kind: str) -> str:
    if kind == "incremental" and not table.base:
        log.info("embedding %r has no snapshot to be based on, and is saved full", table.name)
        return "full"
    return kind


def _check(tables: Tables, name: str, kind: str, overwrite: bool) -> None:
    for table in tables:
        try:
            table.check_save(name, kind, overwrite)
        except (OptionError, SnapshotError) as error:
            raise type(error)(f"embedding {table.name!r}: {error}") from error


def _save_on_ranks(
    world: World,
    tables: Tables,
    name: str,
    kind: str,
    overwrite: bool,
    background: bool,
    progress: ProgressCallback | None,
) -> BackgroundShardedSave | None:
    for table in tables:
        table.at_step()  # first: a background save that completes is a parent
    kinds = [_kind(table, kind) for table in tables]
    for table, its_kind in zip(tables, kinds, strict=True):
        table.check_save(name, its_kind, overwrite, background)
    op = f"saving snapshot {name!r} of {len(tables)} embeddings"
    home, of_all = tables[0].home, None
    if home is not None:
        of_all = OfAll(name, home.path, Decided(home.snapshots / name, secrets.token_hex(16), lambda: None))
    saves: list[tuple[ShardedSave, Snapshot | None]] = []
    with _locked(tables):
        noted = [table.when_saved() for table in tables]
        try:
            for table, its_kind in zip(tables, kinds, strict=True):
                table.check_not_saving(op)
                saves.append(table.begin_save(op, name, its_kind, overwrite, of_all))
        except BaseException:
            for save, _ in saves:
                save.drop()
            raise
        if background:
            parts = [(table.local_table.observers, save) for table, (save, _) in zip(tables, saves, strict=True)]
            saving = BackgroundShardedSave(world, op, parts, noted, f"snapshot {name!r} of {len(tables)} embeddings")
            for table in tables:
                table.note_saving(saving)
            return saving
        errors = [
            catch(partial(table.write_save, save, parent, progress))[1]
            for table, (save, parent) in zip(tables, saves, strict=True)
        ]
        made = commit_together(world, op, [save for save, _ in saves], errors, noted)
        for table, id in zip(tables, made, strict=True):
            table.end_save(kind, id)
    return None
