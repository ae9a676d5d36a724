"""Embeddings that one process trains together, and what the open store of each notes of the others."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

from ..engine.errors import StoreError
from ..engine.ops.rows_contract import EmbeddingBase
from ..engine.table.row_step import is_trained_elsewhere
from ..engine.table.step_gate import StepGate
from ..engine.table.table import OpenTable
from ..snapshots.files.reader import Snapshot, list_snapshots
from ..snapshots.files.versions import (
    EMPTY,
    LIVE,
    At,
    Before,
    GroupRecord,
    Instant,
    Peer,
    Rows,
    Saved,
    Version,
    Versions,
)
from ..snapshots.files.writer import Together
from ..snapshots.store.folder import StoreFolder
from ..snapshots.store.instants import Group, Member, rows_of

log = logging.getLogger("tierbed")

_open: WeakValueDictionary[str, Membership] = WeakValueDictionary()  # by the real path of the store
os.register_at_fork(after_in_child=_open.clear)


UNSETTLED = "they were opened for a load that raised, and are of no common step"


class TrainingGroup:
    """Stores that are trained together by this process: a set that grows, of embeddings held weakly."""

    def __init__(self) -> None:
        self.embeddings: WeakSet[Any] = WeakSet()
        self.ids: dict[str, str] = {}  # by the real path of a store
        self.gate = StepGate()  # of all their tables
        self.is_joined = True  # False after a join that raised, as on a full disk: the next one tries again

    def begin_pass(self) -> None:
        """A backward pass has pinned the rows of one of them, which it updates before it comes to others."""
        if not self.gate.closed:
            self.gate.closed = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end_pass)

    def end_pass(self) -> None:
        """The backward pass has updated all that it reached."""
        self.gate.closed = False

    def check_passed(self) -> None:
        """Called before a forward pass and a close: if the last backward pass raised, rows may differ in step."""
        if self.gate.closed and torch._C._current_graph_task_id() == -1:  # not one that the pass makes again
            self.fail_pass()

    def fail_pass(self) -> None:
        """The backward pass raised: if it had begun its updates, rows may differ in step."""
        if self.gate.closed:
            self.end_pass()
            member = next((one for path in self.stores() if (one := _open.get(path)) is not None), None)
            if member is not None:
                member.tear("a backward pass raised during its updates")

    def note_failed_step(self, embeddings: Iterable[Any], error: BaseException) -> None:
        """A step of embeddings raised: if it updated some of them alone, or in a backward pass, rows differ in step."""
        places = (
            os.path.realpath(os.path.join(one.store_options.persistent_path, one.name))
            for one in embeddings
            if one.group is self and one.world is None
        )
        found = [(one, one.table) for place in places if (one := _open.get(place)) is not None]
        tables = [table for _, table in found if table is not None]
        behind = [table for table in tables if table.in_step or table.failure is not None]
        if 0 < len(behind) < len(tables) and any(table.refused or table.failure is not None for table in behind):
            found[0][0].tear(f"a step raised during its updates ({error!r})")
        if torch._C._current_graph_task_id() != -1:
            self.fail_pass()

    def stores(self, name: str | None = None) -> dict[str, tuple[str, Path]]:
        """The name and the folder of each, or of those of this name, by its real path."""
        wanted = (one for one in self.embeddings if name in (None, one.name))
        folders = ((one.name, Path(one.store_options.persistent_path).absolute()) for one in wanted)
        return {os.path.realpath(path / name): (name, path / name) for name, path in folders}


def train_together(modules: Iterable[Any]) -> None:
    """Let the embeddings among modules, and those that each is trained with already, be one group.

    Those without a folder are left out.
    """
    options = ((one, getattr(one, "store_options", None)) for one in modules if isinstance(one, EmbeddingBase))
    stored = [one for one, given in options if given is not None and given.persistent_path is not None]
    if len(stored) < 2:
        return
    groups = {id(one.group): one.group for one in stored if one.group is not None}
    together = next(iter(groups.values()), TrainingGroup())
    if together.is_joined and len(groups) == 1 and all(one.group is together for one in stored):
        return
    for group in groups.values():
        together.embeddings |= group.embeddings
        together.ids |= group.ids
    together.embeddings |= WeakSet(stored)
    for one in list(together.embeddings):
        one.group = together
    together.is_joined = False
    for one in sorted(together.embeddings, key=lambda one: one.name):  # in one order on all ranks
        one.join()
    together.is_joined = True


class Membership:
    """What an open store knows of the stores that it is trained together with. `folder` notes it in its MARK.

    `versions`: of its rows. `record`: as MARK has it, None for a store that trains alone, which notes nothing.
    """

    def __init__(self, folder: StoreFolder, group: TrainingGroup | None, store: Path | None = None) -> None:
        """folder: held; its MARK notes the group. store: the store folder, where that is another."""
        self.folder, self.group = folder, group
        self.store = folder.path if store is None else store
        self.path = os.path.realpath(self.store)
        self.record: GroupRecord | None = folder.mark.group
        self.versions = Versions(Rows(EMPTY))
        self.holder: Callable[[], Any] = lambda: None  # gives what has the table
        self._formed: Instant | None = None  # of the last open or load of one of them, for the first write of each
        self._came_to: Version | None = None  # the rows of the last state that this store had already
        self._had: set[str] = set()  # the stores that had the rows of a load of all when it came to this one
        self.is_at = False  # whether MARK says that the rows are at a version, and so has to hear of the first write
        self._number = 0  # the largest of an instant in the snapshots: those of states are not in MARK
        self._in_state: Version | None = None  # the last version that a state_dict named
        self.torn = ""  # why its rows and those of the others are of different steps

    @property
    def id(self) -> str:
        """The store's, among those that it is trained together with."""
        return "" if self.record is None else self.record.id

    @property
    def number(self) -> int:
        """The largest of an instant that the store knows of."""
        return max(self._number, 0 if self.record is None else self.record.number)

    @property
    def table(self) -> OpenTable | None:
        """The open table, or None."""
        holder = self.holder()
        return None if holder is None else holder.own.own_open

    def begin_with(self, rows: Rows) -> None:
        """The rows to be opened are of this version."""
        self.versions = self._begin(rows)

    def note_open(self, rows: Rows) -> None:
        """The rows are open: live rows, those of a snapshot, or none. StoreError."""
        self.begin_with(rows)
        self.is_at = self.folder.mark.at is not None
        _open[self.path] = self
        self.enlist()

    def _begin(self, rows: Rows) -> Versions:
        return Versions(rows, self._epochs())

    def _epochs(self) -> list[str]:
        """Those of the rows of snapshots, whose numbers it notes as well."""
        saved = list_snapshots(self.folder.snapshots).snapshots
        of_group = (snapshot.manifest.instant for snapshot in saved)
        self._number = max((one.instant.number for one in of_group if one is not None), default=0)
        return [rows_of(snapshot).now[0] for snapshot in saved]

    @property
    def stores(self) -> list[Path]:
        """The folders of the others, as this process has them."""
        return self._stores()

    def _stores(self, name: str | None = None) -> list[Path]:
        group = {} if self.group is None else self.group.stores(name)
        return [place for path, (_, place) in group.items() if path != self.path]

    @property
    def is_pending(self) -> bool:
        """Whether a load of all has not come to every other store yet."""
        at = None if self.record is None else self.folder.mark.at
        if self.record is None or at is None or at.all is None:
            return False
        for id, version in at.all.versions.items():
            if id in self._had:
                continue
            other = self._other(self.record.peers[id]) if id in self.record.peers else None
            noted = other.folder.mark.group if isinstance(other, Membership) else other and other.record
            if other is not None and other.present != version and noted and noted.number < at.all.number:
                return True
        return False

    def keep(self) -> None:
        """The rows belong to those of the others, since the user says so: no load is expected. StoreError."""
        if self.record is not None:
            self.record = replace(self.record, number=self.instant().number)
            self.folder.change(group=self.record)
            self.reformed()

    def rest(self) -> None:
        """Rows that were loaded and not written since are of an instant with the others when they are closed."""
        at = None if self.record is None or self.torn or self.is_pending else self.folder.mark.at
        if at is not None and at.by == "load":
            self.folder.change(group=self.record, at=None)

    def closed(self) -> None:
        """The rows are no longer open."""
        if _open.get(self.path) is self:
            del _open[self.path]

    def live(self) -> dict[str, Any]:
        """The field of a clean marker with the version of the rows: if others, or a state_dict, know them by it."""
        rows = self.versions.rows
        return {} if self.record is None and rows.now != self._in_state else {LIVE: rows}

    def version_for_state(self) -> Version:
        """The version of the rows, which is known again in the next run as well."""
        self._in_state = self.versions.rows.now
        if self.record is None and self.versions.writes == 0 and self.table is not None:
            self._mark_live()
        return self._in_state

    def _mark_live(self) -> None:
        marker = self.folder.clean_marker
        if marker is not None and LIVE not in marker:
            self.folder.write_clean_marker({**marker, LIVE: self.versions.rows})

    def enlist(self) -> None:
        """Note the group as it is now, if this is not noted yet. StoreError."""
        places = [] if self.group is None else self.group.stores()
        with between_steps([self, *(one for path in places if (one := _open.get(path)) is not None)]):
            self._enlist()

    def _enlist(self) -> None:
        group = self.group
        others = {} if group is None else {path: store for path, store in group.stores().items() if path != self.path}
        if not others and self.record is None:
            return
        known = None if self.group is None else self.group.ids.get(self.path)
        record = self.record or GroupRecord(known or secrets.token_hex(8), {}, self.versions.rows.now)
        if group is not None and others:
            group.ids[self.path] = record.id
            peers = {_id_of(group, path): Peer.of(name, self.store, place) for path, (name, place) in others.items()}
            record = replace(record, peers=peers)
        self.record, noted = record, self.folder.mark.group
        self._form()
        for other in self.open_peers():
            if other.record is not None and record.id not in other.record.peers:
                other._enlist()
            other._form()
        if noted is not None and (noted.id, noted.peers, noted.joined) == (record.id, record.peers, record.joined):
            return
        rows = self.versions.rows
        if self.versions.writes > 0:
            self.record = replace(record, instant=self._formed)
            self.folder.change(group=self.record)
            return
        self._mark_live()
        saved = list_snapshots(self.folder.snapshots).snapshots
        if noted is None and rows.now != EMPTY and not any(rows_of(snapshot).now == rows.now for snapshot in saved):
            log.warning(
                "embedding %r is trained together with %s from here on, and no snapshot has its rows: save a snapshot "
                "of all of them, since after a kill they have no step in common before that",
                self.store.name,
                ", ".join(repr(peer.name) for peer in record.peers.values()),
            )
        self._note_unwritten(rows)

    def _note_unwritten(self, rows: Rows) -> None:
        self.folder.change(group=self.record, at=At(rows.now, "recovery"))
        self.is_at = True

    def begin_fresh(self) -> None:
        """The rows begin empty by the user's will: to the others this is another store from here on."""
        if self.record is not None:
            self.record = replace(self.record, id=secrets.token_hex(8), joined=EMPTY, instant=None)

    def open_peers(self) -> list[Membership]:
        """Those of the others that this process has open, and that have joined."""
        if self.record is None:
            return []
        places = (place for peer in self.record.peers.values() for place in peer.places(self.store))
        found = [one for place in places if (one := _open.get(os.path.realpath(place))) is not None]
        return list({one.path: one for one in found if one.table is not None and one.record is not None}.values())

    def instant(self) -> Instant:
        """That of now, with a new number. The caller holds the locks of all open stores (`between_steps`)."""
        assert self.record is not None
        now = self.seen()
        self.record = replace(self.record, number=now.number)
        return now

    def seen(self) -> Instant:
        """As `instant`, which takes no number. Steps of other threads may have it be of no moment."""
        assert self.record is not None
        versions: dict[str, Version | None] = {self.record.id: self.versions.rows.now}
        number = self.number
        steady = not self.is_amid_step
        for id, peer in self.record.peers.items():
            other = self._other(peer)
            versions[id] = other.present if steady else None
            number = max(number, other.number)
        return Instant(number + 1, versions)

    @property
    def present(self) -> Version | None:
        """The version of the rows now."""
        return self.versions.rows.now

    def _other(self, peer: Peer) -> Membership | Member:
        """Another store, as this process has it open, or as its folder says."""
        places = [*self._stores(peer.name), *peer.places(self.store)]
        there = (_open.get(os.path.realpath(place)) for place in places)
        other = next((one for one in there if one is not None), None)
        if other is not None and other.table is not None and other.record is not None:
            return other
        return Member(next((one for one in places if one.is_dir()), places[-1]), {})

    def instant_with(self, snapshot: Snapshot, digest: str | None) -> Instant | None:
        """The instant to which the load of a state that names `snapshot` moves all; None for a store by itself.

        digest: of the state's instant. If no store notes that, the load is of this store alone, and a kill drops it.
        """
        saved = snapshot.manifest.instant
        if self.record is None or saved is None or digest is None:
            return None
        of_state = next((one for one in self._recorded_instants(saved.instant) if one.digest == digest), None)
        if of_state is None:
            return None
        now = self.instant()
        return Instant(now.number, {**now.versions, **of_state.versions, self.id: saved.rows.now})

    def _recorded_instants(self, first: Instant) -> Iterator[Instant]:
        """The instants that the stores have recorded: `first`, those of loads of all, then those of all snapshots."""
        yield first
        loads = (one.folder.mark.at for one in self.open_peers())
        yield from (at.all for at in loads if at is not None and at.all is not None)
        for member in Group(self.store, {}, stores=self.stores).members.values():
            yield from member.instants()

    def has_come(self) -> bool:
        """The rows are those of a state that is being loaded. False if a load of all means others of this store.

        Another store names these by a snapshot that may be older than the state.
        """
        loads = (one.folder.mark.at for one in self.open_peers())
        if any(at is not None and at.all is not None and at.all.versions.get(self.id) != self.present for at in loads):
            return False
        self._came_to = self.present
        return True

    @property
    def is_amid_step(self) -> bool:
        """Whether one of the stores is in a step, so that their versions are of no instant."""
        in_pass = self.group is not None and self.group.gate.closed
        return in_pass or any(one.table is not None and one.table.in_step for one in [self, *self.open_peers()])

    def _form(self) -> None:
        if self._formed is None or None in self._formed.versions.values():
            self._formed = self.instant()

    def first_write(self) -> GroupRecord | None:
        """The record to note with the first write of a run; None for a store that trains alone."""
        self.check_whole()
        self.is_at = False
        if self.record is None:
            return None
        instant = self._formed or self.record.instant
        self.record = replace(
            self.record, instant=instant, number=max(self.record.number, instant.number if instant else 0)
        )
        return self.record

    def loaded(self, snapshot_rows: Rows, by: str, all_: Instant | None = None) -> dict[str, Any]:
        """What MARK has to note with the snapshot that rows go back to from here on; nothing for a store by itself.

        by: "load", "recovery", or "open" for rows that are to be replaced by a load: these are of no instant.
        """
        self.versions = self._begin(snapshot_rows)
        self.torn = ""
        if self.record is None:
            return {}
        if by == "load":
            number = (self.instant() if all_ is None else all_).number
            self.record = replace(self.record, instant=all_ or self.record.instant, number=max(self.number, number))
        self.is_at = True
        if by == "recovery" or all_ is not None:
            return {"at": At(snapshot_rows.now, "recovery" if by == "recovery" else "load", all_), "group": self.record}
        known = Group(self.store, {}).members.get(self.id) or Member(self.store, {})
        before = Before(known.rows(killed=True), self.number)
        formed = None if self._formed is None else self._formed.versions.get(self.id)
        if by == "load" and formed == before.rows.now and not self._undoes_loads():
            self.record = replace(self.record, instant=self._formed)  # to which a kill undoes this load
        return {"at": At(snapshot_rows.now, "load", before=before), "group": self.record}

    def _undoes_loads(self) -> bool:
        """Whether a kill would undo a load of only one of the open stores."""
        return any(at is not None and at.before is not None for at in (one.folder.mark.at for one in self.open_peers()))

    def tear(self, why: str) -> None:
        """Let none of the stores that are trained together be written or saved, or be marked clean, until it is loaded.

        why: what left their rows at different steps.
        """
        for one in [self, *self.open_peers()]:
            one.torn = why
            if (holder := one.holder()) is not None:
                holder.own.note_torn()

    def check_whole(self) -> None:
        """Raises StoreError if rows of stores that are trained together are of different steps."""
        if self.torn:
            raise StoreError(
                f"embeddings that are trained together have rows of different steps: {self.torn}. Load a snapshot in "
                "each, or make them again: with a persistent_path they go back to the last step of which all have rows"
            )

    def reformed(self) -> None:
        """After a load: the rows that are open now belong together, since the user says so."""
        if self.record is not None:
            with between_steps([self]):
                formed, at = self.instant(), self.folder.mark.at
                versions = {} if at is None or at.all is None else at.all.versions
                everyone = [self, *self.open_peers()]
                self._had = {one.id for one in everyone if one.present in (versions.get(one.id), one._came_to)}
                for one in everyone:
                    one._formed = formed

    def saved(self, id: str) -> Together:
        """What a snapshot with this id of the rows as they are now has beside them."""
        if self.record is None:
            return Together(id, None)
        self.check_whole()
        if any(one.is_pending for one in [self, *self.open_peers()]):
            raise StoreError(
                "a loaded state has not come to all embeddings that are trained together yet: load it into the others, "
                "or call keep_rows() of these, then save"
            )
        return Together(id, Saved(self.record.id, self.versions.rows, self.instant(), self.record.peers))

    def saved_as(self, id: str) -> None:
        """A snapshot has the rows as they are now: those of a store by itself have its version from here on."""
        if self.record is None:
            self.versions = self._begin(Rows((id, 0)))


