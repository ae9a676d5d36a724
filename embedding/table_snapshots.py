"""The snapshots of a table: in its store folder, by name, and in other folders, which checkpoints of a graph have."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from ..distributed.world import World, catch
from ..engine.errors import OptionError, SnapshotError
from ..engine.store.rocksdb import RocksDB
from ..engine.table.background_save import SaveHandle
from ..engine.table.table import OpenTable
from ..snapshots.files.format import HashShard, check_name
from ..snapshots.files.reader import Snapshot, list_snapshots, name_of
from ..snapshots.files.writer import NewSnapshots, ProgressCallback
from ..snapshots.store.folder import StoreFolder
from ..snapshots.store.folder_state import FolderState
from ..snapshots.store.group import Capture, Member
from ..snapshots.store.group_file import GroupFile
from ..snapshots.store.linked import OF_STATE, check_linked, link_snapshot, linked, remove_snapshot
from ..snapshots.store.record import EMPTY, NO_RECORD
from ..snapshots.store.retention import prune, remove_if_unreferenced, state_snapshot
from ..snapshots.store.save import (
    SaveSource,
    begin_save,
    check_kind,
    check_save,
    clear_leftovers,
)
from ..snapshots.store.selection import ALL, LoadReport, Selection
from .compatible import check_stored, fitting
from .rank_recovery import check_row_count
from .rows_reference import RowsReference, is_at, reference_at, saved_as
from .saving import (
    BackgroundSaving,
    TableSave,
    commit,
    locked,
    save_together,
    write_and_commit,
)
from .table_persistence import TablePersistence
from .training_group import TrainingGroup


class TableSnapshots:
    """The part of a `TableHandle` that saves and loads snapshots, as far as one process and ranks do the same.

    All ranks of `world` make each call, unless it is local. Of rows over ranks, rank 0 alone has `store` and
    `member`; rows without a folder have none.
    """

    name: str
    world: World
    place: Path | None  # the folder of the snapshots, which all ranks of `world` see
    store: StoreFolder | None  # the store folder that has them
    group: TrainingGroup | None  # the embeddings that it is trained together with

    @property
    def local_table(self) -> OpenTable:
        """The open table with the rows that this process has."""
        raise NotImplementedError

    @property
    def member(self) -> Member | None:
        """The store in its group; None for rows without a folder, and for shards of ranks other than rank 0."""
        raise NotImplementedError

    @property
    def base(self) -> str | None:
        """The snapshot that was saved or loaded last, if any. Local."""
        if self.place is None:
            return None
        if self.member is not None:
            record, store = self.member.group.record, self.member.id
        else:
            file = GroupFile(FolderState(self.place.parent))
            record, store = file.record, file.store
        id = record.parents.get(store, EMPTY)
        return None if id == EMPTY else name_of(self.place, id)

    @property
    def folder(self) -> Path:
        """The folder of the snapshots. Raises SnapshotError if there is none. Local."""
        if self.place is None:
            raise no_place(self.name)
        return self.place

    def snapshot(self, name: str) -> Snapshot:
        """A snapshot in the store folder, with the rows of all ranks. Raises SnapshotError, StoreError. Local."""
        folder = self.folder
        if self.store is not None:
            self.checked_store()
        check_name(name)
        return Snapshot.open(folder / name)

    def finish_saving(self) -> None:
        """Wait for a snapshot in the background, which may be the one to load. Its error was logged."""
        raise NotImplementedError

    def load_from(self, snapshot: Snapshot) -> LoadReport:
        """Replace all rows by those of a snapshot."""
        raise NotImplementedError

    def before_save(self, background: bool) -> None:
        """Called before a save, without the table's lock."""
        raise NotImplementedError

    def check_save(self, name: str, kind: str, overwrite: bool, background: bool = False) -> None:
        """Raise what `save_snapshot` would raise for these arguments. SnapshotError, StoreError, OptionError."""
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

    def check_not_saving(self) -> None:
        """Raises StoreError while a snapshot is being saved in the background. Local."""
        raise NotImplementedError

    def note_saving(self, saving: BackgroundSaving) -> None:
        """The rows are among those that are being saved in the background."""

    def save_snapshot(
        self,
        name: str,
        kind: str = "full",
        overwrite: bool = False,
        progress: ProgressCallback | None = None,
        background: bool = False,
    ) -> SaveHandle | None:
        """Save the rows as snapshot `name` of the store folder, as `save_together`."""
        return save_together(self.world, [self], name, kind, overwrite, background, progress)

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
            store = self.checked_store()
            _, parent = begin_save(store, name, kind, source, overwrite, new)
            return None if parent is None else parent.name

        over = self.world.call_on_rank_0(f"{op}: begun", begin)
        if over is not None:
            parent = self.world.call_on_all_ranks(
                op, lambda: self._part_of(parent or open_snapshot(self.folder / over))
            )
        its_kind = "full" if kind == "incremental" and parent is None else kind
        return TableSave(
            self.local_table,
            capture,
            self.folder / name,
            its_kind,
            source,
            parent,
            self._shard,
            False,
            self.when_saved(),
        )

    def begin_at(
        self,
        op: str,
        place: Path,
        source: SaveSource,
        new: NewSnapshots,
        kind: str = "full",
        member: Member | None = None,
    ) -> TableSave:
        """Begin the snapshot `place` of the rows as they are now. member: if a state_dict makes it in the store."""
        capture: Capture | None = None

        def begin() -> None:
            nonlocal capture
            capture = None if member is None else member.capture()
            new.begin(place, source.description)

        self.world.call_on_rank_0(f"{op}: begun", begin)
        return TableSave(self.local_table, capture, place, kind, source, None, self._shard, True, self.when_saved())

    def when_saved(self) -> Callable[[str], None]:
        """What each rank does when a snapshot of the rows as they are now has its name. It takes the id."""
        return lambda id: None

    @property
    def _shard(self) -> HashShard | None:
        """The shard of this process; None for all rows."""
        return None

    def save_rows(self, place: Path) -> None:
        """Save the rows as the snapshot `place`, and by its name in a store folder too. SnapshotError, StoreError."""
        if self.place is not None:
            self.save_snapshot(place.name)
            self.link_rows(place)
            return
        op = self.op(f"saving rows as {place.name!r}")
        with ExitStack() as locks, NewSnapshots() as new:
            locks.enter_context(locked([self], waits=self.world.size == 1))
            source = self.world.call_on_all_ranks(op, lambda: self._source(new.new_id()))
            save = self.begin_at(op, place, source, new)
            write_and_commit(self.world, op, [save], new, locks)

    def link_rows(self, place: Path) -> None:
        """Let the snapshot of that name in the store folder be `place` as well. SnapshotError."""
        op, ours = self.op(f"linking snapshot {place.name!r}"), self.folder / place.name
        self._on_rank_0(op, lambda store: link_snapshot(Snapshot.open(ours), place))

    def link_in(self, place: Path, linking: ExitStack) -> Path:
        """The snapshot `place` in the store folder, where rank 0 links it."""
        op = f"linking snapshot {place.name!r} of embedding {self.name!r}"
        self._on_rank_0(op, lambda store: linking.enter_context(linked(place, store)))
        return self.folder / place.name

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
            fitted = self.check_fit(part, selection)
            part.verify()
            if fitted.types is not None:
                for _ in fitted.rows_of(part, LoadReport()):
                    pass
            return part.shard_rows

        check_row_count(self.world, f"checking snapshot {snapshot.name!r} of embedding {self.name!r}", part, check)

    def check_fit(self, snapshot: Snapshot, selection: Selection = ALL) -> Selection:
        """The selection for this table. SnapshotError, OptimizerError if its rows cannot be the table's. Local."""
        raise NotImplementedError

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
            self._load_for_state(awaited.snapshot)
        return found is not False

    def rows_reference(self) -> RowsReference:
        """The step of the rows, now or when they were closed, and the last snapshot, if it is of that step.

        Raises deferred errors of earlier steps. Local.
        """
        raise NotImplementedError

    def _load_for_state(self, name: str) -> None:
        """Load a snapshot that a state_dict names."""
        raise NotImplementedError

    def drop_rows(self, saved: Snapshot) -> None:
        """Remove the snapshot that `save_rows` made for a replaced checkpoint, unless others or the live rows need it.

        Raises SnapshotError if this is unknown, or the snapshot cannot be removed. Local: rank 0 does it.
        """
        if self.store is not None:
            with self.local_table.lock:
                remove_if_unreferenced(self.store, saved)

    def discard_rows(self, name: str) -> None:
        """Remove the snapshot that `save_rows` put into the store folder. After a kill the one before it counts.

        Local: rank 0 does it.
        """
        if self.store is not None:
            remove_snapshot(self.store.snapshots / name)

    def prune_snapshots(self, keep_last: int, keep_every: int | None) -> list[str]:
        """Remove snapshots as `prune` says. Returns the names of those that are gone. OptionError, SnapshotError."""
        op = f"pruning snapshots of embedding {self.name!r}"  # also if a rank is at another step
        _, error = catch(lambda: (self.local_table, self.folder))
        self.world.handshake(op, error, {"keep_last": keep_last, "keep_every": keep_every} if error is None else None)
        return list(self.world.call_on_rank_0(op, lambda: self._prune(keep_last, keep_every)))

    def prune_between_steps(self, keep_last: int, keep_every: int | None) -> tuple[list[str], list[str]]:
        """Prune for another process, as `SaveTarget.prune_between_steps` says. Local, on rank 0."""
        removed = self._prune(keep_last, keep_every)
        return removed, [one.name for one in list_snapshots(self.folder).snapshots]

    def _prune(self, keep_last: int, keep_every: int | None) -> list[str]:
        table, store = self.local_table, self.checked_store()
        with table.lock:  # a snapshot that is being saved is not listed yet, and is based on no other
            if not self._is_saving:
                clear_leftovers(store)
            return [snapshot.name for snapshot in prune(store, keep_last, keep_every).removed]

    @property
    def _is_saving(self) -> bool:
        """Whether a snapshot is being saved in the background."""
        saving = self.local_table.observers.saving
        return saving is not None and not saving.done

    def checked_store(self) -> StoreFolder:
        """`store`, on rank 0. SnapshotError if there is none, StoreError if it was removed or replaced. Local."""
        if self.store is None:
            raise no_place(self.name)
        self.store.check()
        return self.store

    def _on_rank_0(self, op: str, call: Callable[[StoreFolder], object]) -> None:
        """Do `call` with the store folder, if there is one, on rank 0. What it raises is raised on all ranks."""
        self.world.call_on_all_ranks(op, lambda: None if self.store is None else call(self.checked_store()))

    def op(self, what: str) -> str:
        """A call of all ranks at their step, for messages. Raises on all of them where one has closed its rows."""
        table, error = catch(lambda: self.local_table)
        if table is None:
            self.world.handshake(f"{what} of embedding {self.name!r}", error)
        return f"{what} of embedding {self.name!r} at step {self.local_table.step}"

    def _part_of(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot as this process reads it: its own rows alone. Local."""
        return snapshot

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


def open_snapshot(place: Path) -> Snapshot:
    """The snapshot `place`, whose name a store can have. Raises SnapshotError."""
    check_name(place.name)
    return Snapshot.open(place)


def no_place(name: str) -> SnapshotError:
    """The error for an embedding without a folder."""
    return SnapshotError(
        f"embedding {name!r} has no persistent_path, so no place for snapshots; give one in its store options"
    )


class LocalSnapshots(TableSnapshots):
    """The part of `LocalTableHandle` that saves and loads the rows of its table as snapshots."""

    _persistence: TablePersistence

    def _replace(self, build: Callable[[OpenTable], OpenTable], joins: bool = False) -> None:
        """Replace the table by the one that `build` returns for it. joins: it is opened, and joins its group."""
        raise NotImplementedError

    def before_save(self, background: bool) -> None:
        table = self.local_table
        self.checked_store()
        if not background:
            table.flush_ahead()

    def check_not_saving(self) -> None:
        self.local_table.check()
        self.local_table.observers.check_not_saving()

    def _of_step(self, step: int) -> RowsReference:
        """The name of the rows of a step."""
        return reference_at(step, self.place, self.base, None if self.member is None else self.member.version)

    def save_for_state(self, keep: int | None) -> RowsReference:
        """The name of the rows as they are, saved as a snapshot that no incremental one of the user is based on.

        keep: how many of the latest such snapshots stay besides that of these rows; None for all.
        """
        folder = self.checked_store()
        self.local_table.flush_ahead()
        assert self.member is not None
        with locked([self], waits=True), NewSnapshots() as new:
            table, at = self.local_table, self.member.now
            table.check()
            if at.snapshot == EMPTY:  # which needs no snapshot, and a user may replace one of it
                return RowsReference(table.step, version=self.member.version)
            place = state_snapshot(folder, at.snapshot, keep)
            if place is None:
                source = self._source(new.new_id())
                place = folder.snapshots / f"{OF_STATE}{source.id}"
                kind = "full" if source.rocksdb is None else "checkpoint"  # no parent, which nobody could replace
                save = self.begin_at("saving rows for a state_dict", place, source, new, kind, self.member)
                save.write()
                commit(self.world, "saving rows for a state_dict", [save], new, None)
            found = saved_as(self.place, place.name) or self._of_step(table.step)
            return found._replace(version=self.member.version)

    def finish_saving(self) -> None:
        self.local_table.observers.finish_saving()

    def load_snapshot(self, name: str, selection: Selection, strict: bool) -> LoadReport:
        """Replace the rows by those of a snapshot in the store folder, as `load_part`."""
        self.finish_saving()
        return self.load_part(self.snapshot(name), selection, strict)

    def load_from(self, snapshot: Snapshot) -> LoadReport:
        return self.load_part(snapshot, ALL, True)

    def load_part(
        self,
        snapshot: Snapshot,
        selection: Selection,
        strict: bool,
        verified: Callable[[], None] | None = None,
    ) -> LoadReport:
        """Load the rows of a snapshot that this process has. verified: as of `TablePersistence.load`."""
        reports: list[LoadReport] = []

        def build(before: OpenTable) -> OpenTable:
            what = f"snapshot {snapshot.name!r}"
            spec = self._persistence.spec.with_stored_seed(snapshot.description)
            fit, remarks = fitting(spec, snapshot.description, before.optimizer, selection, strict, what)
            table, report = self._persistence.load(before.optimizer, snapshot, before, fit, verified)
            report.remarks += remarks
            reports.append(report)
            return table

        self._replace(build)
        return reports[0]

    def _load_for_state(self, name: str) -> None:
        self.load_from(self.snapshot(name))

    def load_rows(self, place: Path, selection: Selection = ALL) -> None:
        """Replace the rows by those of the snapshot `place`, which `check_rows` has checked.

        A store folder gets the snapshot as well, as its recovery snapshot. Without state, or converted, it gets none,
        since recovery would load the state, or other numbers.
        """
        self._replace(lambda before: self._with_rows(before, place, selection))

    def _with_rows(self, table: OpenTable, place: Path, selection: Selection) -> OpenTable:
        snapshot = Snapshot.open(place)
        if self.place is None or not selection.can_recover:
            fitted = self.check_fit(snapshot, selection)
            return self._persistence.load(table.optimizer, snapshot, table, fitted)[0]
        with table.lock, linked(place, self._folder_of(place.name)) as own:
            return self._persistence.load(table.optimizer, own, table)[0]

    def check_fit(self, snapshot: Snapshot, selection: Selection = ALL) -> Selection:
        optimizer = self.local_table.optimizer
        spec, what = self._persistence.spec.with_stored_seed(snapshot.description), f"snapshot {snapshot.name!r}"
        if selection.convert:
            return fitting(spec, snapshot.description, optimizer, selection, True, what)[0]
        check_stored(spec, selection.description(snapshot.description), optimizer, SnapshotError, what)
        return selection

    def _folder_of(self, name: str) -> StoreFolder:
        folder = self.checked_store()
        check_name(name)
        return folder
