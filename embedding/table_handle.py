"""An embedding's hold on its open table: from the first use to `close`, or the end of the embedding or the process."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..engine.durable import remedy_for
from ..engine.errors import ClosedError, OptimizerError, StoreError
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.optim.row_state import RowState
from ..engine.options.store_options import StoreOptions
from ..engine.options.table_spec import TableSpec
from ..engine.table.table import OpenTable
from ..snapshots.control.server import Service
from ..snapshots.files.format import Manifest
from ..snapshots.files.reader import list_snapshots
from ..snapshots.inspection.row import plain_row, read_row, row_key_of
from ..snapshots.store.selection import Selection
from .group_snapshots import save_together
from .recovery import Decide, RankShard, WriteEpoch
from .rows_in_tensors import RowTensors
from .rows_reference import RowsReference, check_not_awaiting, is_at, saved_as
from .table_persistence import TablePersistence
from .table_snapshots import TableSnapshots
from .training_group import TrainingGroup

log = logging.getLogger("tierbed")
T = TypeVar("T")

_ONE_AT_A_TIME = (
    "a folder is open in one embedding of a process, and the one that had it before is closed; use one embedding in "
    "both places, or give each a name or a persistent_path of its own"
)

_by_folder: weakref.WeakValueDictionary[str, LocalTableHandle] = weakref.WeakValueDictionary()


class LocalTableHandle(TableSnapshots):
    """Opens a table and holds it. A process has one handle of a folder: a second, as in notebooks, closes the first.

    share: what this process has of the rows; None for all of them. decide: chooses the rows to open with, by default
    as `plan_open_local`. group: the embeddings that it is trained together with. for_load: whether its rows are about
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
        self.name = spec.name
        self.device = device
        self._replaced = False  # whether another embedding opened the folder
        self._process = os.getpid()
        self._table: OpenTable | None = None
        self._closed_at = 0  # the step of the rows when they were closed
        self._service = Service()
        self.awaited: Sequence[RowsReference] = ()  # of the embedding: rows of a loaded state that it does not have
        folder = None
        if options.persistent_path is not None:
            place = Path(options.persistent_path) / spec.name
            folder = os.path.realpath(place if share is None else share.folder(place))
            older = _by_folder.get(folder)
            if older is not None:
                if older.own_open is not None:
                    log.warning("embedding %r opens %s: %s", self.name, folder, _ONE_AT_A_TIME)
                    older._replaced = True
                older.close()
        self._persistence = TablePersistence(spec, options, device, share, group)
        if self.membership is not None:
            self.membership.holder = weakref.ref(self)
        try:
            self._table = self._persistence.open(optimizer, decide, for_load)
        except BaseException:
            self._persistence.release()
            raise
        if folder is not None:
            _by_folder[folder] = self
        self._share_gate()
        self._serve()

    @property
    def table(self) -> OpenTable:
        """The open table. ClosedError after `close`, StoreError in a forked process, whose parent has the folder."""
        if self._table is None:
            said = f"another embedding opened its folder, and {_ONE_AT_A_TIME}" if self._replaced else "create it again"
            raise ClosedError(f"embedding {self.name!r} was closed: {said}")
        if self._process != os.getpid() and (self._persistence.folder is not None or self._table.has_thread):
            raise StoreError(
                f"embedding {self.name!r} was opened by process {self._process}, which holds its folder or its "
                "threads; use it there"
            )
        return self._table

    @property
    def unsettled(self) -> str:
        """Why rows that were opened for a load may not be used before it; "" if they may."""
        return self._persistence.unsettled

    def use_after_load(self, unsettled: str) -> None:
        """Let rows that ranks share be used after a load alone, if `unsettled` says why."""
        self._persistence.unsettled = unsettled

    def keep_rows(self) -> None:
        """The rows stay, whatever state was loaded into others. StoreError for rows that a load has yet to bring."""
        if self._persistence.is_untouched:
            raise StoreError(self.unsettled)
        if self.membership is not None and self._table is not None:
            self.membership.keep()

    @property
    def own_open(self) -> OpenTable | None:
        """The table, if it is open in this process."""
        return self._table if self._process == os.getpid() else None

    def join(self, group: TrainingGroup) -> None:
        """Be trained together with others from here on. StoreError."""
        if self.membership is not None:
            self.membership.group = group
            self._share_gate()
            if self._table is not None:
                self.membership.enlist()

    def note_torn(self) -> None:
        """The rows are of another step than those of embeddings that are trained together with them."""
        self._persistence.expect_first_write()

    def _share_gate(self) -> None:
        if self.membership is not None and self.membership.group is not None and self._table is not None:
            self._table.between_steps = self.membership.group.gate

    @property
    def own_table(self) -> OpenTable:
        """The open table, which has all rows of the embedding."""
        return self.table

    @property
    def exchanged(self) -> dict[str, dict[str, int]]:
        """Metrics of what went between ranks: none, for rows of one process."""
        return {}

    def size(self) -> int:
        """How many rows the table has. Raises what an earlier step did wrong and the device found late."""
        table = self.table
        with table.lock:
            table.check()
            return table.counts.rows

    @property
    def is_open(self) -> bool:
        """Whether the table is open, as it stays where a close fails."""
        return self._table is not None

    def check_optimizer(self, optimizer: RowOptimizer) -> None:
        """Raises OptimizerError where the rows carry another state, OptionError where lines have no room for it."""
        table = self.table
        held, wanted = table.state, table.spec.state_of(optimizer)
        known = _is_known(held, wanted)
        as_before = table.optimizer is None or table.optimizer.initial == optimizer.initial
        stateless = held.rule is None and not held.names  # rows that were put
        if table.counts.rows and not stateless and not (known and as_before):
            raise OptimizerError(
                f"embedding {self.name!r} has rows of optimizer {held.rule} with state {list(held.names)} that "
                f"begins as {list(held.initial)}, not of {wanted.rule} with {list(wanted.names)} from "
                f"{list(wanted.initial)}; train with that optimizer, or take another name{self._anew()}"
            )
        self._persistence.check_row(optimizer)

    def _anew(self) -> str:
        """The remedy for rows of another optimizer, where a folder keeps snapshots of them."""
        if self._persistence.folder is None:
            return ""
        return (
            "; or begin its state anew: save_snapshot, close, create the embedding again for the new optimizer, and "
            "load_snapshot(name, weights_only=True)"
        )

    def use_optimizer(self, optimizer: RowOptimizer) -> None:
        """Train the rows by `optimizer` from here on. Opens the table again where lines need room for its state.

        Raises what `check_optimizer` raises.
        """
        self.check_optimizer(optimizer)
        table = self.table
        held, wanted = table.state, table.spec.state_of(optimizer)
        if _is_known(held, wanted) and replace(held, rule=wanted.rule) == wanted:
            table.optimizer, table.state = optimizer, wanted
            return
        self._replace(table, lambda: self._persistence.reopen(table, optimizer))

    def move(self, device: torch.device) -> None:
        """Open the table again on another device, with the rows that it has. InputError, OptionError, StoreError."""
        table = self.table
        self._replace(table, lambda: self._persistence.move(table, device))
        self.device = device

    def begin_write(self) -> None:
        """Take the mark off a share's live rows for an operation of all ranks, before it is certain. StoreError."""
        table = self.table
        with table.lock:
            table.before_write(table.step)

    def count_write(self, before: int | None = None) -> None:
        """Count an operation of all ranks that is about to write, whether or not a row of this share is in it.

        before: how many there were, where this share may have missed some.
        """
        self.life.writes = 1 + (self.life.writes if before is None else before)

    @property
    def life(self) -> WriteEpoch:
        """Which rows a share has, and how many operations `count_write` has counted."""
        assert self._persistence.life is not None
        return self._persistence.life

    def begin_run(self, run: str) -> None:
        """The rows of all ranks are those of a snapshot from here on."""
        self.life.run = run
        self._persistence.unsettled = ""
        self._persistence.expect_first_write()

    def before_first_write(self, call: Callable[[], None]) -> None:
        """Let `call` be called before the first write after an open or a load."""
        self._persistence.before_first_write = call
        self._persistence.expect_first_write()

    def forget_announced(self) -> None:
        """Forget what was announced, and end the thread that makes it ready, if the table is open."""
        if self._table is not None:
            self._table.rest()

    def release(self) -> None:
        """Drop the pin that a failed step left, if the table is open."""
        if self._table is not None:
            self._table.release()

    def tensors(self) -> RowTensors:
        """All rows, copied."""
        return RowTensors.of(self.table)

    def load_tensors(self, tensors: Mapping[str, Any]) -> None:
        """Replace all rows. SnapshotError, StoreError, OptimizerError; where it raises, nothing has changed."""
        self.load_rows_of(RowTensors.parse(tensors))

    def load_rows_of(self, held: RowTensors) -> None:
        before = self.table
        self._replace(before, lambda: self._persistence.load_tensors(before.optimizer, held, before))
        if self.membership is not None:
            self.membership.reformed()

    def named(self) -> RowsReference:
        """The step of the rows, now or when they were closed, and the last snapshot, if it is of that step.

        Raises what an earlier step did wrong and the device found late.
        """
        if self._table is None:
            return self._of_step(self._closed_at)
        with self._table.lock:
            self._table.check()
            return self._of_step(self._table.step)

    def go_to(self, awaited: RowsReference) -> bool:
        """Let rows be those that a state_dict names: its snapshot is loaded if they are others, and it has them.

        Returns whether they are. Others that are trained together come to its instant as well. Raises what a load does.
        """
        self.table.check()  # ClosedError
        found, membership = is_at(awaited, self.named(), saved_as(self._place, awaited.snapshot)), self.membership
        if found and membership is not None and not membership.has_come():
            found = None
        if found is None and awaited.snapshot is not None:
            snapshot = self.snapshot(awaited.snapshot)
            together = None if membership is None else membership.instant_with(snapshot, awaited.instant)
            self.load_from(snapshot, Selection(), True, together=together)
            self.named()  # the next run knows the rows by their version as well
        return found is not False

    def save_between_steps(
        self,
        name: str,
        kind: str,
        progress: Callable[[int], None],
        give_up: Callable[[], bool],
        overwrite: bool = False,
        stores: Sequence[str] = (),
    ) -> Manifest | None:
        """Save a snapshot for another process, as `SaveTarget.save_between_steps` says."""
        others = [self._other(store) for store in stores]

        def save() -> Manifest:
            for one in others or [self]:
                check_not_awaiting(one.name, one.awaited)
            progress(0)
            if len(others) < 2:
                return self.save_snapshot(name, kind, overwrite, progress)
            save_together(others, name, kind, overwrite, progress)
            return self.snapshot(name).manifest

        return self._visit(save, give_up, others)

    def prune_between_steps(self, keep_last: int, keep_every: int | None) -> tuple[list[str], list[str]]:
        """Prune for another process, as `SaveTarget.prune_between_steps` says."""
        removed = self.prune_snapshots(keep_last, keep_every)
        return removed, [one.name for one in list_snapshots(self.folder().snapshots).snapshots]

    def row_between_steps(self, table: int | str, key: int, give_up: Callable[[], bool]) -> dict[str, Any] | None:
        """A row for another process, as `SaveTarget.row_between_steps` says."""
        return self._visit(lambda: self.row(table, key), give_up)

    def row(self, label: int | str, key: int) -> dict[str, Any]:
        """A row of this process as plain values; {} for none."""
        table = self.table
        with table.lock:
            table.check()
            description = table.describe()
            row = read_row(table.use(), table.form, *row_key_of(description, label, key))
        return {} if row is None else plain_row(row[0], description)

    def _visit(
        self, call: Callable[[], T], give_up: Callable[[], bool], others: Sequence[LocalTableHandle] = ()
    ) -> T | None:
        """The result of a call between two steps, of all tables that are trained together with this and `others`."""
        while True:
            table = self.table
            with table.between_steps.visit(lambda: self._visited(others), give_up) as entered:
                if not entered:
                    return None
                if table.stack is not None:
                    return call()
            sleep(0.05)  # the table was closed, and another is about to take its place

    def _other(self, store: str) -> LocalTableHandle:
        """The hold of this process on a store. Raises StoreError."""
        held = _by_folder.get(store)
        if held is None or held._table is None:
            raise StoreError(f"process {os.getpid()} does not have {store!r} open; save that store by itself")
        return held

    def _visited(self, others: Sequence[LocalTableHandle]) -> list[OpenTable]:
        members = [one.membership for one in (self, *others)]
        peers = [peer for member in members if member is not None for peer in member.open_peers()]
        tables = [self.table, *(one.table for one in others), *(peer.table for peer in peers if peer.table is not None)]
        return list({id(table): table for table in tables}.values())

    def status(self) -> dict[str, Any]:
        """The name, step and rows for another process, as `SaveTarget.status` says."""
        table = self.table
        return {"name": self.name, "step": table.step, "rows": table.counts.rows}

    def close(self) -> None:
        """Bring the rows down and let the folder go. May be called again; does nothing in a forked process.

        Where that fails, everything stays open, to be closed again. Where the folder was removed or replaced, or a
        write failed in the middle for lack of memory, nothing is written and all is let go. When all is closed, raises
        the error of an earlier call, if there is one.
        """
        try:
            self._close()
        except OSError as error:  # from a system call of torch or of this close
            if self._table is None:
                raise
            remedy = remedy_for(error, "mend what is wrong")
            raise StoreError(
                f"embedding {self.name!r} could not be closed: {error}: {remedy}, then close it again"
            ) from error

    def _close(self) -> None:
        if self._table is not None and self._process == os.getpid():
            with _disable_current_modes():  # a trace may be under way, and would record what this does
                unsaved = self._table.watch.finish_saving()
                self._service.stop()
                late = self._table.deferred_error(wait=True) or unsaved  # raised at the end: the rows are kept first
                try:
                    self._persistence.close(self._table)
                except BaseException:
                    if self._table.stack is None:  # the table was closed without its rows, which are lost
                        self._let_go()
                    else:
                        self._serve()
                    raise
            self._let_go()
            if late is not None:
                raise late

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

    def _replace(self, before: OpenTable, build: Callable[[], OpenTable]) -> None:
        before.watch.finish_saving()  # its error was logged
        try:
            self._table = build()
            self._share_gate()
        except BaseException:
            if before.stack is None:  # it failed while the new table took its place
                self._service.stop()
                self._let_go()
            raise

    def _serve(self) -> None:
        """Answer other processes that ask for snapshots, while the folder is held. A share cannot save one alone."""
        if self._persistence.folder is not None and self._persistence.life is None:
            self._service.start(self._persistence.folder.path, self)

    def _let_go(self) -> None:
        if self._table is not None:
            self._closed_at = self._table.step
        self._table = None
        self._persistence.release()


def _is_known(held: RowState, wanted: RowState) -> bool:
    """Whether rows with the one state can go on with the other."""
    return held.names == wanted.names and held.rule in (None, wanted.rule)
