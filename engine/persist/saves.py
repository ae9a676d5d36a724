"""The snapshots of a table: in its store folder, by name, and in other folders, which checkpoints of a graph have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...snapshots.files.format import Manifest, check_name
from ...snapshots.files.may_replace import going_over
from ...snapshots.files.reader import Snapshot
from ...snapshots.files.writer import clear_leftovers, write_snapshot
from ...snapshots.store.linked import check_linked, link_snapshot, linked
from ...snapshots.store.retention import prune, remove_snapshot
from ...snapshots.store.saving import Held, begin_save, check_save, save_held
from ...snapshots.store.selection import LoadReport, Selection
from ..errors import OptionError, SnapshotError
from ..row_format import Chunks
from ..store.folder import StoreFolder
from ..store.folder_state import snapshot_id
from ..store.rocksdb import RocksDB
from ..table.background_save import BackgroundSave
from ..table.table import OpenTable
from .compatible import check_stored, fitting
from .open_and_close import TablePersistence


class SavedAs(NamedTuple):
    """How a state_dict names the rows of an embedding: by their step, and by a snapshot of that step, if there is one.

    `digest` is of the snapshot's rows. It is None without a snapshot, and in state_dicts of early versions.
    """

    step: int
    snapshot: str | None
    digest: str | None

    def may_be(self, other: SavedAs) -> bool:
        """Whether both can name the same rows."""
        if self.step != other.step or not (self.snapshot and other.snapshot):
            return self.step == other.step
        if self.digest and other.digest:
            return self.digest == other.digest
        return self.snapshot == other.snapshot


class TableSnapshots:
    """The snapshots of the table that `persistence` opens."""

    def __init__(self, persistence: TablePersistence) -> None:
        self._persistence = persistence

    @property
    def base(self) -> str | None:
        """The snapshot that was saved or loaded last, if any."""
        folder = self._persistence.folder
        return (folder.base or None) if folder is not None else None

    def check_save(self, table: OpenTable, name: str, kind: str, overwrite: bool) -> None:
        """Raise what `save` would raise for these arguments. SnapshotError, StoreError, OptionError."""
        with table.lock:
            check_save(self._folder_of(name), name, kind, self._held(table), overwrite)

    def of_step(self, step: int) -> SavedAs:
        """The name of the rows of a step. It has the snapshot `base` where that is of the same step."""
        base = self.base
        held = None if base is None else self.read(base)
        if held is None or held.step != step:
            return SavedAs(step, None, None)
        return held

    def read(self, name: str) -> SavedAs | None:
        """The name of the rows of a snapshot in the store folder; None where no such snapshot can be read."""
        held = self._read(name)
        if held is None:
            return None
        # two snapshots of the same rows have the same files, whatever their names
        files = [[file, entry.rows, entry.bytes, entry.crc32] for file, entry in sorted(held.manifest.files.items())]
        said = json.dumps(files) if held.kind == "full" else held.manifest.id
        return SavedAs(int(held.description["step"]), name, hashlib.sha256(said.encode()).hexdigest()[:32])

    def _read(self, name: str) -> Snapshot | None:
        folder = self._persistence.folder
        try:
            check_name(name)
            return None if folder is None else Snapshot.open(folder.snapshots / name)
        except SnapshotError:
            return None

    def save(
        self,
        table: OpenTable,
        name: str,
        kind: str = "full",
        progress: Callable[[int], None] | None = None,
        overwrite: bool = False,
    ) -> Manifest:
        """Save the rows as snapshot `name` of the store folder. Raises SnapshotError, StoreError, OptionError."""
        folder = self._folder_of(name)
        with table.lock:  # rows of one step
            table.check()
            table.watch.check_not_saving()
            if kind == "checkpoint":
                table.flush()
            manifest = save_held(folder, name, kind, self._held(table), progress, overwrite)
            if kind == "incremental" or table.watch.changes is not None:
                table.watch.track_changes(manifest.id)
            return manifest

    def save_in_background(
        self, table: OpenTable, name: str, kind: str = "full", overwrite: bool = False
    ) -> BackgroundSave:
        """Save the rows as they are now, by a thread, as a full snapshot. SnapshotError, StoreError, OptionError."""
        folder = self._folder_of(name)
        if kind in ("incremental", "checkpoint"):
            raise OptionError(
                f"background=True, kind={kind!r}: only kind='full' takes as long as the table is large; leave "
                "background out"
            )
        with table.lock:
            table.check()
            table.watch.check_not_saving()
            held = self._held(table)
            place = begin_save(folder, name, kind, held, overwrite)

            def write(chunks: Chunks) -> None:
                table.watch.changes_saved(write_snapshot(place, held.description, chunks, overwrite=overwrite).id)

            return table.watch.save_in_background(f"snapshot {name!r}", write)

    def load(self, table: OpenTable, name: str, selection: Selection, strict: bool) -> tuple[OpenTable, LoadReport]:
        """A table with the rows of a snapshot. Until the rows are verified, `table` and its rows stay as they were."""
        snapshot = Snapshot.open(self._folder_of(name).snapshots / name)
        what = f"snapshot {name!r}"
        selection, remarks = fitting(
            self._persistence.spec, snapshot.description, table.optimizer, selection, strict, what
        )
        loaded, report = self._persistence.load(table.optimizer, snapshot, table, selection)
        report.remarks += remarks
        return loaded, report

    def prune(self, table: OpenTable, keep_last: int, keep_every: int | None) -> list[str]:
        """Remove snapshots as `prune` says. Returns the names of those that are gone. OptionError, SnapshotError."""
        folder = self._folder()
        with table.lock:  # a snapshot that is being saved is not listed yet, and goes over no other
            if table.watch.saving is None or table.watch.saving.done:
                clear_leftovers(folder.snapshots)
            return [snapshot.name for snapshot in prune(folder, keep_last, keep_every).removed]

    def save_rows(self, table: OpenTable, place: Path) -> None:
        """Save the rows as the snapshot `place`, and by its name in a store folder too. SnapshotError, StoreError."""
        folder = self._persistence.folder
        if folder is not None:
            self.save(table, place.name)
            link_snapshot(Snapshot.open(folder.snapshots / place.name), place)
            return
        with table.lock:
            table.check()
            write_snapshot(place, table.describe(), table.scan())

    def load_rows(self, table: OpenTable, place: Path, state: bool = True) -> OpenTable:
        """A table with the rows of the snapshot `place`, which `check_rows` has checked.

        A store folder gets the snapshot as well, to go back to. Without `state` the table has the weights alone, and a
        store folder gets no snapshot, since going back to it would bring the state.
        """
        snapshot = Snapshot.open(place)
        if self._persistence.folder is None or not state:
            return self._persistence.load(table.optimizer, snapshot, table, Selection(state=state))[0]
        folder = self._folder_of(place.name)
        linking = linked(snapshot, folder.snapshots / place.name, lambda: folder.base == place.name)
        with table.lock, linking as own:  # kept where a load fails late: the live rows may go back to it
            return self._persistence.load(table.optimizer, own, table)[0]

    def check_rows(self, table: OpenTable, place: Path, state: bool = True) -> None:
        """Read and check all that `load_rows` needs. SnapshotError for a damaged or unfit snapshot, OptimizerError."""
        snapshot = Snapshot.open(place)
        what = f"snapshot {place.name!r}"
        described = Selection(state=state).description(snapshot.description)
        check_stored(self._persistence.spec, described, table.optimizer, SnapshotError, what)
        snapshot.verify()
        if self._persistence.folder is not None and state:
            check_linked(snapshot, self._folder_of(place.name).snapshots / place.name)

    def drop_rows(self, table: OpenTable, saved: Snapshot) -> None:
        """Remove the snapshot that `save_rows` made for a replaced checkpoint, unless others or the live rows need it.

        Raises SnapshotError where this is unknown, or the snapshot cannot be removed.
        """
        folder = self._persistence.folder
        if folder is None:
            return
        with table.lock:
            place = folder.snapshots / saved.name
            if snapshot_id(place) == saved.manifest.id and folder.base != saved.name and not going_over(place):
                remove_snapshot(place)

    def discard_rows(self, name: str) -> None:
        """Remove the snapshot that `save_rows` put into the store folder. After a kill the one before it counts."""
        if self._persistence.folder is not None:
            remove_snapshot(self._persistence.folder.snapshots / name)

    def _held(self, table: OpenTable) -> Held:
        assert table.stack is not None
        bottom = table.stack.bottom
        rocksdb = bottom if isinstance(bottom, RocksDB) else None
        return Held(table.describe(), table.counts.rows, table.scan, rocksdb, table.watch.changed)

    def _folder_of(self, name: str) -> StoreFolder:
        folder = self._folder()
        check_name(name)
        return folder

    def _folder(self) -> StoreFolder:
        folder = self._persistence.folder
        if folder is None:
            raise SnapshotError(
                f"embedding {self._persistence.spec.name!r} has no persistent_path, so no place for snapshots; "
                "give one in its store options"
            )
        folder.check()
        return folder
