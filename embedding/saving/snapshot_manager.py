"""Saves and loads one table's snapshots: by name in its store folder, and in a checkpoint's folder.

A save consists of three calls, so that `save_together` can save several embeddings at once. `check_save` checks the
arguments. `begin_save` prepares a temporary folder and captures which rows to save. The `TableSave` that `begin_save`
returns then writes the rows. All ranks make each call, and each rank writes and reads its own shard. Only methods
marked "Local" may be called by a single rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from pathlib import Path

from ...distributed.world import World, try_call
from ...engine.checks import check_choice
from ...engine.errors import OptionError, SnapshotError, StoreError
from ...engine.store.rocksdb import RocksDB
from ...engine.table.background_save import SaveHandle
from ...engine.table.change_observers import format_still_saving
from ...snapshots.files.format import KINDS, HashShard, check_name
from ...snapshots.files.reader import Snapshot, exhaust, find_snapshot_name, read_changes
from ...snapshots.files.writer import NewSnapshots, ProgressCallback
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import FolderState
from ...snapshots.store.group import Member, PendingSave, record_load
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.linking import STATE_PREFIX, check_linked, link_snapshot, link_temporarily, remove_snapshot
from ...snapshots.store.recovery_rule import EMPTY_ID, EMPTY_RECORD, NO_ENTRY, make_snapshot_version
from ...snapshots.store.retention import link_state_snapshot, prune, remove_if_unreferenced
from ...snapshots.store.save import SaveInputs, begin_save, check_save
from ...snapshots.store.selection import ALL, LoadReport, Selection
from ..tables.increments import find_increments
from ..tables.local_table import LocalTable
from ..tables.rank_recovery import check_row_count
from ..tables.training_group import TrainingGroup, lock_between_steps
from .background_saving import BackgroundSnapshotJob
from .rows_reference import RowsReference, compare_references, read_snapshot_reference
from .save_and_load import save_together
from .table_save import TableSave, commit

log = logging.getLogger("tierbed")


class SnapshotManager:
    """Saves and loads a table's snapshots."""

    def __init__(
        self,
        local: LocalTable,  # this process's rows
        world: World,
        folder: Path | None,  # the snapshots' folder, seen by all ranks; None for rows in memory
        store: StoreFolder | None,  # the store folder that contains `folder`; set only on rank 0
        shard: HashShard | None = None,  # this process's shard; None if this process holds all rows
        close: Callable[[], None] | None = None,  # closes the rows
    ) -> None:
        self.local, self.world, self._folder, self.store = local, world, folder, store
        self._shard, self._close = shard, close or local.close
        self._background_save: BackgroundSnapshotJob | None = None  # a running save of a shard; None in one process

    @property
    def name(self) -> str:
        return self.local.name

    @property
    def group(self) -> TrainingGroup | None:
        """The embeddings that are trained together with this embedding."""
        return self.local.group

    @property
    def member(self) -> Member | None:
        """The store's membership in its training group; None without a folder, and on all ranks except rank 0."""
        return self.local.member

    @property
    def has_folder(self) -> bool:
        """True if snapshots have a folder; False for rows in memory."""
        return self._folder is not None

    @property
    def folder(self) -> Path:
        """The snapshots' folder. Raises SnapshotError for rows in memory. Local."""
        if self._folder is None:
            raise make_no_folder_error(self.name)
        return self._folder

    @property
    def last_snapshot_name(self) -> str | None:
        """The name of the snapshot that was last saved, loaded or restored by recovery; None without one. Local."""
        if self._folder is None:
            return None
        restored = self.local.persistence.restored_snapshot
        if self.member is not None:
            record, store_id, is_as_opened = self.member.group.record, self.member.id, not self.member.group.is_locked
        else:
            file = GroupFile(FolderState(self._folder.parent))
            record, store_id = file.record, file.store_id
            is_as_opened = self.local.persistence.version == make_snapshot_version(restored)
        id = record.parents.get(store_id, EMPTY_ID)
        is_restored = not record.changed_stores and record.entries.get(store_id, NO_ENTRY).snapshot == restored
        if restored and is_as_opened and not is_restored:
            id = restored  # recovery used this snapshot; the record names it only after the first change or save
        return None if id == EMPTY_ID else find_snapshot_name(self._folder, id)

    def open_by_name(self, name: str) -> Snapshot:
        """Open a snapshot in the store folder, with the rows of all ranks. Raises SnapshotError, StoreError. Local."""
        folder = self.folder
        if self.store is not None:
            self.require_store()
        check_name(name)
        return Snapshot.open(folder / name)

    def require_store(self) -> StoreFolder:
        """Return rank 0's store folder. Raises SnapshotError without a folder, StoreError if it was removed. Local."""
        if self.store is None:
            raise make_no_folder_error(self.name)
        self.store.check()
        return self.store

    @property
    def cheapest_kind(self) -> str:
        """The cheapest kind of a snapshot that loads without other snapshots. Equal on all ranks."""
        stack, store = self.local.table.stack, self.store
        has_files = stack is not None and isinstance(stack.bottom, RocksDB) and self._shard is None
        if not has_files or store is None:
            return "full"
        with suppress(OSError):  # if a folder was removed, the save raises
            if os.stat(store.live_path).st_dev == os.stat(store.snapshot_store.path).st_dev:
                return "checkpoint"
        return "full"  # without hard links, files would have to be copied

    def name_call(self, action: str) -> str:
        """Return a collective's name, with the step. Raises on all ranks if any rank has closed its rows."""
        table, error = try_call(lambda: self.local.table)
        if table is None:
            self.world.handshake(f"{action} of embedding {self.name!r}", error)
        return f"{action} of embedding {self.name!r} at step {self.local.table.step}"

    # saves

    def save(self, name: str, kind: str, overwrite: bool, background: bool) -> SaveHandle | None:
        """Save this embedding alone. The arguments are the same as for `save_together`."""
        return save_together(self.world, [self], name, kind, overwrite, background)

    def check_save(self, name: str, kind: str, overwrite: bool, background: bool = False) -> None:
        """Check a save's arguments. Raises SnapshotError, StoreError, OptionError."""
        op = self.name_call("saving a snapshot")
        _, error = try_call(lambda: self._check_arguments(name, kind, background))
        shared_values = {"snapshot": name, "kind": kind, "overwrite": overwrite, "background": background}
        self.world.handshake(op, error, shared_values if error is None else None)

        def check(store: StoreFolder) -> None:
            if self.member is not None:
                self.member.lock()  # frees the names of snapshots that a recovery did not use
            check_save(store, name, kind, self._make_inputs(), overwrite)

        with self.local.table.lock:
            self._on_rank_0(op, check)

    def _check_arguments(self, name: str, kind: str, background: bool) -> None:
        check_choice("kind", kind, KINDS)
        check_name(name)
        if kind == "checkpoint" and self._shard is not None:
            raise OptionError(
                f"kind='checkpoint' links the RocksDB files of one process, but the rows of embedding {self.name!r} "
                f"are spread over {self.world.size} ranks; give 'full' or 'incremental'"
            )
        is_incremental = kind == "incremental" and not self.local.table.processor.defers_errors
        if background and not (kind == "full" or is_incremental):
            raise OptionError(
                f"background=True, kind={kind!r}: only kind='full', and on a CPU 'incremental', can be saved in the "
                "background; leave background out"
            )
        if self._folder is None:
            raise make_no_folder_error(self.name)
        self.local.table.require_top_tier()
        self.local.table.raise_deferred_error()

    def prepare_save(self, flushes: bool) -> None:
        """Prepare for a save. The caller does not hold the table's lock. flushes: True if the save will flush rows."""
        self.try_complete()
        if self._background_save is not None and self._background_save.yields_to_saves:
            self.wait_for_save()
        if self._shard is None and self.has_folder:
            self.require_store()
            if flushes:
                self.local.table.flush_ahead()

    def begin_save(
        self, op: str, name: str, kind: str, overwrite: bool, new_snapshots: NewSnapshots, path: Path | None
    ) -> TableSave:
        """Begin a snapshot of the rows as they are now. All ranks call this, holding the table's lock.

        path: in a checkpoint, where the snapshot is also linked, or only saved if there is no store folder.
        """
        pending_save: PendingSave | None
        inputs: SaveInputs
        parent: Snapshot | None = None

        def prepare() -> tuple[PendingSave | None, SaveInputs]:
            self.check_not_saving()
            return None if self.member is None else self.member.capture(), self._make_inputs(new_snapshots.make_id())

        pending_save, inputs = self.world.call_on_all_ranks(op, prepare)
        if path is not None and not self.has_folder:
            return self._begin_snapshot(op, path, inputs, new_snapshots, "full", None)

        def begin() -> str | None:
            nonlocal parent
            _, parent = begin_save(self.require_store(), name, kind, inputs, overwrite, new_snapshots)
            return None if parent is None else parent.name

        parent_name = self.world.call_on_rank_0(f"{op} (begin)", begin)
        if parent_name is not None:
            parent = self.world.call_on_all_ranks(
                op, lambda: self._restrict_to_shard(parent or open_snapshot(self.folder / parent_name))
            )
        kind = "full" if kind == "incremental" and parent is None else kind
        folder, on_saved = self.folder / name, self.local.make_save_callback()
        if path is not None:  # linked before the record names the snapshot, so a failure changes no record
            new_snapshots.call_after_publish(lambda: link_snapshot(Snapshot.open(folder), path))
        return TableSave(self.local.table, pending_save, folder, kind, inputs, parent, self._shard, False, on_saved)

    def _begin_snapshot(
        self, op: str, path: Path, inputs: SaveInputs, new_snapshots: NewSnapshots, kind: str, member: Member | None
    ) -> TableSave:
        """Begin the snapshot `path` of the present rows. member: None unless the snapshot is for a state_dict."""
        pending_save: PendingSave | None = None

        def begin() -> None:
            nonlocal pending_save
            pending_save = None if member is None else member.capture()
            new_snapshots.begin(path, inputs.description)

        self.world.call_on_rank_0(f"{op} (begin)", begin)
        on_saved = self.local.make_save_callback()
        return TableSave(self.local.table, pending_save, path, kind, inputs, None, self._shard, True, on_saved)

    def save_state_dict_snapshot(self, keep: int | None) -> RowsReference:
        """Return the reference that a state_dict stores in place of the rows. Saves a snapshot if none holds the rows.

        The saved snapshot never becomes the parent of a user's snapshot. `keep` is the number of older state_dict
        snapshots to keep; None keeps all.
        """
        op = self.name_call("saving rows for a state_dict")
        self.world.handshake(op, shared_values={"state_dict_snapshots": keep})
        self.prepare_save(flushes=True)
        with lock_between_steps([self], awaits_step=self.world.size == 1), NewSnapshots() as new_snapshots:
            self.world.call_on_all_ranks(op, self.local.table.raise_deferred_error)
            inputs = self._make_inputs(new_snapshots.make_id())

            def find() -> tuple[str, bool]:
                """Return the snapshot's name ("" for no rows), and True if the snapshot has to be saved."""
                assert self.member is not None
                if self.member.current_entry.snapshot == EMPTY_ID:  # without rows, no snapshot is needed
                    return "", False
                path = link_state_snapshot(self.require_store(), self.member.current_entry.snapshot, keep)
                return (f"{STATE_PREFIX}{inputs.id}", True) if path is None else (path.name, False)

            name, is_new = self.world.call_on_rank_0(f"{op} (choose the name)", find)
            if is_new:
                has_files = inputs.rocksdb is not None and self._shard is None
                kind = "checkpoint" if has_files else "full"  # an incremental one would prevent replacing its parent
                save = self._begin_snapshot(op, self.folder / name, inputs, new_snapshots, kind, self.member)
                commit(self.world, op, [save], new_snapshots, try_call(save.write)[1])
        reference = read_snapshot_reference(self._folder, name) or RowsReference(self.local.table.step)
        return reference._replace(version=self.local.persistence.version)

    def _make_inputs(self, id: str | None = None) -> SaveInputs:
        table, observers = self.local.table, self.local.table.observers
        table.require_top_tier()
        assert table.stack is not None
        rocksdb = table.stack.bottom if isinstance(table.stack.bottom, RocksDB) else None
        record, store_id = (EMPTY_RECORD, "") if self.member is None else (self.member.group.record, self.member.id)
        counts = table.counts.known_table_counts
        return SaveInputs(
            table.describe(),
            table.counts.num_rows,
            table.scan,
            record,
            store_id,
            rocksdb,
            observers.read_changes,
            id,
            None if counts is None else counts.tolist(),
        )

    # saves in the background

    def set_background_save(self, job: BackgroundSnapshotJob) -> None:
        """Remember a background save that includes these rows."""
        self._background_save = job if self._shard is not None else None

    def try_complete(self) -> None:
        """Complete a background save if all ranks have written their rows. Called between two steps."""
        if self._background_save is not None:
            self._background_save.try_complete()
            if self._background_save.done:
                self._background_save = None

    def wait_for_save(self) -> None:
        """Wait for a background save, because the caller may load its snapshot. Errors were logged already."""
        if self._background_save is None:
            if self.local.table_if_open is not None:  # if the table is closed, the next call raises on all ranks
                self.local.table_if_open.observers.finish_saving()
            return
        _, error = try_call(self._background_save.wait)
        if error is not None and self.world.failure is not None:
            raise error
        interrupted = not isinstance(error, Exception | None)
        self.world.handshake(f"{self._background_save.label} (wait for the save)", error if interrupted else None)
        self._background_save = None

    def drop_background_save(self) -> None:
        """Drop a background save before the rows are closed. Local."""
        if self._background_save is not None:
            self._background_save.drop()

    def check_not_saving(self) -> None:
        """Raise StoreError if a background save is running. Local."""
        self.local.table.raise_deferred_error()
        if self._background_save is not None:  # other ranks may still be writing
            raise StoreError(format_still_saving(self._background_save.label))
        self.local.table.observers.check_not_saving()

    # loads

    def load_snapshot(self, name: str, selection: Selection = ALL, strict: bool = True) -> LoadReport:
        """Replace the rows by a snapshot in the store folder. The returned report counts the rows of all ranks."""
        self.wait_for_save()
        snapshot = self.world.call_on_all_ranks(self._name_load(name), lambda: self.open_by_name(name))
        return self.load(snapshot, selection, strict)

    def load_snapshot_at(self, path: Path, selection: Selection = ALL) -> None:
        """Replace the rows by the snapshot `path`, already checked by `check_snapshot_at`.

        Links the snapshot into the store folder, if there is one, so that recovery can load the snapshot. Makes no
        link if the load drops state or converts rows, because recovery would load the snapshot unchanged.
        """
        self.world.call_on_all_ranks(self._name_load(path.name), lambda: self.local.table)  # raises ClosedError
        self.wait_for_save()
        with lock_between_steps([self], finishes_saves=True), ExitStack() as link_stack:
            if self._folder is not None and selection.can_recover:
                path = self.link_into_store(path, link_stack)
            self.load(self.world.call_on_all_ranks(self._name_load(path.name), lambda: open_snapshot(path)), selection)

    def _name_load(self, name: str) -> str:
        """Return the name that all ranks use for a load. It contains no step, because ranks' steps may differ."""
        return f"loading snapshot {name!r} of embedding {self.name!r}"

    def load(self, snapshot: Snapshot, selection: Selection = ALL, strict: bool = True) -> LoadReport:
        """Replace all rows by the rows of a snapshot, or by a selection of its rows.

        No rank changes a row before all ranks have verified their shards (see `_record_load`). If a rank fails later,
        all ranks close the embedding, because some ranks have new rows and others have old rows.
        """
        if self._shard is None:
            return self.local.load_part(snapshot, selection, strict)
        op = self._name_load(snapshot.name)
        world, snapshot, has_verified = self.world, self._restrict_to_shard(snapshot), False
        tables = selection.tables  # not checked yet: errors in the selection are raised below
        shared_values = {
            "the snapshot's id": snapshot.manifest.id,
            "strict": bool(strict),
            "tables": sorted(map(str, tables)) if isinstance(tables, Collection) else repr(tables),
            "where": selection.where is not None,
            "weights_only": not selection.includes_state,
            "convert": selection.converts,
        }
        world.handshake(op, shared_values=shared_values)

        def on_verified() -> None:
            nonlocal has_verified
            has_verified = True
            self._record_load(op, snapshot, selection.is_whole)

        report, error = try_call(lambda: self.local.load_part(snapshot, selection, strict, on_verified))
        if error is not None and has_verified and not world.must_report(error):
            if error is not world.shared_error:
                self._mark_load_failed(snapshot.name)
            raise error
        if error is not None and not has_verified:
            world.handshake(f"{op} (verify rows)", error)

        def report_counts() -> list[int]:
            if report is None:
                raise error or AssertionError("a load without a report")
            return [report.rows, report.left_out]

        try:
            counts = world.all_gather_object(f"{op} (count rows)", report_counts)
        except BaseException:
            problem = self._mark_load_failed(snapshot.name)
            if world.failure is None:  # after a failed collective, ranks close separately
                self._close_all(problem)
            raise
        assert report is not None
        rows, left_out = (sum(column) for column in zip(*counts, strict=True))
        return LoadReport(rows, left_out, report.remarks)

    def _record_load(self, op: str, snapshot: Snapshot, is_whole: bool) -> None:
        """Write to the group's record that rows are replaced. Called once every rank has verified its shard."""
        world, member, id = self.world, self.member, snapshot.manifest.id if is_whole else None
        check_row_count(world, op, snapshot, lambda: snapshot.shard_rows)
        with ExitStack() as stack:
            if id is not None:  # from here on, the next run loads the snapshot even after a kill
                loads = {} if member is None else {member: id}
                world.call_on_all_ranks(f"{op} (record the load)", lambda: stack.enter_context(record_load(loads)))
            mark = f"{op} (mark stores as loading)"
            writes = world.all_gather_object(mark, lambda: self.local.begin_load(records_change=not is_whole))
            self.local.count_load(max(writes), id)  # a rank that failed may have missed writes
            if member is not None:
                member.mark_replaced(id)

    def _mark_load_failed(self, name: str) -> str:
        """Mark the rows as failed. Otherwise the next run could use the old rows as if they had been loaded."""
        problem = f"embedding {self.name!r}: loading snapshot {name!r} failed after some rows were replaced"
        self.local.mark_failed(StoreError(f"{problem}; close the embedding, and create it again"))
        return problem

    def _close_all(self, problem: str) -> None:
        """Close the rows after a load that only some ranks completed. Every rank calls this."""
        next_run = f"recovers from snapshot {self.last_snapshot_name!r}" if self.last_snapshot_name else "begins empty"
        log.error("%s. The embedding is closed on all ranks. If you create it again, it %s", problem, next_run)
        _, error = try_call(self._close)
        if error is not None:
            log.error("closing the rows of embedding %r failed as well: %s", self.name, error)

    def check_snapshot_at(self, path: Path, selection: Selection = ALL) -> None:
        """Read and check the snapshot `path` for `load_snapshot_at`. Raises the same errors as `check_snapshot`."""
        op = f"checking snapshot {path.name!r} of embedding {self.name!r}"
        snapshot: Snapshot = self.world.call_on_all_ranks(op, lambda: open_snapshot(path))
        self.check_snapshot(snapshot, selection)
        if self._folder is not None and selection.can_recover:
            self._on_rank_0(op, lambda store: check_linked(snapshot, store.snapshots_path / path.name))

    def check_snapshot(self, snapshot: Snapshot, selection: Selection = ALL) -> None:
        """Read and check a snapshot before a load.

        Raises SnapshotError if the snapshot is damaged or does not fit. Raises OptimizerError if the snapshot contains
        another optimizer's state. Raises InputError if a number is too large for a narrower dtype.
        """
        shard = self._restrict_to_shard(snapshot)

        def check() -> dict[str, int]:
            fit = self.local.fit_selection(shard, selection)
            if increments := find_increments(self.local.table, shard, self.local.persistence.spec, fit):
                exhaust(read_changes(increments))
            else:
                shard.verify()
            if fit.target_dtypes is not None:
                exhaust(fit.read_rows(shard, LoadReport()))
            return shard.shard_rows

        check_row_count(self.world, f"checking snapshot {snapshot.name!r} of embedding {self.name!r}", shard, check)

    def _restrict_to_shard(self, snapshot: Snapshot) -> Snapshot:
        """Return the snapshot restricted to this process's rows. Local."""
        return snapshot if self._shard is None else snapshot.restrict_to_shard(self._shard)

    # references in state_dicts

    def make_rows_reference(self) -> RowsReference:
        """Return a reference to the present rows, or after a close, to the rows at the close. Local.

        If snapshot `last_snapshot_name` has these rows, the reference names it. Raises earlier steps' deferred errors.
        """
        step = self.local.step
        version = None if self._folder is None else self.local.persistence.version
        reference = read_snapshot_reference(self._folder, self.last_snapshot_name)
        return reference if reference and reference.version == version else RowsReference(step, version=version)

    def restore(self, pending: RowsReference) -> bool:
        """Load the rows that a state_dict names, if they are not present. Returns False if no snapshot holds them."""
        op = f"loading the state of embedding {self.name!r}"
        self.world.handshake(op, shared_values={"state_dict": pending._asdict()})
        saved = read_snapshot_reference(self._folder, pending.snapshot)

        def compare() -> bool | None:
            self.local.table.raise_deferred_error()  # raises ClosedError
            return compare_references(pending, self.make_rows_reference(), saved)

        is_present: bool | None = self.world.all_gather_object(op, compare)[0]
        if is_present is None and pending.snapshot is not None:
            self.load_snapshot(pending.snapshot)
        return is_present is not False

    # linking and removing snapshots

    def link_into_store(self, path: Path, link_stack: ExitStack) -> Path:
        """Link the snapshot `path` into the store folder, on rank 0, and return the link's path."""
        op = f"linking snapshot {path.name!r} of embedding {self.name!r}"
        self._on_rank_0(op, lambda store: link_stack.enter_context(link_temporarily(path, store)))
        return self.folder / path.name

    def remove_replaced_snapshot(self, snapshot: Snapshot) -> None:
        """Remove a replaced checkpoint's snapshot if nothing needs it. Raises SnapshotError. Local, on rank 0."""
        if self.store is not None:
            with self.local.table.lock:
                remove_if_unreferenced(self.store, snapshot)

    def remove_failed_snapshot(self, name: str) -> None:
        """Remove a failed checkpoint's snapshot. Recovery then uses an earlier snapshot. Local, on rank 0."""
        if self.store is not None:
            remove_snapshot(self.store.snapshots_path / name)

    def prune(self, keep_last: int, keep_every: int | None) -> list[str]:
        """Remove or fold old snapshots, and return their names. Raises OptionError, SnapshotError."""
        op = f"pruning snapshots of embedding {self.name!r}"  # names no step, because ranks' steps may differ
        _, error = try_call(lambda: (self.local.table, self.folder))
        self.world.handshake(op, error, {"keep_last": keep_last, "keep_every": keep_every} if error is None else None)
        return list(self.world.call_on_rank_0(op, lambda: self.prune_on_rank_0(keep_last, keep_every)))

    def prune_on_rank_0(
        self, keep_last: int, keep_every: int | None, progress: ProgressCallback | None = None
    ) -> list[str]:
        """Remove or fold old snapshots, and return their names. Not collective: only rank 0 calls this."""
        store = self.require_store()
        with self.local.lock_table() as table:  # a snapshot that a background save writes is not listed yet
            last_save = table.observers.last_save
            is_saving = self._background_save is not None or (last_save is not None and not last_save.done)
            if not is_saving:  # no temporary folder is in use
                store.clear_snapshots()
            plan = prune(store, keep_last, keep_every, not is_saving, progress)
            return [snapshot.name for snapshot in (*plan.removed, *plan.folded)]

    def _on_rank_0(self, op: str, call: Callable[[StoreFolder], object]) -> None:
        """Call `call` with rank 0's store folder, if there is one. An error of the call is raised on all ranks."""
        self.world.call_on_all_ranks(op, lambda: None if self.store is None else call(self.require_store()))


def open_snapshot(path: Path) -> Snapshot:
    """Open the snapshot `path` after checking its name. Raises SnapshotError."""
    check_name(path.name)
    return Snapshot.open(path)


def make_no_folder_error(name: str) -> SnapshotError:
    """Return the error for an embedding without a store folder."""
    return SnapshotError(
        f"embedding {name!r} has no persistent_path, so it has no folder for snapshots; set persistent_path in its "
        "store options"
    )
