"""Keeps a table's rows between runs: opens and closes a store folder, and recovers rows from its snapshots.

Live rows are RocksDB's files or, for rows in memory, the row files of the last close. A clean marker says that live
rows are complete and durable. The first write clears the marker, and a clean shutdown writes it again. Live rows
without a marker are never used; the table then opens with the rows named in its training group's record (`Member`).

A load builds new rows in the folder `incoming`, next to the live rows. One write of the store's file MARK then switches
to the new rows, so a failed load leaves the old rows as they were.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...engine.errors import SnapshotError, StoreError, TierbedError, undo_on_error
from ...engine.lifecycle.lifecycle import Lifecycle
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.store_options import CachedSsdOptions, StoreOptions
from ...engine.options.table_spec import RUN_ID_FIELD, TableSpec
from ...engine.row_format import Chunks, RowFormat
from ...engine.signals import defer_signals
from ...engine.store.rocksdb import RocksDB
from ...engine.table.auto_budgets import AutoBudgets
from ...engine.table.row_scan import check_rows, fill_table, restore_rows
from ...engine.table.stack import Stack, build_stack, get_processor_factory
from ...engine.table.table import OpenTable
from ...snapshots.files.format import check_description
from ...snapshots.files.read_errors import find_os_error
from ...snapshots.files.reader import Snapshot, exhaust
from ...snapshots.files.writer import write_snapshot
from ...snapshots.store.changed_keys import read_changed_keys
from ...snapshots.store.closed_store import check_live, scan_live_rows
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import FolderState, locate_shard, locate_snapshots, remove_other_shards
from ...snapshots.store.group import Member, open_store, record_load
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.mark import read_live_version
from ...snapshots.store.recovery_rule import EMPTY_ID
from ...snapshots.store.selection import ALL, LoadReport, Selection, convert_description
from .compatibility import LoadedIdCounter, check_stored_rows
from .increments import find_increments, take_over, verify_increments
from .linked_rows import FileCheck, add_increments, link_rows, list_linkable, remove_table
from .recovery import (
    FolderContents,
    LiveRowsState,
    OpenPlan,
    Planner,
    RankShard,
    RowsVersion,
    check_shards_unlocked,
    describe_full_disk,
    is_disk_full,
    make_clean_marker,
    plan_open,
    read_contents,
)
from .row_tensors import RowTensors

log = logging.getLogger("tierbed")
Description = dict[str, Any]  # describes rows, in the format of a snapshot's description


class TablePersistence:
    """The store folder of an embedding, locked until `release`. There is no folder if the options have no path.

    list_members: returns the stores trained together with this store. group_folders: the folders of the group's stores.
    """

    def __init__(
        self,
        spec: TableSpec,
        options: StoreOptions,
        device: torch.device,
        shard: RankShard | None = None,
        list_members: Callable[[], Iterable[Member]] = tuple,
        group_folders: Sequence[Path] = (),
    ) -> None:
        self.spec = spec
        self.options = options = options if shard is None else shard.make_options(options)
        self.rows_version = None if shard is None else RowsVersion(shard)
        self._processor_factory = get_processor_factory(device, options)
        self._budgets = AutoBudgets(spec.name, options, num_ranks=1 if shard is None else shard.num_ranks_on_host)
        self.folder: StoreFolder | None = None
        if options.persistent_path is not None:
            path, user = Path(options.persistent_path) / spec.name, f"embedding {spec.name!r}"
            if shard is None:
                self.folder = StoreFolder(path, user, locate_snapshots(options.snapshot_path, spec.name))
            else:
                self.folder = StoreFolder(locate_shard(path, shard.rank, shard.num_ranks), user)
        self.member: Member | None = None  # with several ranks, set only on rank 0
        self._is_on_disk = isinstance(options, CachedSsdOptions)
        self._file_check: FileCheck | None = None
        self._open_mode = options.open
        self._unusable_reason = ""  # the value of `unusable_reason` if `member` is None
        self._live_rows_state = LiveRowsState.RECORDED
        self._list_members, self._group_folders = list_members, group_folders
        self._run_id = ""  # the id of the run that began with an empty table and created these rows
        self.log_entry = (logging.INFO, "new, in memory")  # level and text of the log about the rows' origin
        self.resumed_step = 0  # the step of an earlier run's rows; 0 if the rows are new or a user loaded them
        self.restored_snapshot: str | None = None  # the id of the snapshot that the table opened with

    def open(self, optimizer: RowOptimizer | None, planner: Planner | None = None, for_load: bool = False) -> OpenTable:
        """Open the table with the rows that `planner` chooses; by default, with the rows that the record names.

        for_load: the rows are about to be replaced, so they need not fit the group's other embeddings. Raises
        StoreError, OptionError, OptimizerError, and `planner`'s errors.
        """
        if self.folder is None:
            return self._build(optimizer, None, None)
        try:
            self._live_rows_state = LiveRowsState.RECORDED
            contents = read_contents(self.folder)
            is_new = self.rows_version is None and contents.clean_marker is None and not contents.had_live_rows
            if planner is not None:
                plan = planner(contents)
            elif (version := self.rows_version) is not None:  # a shard is opened again, for another optimizer or device
                plan = OpenPlan(contents.clean_marker, None, None, version.run_id, version.num_writes, version.version)
            else:
                plan = self._plan_from_record(self.folder, contents, for_load)
            self._unusable_reason = plan.unusable_reason
            table = self._execute_plan(optimizer, plan, self.folder, is_new, for_load)
            if self.member is not None and self.rows_version is None:
                self.member.move_to(self.folder)
                remove_other_shards(self.folder.path, 1)
            return table
        except TierbedError as error:
            self._leave_group()
            if not is_disk_full(error):
                raise
            raise StoreError(describe_full_disk(self.folder, error)) from error

    def _plan_from_record(self, folder: StoreFolder, contents: FolderContents, for_load: bool) -> OpenPlan:
        """Read the group's record, and plan how to open a store whose rows are all in this process."""
        check_shards_unlocked(folder.path, folder.num_ranks)
        if self._open_mode == "fresh" and contents.clean_marker is None:
            folder.discard_live_rows()  # frees space for the record: no run uses these rows again
        member = open_store(folder, self._open_mode, for_load, siblings=self._group_folders)
        self.set_member(member)
        plan = OpenPlan() if self._open_mode == "fresh" else plan_open(folder, contents, member)
        if member.mark_folder is not folder:
            member.copy_to(folder)  # before the clean marker, which is valid only with a record
        return plan

    @property
    def unusable_reason(self) -> str:
        """The reason why the rows may not be used before a load; "" if they may be used."""
        return self._unusable_reason if self.member is None else self.member.unusable_reason

    @property
    def is_placeholder(self) -> bool:
        """True if the table is empty only because a load still has to convert the stored rows."""
        return self._live_rows_state is LiveRowsState.PLACEHOLDER

    @property
    def version(self) -> str | None:
        """The rows' version. The next run recognizes the rows by their version. None without a folder."""
        if self.rows_version is not None:
            return None if self.folder is None else self.rows_version.version
        return None if self.member is None else self.member.version

    def set_member(self, member: Member) -> None:
        """Set the group's member, so that later changes of the rows are written to the group's record."""
        self.member = member
        member.attach(self.expect_change, self._list_members)

    def _execute_plan(
        self, optimizer: RowOptimizer | None, plan: OpenPlan, folder: StoreFolder, is_new: bool, for_load: bool
    ) -> OpenTable:
        self.restored_snapshot = None
        if self.rows_version is not None:
            self.rows_version.begin(plan.run_id, plan.num_writes, plan.version)
        if plan.clean_marker is not None:
            self.log_entry = logging.INFO, f"live rows of the last close of store folder {folder.path}"
            table = self._resume(optimizer, plan.clean_marker, folder, for_load)
            self.resumed_step = table.step
            if plan.snapshot_id not in (None, EMPTY_ID):
                table.observers.track_changes(plan.snapshot_id)
            elif (changed := read_changed_keys(folder, plan.clean_marker)) is not None:
                table.observers.track_changes(*changed)
            return table
        self.log_entry = logging.INFO, f"new, in store folder {folder.path}"
        if plan.snapshot is not None:
            description = plan.snapshot.description
            spec, label = self.spec.with_stored_seed(description), f"store folder {str(folder.path)!r}"
            self.log_entry = logging.INFO, f"snapshot {plan.snapshot.name!r} of store folder {folder.path}"
            if is_new:
                label = f"snapshot {plan.snapshot.name!r} of {label}"
            try:
                check_stored_rows(spec, description, optimizer, StoreError, label, can_load=is_new, for_load=for_load)
                self.spec = spec
            except StoreError as error:
                if not (is_new and for_load):
                    raise
                converted = convert_description(description, (spec.dtype, spec.state_dtype))
                check_stored_rows(spec, converted, optimizer, StoreError, label)
                assert self.member is not None
                self.member.mark_broken(str(error))
                self._live_rows_state = LiveRowsState.PLACEHOLDER
                plan = OpenPlan()
        if plan.snapshot is None:
            table = self._start_empty(optimizer, folder)
        else:
            folder.discard_live_rows()  # frees space: no run uses these rows again
            table = self._open_snapshot(optimizer, plan.snapshot, folder, plan, for_load)
            self.resumed_step = 0 if is_new else table.step
            self.restored_snapshot = plan.snapshot.manifest.id
        self.log_entry = plan.log_entry or self.log_entry
        return table

    def close(self, table: OpenTable) -> None:
        """Flush written rows and write the clean marker, so that the next run resumes from them.

        If this fails, as on a full disk, the table stays open and can be closed again. After a failed write, or if the
        folder was removed (StoreError), the table closes without a clean marker, so the next run recovers.
        """
        with table.lock:
            table.stop_prefetch()  # first, because later calls may fail, and no thread may run when the process ends
            if self.folder is not None and self._has_rows_to_keep(table):
                try:
                    self.folder.check()
                except StoreError:
                    table.close()
                    raise
                try:
                    self._write_live_rows(table, self.folder)
                except BaseException:
                    if table.is_inconsistent:
                        table.close()
                    raise
            self._leave_group()
            table.close()
            if self.folder is not None and self.is_placeholder:
                self.folder.discard_live_rows()

    def _leave_group(self) -> None:
        """Leave the training group. Does nothing for a shard: rank 0 leaves the group after closing its shard."""
        if self.member is not None and self.rows_version is None:
            self.member.leave()

    def _has_rows_to_keep(self, table: OpenTable) -> bool:
        """True if a close must write live rows, or name live rows in the record."""
        if self.folder is None or table.is_inconsistent or (self.member is not None and self.member.unusable_reason):
            return False
        version, member = read_live_version(self.folder.clean_marker), self.member
        entries = {} if member is None else member.group.record.entries
        return version is None or (member is not None and entries[member.id].live_version != version)

    def expect_change(self) -> None:
        """Make the next change of rows write to the group's record first."""
        if self._live_rows_state is LiveRowsState.CHANGED:
            self._live_rows_state = LiveRowsState.RECORDED

    def _write_live_rows(self, table: OpenTable, folder: StoreFolder) -> None:
        """Durably write the table's rows as live rows, with a clean marker."""
        if folder.clean_marker is None:
            if self._is_on_disk:
                table.flush()
                folder.write_clean_marker(make_clean_marker(table, self.folder, self.member, self.rows_version))
            else:
                folder.clear_incoming()
                write_snapshot(folder.incoming, table.describe(), table.scan())
                marker = make_clean_marker(table, folder, self.member, self.rows_version)
                folder.replace_live_rows(folder.incoming, marker)
        if self.member is not None:
            self.member.mark_closed(read_live_version(folder.clean_marker) or "")

    def unlock(self) -> None:
        """Unlock the folder without writing, and release the memory that automatic budgets reserved."""
        self._budgets.release()
        self._leave_group()
        if self.folder is not None:
            self.folder.unlock()

    def check_row(self, optimizer: RowOptimizer) -> None:
        """Raise OptionError if the row size in the options differs from the size that the optimizer needs."""
        self.options.check_row(self.spec.dim, self.spec.dim + self.spec.make_row_state(optimizer).width)

    def reopen(self, table: OpenTable, optimizer: RowOptimizer | None) -> OpenTable:
        """Open a table with the same rows, with room for the optimizer's state, on the present device."""
        table.raise_deferred_error()
        if self.folder is not None:
            resumed_step = self.resumed_step
            self.close(table)
            reopened = self.open(optimizer)
            self.resumed_step = resumed_step
            return reopened
        new_table = self._build(optimizer, {**table.describe(), "rows": table.counts.num_rows, "shards": None}, None)
        fill_table(new_table, table.describe(), table.scan())
        table.close()
        return new_table

    def move(self, table: OpenTable, device: torch.device) -> OpenTable:
        """Open a table with the same rows on another device. Raises InputError, OptionError, StoreError."""
        old_factory, self._processor_factory = self._processor_factory, get_processor_factory(device, self.options)
        try:
            return self.reopen(table, table.optimizer)
        except BaseException:
            self._processor_factory = old_factory
            raise

    def _start_empty(self, optimizer: RowOptimizer | None, folder: StoreFolder) -> OpenTable:
        is_new = not folder.has_rows_or_snapshots
        if folder.clean_marker is not None:
            self._build(optimizer, None, folder.incoming).close()  # test the options before good rows are deleted
            folder.clear_incoming()
        folder.discard_live_rows()
        try:
            table = self._build(optimizer, None, folder.live_path)
        except BaseException:
            if is_new:
                folder.reset()
            raise
        if not self.is_placeholder:
            folder.store_step(0)
        if self._open_mode == "fresh":
            self._open_mode = "resume"
        return table

    def _resume(
        self, optimizer: RowOptimizer | None, marker: dict[str, Any], folder: StoreFolder, for_load: bool
    ) -> OpenTable:
        label = f"store folder {str(folder.path)!r}"
        try:
            check_description(marker)
        except ValueError as error:
            raise StoreError(
                f"{label} was written by another version of tierbed: its clean marker has {error}"
            ) from error
        self.spec = self.spec.with_stored_seed(marker)
        check_stored_rows(self.spec, marker, optimizer, StoreError, label, for_load=for_load)
        table = self._open_live_rows(optimizer, marker, folder, label)
        own_limits = self.spec.read_id_limits(None)
        if self.spec.max_ids is not None and table.id_limits != own_limits and not for_load:
            ids = LoadedIdCounter(self.spec)
            exhaust(ids.count(check_rows(table.scan(), self.spec.num_tables)))
            if not ids.log_remarks(label, False, None):
                table.reset_id_limits()
        return table

    def _open_snapshot(
        self, optimizer: RowOptimizer | None, snapshot: Snapshot, folder: StoreFolder, plan: OpenPlan, for_load: bool
    ) -> OpenTable:
        """Open a table with a snapshot's rows. Links a RocksDB checkpoint's files, if it can."""
        state = None if optimizer is None else self.spec.make_row_state(optimizer)
        chain = list_linkable(snapshot, self.spec, state) if self._is_on_disk and self.rows_version is None else []
        if chain:
            folder.clear_incoming()
            try:
                table = self._build(optimizer, link_rows(chain, folder.incoming), folder.incoming)
                add_increments(table, chain)
            except (StoreError, SnapshotError, OSError) as error:  # `load` raises an error that names the damaged file
                log.info("snapshot %r: its files cannot be linked, so its rows are read: %s", snapshot.name, error)
            else:
                marker = make_clean_marker(table, self.folder, self.member, self.rows_version)
                table.close()
                folder.replace_live_rows(folder.incoming, marker)
                table = self._resume(optimizer, marker, folder, for_load)
                table.observers.track_changes(snapshot.manifest.id)
                self._file_check = FileCheck(chain[0], table)
                return table
        return self.load(optimizer, snapshot, None, on_verified=plan.on_verified, for_load=for_load)[0]

    def _open_live_rows(
        self, optimizer: RowOptimizer | None, marker: dict[str, Any], folder: StoreFolder, label: str
    ) -> OpenTable:
        """Open a table with the live rows that a clean marker describes."""
        fields = None if optimizer is None else self.spec.make_row_format(self.spec.make_row_state(optimizer)).fields
        has_same_row_format = fields in (None, RowFormat.from_description(marker).fields)
        try:
            if self._is_on_disk and marker["live"] == "rocksdb" and has_same_row_format:
                table = self._build(optimizer, marker, folder.live_path)
                assert table.stack is not None
                assert isinstance(table.stack.bottom, RocksDB)
                with undo_on_error(table.close):
                    check_live(folder, marker, table.stack.bottom)
                return table
            return self._build_from_rows(optimizer, marker, scan_live_rows(folder, marker))
        except (SnapshotError, StoreError) as error:
            if find_os_error(error) is not None:
                raise
            store = FolderState(folder.path if self.rows_version is None else folder.path.parent.parent)
            name = GroupFile(store).last_snapshot or "NAME"
            raise StoreError(
                f"the live rows of {label} have a clean marker and cannot be read: {error}. Load a snapshot with "
                f'`tierbed snapshot load {store.path} {name}`, or start over with open="fresh"'
            ) from error

    def load(
        self,
        optimizer: RowOptimizer | None,
        snapshot: Snapshot,
        old_table: OpenTable | None,
        selection: Selection = ALL,
        on_verified: Callable[[], None] | None = None,
        for_load: bool = False,
    ) -> tuple[OpenTable, LoadReport]:
        """Load a snapshot's rows, or a selection, into a new table. Closes `old_table` once all rows are verified.

        Args:
            on_verified: called before `old_table` closes. If `on_verified` raises, nothing has changed.
            for_load: True if another load is about to replace the rows.
        """
        report, ids = LoadReport(), LoadedIdCounter(self.spec, counts_ids=not for_load)
        description = {**snapshot.description, "rows": snapshot.manifest.rows}
        increments = [] if old_table is None else find_increments(old_table, snapshot, self.spec, selection)
        if selection.has_every_row and snapshot.shard is None:
            report = LoadReport(snapshot.manifest.rows)
        else:
            chunks = ids.remember_padding(snapshot.chunks())
            for _ in selection.select_chunks(chunks, description, report):  # `capacity` needs the row count
                pass
        loaded = {**selection.describe(description), "rows": report.rows}
        selected = ids.count(selection.read_rows(snapshot, LoadReport()))
        with self._adopt_seed(snapshot.description), contextlib.nullcontext() if old_table is None else old_table.lock:
            snapshot_id = snapshot.manifest.id if selection.is_whole else None
            if increments and old_table is not None:
                table = self._apply_increments(optimizer, loaded, increments, old_table)
            else:
                source = contextlib.nullcontext(selected)
                table = self._build_from_rows(optimizer, loaded, source, old_table, snapshot_id, on_verified)
            if self.folder is not None and snapshot_id is not None:
                table.observers.track_changes(snapshot_id)
            if self.folder is not None and self.folder.clean_marker is None:
                self.folder.store_step(table.step)
        if old_table is not None:
            text = "embedding %r: %d rows of step %d, loaded from snapshot %r"
            log.info(text, self.spec.name, report.rows, table.step, snapshot.name)
        untrained = not description["states"] and not description["step"]
        remarks = ids.log_remarks(f"snapshot {snapshot.name!r}", untrained, description["padding_idx"])
        return table, replace(report, remarks=report.remarks + remarks)

    def _apply_increments(
        self, optimizer: RowOptimizer | None, description: Description, increments: list[Snapshot], old_table: OpenTable
    ) -> OpenTable:
        """Load snapshots' changes in place, and close `old_table`. A kill leaves the snapshot for the next run."""
        changes, counts = verify_increments(old_table, increments)
        table = self._build(optimizer, {**description, "shards": None}, None, old_table)
        change = partial(take_over, old_table, table, changes, counts, self.member)
        with defer_signals():
            self._replace_rows(increments[-1].manifest.id, change)
            if self._file_check is not None:
                self._file_check.attach(table)
        return table

    def load_tensors(self, optimizer: RowOptimizer | None, tensors: RowTensors, old_table: OpenTable) -> OpenTable:
        """Load rows from memory into a new table, and close `old_table`. The recovery snapshot stays the same."""
        with self._adopt_seed(tensors.description), old_table.lock:
            check_stored_rows(self.spec, tensors.describe(), optimizer, SnapshotError, "the state")
            ids = LoadedIdCounter(self.spec)
            chunks = ids.count(check_rows(tensors.chunks(), self.spec.num_tables))
            table = self._build_from_rows(optimizer, tensors.describe(), contextlib.nullcontext(chunks), old_table)
            ids.log_remarks("the state", False, None)
            if self.folder is not None and self.folder.clean_marker is None:
                self.folder.store_step(table.step)
            return table

    @contextlib.contextmanager
    def _adopt_seed(self, description: dict[str, Any]) -> Iterator[None]:
        """Adopt the seed of loaded rows; if the block raises, restore the old seed."""
        old_spec, self.spec = self.spec, self.spec.with_stored_seed(description)
        try:
            yield
        except BaseException:
            self.spec = old_spec
            raise

    def _build_from_rows(
        self,
        optimizer: RowOptimizer | None,
        description: dict[str, Any],
        source: contextlib.AbstractContextManager[Chunks],
        old_table: OpenTable | None = None,
        snapshot_id: str | None = None,
        on_verified: Callable[[], None] | None = None,
    ) -> OpenTable:
        """Build a new table from the rows in `source`. Replace `old_table` and the live rows once all rows are read.

        snapshot_id: the id of the snapshot with exactly these rows, or None.
        """
        folder = self.folder
        path = folder.incoming if folder is not None and self._is_on_disk else None
        if folder is not None:
            folder.clear_incoming()
        table = self._build(optimizer, {**description, "shards": None}, path)
        with undo_on_error(remove_table, table, path):
            with source as chunks:
                count = fill_table(table, description, chunks)
            if count != description["rows"]:
                raise StoreError(f"embedding {self.spec.name!r}: {count} rows were found, not {description['rows']}")
            if self._is_on_disk:
                table.flush()
            if on_verified is not None:
                on_verified()
        with defer_signals():
            with undo_on_error(remove_table, table, path):
                if old_table is not None:
                    self._replace_rows(snapshot_id, old_table.close)
            if path is None or folder is None:
                return table
            marker = make_clean_marker(table, self.folder, self.member, self.rows_version)
            table.close()
            folder.replace_live_rows(path, marker)
            return self._build(optimizer, marker, folder.live_path)

    def _replace_rows(self, snapshot_id: str | None, change: Callable[[], None]) -> None:
        """Record that `change` replaces all rows. snapshot_id: the id of the snapshot with the new rows, or None."""
        member = self.member if self.rows_version is None else None  # for a shard, all ranks record the load together
        with record_load({member: snapshot_id}) if snapshot_id and member is not None else contextlib.nullcontext():
            self.begin_change(snapshot_id is None and self.rows_version is None, replaces_rows=True)
            change()
            self._unusable_reason, self._live_rows_state = "", LiveRowsState.RECORDED  # the next write is recorded
            if member is not None:
                member.mark_replaced(snapshot_id)

    def _build(
        self,
        optimizer: RowOptimizer | None,
        description: Description | None,
        path: Path | None,
        old_table: OpenTable | None = None,
    ) -> OpenTable:
        """Build a table over new tiers, the files at `path`, or `old_table`'s tiers. description: None without rows."""
        state = RowState() if description is None else RowState.from_description(description)
        if optimizer is not None:
            self.check_row(optimizer)
            state = self.spec.make_row_state(optimizer)
        rows, shards = (0, None) if description is None else (description["rows"], description["shards"])
        lifecycle = Lifecycle(self.spec.name, self.spec.num_tables, self.options, rows, self.spec.seed % 2**64)
        if old_table is not None and old_table.stack is not None:
            processor, stack = old_table.processor, old_table.stack
            stack.make_writable()
        else:
            processor = self._processor_factory(self.spec, state, lifecycle.capacity)
            stack = build_stack(self._budgets.resolve(processor), processor, path, shards)
        has_files = self.folder is not None or isinstance(stack.bottom, RocksDB)
        before_write = partial(self._prepare_write, stack) if has_files else None
        table = OpenTable(self.spec, processor, stack, state, lifecycle, before_write, self.options.background_threads)
        stored_run = "" if description is None else str(description.get(RUN_ID_FIELD, "")) or self._run_id
        self._run_id = stored_run or (self.rows_version and self.rows_version.run_id) or secrets.token_hex(8)
        table.start(optimizer, self._run_id, description)
        if self.folder is not None:
            table.observers.max_key_bytes = int(self.options.changed_keys_mb * (1 << 20))
        if description is not None and shards is not None:  # the rows are in RocksDB already
            restore_rows(table, description)
        return table

    def _prepare_write(self, stack: Stack, step: int) -> None:
        """Prepare the folder for a write in step `step`. Called before each write."""
        stack.make_writable()  # first: if this fails, the live rows keep their clean marker
        if self.folder is not None:
            if self._live_rows_state is not LiveRowsState.CHANGED:
                self.begin_change()
                self._live_rows_state = LiveRowsState.CHANGED
            if self.rows_version is None and self.member is not None:
                self.member.count_write()
            self.folder.store_step(step)

    def count_write(self, num_earlier: int | None = None) -> None:
        """Add 1 to the number of writes. num_earlier: how many writes came before; default: this shard's count."""
        assert self.rows_version is not None
        self.rows_version.count_write(num_earlier)
        if self.member is not None:
            self.member.count_write()

    def rename(self, name: str) -> None:
        self.spec = replace(self.spec, name=name)

    def begin_change(self, records_change: bool = True, replaces_rows: bool = False) -> None:
        """Clear the clean marker. If `records_change`, first write to the group's record that the rows will change."""
        if self.folder is None:
            return
        with defer_signals():
            if self.member is not None and records_change:
                self.member.begin_change(replaces_rows)
            if self.folder.clean_marker is not None:
                self.folder.clear_clean_marker()
        if not self._is_on_disk:
            self.folder.discard_live_rows()  # frees disk space; a close writes the rows from memory to disk again
