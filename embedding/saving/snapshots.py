"""The snapshots of a table: in its store folder, by name, and in other folders, which checkpoints of a graph have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from ...distributed.world import World, catch
from ...engine.errors import OptionError, SnapshotError, StoreError
from ...engine.store.rocksdb import RocksDB
from ...engine.table.background_save import SaveHandle
from ...engine.table.change_observers import still_saving
from ...engine.table.table import OpenTable
from ...snapshots.files.format import HashShard, check_name
from ...snapshots.files.reader import Snapshot, list_snapshots, name_of
from ...snapshots.files.writer import NewSnapshots
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import FolderState
from ...snapshots.store.group import Capture, Member, loading
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.linked import OF_STATE, check_linked, link_snapshot, linked, remove_snapshot
from ...snapshots.store.recovery_rule import EMPTY, NO_RECORD
from ...snapshots.store.retention import prune, remove_if_unreferenced, state_snapshot
from ...snapshots.store.save import SaveSource, begin_save, check_kind, check_save
from ...snapshots.store.selection import ALL, LoadReport, Selection
from ..tables.local_table import LocalTable
from ..tables.rank_recovery import check_row_count
from ..tables.training_group import TrainingGroup, between_steps
from .background_saving import BackgroundSaving
from .rows_reference import RowsReference, is_at, reference_at, saved_as
from .save_and_load import save_together
from .table_save import TableSave, commit, write_and_commit

log = logging.getLogger("tierbed")


class Snapshots:
    """Saves the rows of a table as snapshots, and loads them.

    The rows are all in this process, or each rank of `world` has a shard, writes it and reads it. All ranks make each
    call, unless it is local. place: the folder of the snapshots, which all ranks see. store: the store folder that has
    them, on rank 0. Both are None for rows without a folder.
    """

    def __init__(
        self,
        own: LocalTable,
        world: World,
        place: Path | None,
        store: StoreFolder | None,
        shard: HashShard | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        """own: the rows that this process has. shard: which of all rows; None for all. close: closes the embedding."""
        self.own, self.world, self.place, self.store = own, world, place, store
        self._shard, self._close = shard, close or own.close
        self._saving: BackgroundSaving | None = None  # of ranks

    @property
    def name(self) -> str:
        return self.own.name

    @property
    def group(self) -> TrainingGroup | None:
        """The embeddings that it is trained together with."""
        return self.own.group

    @property
    def local_table(self) -> OpenTable:
        """The open table with the rows that this process has. ClosedError."""
        return self.own.table

    @property
    def member(self) -> Member | None:
        """The store in its group; None for rows without a folder, and on ranks other than 0."""
        return self.own.member

    @property
    def folder(self) -> Path:
        """The folder of the snapshots. Raises SnapshotError if there is none. Local."""
        if self.place is None:
            raise no_place(self.name)
        return self.place

    @property
    def last(self) -> str | None:
        """The name of the snapshot that was saved or loaded last, if any. Local."""
        if self.place is None:
            return None
        if self.member is not None:
            record, store = self.member.group.record, self.member.id
        else:
            file = GroupFile(FolderState(self.place.parent))
            record, store = file.record, file.store
        id = record.parents.get(store, EMPTY)
        return None if id == EMPTY else name_of(self.place, id)

    def snapshot(self, name: str) -> Snapshot:
        """A snapshot in the store folder, with the rows of all ranks. Raises SnapshotError, StoreError. Local."""
        folder = self.folder
        if self.store is not None:
            self.checked_store()
        check_name(name)
        return Snapshot.open(folder / name)

    def checked_store(self) -> StoreFolder:
        """`store`, on rank 0. SnapshotError if there is none, StoreError if it was removed or replaced. Local."""
        if self.store is None:
            raise no_place(self.name)
        self.store.check()
        return self.store

    def op(self, what: str) -> str:
        """A call of all ranks at their step, for messages. Raises on all of them where one has closed its rows."""
        table, error = catch(lambda: self.local_table)
        if table is None:
            self.world.handshake(f"{what} of embedding {self.name!r}", error)
        return f"{what} of embedding {self.name!r} at step {self.local_table.step}"

    # saves

    def save(self, name: str, kind: str, overwrite: bool, background: bool) -> SaveHandle | None:
        """Save the rows alone, as `save_together`."""
        return save_together(self.world, [self], name, kind, overwrite, background)

    def check_save(self, name: str, kind: str, overwrite: bool, background: bool = False) -> None:
        """Raise what a save with these arguments would raise. SnapshotError, StoreError, OptionError."""
        op = self.op("saving a snapshot")
        _, error = catch(lambda: self._check_arguments(name, kind, background))
        same = {"snapshot": name, "kind": kind, "overwrite": overwrite, "background": background}
        self.world.handshake(op, error, same if error is None else None)

        def check(store: StoreFolder) -> None:
            if self.member is not None:
                self.member.lock()  # a recovery frees the names of what it has undone
            check_save(store, name, kind, self._source(), overwrite)

        with self.local_table.lock:
            self._on_rank_0(op, check)

    def _check_arguments(self, name: str, kind: str, background: bool) -> None:
        check_kind(kind)
        check_name(name)
        if kind == "checkpoint" and self._shard is not None:
            raise OptionError(
                f"kind='checkpoint' is of RocksDB's files of one process, and the rows of embedding {self.name!r} are "
                f"spread over {self.world.size} ranks; give 'full' or 'incremental'"
            )
        if kind != "full" and background:
            raise OptionError(
                f"background=True, kind={kind!r}: only kind='full' takes as long as the table is large; leave "
                "background out"
            )
        if self.place is None:
            raise no_place(self.name)
        self.local_table.require_open()
        self.local_table.check()

    def before_save(self, background: bool) -> None:
        """Called before a save, without the table's lock."""
        self.at_step()
        if self._shard is None:
            self.checked_store()
            if not background:
                self.local_table.flush_ahead()

    def begin_save(self, op: str, name: str, kind: str, overwrite: bool, new: NewSnapshots) -> TableSave:
        """Begin a snapshot of the rows as they are now. All ranks call it, with the table's lock."""
        capture: Capture | None = None

        def ready() -> SaveSource:
            nonlocal capture
            self.check_not_saving()
            capture = None if self.member is None else self.member.capture()
            return self._source(new.new_id())

        source: SaveSource = self.world.call_on_all_ranks(op, ready)
        parent: Snapshot | None = None

        def begin() -> str | None:
            nonlocal parent
            _, parent = begin_save(self.checked_store(), name, kind, source, overwrite, new)
            return None if parent is None else parent.name

        over = self.world.call_on_rank_0(f"{op}: begun", begin)
        if over is not None:
            parent = self.world.call_on_all_ranks(
                op, lambda: self._part_of(parent or open_snapshot(self.folder / over))
            )
        its_kind = "full" if kind == "incremental" and parent is None else kind
        return self._save(capture, self.folder / name, its_kind, source, parent)

    def _begin_at(
        self, op: str, place: Path, source: SaveSource, new: NewSnapshots, kind: str, member: Member | None
    ) -> TableSave:
        """Begin the snapshot `place` of the rows as they are now. member: if a state_dict makes it in the store."""
        capture: Capture | None = None

        def begin() -> None:
            nonlocal capture
            capture = None if member is None else member.capture()
            new.begin(place, source.description)

        self.world.call_on_rank_0(f"{op}: begun", begin)
        return self._save(capture, place, kind, source, None, is_of_state=True)

    def _save(
        self,
        capture: Capture | None,
        place: Path,
        kind: str,
        source: SaveSource,
        parent: Snapshot | None,
        is_of_state: bool = False,
    ) -> TableSave:
        saved = self.own.when_saved()
        return TableSave(self.local_table, capture, place, kind, source, parent, self._shard, is_of_state, saved)

    def save_rows(self, place: Path) -> None:
        """Save rows without a folder as the snapshot `place`. SnapshotError, StoreError."""
        op = self.op(f"saving rows as {place.name!r}")
        with ExitStack() as locks, NewSnapshots() as new:
            locks.enter_context(between_steps([self], waits=self.world.size == 1))
            source = self.world.call_on_all_ranks(op, lambda: self._source(new.new_id()))
            save = self._begin_at(op, place, source, new, "full", None)
            write_and_commit(self.world, op, [save], new, locks)

    def save_for_state(self, keep: int | None) -> RowsReference:
        """The name of the rows as they are, saved as a snapshot that no incremental one of the user is based on.

        keep: how many of the latest such snapshots stay besides that of these rows; None for all.
        """
        op = self.op("saving rows for a state_dict")
        self.world.handshake(op, same={"state_dict_snapshots": keep})
        self.before_save(background=False)
        with between_steps([self], waits=self.world.size == 1), NewSnapshots() as new:
            self.world.call_on_all_ranks(op, self.local_table.check)
            source = self._source(new.new_id())

            def find() -> tuple[str, bool]:
                """The snapshot of these rows, "" for none, and whether it is to be made."""
                assert self.member is not None
                if self.member.now.snapshot == EMPTY:  # which needs no snapshot, and a user may replace one of it
                    return "", False
                place = state_snapshot(self.checked_store(), self.member.now.snapshot, keep)
                return (f"{OF_STATE}{source.id}", True) if place is None else (place.name, False)

            name, is_new = self.world.call_on_rank_0(f"{op}: its place", find)
            if is_new:
                has_files = source.rocksdb is not None and self._shard is None
                kind = "checkpoint" if has_files else "full"  # no parent, which nobody could replace
                save = self._begin_at(op, self.folder / name, source, new, kind, self.member)
                commit(self.world, op, [save], new, catch(save.write)[1])
        found = saved_as(self.place, name) or RowsReference(self.local_table.step)
        return found._replace(version=self.own.version)

    def _source(self, id: str | None = None) -> SaveSource:
        table = self.local_table
        table.require_open()
        assert table.stack is not None
        bottom = table.stack.bottom
        rocksdb = bottom if isinstance(bottom, RocksDB) else None
        record, store = (NO_RECORD, "") if self.member is None else (self.member.group.record, self.member.id)
        return SaveSource(
            table.describe(), table.counts.rows, table.scan, record, store, rocksdb, table.observers.changed, id
        )

    # saves in the background

    def note_saving(self, saving: BackgroundSaving) -> None:
        """The rows are among those that are being saved in the background."""
        self._saving = saving if self._shard is not None else None

    def at_step(self) -> None:
        """Between two steps: complete the snapshot in the background, if all ranks have written it."""
        if self._saving is not None:
            self._saving.at_step()
            if self._saving.done:
                self._saving = None

    def finish_saving(self) -> None:
        """Wait for a snapshot in the background, which may be the one to load. Its error was logged."""
        if self._saving is None:
            if self.own.own_open is not None:  # a closed table is refused by what the caller does next, on all ranks
                self.own.own_open.observers.finish_saving()
            return
        _, error = catch(self._saving.wait)
        if error is not None and self.world.failure is not None:
            raise error
        interrupted = not isinstance(error, Exception | None)
        self.world.handshake(f"{self._saving.what}: waited for", error if interrupted else None)
        self._saving = None

    def drop_saving(self) -> None:
        """Drop the snapshot in the background, before the rows are closed. Local."""
        if self._saving is not None:
            self._saving.drop()

    def check_not_saving(self) -> None:
        """Raises StoreError while a snapshot is being saved in the background. Local."""
        self.local_table.check()
        if self._saving is not None:  # also if this rank has written its shard
            raise StoreError(still_saving(self._saving.what))
        self.local_table.observers.check_not_saving()

    # loads

    def load_snapshot(self, name: str, selection: Selection = ALL, strict: bool = True) -> LoadReport:
        """Replace the rows by those of a snapshot in the store folder. The report is of the rows of all ranks."""
        self.finish_saving()
        snapshot = self.world.call_on_all_ranks(self._loading(name), lambda: self.snapshot(name))
        return self.load(snapshot, selection, strict)

    def load_rows(self, place: Path, selection: Selection = ALL) -> None:
        """Replace the rows by those of the snapshot `place`, which `check_rows` has checked.

        A store folder gets the snapshot as well, as its recovery snapshot. Without state, or converted, it gets none,
        since recovery would load the state, or other numbers.
        """
        self.world.call_on_all_ranks(self._loading(place.name), lambda: self.local_table)  # ClosedError
        self.finish_saving()
        with between_steps([self], replaces=True), ExitStack() as linking:
            read = self.link_in(place, linking) if self.place is not None and selection.can_recover else place
            self.load(self.world.call_on_all_ranks(self._loading(place.name), lambda: open_snapshot(read)), selection)

    def _loading(self, name: str) -> str:
        """A load by all ranks, of which one may be at another step, for messages."""
        return f"loading snapshot {name!r} of embedding {self.name!r}"

    def load(self, snapshot: Snapshot, selection: Selection = ALL, strict: bool = True) -> LoadReport:
        """Replace all rows by those of a snapshot, or a selection of them."""
        if self._shard is None:
            return self.own.load_part(snapshot, selection, strict)
        op = self._loading(snapshot.name)
        world, snapshot, voted = self.world, self._part_of(snapshot), False
        given = selection.tables  # whatever the user gave: errors in it are raised below
        same = {
            "the snapshot's id": snapshot.manifest.id,
            "strict": bool(strict),
            "tables": sorted(map(str, given)) if isinstance(given, Collection) else repr(given),
            "where": selection.where is not None,
            "weights_only": not selection.state,
            "convert": selection.convert,
        }
        world.handshake(op, same=same)

        def verified() -> None:
            nonlocal voted
            voted = True
            self._note_load(op, snapshot, selection.is_whole)

        report, error = catch(lambda: self.own.load_part(snapshot, selection, strict, verified))
        if error is not None and voted and not world.must_report(error):
            if error is not world.shared_error:
                self._lose(snapshot.name)
            raise error
        if error is not None and not voted:
            world.handshake(f"{op}: its rows", error)

        def loaded() -> list[int]:
            if report is None:
                raise error or AssertionError("a load without a report")
            return [report.rows, report.left_out]

        try:
            counts = world.all_gather_object(f"{op}: done", loaded)
        except BaseException:
            lost = self._lose(snapshot.name)
            if world.failure is None:  # else each rank closes when it likes
                self._close_all(lost)
            raise
        assert report is not None
        rows, left_out = (sum(column) for column in zip(*counts, strict=True))
        return LoadReport(rows, left_out, report.remarks)

    def _note_load(self, op: str, snapshot: Snapshot, whole: bool) -> None:
        """Once every rank has verified its part: let the record say that the rows are replaced."""
        world, member, id = self.world, self.member, snapshot.manifest.id if whole else None
        check_row_count(world, op, snapshot, lambda: snapshot.shard_rows)
        with ExitStack() as noting:
            if id is not None:  # the next run loads it, from here on
                loads = {} if member is None else {member: id}
                world.call_on_all_ranks(f"{op}: noted", lambda: noting.enter_context(loading(loads)))
            writes = world.all_gather_object(f"{op}: marks", lambda: self.own.begin_load(notes=not whole))
            self.own.note_load(max(writes), id)  # a rank that failed may have missed some
            if member is not None:
                member.replaced(id)

    def _lose(self, name: str) -> str:
        """Let the rows close without a clean marker, so that old rows of one rank do not pass for those of a load."""
        lost = f"embedding {self.name!r}: loading snapshot {name!r} failed during its changes, and the rows are closed"
        self.own.lose(StoreError(lost))
        return lost

    def _close_all(self, lost: str) -> None:
        """Close the rows, if some ranks have those of a load and others do not: every rank calls it."""
        last = f"recovers from snapshot {self.last!r}" if self.last else "begins empty"
        log.error("%s on all ranks; create it again, and it %s", lost, last)
        _, error = catch(self._close)
        if error is not None:
            log.error("closing the rows of embedding %r failed as well: %s", self.name, error)

    def check_rows(self, place: Path, selection: Selection = ALL) -> None:
        """Read and check all that `load_rows` needs. Raises what `check_snapshot` does."""
        op = f"checking snapshot {place.name!r} of embedding {self.name!r}"
        snapshot: Snapshot = self.world.call_on_all_ranks(op, lambda: open_snapshot(place))
        self.check_snapshot(snapshot, selection)
        if self.place is not None and selection.can_recover:
            self._on_rank_0(op, lambda store: check_linked(snapshot, store.snapshots / place.name))

    def check_snapshot(self, snapshot: Snapshot, selection: Selection = ALL) -> None:
        """Read and check all that a load needs. SnapshotError for a damaged or unfit snapshot, OptimizerError.

        InputError for a number that a narrower dtype cannot hold.
        """
        part = self._part_of(snapshot)

        def check() -> dict[str, int]:
            fitted = self.own.fitted(part, selection)
            part.verify()
            if fitted.types is not None:
                for _ in fitted.rows_of(part, LoadReport()):
                    pass
            return part.shard_rows

        check_row_count(self.world, f"checking snapshot {snapshot.name!r} of embedding {self.name!r}", part, check)

    def _part_of(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot as this process reads it: its own rows alone. Local."""
        return snapshot if self._shard is None else snapshot.of_shard(self._shard)

    # names of rows

    def rows_reference(self) -> RowsReference:
        """The step of the rows, now or when they were closed, and the last snapshot, if it is of that step.

        Raises deferred errors of earlier steps. Local.
        """
        step = self.own.step
        return reference_at(step, self.place, self.last, None if self.place is None else self.own.version)

    def go_to(self, awaited: RowsReference) -> bool:
        """Load the snapshot that a state_dict names, unless the rows are those already.

        Returns whether they are. Raises what a load does.
        """
        op = f"loading the state of embedding {self.name!r}"
        self.world.handshake(op, same={"state_dict": awaited._asdict()})
        there = saved_as(self.place, awaited.snapshot)

        def is_found() -> bool | None:
            self.local_table.check()  # ClosedError
            return is_at(awaited, self.rows_reference(), there)

        found: bool | None = self.world.all_gather_object(op, is_found)[0]
        if found is None and awaited.snapshot is not None:
            self.load_snapshot(awaited.snapshot)
        return found is not False

    # what checkpoints have, and retention

    def link_rows(self, place: Path) -> None:
        """Let the snapshot of that name in the store folder be `place` as well. SnapshotError."""
        op, ours = self.op(f"linking snapshot {place.name!r}"), self.folder / place.name
        self._on_rank_0(op, lambda store: link_snapshot(Snapshot.open(ours), place))

    def link_in(self, place: Path, linking: ExitStack) -> Path:
        """The snapshot `place` in the store folder, where rank 0 links it."""
        op = f"linking snapshot {place.name!r} of embedding {self.name!r}"
        self._on_rank_0(op, lambda store: linking.enter_context(linked(place, store)))
        return self.folder / place.name

    def drop_rows(self, saved: Snapshot) -> None:
        """Remove the snapshot that a replaced checkpoint linked, unless others or the live rows need it.

        Raises SnapshotError if this is unknown, or the snapshot cannot be removed. Local: rank 0 does it.
        """
        if self.store is not None:
            with self.local_table.lock:
                remove_if_unreferenced(self.store, saved)

    def discard_rows(self, name: str) -> None:
        """Remove a snapshot of a checkpoint that failed. After a kill the one before it counts. Local, on rank 0."""
        if self.store is not None:
            remove_snapshot(self.store.snapshots / name)

    def prune(self, keep_last: int, keep_every: int | None) -> list[str]:
        """Remove snapshots as `prune` says. Returns the names of those that are gone. OptionError, SnapshotError."""
        op = f"pruning snapshots of embedding {self.name!r}"  # also if a rank is at another step
        _, error = catch(lambda: (self.local_table, self.folder))
        self.world.handshake(op, error, {"keep_last": keep_last, "keep_every": keep_every} if error is None else None)
        return list(self.world.call_on_rank_0(op, lambda: self.prune_here(keep_last, keep_every)))

    def prune_here(self, keep_last: int, keep_every: int | None) -> list[str]:
        """`prune` in this process alone, on rank 0."""
        table, store = self.local_table, self.checked_store()
        with table.lock:  # a snapshot that is being saved is not listed yet, and is based on no other
            saving = table.observers.saving
            if self._saving is None and (saving is None or saving.done):  # of ranks, one may be getting its name
                store.clear_snapshots()
            return [snapshot.name for snapshot in prune(store, keep_last, keep_every).removed]

    def names(self) -> list[str]:
        """The names of the snapshots in the store folder. Local."""
        return [one.name for one in list_snapshots(self.folder).snapshots]

    def _on_rank_0(self, op: str, call: Callable[[StoreFolder], object]) -> None:
        """Do `call` with the store folder, if there is one, on rank 0. What it raises is raised on all ranks."""
        self.world.call_on_all_ranks(op, lambda: None if self.store is None else call(self.checked_store()))


def open_snapshot(place: Path) -> Snapshot:
    """The snapshot `place`, whose name a store can have. Raises SnapshotError."""
    check_name(place.name)
    return Snapshot.open(place)


def no_place(name: str) -> SnapshotError:
    """The error for an embedding without a folder."""
    return SnapshotError(
        f"embedding {name!r} has no persistent_path, so no place for snapshots; give one in its store options"
    )
