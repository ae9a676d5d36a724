"""The snapshots of a table: in its store folder, by name, and in other folders, which checkpoints of a graph have."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..engine.errors import OptionError, SnapshotError
from ..engine.row_format import Chunks
from ..engine.store.image import MAX_BEFORE_IMAGE_BYTES
from ..engine.store.rocksdb import RocksDB
from ..engine.table.background_save import BackgroundSave
from ..engine.table.table import OpenTable
from ..snapshots.files.format import Manifest, check_name
from ..snapshots.files.reader import Snapshot
from ..snapshots.files.versions import EMPTY, Instant
from ..snapshots.files.writer import Together, write_snapshot
from ..snapshots.store.all_or_none import OfAll
from ..snapshots.store.folder import StoreFolder
from ..snapshots.store.linked import OF_STATE, check_linked, link_snapshot, linked, remove_snapshot
from ..snapshots.store.retention import prune, remove_if_unreferenced, state_snapshot
from ..snapshots.store.save import SaveSource, begin_save, check_save, clear_leftovers, save_snapshot_of
from ..snapshots.store.selection import ALL, LoadReport, Selection
from .compatible import check_stored, fitting
from .rows_reference import RowsReference, reference_at, saved_as
from .table_persistence import TablePersistence
from .training_group import Membership, between_steps


class TableSnapshots:
    """The part of `LocalTableHandle` that saves and loads the rows of its table as snapshots."""

    _persistence: TablePersistence

    @property
    def table(self) -> OpenTable:
        """The open table."""
        raise NotImplementedError

    def _replace(self, before: OpenTable, build: Callable[[], OpenTable]) -> None:
        """Replace the table by the one that `build` returns."""
        raise NotImplementedError

    @property
    def membership(self) -> Membership | None:
        """What the store notes of those that it is trained together with; None without a folder."""
        return self._persistence.membership

    @property
    def base(self) -> str | None:
        """The snapshot that was saved or loaded last, if any."""
        folder = self._persistence.folder
        return (folder.recovery_snapshot or None) if folder is not None else None

    def check_save(self, name: str, kind: str, overwrite: bool) -> None:
        """Raise what `save_snapshot` would raise for these arguments. SnapshotError, StoreError, OptionError."""
        table = self.table
        with table.lock:
            check_save(self._folder_of(name), name, kind, self._source(table), overwrite)

    def _of_step(self, step: int) -> RowsReference:
        """The name of the rows of a step."""
        membership = self.membership
        found = reference_at(
            step, self._place, self.base, None if membership is None else membership.version_for_state()
        )
        if found.snapshot is None or membership is None or membership.record is None:
            return found
        return found._replace(instant=membership.seen().digest)

    @property
    def _place(self) -> Path | None:
        folder = self._persistence.folder
        return None if folder is None else folder.snapshots

    def save_snapshot(
        self,
        name: str,
        kind: str = "full",
        overwrite: bool = False,
        progress: Callable[[int], None] | None = None,
        of_all: OfAll | None = None,
    ) -> Manifest:
        """Save the rows as snapshot `name` of the store folder. Raises SnapshotError, StoreError, OptionError.

        of_all: of a save of several stores, whose locks the caller has.
        """
        table, folder = self.table, self._folder_of(name)
        with self._rows_of_one_step(table, of_all) as together:
            table.check()
            table.observers.check_not_saving()
            if kind == "checkpoint":
                table.flush()
            manifest = save_snapshot_of(folder, name, kind, self._source(table, together), progress, overwrite)
            if kind == "incremental" or table.observers.changes is not None:
                table.observers.track_changes(manifest.id)
            if self.membership is not None:
                self.membership.saved_as(manifest.id)
            return manifest

    @contextmanager
    def _rows_of_one_step(self, table: OpenTable, of_all: OfAll | None = None) -> Iterator[Together | None]:
        """A block with the table's lock, and what a snapshot of its rows as they are has beside them."""
        with ExitStack() as own:
            with between_steps([] if self.membership is None else [self.membership]):
                own.enter_context(table.lock)
                together = None
                if self.membership is not None and self.membership.record is not None:
                    together = self.membership.saved(of_all)
            yield together

    def save_in_background(
        self, name: str, kind: str = "full", overwrite: bool = False, of_all: OfAll | None = None
    ) -> BackgroundSave:
        """Save the rows as they are now, by a thread, as a full snapshot. SnapshotError, StoreError, OptionError."""
        table, folder = self.table, self._folder_of(name)
        if kind in ("incremental", "checkpoint"):
            raise OptionError(
                f"background=True, kind={kind!r}: only kind='full' takes as long as the table is large; leave "
                "background out"
            )
        with self._rows_of_one_step(table, of_all) as together:
            table.check()
            table.observers.check_not_saving()
            source = self._source(table, together)
            place = begin_save(folder, name, kind, source, overwrite)
            replaces = os.path.lexists(place)

            def write(chunks: Chunks) -> None:
                made = write_snapshot(place, source.description, chunks, overwrite=replaces, together=together)
                table.observers.changes_saved(made.id)

            kept = MAX_BEFORE_IMAGE_BYTES if of_all is None else MAX_BEFORE_IMAGE_BYTES // of_all.stores
            return table.observers.save_in_background(f"snapshot {name!r}", write, kept)

    def save_for_state(self, keep: int | None) -> RowsReference:
        """The name of the rows as they are, saved as a snapshot that no chain or recovery of the user is based on.

        keep: how many of the latest such snapshots stay besides that of these rows; None for all.
        """
        table, folder = self.table, self.folder()
        assert self.membership is not None
        with self._rows_of_one_step(table) as together:
            table.check()
            now = self.membership.versions.rows.now
            if now == EMPTY:  # which needs no snapshot, and a user may replace one of it
                return RowsReference(table.step, version=self.membership.version_for_state())
            place = state_snapshot(folder, now, keep)
            if place is None:
                together = together or Together(secrets.token_hex(16), None)
                place = folder.snapshots / (OF_STATE + together.id)
                self._write_for_state(table, place, together)
                self.membership.saved_as(together.id)
            self.membership.version_for_state()
            instant = None if together is None or together.saved is None else together.saved.instant.digest
            return (saved_as(self._place, place.name) or self._of_step(table.step))._replace(instant=instant)

    def _write_for_state(self, table: OpenTable, place: Path, together: Together) -> None:
        source = self._source(table)
        if source.rocksdb is not None:
            from ..snapshots.files.rocksdb_checkpoint import write_checkpoint  # only where there is RocksDB

            table.flush()
            write_checkpoint(place, source.description, source.rows, source.rocksdb, together=together)
        else:  # not an incremental one, whose parent the user could not replace any more
            write_snapshot(place, source.description, source.scan(), together=together)

    def snapshot(self, name: str) -> Snapshot:
        """A snapshot in the store folder. Raises SnapshotError."""
        return Snapshot.open(self._folder_of(name).snapshots / name)

    def load_snapshot(self, name: str, selection: Selection, strict: bool) -> LoadReport:
        """Replace the rows by those of a snapshot in the store folder, as `load_from`."""
        self.table.observers.finish_saving()  # it may be the one to load; its error was logged
        return self.load_from(self.snapshot(name), selection, strict)

    def load_from(
        self,
        snapshot: Snapshot,
        selection: Selection,
        strict: bool,
        verified: Callable[[], None] | None = None,
        together: Instant | None = None,
    ) -> LoadReport:
        """Load a snapshot from anywhere. verified, together: as of `TablePersistence.load`."""
        before = self.table
        reports: list[LoadReport] = []

        def build() -> OpenTable:
            what = f"snapshot {snapshot.name!r}"
            spec = self._persistence.spec.with_stored_seed(snapshot.description)
            fit, remarks = fitting(spec, snapshot.description, before.optimizer, selection, strict, what)
            table, report = self._persistence.load(before.optimizer, snapshot, before, fit, verified, together)
            report.remarks += remarks
            reports.append(report)
            return table

        self._replace(before, build)
        if self.membership is not None:
            self.membership.reformed()
        return reports[0]

    def prune_snapshots(self, keep_last: int, keep_every: int | None) -> list[str]:
        """Remove snapshots as `prune` says. Returns the names of those that are gone. OptionError, SnapshotError."""
        table, folder = self.table, self.folder()
        with table.lock:  # a snapshot that is being saved is not listed yet, and is based on no other
            if table.observers.saving is None or table.observers.saving.done:
                clear_leftovers(folder)
            return [snapshot.name for snapshot in prune(folder, keep_last, keep_every).removed]

    def save_rows(self, place: Path) -> None:
        """Save the rows as the snapshot `place`, and by its name in a store folder too. SnapshotError, StoreError."""
        table = self.table
        if self._persistence.folder is not None:
            self.save_snapshot(place.name)
            self.link_rows(place)
            return
        with table.lock:
            table.check()
            write_snapshot(place, table.describe(), table.scan())

    def link_rows(self, place: Path) -> None:
        """Let the snapshot of that name in the store folder be `place` as well. SnapshotError."""
        link_snapshot(self.snapshot(place.name), place)

    def load_rows(self, place: Path, selection: Selection = ALL) -> None:
        """Replace the rows by those of the snapshot `place`, which `check_rows` has checked.

        A store folder gets the snapshot as well, as its recovery snapshot. Without state, or converted, it gets none,
        since recovery would load the state, or other numbers.
        """
        before = self.table
        self._replace(before, lambda: self._with_rows(before, place, selection))

    def _with_rows(self, table: OpenTable, place: Path, selection: Selection) -> OpenTable:
        snapshot = Snapshot.open(place)
        if self._persistence.folder is None or not selection.can_recover:
            fitted = self.check_fit(snapshot, selection)
            return self._persistence.load(table.optimizer, snapshot, table, fitted)[0]
        with table.lock, linked(place, self._folder_of(place.name)) as own:
            return self._persistence.load(table.optimizer, own, table)[0]

    def check_rows(self, place: Path, selection: Selection = ALL) -> None:
        """Read and check all that `load_rows` needs. SnapshotError for a damaged or unfit snapshot, OptimizerError.

        InputError for a number that a narrower dtype cannot hold.
        """
        snapshot = Snapshot.open(place)
        fitted = self.check_fit(snapshot, selection)
        snapshot.verify()
        if fitted.types is not None:
            for _ in fitted.rows_of(snapshot, LoadReport()):
                pass
        if self._persistence.folder is not None and selection.can_recover:
            check_linked(snapshot, self._folder_of(place.name).snapshots / place.name)

    def check_fit(self, snapshot: Snapshot, selection: Selection = ALL) -> Selection:
        """The selection for this table. SnapshotError, OptimizerError if rows of a snapshot cannot be its own."""
        optimizer = self.table.optimizer
        spec, what = self._persistence.spec.with_stored_seed(snapshot.description), f"snapshot {snapshot.name!r}"
        if selection.convert:
            return fitting(spec, snapshot.description, optimizer, selection, True, what)[0]
        check_stored(spec, selection.description(snapshot.description), optimizer, SnapshotError, what)
        return selection

    def drop_rows(self, saved: Snapshot) -> None:
        """Remove the snapshot that `save_rows` made for a replaced checkpoint, unless others or the live rows need it.

        Raises SnapshotError if this is unknown, or the snapshot cannot be removed.
        """
        table, folder = self.table, self._persistence.folder
        if folder is not None:
            with table.lock:
                remove_if_unreferenced(folder, saved)

    def discard_rows(self, name: str) -> None:
        """Remove the snapshot that `save_rows` put into the store folder. After a kill the one before it counts."""
        if self._persistence.folder is not None:
            remove_snapshot(self._persistence.folder.snapshots / name)

    def _source(self, table: OpenTable, together: Together | None = None) -> SaveSource:
        assert table.stack is not None
        bottom = table.stack.bottom
        rocksdb = bottom if isinstance(bottom, RocksDB) else None
        record = None if self.membership is None else self.membership.record
        return SaveSource(
            table.describe(), table.counts.rows, table.scan, rocksdb, table.observers.changed, together, record
        )

    def _folder_of(self, name: str) -> StoreFolder:
        folder = self.folder()
        check_name(name)
        return folder

    def folder(self) -> StoreFolder:
        """The store folder. Raises SnapshotError if there is none."""
        folder = self._persistence.folder
        if folder is None:
            raise SnapshotError(
                f"embedding {self._persistence.spec.name!r} has no persistent_path, so no place for snapshots; "
                "give one in its store options"
            )
        folder.check()
        return folder
