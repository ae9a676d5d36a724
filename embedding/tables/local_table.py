"""Keeps this process's rows of an embedding in an open table, from the first use to `close`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from threading import main_thread

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...engine.durable import choose_remedy
from ...engine.errors import ClosedError, OptimizerError, SnapshotError, StoreError, undo_on_error
from ...engine.optim.kernel import load_kernels
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.store_options import StoreOptions
from ...engine.options.table_spec import TableSpec
from ...engine.table.table import OpenTable, RowsReplacedError
from ...engine.table.table_report import cache_metrics
from ...engine.threads import Thread
from ...snapshots.control.server import RequestHandler, Service
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.group import Member, is_changing_groups
from ...snapshots.store.selection import ALL, LoadReport, Selection
from .compatibility import check_stored_rows, fit_selection
from .persistence import TablePersistence
from .recovery import Planner, RankShard, RowsVersion, describe_failed_close
from .row_tensors import RowTensors
from .training_group import TrainingGroup, lock_between_steps

log = logging.getLogger("tierbed")


class LocalTable:
    """Opens a table and keeps it open. Raises StoreError, OptionError, OptimizerError.

    A new table replaces the old one when rows are loaded, moved to another device, or need room for optimizer state.

    Args:
        shard: this process's part of the rows; None for all rows.
        planner: chooses the rows to open with. Default: `plan_open`.
        for_load: True if a load is about to replace the rows.
    """

    def __init__(
        self,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        shard: RankShard | None = None,
        planner: Planner | None = None,
        group: TrainingGroup | None = None,
        for_load: bool = False,
    ) -> None:
        load_kernels()  # a garbage collection may close this table inside of ast.parse, which cannot be nested
        self.name, self.device, self.group = spec.name, device, group
        self._process_id = os.getpid()
        self._table: OpenTable | None = None
        self._closed_step = 0  # the step of the rows at the last close
        self._service = Service()
        self._handler_and_folder: tuple[RequestHandler, StoreFolder | None] | None = None
        self.persistence = TablePersistence(
            spec, options, device, shard, self._list_members, () if group is None else group.list_folders()
        )
        with undo_on_error(self.persistence.unlock):
            self._table = self.persistence.open(optimizer, planner, for_load)
        cache_metrics(self._table)
        if shard is None or shard.rank == 0:
            (level, text), rows = self.persistence.log_entry, f"{self._table.counts.num_rows:,} rows"
            rows += f" of rank 0 of {shard.num_ranks}" if shard is not None else ""
            log.log(level, "embedding %r: %s of step %d; %s", self.name, rows, self._table.step, text)
        self._share_gate()

    @property
    def table(self) -> OpenTable:
        """The open table. Raises ClosedError after `close`, and StoreError in a process forked after the opening."""
        if self._table is None:
            raise ClosedError(f"embedding {self.name!r} was closed: create it again")
        if self._process_id != os.getpid() and (self.store is not None or self._table.has_thread):
            raise StoreError(
                f"embedding {self.name!r} was opened by process {self._process_id}, which holds its folder or its "
                "threads; use the embedding in that process"
            )
        return self._table

    @property
    def table_if_open(self) -> OpenTable | None:
        """The table, if it is open in this process."""
        return self._table if self._process_id == os.getpid() else None

    @property
    def is_open(self) -> bool:
        """True while the table is open, also after a failed close."""
        return self._table is not None

    @property
    def store(self) -> StoreFolder | None:
        """The folder of the table; None for rows in memory."""
        return self.persistence.folder

    @property
    def member(self) -> Member | None:
        """The store's membership in its training group; None without a folder, and on all ranks except rank 0."""
        return self.persistence.member

    @property
    def step(self) -> int:
        """The rows' present step, or their step at the close. Raises earlier steps' deferred errors."""
        if self._table is None:
            return self._closed_step
        with self._table.lock:
            self._table.raise_deferred_error()
            return self._table.step

    def keep_rows(self) -> None:
        """Accept the rows, even if a loaded state_dict names others. Raises StoreError if rows need a load first."""
        if self.persistence.is_placeholder:
            raise StoreError(self.persistence.unusable_reason)

    def rename(self, name: str) -> None:
        self.name = name
        self.persistence.rename(name)
        if self._table is not None:
            self._table.rename(name)

    def join(self, group: TrainingGroup) -> None:
        """Join a training group. Raises StoreError."""
        self.group = group
        self._share_gate()
        self.persistence.expect_change()  # the next change of rows merges the records of the group's stores into one

    def _list_members(self) -> list[Member]:
        return [] if self.group is None else self.group.list_members()

    def _share_gate(self) -> None:
        if self.group is not None and self.store is not None and self._table is not None:
            self._table.set_step_gate(self.group.gate)

    def serve(self, handler: RequestHandler, folder: StoreFolder | None) -> None:
        """Serve other processes' requests for a folder, until `close`. folder: None on ranks without a folder."""
        self._handler_and_folder = handler, folder
        if folder is not None:
            self._service.start(folder.path, handler)

    def check_optimizer(self, optimizer: RowOptimizer) -> None:
        """Raise OptimizerError if rows have another optimizer's state, OptionError if rows lack room for new state."""
        table = self.table
        stored, needed = table.state, table.spec.make_row_state(optimizer)
        is_same_initial = table.optimizer is None or table.optimizer.initial_values == optimizer.initial_values
        is_stateless = stored.rule is None and not stored.names  # the rows were written by `put`
        if table.counts.num_rows and not is_stateless and not (_is_compatible(stored, needed) and is_same_initial):
            raise OptimizerError(
                f"embedding {self.name!r} has rows of optimizer {stored.rule} (state {list(stored.names)}, initial "
                f"values {list(stored.initial_values)}), but the new one is {needed.rule} (state {list(needed.names)}, "
                f"initial values {list(needed.initial_values)}); train with the rows' optimizer{self._reset_remedy()}"
            )
        self.persistence.check_row(optimizer)

    def _reset_remedy(self) -> str:
        """Return the part of an error text that says how to continue with another optimizer."""
        if self.store is None:
            return (
                "; or to begin without state, keep rows = tierbed.to_dense_state_dict(model), make a new model or call "
                "reset_parameters() of the Embedding, then make the optimizer, and call model.load_state_dict(rows)"
            )
        return (
            ", or take another name; or reset its state: save_snapshot, close, create the embedding again for the new "
            "optimizer, and load_snapshot(name, weights_only=True)"
        )

    def use_optimizer(self, optimizer: RowOptimizer) -> None:
        """Train rows with `optimizer`. Opens the table again if optimizer state needs more room. Raises StoreError."""
        if self._process_id != os.getpid():
            raise StoreError(
                f"embedding {self.name!r} was opened by process {self._process_id}, so this process would only train a "
                "copy of the rows. Train in one process, or give world= to share the rows across ranks"
            )
        self.check_optimizer(optimizer)
        table = self.table
        stored, needed = table.state, table.spec.make_row_state(optimizer)
        if _is_compatible(stored, needed) and replace(stored, rule=needed.rule) == needed:
            table.use_optimizer(optimizer, needed)
            return
        self._replace(lambda old_table: self.persistence.reopen(old_table, optimizer), joins_group=True)

    def move(self, device: torch.device) -> None:
        """Open the table again on another device, with the same rows. Raises InputError, OptionError, StoreError."""
        self._replace(lambda old_table: self.persistence.move(old_table, device), joins_group=True)
        self.device = device

    def forget_announced(self) -> None:
        """Forget announced batches and stop the prefetch thread, if the table is open."""
        if self._table is not None:
            self._table.stop_prefetch()

    def unpin_rows(self) -> None:
        """Unpin the rows that a failed step left pinned, if the table is open."""
        if self._table is not None:
            self._table.unpin_rows()

    def copy_rows(self) -> RowTensors:
        while True:
            with suppress(RowsReplacedError):
                return RowTensors.copy_from(self.table)

    def load_tensors(self, tensors: RowTensors) -> None:
        """Replace all rows. On SnapshotError, StoreError or OptimizerError, nothing has changed."""
        self._replace(lambda old_table: self.persistence.load_tensors(old_table.optimizer, tensors, old_table))

    def load_part(
        self, snapshot: Snapshot, selection: Selection, strict: bool, on_verified: Callable[[], None] | None = None
    ) -> LoadReport:
        """Load this process's rows of a snapshot. on_verified: as in `TablePersistence.load`.

        Recovery then uses this snapshot. A loaded selection becomes durable only with the next save or close.
        """
        reports: list[LoadReport] = []

        def build(old_table: OpenTable) -> OpenTable:
            label = f"snapshot {snapshot.name!r}"
            spec = self.persistence.spec.with_stored_seed(snapshot.description)
            fit, remarks = fit_selection(spec, snapshot.description, old_table.optimizer, selection, strict, label)
            table, report = self.persistence.load(old_table.optimizer, snapshot, old_table, fit, on_verified)
            reports.append(replace(report, remarks=report.remarks + remarks))
            return table

        self._replace(build)
        return reports[0]

    def fit_selection(self, snapshot: Snapshot, selection: Selection = ALL) -> Selection:
        """Return the selection restricted to this table. Raises SnapshotError or OptimizerError if rows do not fit."""
        optimizer = self.table.optimizer
        spec, label = self.persistence.spec.with_stored_seed(snapshot.description), f"snapshot {snapshot.name!r}"
        if selection.converts:
            return fit_selection(spec, snapshot.description, optimizer, selection, True, label)[0]
        check_stored_rows(spec, selection.describe(snapshot.description), optimizer, SnapshotError, label)
        return selection

    def begin_load(self, records_change: bool) -> int:
        """Clear a shard's clean marker for a collective load. Returns the shard's write count. Raises StoreError."""
        with self.table.lock:
            self.persistence.begin_change(records_change, replaces_rows=True)
            return self.rows_version.num_writes

    def count_write(self) -> None:
        """Count a collective write that is about to begin, even if the write changes no row of this rank."""
        self.persistence.count_write()

    def count_load(self, num_writes: int, snapshot_id: str | None) -> None:
        """Count a load as a write. num_writes: how many writes came before. snapshot_id: None for a partial load."""
        self.persistence.count_write(num_writes)
        if snapshot_id is not None:
            self.rows_version.set_snapshot(snapshot_id, self.rows_version.num_writes)

    @property
    def rows_version(self) -> RowsVersion:
        assert self.persistence.rows_version is not None
        return self.persistence.rows_version

    def make_save_callback(self) -> Callable[[str], None]:
        """Return a function that must be called with a snapshot's id once that snapshot contains the present rows."""
        version = self.persistence.rows_version
        return (lambda id: None) if version is None else partial(version.set_snapshot, num_writes=version.num_writes)

    def mark_failed(self, error: BaseException) -> None:
        """Mark the rows as failed, so that a close writes no clean marker."""
        if (table := self.table_if_open) is not None:
            table.record_failure(error)

    def close(self) -> None:
        """Write back the rows and unlock the folder. May be called again; does nothing in a forked process.

        If a close fails, the table stays open and can be closed again. The close writes nothing and releases the table
        in two cases: the folder was removed or replaced; an earlier write ran out of memory midway.
        Once the table is closed, raises an earlier call's deferred error, if there is one.
        """
        try:
            self._close()
        except OSError as error:  # a file error of this close or of an earlier write
            if self._table is None:
                raise
            remedy = choose_remedy(error, "remove its cause")
            raise StoreError(
                f"embedding {self.name!r} could not be closed: {error}: {remedy}, then close it again"
            ) from error

    def _close(self) -> None:
        if self._table is not None and self._process_id == os.getpid():
            with _disable_current_modes():  # a trace may be running and would record the operations
                save_error = self._table.observers.finish_saving()
                self._service.stop()
                deferred_error = self._table.take_deferred_error(wait=True) or save_error  # raised after the close
                try:
                    with self._table.observers.between_saves():
                        if self.group is not None:
                            self.group.detect_failed_backward()
                        self.persistence.close(self._table)
                except BaseException:
                    if self._table.stack is None:  # the table was closed without writing its rows
                        self._drop_table()
                    elif self._handler_and_folder is not None:
                        self.serve(*self._handler_and_folder)
                    raise
            self._drop_table()
            if deferred_error is not None:
                raise deferred_error

    def close_and_log(self) -> None:
        """Close when the embedding or the process ends. Logs errors, because no caller could catch them."""
        try:
            self.close()
        except Exception as error:
            if self._table is None:  # the table is closed; this is an earlier call's deferred error
                log.error("embedding %r: %s", self.name, error)
                return
            self._service.stop()
            consequence = describe_failed_close(self.store, self.member, self._table.step)
            log.error("embedding %r could not be closed: %s; %s", self.name, error, consequence)

    def _replace(self, build: Callable[[OpenTable], OpenTable], joins_group: bool = False) -> None:
        """Replace the table by `build(table)`. joins_group: True if `build` opens the store again."""
        self.table.observers.finish_saving()
        with lock_between_steps([self] if joins_group else []):
            while True:
                old_table = self.table
                with old_table.observers.between_saves():  # readers wait for the lock until the new table is in place
                    if old_table is self._table:
                        self._swap(old_table, build)
                        return

    @contextmanager
    def lock_table(self) -> Iterator[OpenTable]:
        """Lock the table and yield it. A load that held the lock may have replaced the table meanwhile."""
        while True:
            table = self.table
            with table.lock:
                if table is self._table:
                    yield table
                    return

    def _swap(self, old_table: OpenTable, build: Callable[[OpenTable], OpenTable]) -> None:
        cache_metrics(old_table)
        try:
            self._table = build(old_table)
            old_table.mark_replaced()
            self._share_gate()
        except BaseException:
            if old_table.stack is None:  # the old table failed while it was being replaced
                self._service.stop()
                self._drop_table()
            raise
        cache_metrics(self._table)

    @property
    def local(self) -> LocalTable:
        """The LocalTable with this process's rows. This is the object itself, because this process holds all rows."""
        return self

    def _drop_table(self) -> None:
        if self._table is not None:
            self._closed_step = self._table.step
        self._table = None
        self.persistence.unlock()


def _is_compatible(stored: RowState, needed: RowState) -> bool:
    """True if rows with the state `stored` can be trained by an optimizer that needs the state `needed`."""
    return stored.names == needed.names and stored.rule in (None, needed.rule)


def close_collected(close: Callable[[], None]) -> None:
    """Call `close` after the garbage collector found an embedding. It may do so between any two lines of Python.

    A thread of its own closes if a save may need this thread's lock. So it does inside an op's fake kernel, where torch
    would run the fake kernels of the close's ops too.
    """
    in_fake_kernel = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python)
    if (is_changing_groups() or in_fake_kernel) and main_thread().is_alive():  # at exit, nothing waits for new threads
        with suppress(RuntimeError):  # no thread could be started
            return Thread(target=close, name="tierbed-close", daemon=False).start()
    return close()
