"""The handle of an embedding to its open table, from the first use to `close`, or the end of the process."""

from __future__ import annotations

import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any, Self, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..distributed.world import World
from ..engine.durable import remedy_for
from ..engine.errors import ClosedError, OptimizerError, StoreError
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.optim.row_state import RowState
from ..engine.options.store_options import StoreOptions
from ..engine.options.table_spec import TableSpec
from ..engine.table.table import OpenTable, RowsReplaced
from ..engine.table.table_report import note_metrics
from ..snapshots.control.server import Service
from ..snapshots.files.format import Manifest
from ..snapshots.inspection.row import plain_row, read_row, row_key_of
from ..snapshots.store.group import Member
from .recovery import Decide, RankShard, WriteEpoch
from .rows_in_tensors import RowTensors
from .rows_reference import RowsReference, check_not_awaiting
from .saving import save_together
from .table_persistence import TablePersistence
from .table_snapshots import LocalSnapshots
from .training_group import TrainingGroup, between_steps

log = logging.getLogger("tierbed")
T = TypeVar("T")

_by_folder: weakref.WeakValueDictionary[str, LocalTableHandle] = weakref.WeakValueDictionary()


class LocalTableHandle(LocalSnapshots):
    """Opens a table and keeps it open. A process has one handle of a folder.

    share: the shard of this process; None for all rows. decide: chooses the rows to open with, by default as
    `plan_open`. group: the embeddings that it is trained together with. for_load: whether its rows are about
    to be replaced. Raises StoreError, OptionError, OptimizerError, and what `decide` raises.
    """

    def __init__(
        self,
        spec: TableSpec,
        options: StoreOptions,
        optimizer: RowOptimizer | None,
        device: torch.device,
        share: RankShard | None = None,
        decide: Decide | None = None,
        group: TrainingGroup | None = None,
        for_load: bool = False,
    ) -> None:
        self.name, self.world = spec.name, World.of_one()
        self.device = device
        self._process = os.getpid()
        self._table: OpenTable | None = None
        self._closed_at = 0  # the step of the rows when they were closed
        self._service = Service()
        self.awaited: Sequence[RowsReference] = ()  # of the embedding: rows of a loaded state that it does not have
        folder = None
        if options.persistent_path is not None:
            place = Path(options.persistent_path) / spec.name
            folder = os.path.realpath(place if share is None else share.folder(place))
            check_not_open(_by_folder, folder, spec.name)
        self._persistence = TablePersistence(spec, options, device, share)
        self._persistence.partners = self._partners
        self._persistence.beside = tuple if group is None else group.folders
        self.store, self.group = self._persistence.folder, group
        self.place = None if self.store is None else self.store.snapshots
        try:
            self._table = self._persistence.open(optimizer, decide, for_load)
        except BaseException:
            self._persistence.release()
            raise
        if folder is not None:
            _by_folder[folder] = self
        note_metrics(self._table)
        if share is None or share.rank == 0:
            (level, source), rows = self._persistence.source, f"{self._table.counts.rows:,} rows"
            rows += f" of rank 0 of {share.ranks}" if share is not None else ""
            log.log(level, "embedding %r: %s of step %d; %s", self.name, rows, self._table.step, source)
        self._share_gate()
        self._serve()

    @property
    def table(self) -> OpenTable:
        """The open table. ClosedError after `close`, StoreError in a forked process, whose parent has the folder."""
        if self._table is None:
            raise ClosedError(f"embedding {self.name!r} was closed: create it again")
        if self._process != os.getpid() and (self._persistence.folder is not None or self._table.has_thread):
            raise StoreError(
                f"embedding {self.name!r} was opened by process {self._process}, which holds its folder or its "
                "threads; use it there"
            )
        return self._table

    @property
    def own(self) -> Self:
        """The handle of the rows of this process, which are all rows."""
        return self

    @property
    def unsettled(self) -> str:
        """Why rows that were opened for a load may not be used before it; "" if they may."""
        return self._persistence.unsettled

    def keep_rows(self) -> None:
        """Keep the rows, whatever state was loaded into others. StoreError for rows that need a load first."""
        if self._persistence.is_untouched:
            raise StoreError(self.unsettled)

    @property
    def resumed_step(self) -> int:
        """The step of rows of an earlier run at the open; 0 for others."""
        return self._persistence.resumed_step

    @property
    def own_open(self) -> OpenTable | None:
        """The table, if it is open in this process."""
        return self._table if self._process == os.getpid() else None

    def join(self, group: TrainingGroup) -> None:
        """Be trained together with others from here on. StoreError."""
        self.group = group
        self._share_gate()
        self._persistence.expect_first_write()  # which joins them in the record

    def _partners(self) -> list[Member]:
        return [] if self.group is None else self.group.members()

    @property
    def member(self) -> Member | None:
        return self._persistence.member

    def rename(self, name: str) -> None:
        """Be called by another name from here on, with rows that are in memory."""
        self.name = name
        self._persistence.spec = replace(self._persistence.spec, name=name)
        if self._table is not None:
            self._table.spec = replace(self._table.spec, name=name)

    def _share_gate(self) -> None:
        if self.group is not None and self.store is not None and self._table is not None:
            self._table.step_gate = self.group.gate

    @property
    def local_table(self) -> OpenTable:
        return self.table

    @property
    def exchanged(self) -> dict[str, dict[str, int]]:
        """Metrics of what went between ranks: none, for rows of one process."""
        return {}

    @property
    def is_open(self) -> bool:
        """Whether the table is open, as it stays if a close fails."""
        return self._table is not None

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
        if self._persistence.folder is None:
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
            table.optimizer, table.state = optimizer, wanted
            return
        self._replace(lambda before: self._persistence.reopen(before, optimizer), joins=True)

    def move(self, device: torch.device) -> None:
        """Open the table again on another device, with the rows that it has. InputError, OptionError, StoreError."""
        self._replace(lambda before: self._persistence.move(before, device), joins=True)
        self.device = device

    def begin_load(self, notes: bool) -> int:
        """Clear the clean marker of a shard for a load of all ranks. Returns how many writes it has counted.

        notes: as of `TablePersistence.begin_change`. StoreError.
        """
        with self.table.lock:
            self._persistence.begin_change(notes, replaces=True)
            return self.life.writes

    def count_write(self, before: int | None = None) -> None:
        """Count an operation of all ranks that is about to write, whether or not a row of this shard is in it.

        before: how many there were, if this shard may have missed some.
        """
        self.life.writes = 1 + (self.life.writes if before is None else before)
        self._persistence.count_change()

    @property
    def life(self) -> WriteEpoch:
        """Which rows a shard has, and how many operations `count_write` has counted."""
        assert self._persistence.life is not None
        return self._persistence.life

    def share(self, member: Member, partners: Callable[[], Iterable[Member]]) -> None:
        """On rank 0: note changes of the rows of all ranks in the record of the store's group."""
        self._persistence.partners = partners
        self._persistence.share(member)

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

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Replace all rows. SnapshotError, StoreError, OptimizerError; if it raises, nothing has changed."""
        self.load_rows_of(RowTensors.parse(tensors))

    def load_rows_of(self, given: RowTensors) -> None:
        self._replace(lambda before: self._persistence.load_tensors(before.optimizer, given, before))

    def rows_reference(self) -> RowsReference:
        if self._table is None:
            return self._of_step(self._closed_at)
        with self._table.lock:
            self._table.check()
            return self._of_step(self._table.step)

    def save_between_steps(
        self,
        name: str,
        kind: str,
        progress: Callable[[int], None],
        give_up: Callable[[], bool],
        overwrite: bool = False,
        stores: Sequence[str] = (),
    ) -> Manifest | None:
        others = [open_handle(_by_folder, store) for store in stores]

        def save() -> Manifest:
            for one in others or [self]:
                check_not_awaiting(one.name, one.awaited)
            progress(0)
            save_together(self.world, others if len(others) > 1 else [self], name, kind, overwrite, progress=progress)
            return self.snapshot(name).manifest

        return self._visit(save, give_up, others)

    def row_between_steps(self, table: int | str, key: int, give_up: Callable[[], bool]) -> dict[str, Any] | None:
        return self._visit(lambda: self.row(table, key), give_up)

    def row(self, label: int | str, key: int) -> dict[str, Any]:
        """A row of this process as plain values; {} for none."""
        table = self.table
        with table.lock:
            table.check()
            description = table.describe()
            row = read_row(table.ready(), table.form, *row_key_of(description, label, key))
        return {} if row is None else plain_row(row[0], description)

    def _visit(
        self, call: Callable[[], T], give_up: Callable[[], bool], others: Sequence[LocalTableHandle] = ()
    ) -> T | None:
        """The result of a call between two steps, of all tables that are trained together with this and `others`."""
        while True:
            table = self.table
            with table.step_gate.between_steps(lambda: self._visited(others), give_up) as entered:
                if not entered:
                    return None
                if table.stack is not None:
                    return call()
            sleep(0.05)  # the table was closed, and another is about to replace it

    def _visited(self, others: Sequence[LocalTableHandle]) -> list[OpenTable]:
        groups = {id(one.group): one.group for one in (self, *others) if one.group is not None}.values()
        handles = [self, *others, *(one for group in groups for one in group.handles())]
        return list({id(one.own.table): one.own.table for one in handles}.values())

    def status(self) -> dict[str, Any]:
        table = self.table
        return {"name": self.name, "step": table.step, "rows": table.counts.rows}

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
                    else:
                        self._serve()
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
        self.finish_saving()
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
            before.is_replaced = True
            self._share_gate()
        except BaseException:
            if before.stack is None:  # it failed while the new table replaced it
                self._service.stop()
                self._release()
            raise
        note_metrics(self._table)

    def _serve(self) -> None:
        """Serve other processes that request snapshots, while the folder is locked. A shard cannot save one alone."""
        if self._persistence.folder is not None and self._persistence.life is None:
            self._service.start(self._persistence.folder.path, self)

    def _release(self) -> None:
        if self._table is not None:
            self._closed_at = self._table.step
        self._table = None
        self._persistence.release()


def check_not_open(by_folder: Mapping[str, Any], folder: str, name: str) -> None:
    """StoreError if another embedding of this process has a folder open."""
    for is_last in (False, True):
        older = by_folder.get(folder)
        if older is None or older.own.own_open is None:
            return
        if not is_last:
            gc.collect()  # an embedding that nobody can use may wait in a circle of references
    raise StoreError(
        f"embedding {name!r}: another embedding of that name in this process has {folder} open; use that one in both "
        "places, or call its close(), or give one of them another name or persistent_path, or del all that holds the "
        "other one, such as its EagerOptimizer"
    )


def open_handle(by_folder: Mapping[str, Any], store: str) -> Any:
    """The handle of this process to a store, by the real path of its folder. Raises StoreError if it has none open."""
    handle = by_folder.get(store)
    if handle is None or handle.own.own_open is None:
        raise StoreError(f"process {os.getpid()} does not have {store!r} open; save that store by itself")
    return handle


def _is_known(stored: RowState, wanted: RowState) -> bool:
    """Whether rows with the one state can be trained with the other."""
    return stored.names == wanted.names and stored.rule in (None, wanted.rule)