def _id_of(group: TrainingGroup, path: str) -> str:
    """The id of another store of the group: as it notes it, or as it will."""
    if path not in group.ids:
        record = Member(Path(path), {}).record
        group.ids[path] = secrets.token_hex(8) if record is None else record.id
    return group.ids[path]


def open_rows() -> dict[str, Rows]:
    """The versions of the rows of all stores that this process has open, by their real paths."""
    there = [one for ref in _open.valuerefs() if (one := ref()) is not None]  # others may open and close meanwhile
    return {one.path: one.versions.rows for one in there if one.table is not None}


@contextmanager
def between_steps(members: Iterable[Membership], waits: bool = False, handles: Iterable[Any] = ()) -> Iterator[None]:
    """A block in which no other thread writes to or saves these stores, nor any that is trained together with them.

    waits: for the end of a step of another thread, in which some of the stores may be a step ahead of the others.
    handles: of tables that have no membership in this process.
    """
    everyone = {one.path: one for member in members for one in [member, *member.open_peers()]}.values()
    gate: StepGate | None = None
    while True:
        found = {table for one in everyone if (table := one.table) is not None}
        tables = sorted(found.union(handle.local_table for handle in handles), key=id)
        for table in tables:
            table.observers.wait_for_foreground()
        with ExitStack() as stack:
            if gate is not None:
                stack.enter_context(gate.between_steps(tables.copy, lambda: False))
            for table in tables:
                stack.enter_context(table.lock)
            if any(table.is_replaced or table.is_saved_by_another for table in tables):
                continue
            groups = [one.group for one in everyone if waits and one.group is not None and one.is_amid_step]
            gate = next((group.gate for group in groups if is_trained_elsewhere(group.embeddings)), None)
            if gate is None:
                yield
                return
