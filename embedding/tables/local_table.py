"""The rows that this process has of an embedding, in an open table from the first use to `close`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ...engine.durable import remedy_for
from ...engine.errors import ClosedError, OptimizerError, SnapshotError, StoreError
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.store_options import StoreOptions
from ...engine.options.table_spec import TableSpec
from ...engine.table.table import OpenTable, RowsReplaced
from ...engine.table.table_report import note_metrics
from ...snapshots.control.server import SaveTarget, Service
from ...snapshots.files.reader import Snapshot
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.group import Member
from ...snapshots.store.selection import ALL, LoadReport, Selection
from .compatible import check_stored, fitting
from .persistence import TablePersistence
from .recovery import Decide, RankShard, WriteEpoch
from .rows_in_tensors import RowTensors
from .training_group import TrainingGroup, between_steps

log = logging.getLogger("tierbed")


class LocalTable:
    """Opens the table and keeps it open.

    shard: which rows this process has; None for all. decide: chooses the rows to open with, by default as `plan_open`.
    group: the embeddings that it is trained together with. for_load: whether its rows are about to be replaced. Raises
    StoreError, OptionError, OptimizerError, and what `decide` raises.
    """

    def __init__(
        self,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        shard: RankShard | None = None,
        decide: Decide | None = None,
        group: TrainingGroup | None = None,
        for_load: bool = False,
    ) -> None:
        self.name, self.device, self.group = spec.name, device, group
        self._process = os.getpid()
        self._table: OpenTable | None = None
        self._closed_at = 0  # the step of the rows when they were closed
        self._service = Service()
        self._served: tuple[SaveTarget, StoreFolder | None] | None = None
        self._persistence = TablePersistence(
            spec, options, device, shard, self._partners, () if group is None else group.folders()
        )
        try:
            self._table = self._persistence.open(optimizer, decide, for_load)
        except BaseException:
            self._persistence.release()
            raise
        note_metrics(self._table)
        if shard is None or shard.rank == 0:
            (level, source), rows = self._persistence.source, f"{self._table.counts.rows:,} rows"
            rows += f" of rank 0 of {shard.ranks}" if shard is not None else ""
            log.log(level, "embedding %r: %s of step %d; %s", self.name, rows, self._table.step, source)
        self._share_gate()

    @property
    def table(self) -> OpenTable:
        """The open table. ClosedError after `close`, StoreError in a forked process, whose parent has the folder."""
        if self._table is None:
            raise ClosedError(f"embedding {self.name!r} was closed: create it again")
        if self._process != os.getpid() and (self.store is not None or self._table.has_thread):
            raise StoreError(
                f"embedding {self.name!r} was opened by process {self._process}, which holds its folder or its "
                "threads; use it there"
            )
        return self._table

    @property
    def own_open(self) -> OpenTable | None:
        """The table, if it is open in this process."""
        return self._table if self._process == os.getpid() else None

    @property
    def is_open(self) -> bool:
        """Whether the table is open, as it stays if a close fails."""
        return self._table is not None

    @property
    def store(self) -> StoreFolder | None:
        """The folder of the table; None for rows in memory."""
        return self._persistence.folder

    @property
    def member(self) -> Member | None:
        """The store in its group; None for rows without a folder, and on ranks other than 0."""
        return self._persistence.member

    @property
    def version(self) -> str | None:
        """The version of the rows, which the next run knows; None without a folder."""
        return self._persistence.version

    @property
    def step(self) -> int:
        """The step of the rows, now or when they were closed. Raises deferred errors of earlier steps."""
        if self._table is None:
            return self._closed_at
        with self._table.lock:
            self._table.check()
            return self._table.step

    @property
    def resumed_step(self) -> int:
        """The step of rows of an earlier run at the open; 0 for others."""
        return self._persistence.resumed_step

    @property
    def unsettled(self) -> str:
        """Why rows that were opened for a load may not be used before it; "" if they may."""
        return self._persistence.unsettled

    def keep_rows(self) -> None:
        """Keep the rows, whatever state was loaded into others. StoreError for rows that need a load first."""
        if self._persistence.is_placeholder:
            raise StoreError(self.unsettled)

    def rename(self, name: str) -> None:
        """Be called by another name from here on, with rows that are in memory."""
        self.name = name
        self._persistence.rename(name)
        if self._table is not None:
            self._table.rename(name)

    def join(self, group: TrainingGroup) -> None:
        """Be trained together with others from here on. StoreError."""
        self.group = group
        self._share_gate()
        self._persistence.expect_change()  # which joins them in the record

    def _partners(self) -> list[Member]:
        return [] if self.group is None else self.group.members()

    def _share_gate(self) -> None:
        if self.group is not None and self.store is not None and self._table is not None:
            self._table.share_gate(self.group.gate)

    def share(self, member: Member) -> None:
        """On rank 0: note changes of the rows of all ranks in the record of the store's group."""
        self._persistence.share(member)

    def serve(self, target: SaveTarget, folder: StoreFolder | None) -> None:
        """Serve other processes that request snapshots of a folder, until `close`. folder: None on ranks without it."""
        self._served = target, folder
        if folder is not None:
            self._service.start(folder.path, target)

    def check_optimizer(self, optimizer: RowOptimizer) -> None:
        """Raises OptimizerError if the rows have another state, OptionError if lines have no room for it."""
        table = self.table
        stored, wanted = table.state, table.spec.state_of(optimizer)
        known = _is_known(stored, wanted)
        as_before = table.optimizer is None or table.optimizer.initial == optimizer.initial
        stateless = stored.rule is None and not stored.names  # rows that were put
        if table.counts.rows and not stateless and not (known and as_before):
            raise OptimizerError(
                f"embedding {self.name!r} has rows of optimizer {stored.rule} with state {list(stored.names)} that "
                f"begins as {list(stored.initial)}, not of {wanted.rule} with {list(wanted.names)} from "
                f"{list(wanted.initial)}; train with that optimizer{self._reset_remedy()}"
            )
        self._persistence.check_row(optimizer)

    def _reset_remedy(self) -> str:
        """The remedy for rows of another optimizer, if a folder keeps snapshots of them."""
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
        """Train the rows by `optimizer` from here on. Opens the table again if lines need room for its state.

        Raises what `check_optimizer` raises.
        """
        if self._process != os.getpid():
            raise StoreError(
                f"embedding {self.name!r} was opened by process {self._process}, and this one would train a copy of "
                "its rows; train in one process, or over ranks by world="
            )
        self.check_optimizer(optimizer)
        table = self.table
        stored, wanted = table.state, table.spec.state_of(optimizer)
        if _is_known(stored, wanted) and replace(stored, rule=wanted.rule) == wanted:
            table.use_optimizer(optimizer, wanted)
            return
        self._replace(lambda before: self._persistence.reopen(before, optimizer), joins=True)

    def move(self, device: torch.device) -> None:
        """Open the table again on another device, with the rows that it has. InputError, OptionError, StoreError."""
        self._replace(lambda before: self._persistence.move(before, device), joins=True)
        self.device = device

    def forget_announced(self) -> None:
        """Forget what was announced, and end the prefetch thread, if the table is open."""
        if self._table is not None:
            self._table.stop_prefetch()

    def release(self) -> None:
        """Drop the pin that a failed step left, if the table is open."""
        if self._table is not None:
            self._table.release()

    def tensors(self) -> RowTensors:
        """All rows, copied."""
        while True:
            with suppress(RowsReplaced):
                return RowTensors.of(self.table)

    def load_tensors(self, given: RowTensors) -> None:
        """Replace all rows. SnapshotError, StoreError, OptimizerError; if it raises, nothing has changed."""
        self._replace(lambda before: self._persistence.load_tensors(before.optimizer, given, before))

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
            reports.append(replace(report, remarks=report.remarks + remarks))
            return table

        self._replace(build)
        return reports[0]

    def fitted(self, snapshot: Snapshot, selection: Selection = ALL) -> Selection:
        """The selection for this table. SnapshotError, OptimizerError if its rows cannot be the table's."""
        optimizer = self.table.optimizer
        spec, what = self._persistence.spec.with_stored_seed(snapshot.description), f"snapshot {snapshot.name!r}"
        if selection.convert:
            return fitting(spec, snapshot.description, optimizer, selection, True, what)[0]
        check_stored(spec, selection.description(snapshot.description), optimizer, SnapshotError, what)
        return selection

    def begin_load(self, notes: bool) -> int:
        """Clear the clean marker of a shard for a load of all ranks. Returns how many writes it has counted.

        notes: as of `TablePersistence.begin_change`. StoreError.
        """
        with self.table.lock:
            self._persistence.begin_change(notes, replaces=True)
            return self.life.writes

    def count_write(self) -> None:
        """Count a write of all ranks that is about to begin, whether or not a row of this shard is in it."""
        self._persistence.count_write()

    def note_load(self, writes: int, snapshot: str | None) -> None:
        """Count a load of all ranks, which have counted that many writes, of a whole snapshot or of other rows."""
        self._persistence.count_write(writes)
        if snapshot is not None:
            self.life.came_as(snapshot, self.life.writes)

    @property
    def life(self) -> WriteEpoch:
        """Which rows a shard has."""
        assert self._persistence.life is not None
        return self._persistence.life

    def when_saved(self) -> Callable[[str], None]:
        """What this process does when a snapshot of the rows as they are now has its name. It takes the id."""
        life = self._persistence.life
        return (lambda id: None) if life is None else partial(life.came_as, writes=life.writes)

    def lose(self, error: StoreError) -> None:
        """Let the rows close without a clean marker."""
        if self._table is not None:
            self._table.note_failure(error)

    def close(self) -> None:
        """Write back the rows and unlock the folder. May be called again; does nothing in a forked process.

        If that fails, everything stays open, to be closed again. If the folder was removed or replaced, or a write
        failed in the middle for lack of memory, nothing is written and all is released. When all is closed, raises the
        error of an earlier call, if there is one.
        """
        try:
            self._close()
        except OSError as error:  # from a system call of torch or of this close
            if self._table is None:
                raise
            remedy = remedy_for(error, "remove its cause")
            raise StoreError(
                f"embedding {self.name!r} could not be closed: {error}: {remedy}, then close it again"
            ) from error

    def _close(self) -> None:
        if self._table is not None and self._process == os.getpid():
            with _disable_current_modes():  # a trace may be running, and would record what this does
                unsaved = self._table.observers.finish_saving()
                self._service.stop()
                deferred = self._table.deferred_error(wait=True) or unsaved  # raised once the rows are kept
                try:
                    with self._table.observers.between_saves():
                        if self.group is not None:
                            self.group.check_passed()
                        self._persistence.close(self._table)
                except BaseException:
                    if self._table.stack is None:  # the table was closed without its rows, which are lost
                        self._release()
                    elif self._served is not None:
                        self.serve(*self._served)
                    raise
            self._release()
            if deferred is not None:
                raise deferred

    def finish(self) -> None:
        """Close at the end of the embedding or the process. Errors are logged, since nobody could catch them."""
        try:
            self.close()
        except Exception as error:
            if self._table is None:  # closed: the error is of an earlier call
                log.error("embedding %r: %s", self.name, error)
                return
            self._service.stop()
            kept = self._persistence.after_failed_close(self._table)
            log.error("embedding %r could not be closed: %s; %s", self.name, error, kept)

    def _replace(self, build: Callable[[OpenTable], OpenTable], joins: bool = False) -> None:
        """Replace the table by the one that `build` returns for it. joins: it is opened, and joins its group."""
        self.table.observers.finish_saving()
        with between_steps([self] if joins else []):
            while True:
                before = self.table
                with before.observers.between_saves():  # readers wait for the lock until the new table is here
                    if before is self._table:
                        self._swap(before, build)
                        return

    def _swap(self, before: OpenTable, build: Callable[[OpenTable], OpenTable]) -> None:
        note_metrics(before)
        try:
            self._table = build(before)
            before.replaced()
            self._share_gate()
        except BaseException:
            if before.stack is None:  # it failed while the new table replaced it
                self._service.stop()
                self._release()
            raise
        note_metrics(self._table)

    @property
    def own(self) -> LocalTable:
        """The rows of this process, which are all rows here."""
        return self

    def _release(self) -> None:
        if self._table is not None:
            self._closed_at = self._table.step
        self._table = None
        self._persistence.release()


def _is_known(stored: RowState, wanted: RowState) -> bool:
    """Whether rows with the one state can be trained with the other."""
    return stored.names == wanted.names and stored.rule in (None, wanted.rule)
