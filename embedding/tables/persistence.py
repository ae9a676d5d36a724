"""The rows of a table between runs: opening and closing one store folder, and recovery from its snapshots.

The clean marker is cleared before the first write to the live rows, and written again by a clean shutdown. Live rows
without it are never served: the rows that the record of the store's group names are.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...engine.durable import remove_folder
from ...engine.errors import SnapshotError, StoreError, TierbedError
from ...engine.lifecycle.lifecycle import Lifecycle
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.row_state import RowState
from ...engine.options.store_options import CachedSsdOptions, StoreOptions
from ...engine.options.table_spec import RUN, TableSpec
from ...engine.row_format import Chunks, RowForm
from ...engine.signals import uninterrupted
from ...engine.store.contract import InMemoryTier
from ...engine.store.rocksdb import RocksDB
from ...engine.store.table_counts import FIELD, counted_chunks, counts_in
from ...engine.table.auto_budgets import AutoBudgets
from ...engine.table.row_scan import checked_rows, load_rows
from ...engine.table.stack import build_stack, processor_of
from ...engine.table.table import OpenTable
from ...snapshots.files.format import FILES, LIVE, SHARE, check_description
from ...snapshots.files.read_errors import os_error_in
from ...snapshots.files.reader import Snapshot
from ...snapshots.files.writer import write_snapshot
from ...snapshots.store.closed_store import check_live, scan_live_rows
from ...snapshots.store.folder import StoreFolder
from ...snapshots.store.folder_state import FolderState, remove_other_shares, snapshot_folder_of
from ...snapshots.store.group import Member, loading, open_store
from ...snapshots.store.group_file import GroupFile
from ...snapshots.store.mark import live_version
from ...snapshots.store.selection import ALL, LoadReport, Selection, converted_description
from .compatible import LoadedIds, check_stored
from .recovery import (
    Decide,
    FolderContents,
    OpenPlan,
    RankShard,
    WriteEpoch,
    check_shards_unlocked,
    contents_of,
    lacks_space,
    no_space_to_open,
    plan_open,
    what_is_lost,
)
from .rows_in_tensors import RowTensors

log = logging.getLogger("tierbed")


class LiveRows(Enum):
    """What the record of the store's group says of the present rows, while the table is open."""

    RECORDED = auto()  # what they are: a change is noted before it is made
    CHANGED = auto()  # that they have changed
    PLACEHOLDER = auto()  # what a load that converts is about to bring: the folder stays new until then


class TablePersistence:
    """The store folder of an embedding, locked while this object lives, or nothing if the options name no path."""

    def __init__(
        self,
        spec: TableSpec,
        options: StoreOptions,
        device: torch.device,
        shard: RankShard | None = None,
        partners: Callable[[], Iterable[Member]] = tuple,
        beside: Sequence[Path] = (),
    ) -> None:
        """shard: of this process; None for all rows.

        partners: returns the stores that this process trains together with it. beside: their folders, of those that are
        not open as well.
        """
        self.spec = spec
        self.options = options = options if shard is None else shard.options(options)
        self.life = None if shard is None else WriteEpoch(shard)
        self._processor = processor_of(device, options)
        self._budgets = AutoBudgets(spec.name, options, ranks=1 if shard is None else shard.on_host)
        self.folder: StoreFolder | None = None
        if options.persistent_path is not None:
            path, user = Path(options.persistent_path) / spec.name, f"embedding {spec.name!r}"
            if shard is None:
                self.folder = StoreFolder(path, user, snapshot_folder_of(options.snapshot_path, spec.name))
            else:
                self.folder = StoreFolder(shard.folder(path), user)
        self.member: Member | None = None  # of rows that this process has alone
        self._on_disk = isinstance(options, CachedSsdOptions)
        self._mode = options.open
        self._unsettled = ""  # of a shard without a member
        self._live = LiveRows.RECORDED
        self._partners, self._beside = partners, beside
        self._run = ""  # the id of the run in which the rows began
        self.source = (logging.INFO, "new, in memory")  # the level and the text to log of where the rows come from
        self.resumed_step = 0  # of the rows of an earlier run; 0 for rows that begin here, or that a user brought

    def open(self, optimizer: RowOptimizer | None, decide: Decide | None = None, for_load: bool = False) -> OpenTable:
        """Open the table with the rows that `decide` chooses, by default the folder's last consistent ones.

        Those of embeddings that are trained together are from the same step, unless `for_load`, which replaces them.
        Raises what `decide` raises, StoreError, OptionError, OptimizerError.
        """
        if self.folder is None:
            return self._build(optimizer, None, None)
        try:
            self._live = LiveRows.RECORDED
            found = contents_of(self.folder)
            is_new = self.life is None and found.clean_marker is None and not found.was_open
            if decide is not None:
                opening = decide(found)
            elif self.life is not None:  # once more, for another optimizer or device
                opening = OpenPlan(found.clean_marker, None, self.life.run, self.life.writes, self.life.version)
            else:
                opening = self._open_member(self.folder, found, for_load)
            self._unsettled = opening.unsettled
            table = self._open_with(optimizer, opening, self.folder, is_new, for_load)
            if self.member is not None and self.life is None:
                self.member.move_to(self.folder)
                remove_other_shares(self.folder.path, 1)
            return table
        except TierbedError as error:
            self._leave()
            if not lacks_space(error):
                raise
            raise StoreError(no_space_to_open(self.folder, error)) from error

    def _open_member(self, folder: StoreFolder, found: FolderContents, for_load: bool) -> OpenPlan:
        """How a store opens whose rows this process has alone."""
        check_shards_unlocked(folder.path, folder.ranks)
        if self._mode == "fresh" and found.clean_marker is None:
            folder.discard_live()  # frees space for the record: no run uses these rows again
        member = open_store(folder, self._mode, for_load, beside=self._beside)
        self.share(member)
        plan = OpenPlan() if self._mode == "fresh" else plan_open(folder, found, member)
        if member.home is not folder:
            member.copy_to(folder)  # before it has a clean marker, by which it counts
        return plan

    @property
    def unsettled(self) -> str:
        """Why the rows may not be used before a load; "" if they may."""
        return self._unsettled if self.member is None else self.member.broken

    @property
    def is_placeholder(self) -> bool:
        """Whether the rows stand for those that a load is about to bring."""
        return self._live is LiveRows.PLACEHOLDER

    @property
    def version(self) -> str | None:
        """The version of the rows, which the next run knows; None without a folder."""
        if self.life is not None:
            return None if self.folder is None else self.life.version
        return None if self.member is None else self.member.version

    def share(self, member: Member) -> None:
        """Note changes of the rows in the record of the store's group."""
        self.member = member
        member.attach(self.expect_change, self._partners)

    def _open_with(
        self, optimizer: RowOptimizer | None, opening: OpenPlan, folder: StoreFolder, is_new: bool, for_load: bool
    ) -> OpenTable:
        if self.life is not None:
            self.life.begin(opening.run, opening.writes, opening.version)
        if opening.clean_marker is not None:
            self.source = logging.INFO, f"live rows of the last close of store folder {folder.path}"
            table = self._resume(optimizer, opening.clean_marker, folder, for_load)
            self.resumed_step = table.step
            return table
        self.source = logging.INFO, f"new, in store folder {folder.path}"
        if opening.snapshot is not None:
            stored = opening.snapshot.description
            spec, what = self.spec.with_stored_seed(stored), f"store folder {str(folder.path)!r}"
            self.source = logging.INFO, f"snapshot {opening.snapshot.name!r} of store folder {folder.path}"
            if is_new:
                what = f"snapshot {opening.snapshot.name!r}, with which {what} opens,"
            try:
                check_stored(spec, stored, optimizer, StoreError, what, can_load=is_new, for_load=for_load)
                self.spec = spec
            except StoreError as error:
                if not (is_new and for_load):
                    raise
                fitting = converted_description(stored, (spec.dtype, spec.state_dtype))
                check_stored(spec, fitting, optimizer, StoreError, what)
                assert self.member is not None
                self.member.tear(str(error))
                self._live = LiveRows.PLACEHOLDER
                opening = OpenPlan()
        if opening.snapshot is None:
            table = self._start_empty(optimizer, folder)
        else:
            folder.discard_live()  # this frees space: no run uses these rows again
            table, _ = self.load(optimizer, opening.snapshot, None, verified=opening.verified, replaced=for_load)
            self.resumed_step = 0 if is_new else table.step
        self.source = opening.log_entry or self.source
        return table

    def close(self, table: OpenTable) -> None:
        """Flush written rows and write the clean marker, so that the next run resumes from them.

        If that fails, as on a full disk, the table stays open, to be closed again. A table whose write failed is closed
        without the clean marker: the next run recovers from the last snapshot. So is a table whose folder was removed
        or replaced, and then StoreError is raised.
        """
        with table.lock:
            table.stop_prefetch()  # first: a later call may fail, and no thread may be running when the process ends
            if self.folder is not None and self._is_to_be_kept(table):
                try:
                    self.folder.check()
                except StoreError:
                    table.close()
                    raise
                try:
                    self._keep(table, self.folder)
                except BaseException:
                    if table.is_inconsistent:
                        table.close()
                    raise
            self._leave()
            table.close()
            if self.folder is not None and self.is_placeholder:
                self.folder.discard_live()

    def _leave(self) -> None:
        """The store is no longer open here. Rank 0 does it once it has closed its shard."""
        if self.member is not None and self.life is None:
            self.member.leave()

    def _is_to_be_kept(self, table: OpenTable) -> bool:
        """Whether a close has something to write: live rows, or in which record they are the store's rows."""
        if self.folder is None or table.is_inconsistent or (self.member is not None and self.member.broken):
            return False
        live = live_version(self.folder.clean_marker)
        return live is None or (self.member is not None and self.member.group.record.now[self.member.id].live != live)

    def expect_change(self) -> None:
        """Let the next change of the rows be noted before it."""
        if self._live is LiveRows.CHANGED:
            self._live = LiveRows.RECORDED

    def _keep(self, table: OpenTable, folder: StoreFolder) -> None:
        """Make the table's rows the live rows, durably, with a clean marker."""
        if folder.clean_marker is None:
            if self._on_disk:
                table.flush()
                folder.write_clean_marker(self._clean_marker_of(table))
            else:
                folder.clear_incoming()
                write_snapshot(folder.incoming, table.describe(), table.scan())
                folder.replace_live(folder.incoming, self._clean_marker_of(table))
        if self.member is not None:
            self.member.closed(live_version(folder.clean_marker) or "")

    def after_failed_close(self, table: OpenTable) -> str:
        """What the next run would find if this run ended now, for the log."""
        if self.folder is None or self.folder.clean_marker is not None:
            return "no stored row is lost by it"
        return what_is_lost(self.folder, self.member, table.step)

    def release(self) -> None:
        """Unlock the folder as it is, and release the memory that was promised."""
        self._budgets.release()
        self._leave()
        if self.folder is not None:
            self.folder.release()

    def check_row(self, optimizer: RowOptimizer) -> None:
        """Raises OptionError if the options name another row size than the optimizer needs."""
        self.options.check_row(self.spec.dim, self.spec.dim + self.spec.state_of(optimizer).width)

    def reopen(self, table: OpenTable, optimizer: RowOptimizer | None) -> OpenTable:
        """A table of the same rows, with room for the optimizer's state, on the device that is wanted now."""
        table.check()
        if self.folder is not None:
            before = self.resumed_step
            self.close(table)
            reopened = self.open(optimizer)
            self.resumed_step = before
            return reopened
        wider = self._build(optimizer, {**table.describe(), "rows": table.counts.rows, "shards": None}, None)
        self._fill(wider, table.describe(), table.scan())
        table.close()
        return wider

    def move(self, table: OpenTable, device: torch.device) -> OpenTable:
        """A table of the same rows on another device. Raises InputError, OptionError, StoreError."""
        before, self._processor = self._processor, processor_of(device, self.options)
        try:
            return self.reopen(table, table.optimizer)
        except BaseException:
            self._processor = before
            raise

    def _start_empty(self, optimizer: RowOptimizer | None, folder: StoreFolder) -> OpenTable:
        new = not folder.has_begun
        if folder.clean_marker is not None:
            self._build(optimizer, None, folder.incoming).close()  # options that cannot work must not cost good rows
            folder.clear_incoming()
        folder.discard_live()
        try:
            table = self._build(optimizer, None, folder.live)
        except BaseException:
            if new:
                folder.forget()
            raise
        if not self.is_placeholder:
            folder.note_step(0)
        if self._mode == "fresh":
            self._mode = "resume"
        return table

    def _resume(
        self, optimizer: RowOptimizer | None, marker: dict[str, Any], folder: StoreFolder, for_load: bool
    ) -> OpenTable:
        where = f"store folder {str(folder.path)!r}"
        try:
            check_description(marker)
        except ValueError as error:
            raise StoreError(
                f"{where} was written by another version of tierbed: its clean marker has {error}"
            ) from error
        self.spec = self.spec.with_stored_seed(marker)
        check_stored(self.spec, marker, optimizer, StoreError, where, for_load=for_load)
        table = self._live_table(optimizer, marker, folder, where)
        own = self.spec.reach(None)
        if self.spec.last_ids is not None and table.reach != own and not for_load:
            ids = LoadedIds(self.spec)
            for _ in ids.counted(checked_rows(table.scan(), self.spec.num_tables)):
                pass
            if not self._remark(ids.remarks(where, False, None)):
                table.use_own_reach()
        return table

    def _live_table(
        self, optimizer: RowOptimizer | None, marker: dict[str, Any], folder: StoreFolder, where: str
    ) -> OpenTable:
        """A table of the live rows that a clean marker describes."""
        wanted = None if optimizer is None else self.spec.form(self.spec.state_of(optimizer)).fields
        same_lines = wanted in (None, RowForm.described(marker).fields)
        try:
            if self._on_disk and marker["live"] == "rocksdb" and same_lines:
                table = self._build(optimizer, marker, folder.live)
                assert table.stack is not None
                assert isinstance(table.stack.bottom, RocksDB)
                try:
                    check_live(folder, marker, table.stack.bottom)
                except BaseException:
                    table.close()
                    raise
                return table
            return self._restore(optimizer, marker, scan_live_rows(folder, marker))
        except (SnapshotError, StoreError) as error:
            if os_error_in(error) is not None:
                raise
            store = FolderState(folder.path if self.life is None else folder.path.parent.parent)
            name = GroupFile(store).last_snapshot or "NAME"
            raise StoreError(
                f"the live rows of {where} have a clean marker and cannot be read: {error}. Load a snapshot with "
                f'`tierbed snapshot load {store.path} {name}`, or start over with open="fresh"'
            ) from error

    def load(
        self,
        optimizer: RowOptimizer | None,
        snapshot: Snapshot,
        running: OpenTable | None,
        selection: Selection = ALL,
        verified: Callable[[], None] | None = None,
        replaced: bool = False,
    ) -> tuple[OpenTable, LoadReport]:
        """The table with a snapshot's rows, or a selection of them; closes `running` when they are verified.

        Recovery rolls back to this snapshot from here on, unless a selection is loaded: only the next save or close
        makes that durable. verified: called once the rows are verified; if it raises, nothing has changed.
        replaced: whether another load is about to replace the rows, so that no remark is made about their ids.
        """
        report, ids = LoadReport(), LoadedIds(self.spec, counts=not replaced)
        described = {**snapshot.description, "rows": snapshot.manifest.rows}
        if selection.has_every_row and snapshot.shard is None:
            report = LoadReport(snapshot.manifest.rows)
        else:
            chunks = ids.stored(snapshot.chunks())
            for _ in selection.chunks(chunks, described, report):  # counted first, for `capacity`
                pass
        stored = {**selection.description(described), "rows": report.rows}
        selected = ids.counted(selection.rows_of(snapshot, LoadReport()))
        with self._with_seed_of(snapshot.description), contextlib.nullcontext() if running is None else running.lock:
            whole = snapshot.manifest.id if selection.is_whole else None
            source = contextlib.nullcontext(selected)
            table = self._restore(optimizer, stored, source, running, whole, verified=verified)
            if self.folder is not None and self.folder.clean_marker is None:
                self.folder.note_step(table.step)
        if running is not None:
            log.info(
                "embedding %r: %d rows of step %d, loaded from snapshot %r",
                self.spec.name,
                report.rows,
                table.step,
                snapshot.name,
            )
        untrained = not described["states"] and not described["step"]
        remarks = self._remark(ids.remarks(f"snapshot {snapshot.name!r}", untrained, described["padding_idx"]))
        return table, replace(report, remarks=report.remarks + remarks)

    def _remark(self, remarks: list[str]) -> list[str]:
        for remark in remarks:
            log.warning("embedding %r: %s", self.spec.name, remark)
        return remarks

    def load_tensors(self, optimizer: RowOptimizer | None, given: RowTensors, running: OpenTable) -> OpenTable:
        """The table with rows that are in memory; closes `running`. The recovery snapshot stays the same."""
        with self._with_seed_of(given.description), running.lock:
            check_stored(self.spec, given.stored(), optimizer, SnapshotError, "the state")
            ids = LoadedIds(self.spec)
            chunks = ids.counted(checked_rows(given.chunks(), self.spec.num_tables))
            table = self._restore(optimizer, given.stored(), contextlib.nullcontext(chunks), running)
            self._remark(ids.remarks("the state", False, None))
            if self.folder is not None and self.folder.clean_marker is None:
                self.folder.note_step(table.step)
            return table

    @contextlib.contextmanager
    def _with_seed_of(self, description: dict[str, Any]) -> Iterator[None]:
        """A block that loads rows of this description, and keeps their seed unless it raises."""
        before, self.spec = self.spec, self.spec.with_stored_seed(description)
        try:
            yield
        except BaseException:
            self.spec = before
            raise

    def _restore(
        self,
        optimizer: RowOptimizer | None,
        stored: dict[str, Any],
        source: contextlib.AbstractContextManager[Chunks],
        running: OpenTable | None = None,
        whole: str | None = None,
        verified: Callable[[], None] | None = None,
    ) -> OpenTable:
        """A table with the rows of `source`, built next to the live rows; closes `running` when all are read.

        whole: the id of the snapshot that has these rows; None if none has.
        """
        folder = self.folder
        place = folder.incoming if folder is not None and self._on_disk else None
        if folder is not None:
            folder.clear_incoming()
        table = self._build(optimizer, {**stored, "shards": None}, place)
        try:
            with source as chunks:
                count = self._fill(table, stored, chunks)
            if count != stored["rows"]:
                raise StoreError(f"embedding {self.spec.name!r}: {count} rows were found, not {stored['rows']}")
            if self._on_disk:
                table.flush()
            if verified is not None:
                verified()
        except BaseException:
            _drop(table, place)
            raise
        with uninterrupted():
            try:
                if running is not None:
                    self._replace(running, whole)
            except BaseException:
                _drop(table, place)
                raise
            if place is None or folder is None:
                return table
            marker = self._clean_marker_of(table)
            table.close()
            folder.replace_live(place, marker)
            return self._build(optimizer, marker, folder.live)

    def _replace(self, running: OpenTable, whole: str | None) -> None:
        """Close a table whose rows are replaced. whole: the id of the snapshot that has the new ones, if one has."""
        member = self.member if self.life is None else None  # ranks have noted it together
        with loading({member: whole}) if whole and member is not None else contextlib.nullcontext():
            self.begin_change(notes=whole is None and self.life is None, replaces=True)
            running.close()
            self._unsettled, self._live = "", LiveRows.RECORDED  # the next write is noted, whatever came before
            if member is not None:
                member.replaced(whole)

    def _fill(self, table: OpenTable, stored: dict[str, Any], chunks: Chunks) -> int:
        """Load scanned rows, with room for the optimizer's state if they were put without one. Returns how many."""
        assert table.stack is not None
        if table.state.names and not stored["states"]:
            chunks = table.state.added_to(chunks, self.spec.dim, self.spec.dtype)
        checked = checked_rows(chunks, self.spec.num_tables)
        remembered = table.lifecycle.note_loaded(checked)
        counts = load_rows(table.stack, remembered, table.form, self.spec.num_tables)
        table.counts.note_stored(counts)
        return int(counts.sum())

    def _build(self, optimizer: RowOptimizer | None, stored: dict[str, Any] | None, place: Path | None) -> OpenTable:
        """A table over an empty stack, or over RocksDB in `place`, with the step and the row count of `stored`."""
        state = RowState() if stored is None else RowState.described(stored)
        if optimizer is not None:
            self.check_row(optimizer)
            state = self.spec.state_of(optimizer)
        rows, shards = (0, None) if stored is None else (stored["rows"], stored["shards"])
        lifecycle = Lifecycle(self.spec.name, self.spec.num_tables, self.options, rows, self.spec.seed % 2**64)
        processor = self._processor(self.spec, state, lifecycle.capacity)
        stack = build_stack(self._budgets.numbers(processor), processor, place, shards)
        on_disk = self.folder is not None or isinstance(stack.bottom, RocksDB)
        write_at = partial(self._write_at, stack.bottom) if on_disk else None
        table = OpenTable(self.spec, processor, stack, state, lifecycle, write_at, self.options.background_threads)
        known = "" if stored is None else str(stored.get(RUN, "")) or self._run
        self._run = known or (self.life and self.life.run) or secrets.token_hex(8)
        table.begin(optimizer, self._run, stored)
        if stored is not None and shards is not None:  # the rows are in RocksDB already
            table.counts.note_stored(counts_in(stored, self.spec.num_tables))
            if lifecycle.has_ledger:
                try:
                    remembered = lifecycle.note_loaded(checked_rows(table.scan(), self.spec.num_tables))
                    table.counts.note_stored(counted_chunks(remembered, self.spec.num_tables))
                except BaseException:
                    table.close()
                    raise
        return table

    def _write_at(self, bottom: RocksDB | InMemoryTier, step: int) -> None:
        """Prepare the folder for a write of step `step`. Called before each write."""
        if isinstance(bottom, RocksDB):
            bottom.make_writable()  # first: if it fails, the live rows keep their clean marker
        if self.folder is not None:
            if self._live is not LiveRows.CHANGED:
                self.begin_change()
                self._live = LiveRows.CHANGED
            if self.life is None and self.member is not None:
                self.member.write()
            self.folder.note_step(step)

    def count_write(self, before: int | None = None) -> None:
        """Count a write of all ranks. before: how many there were, if this shard may have missed some."""
        assert self.life is not None
        self.life.count(before)
        if self.member is not None:
            self.member.write()

    def rename(self, name: str) -> None:
        self.spec = replace(self.spec, name=name)

    def begin_change(self, notes: bool = True, replaces: bool = False) -> None:
        """Note that the rows change, then clear the clean marker, whose rows are not the table's from here on.

        notes: whether the record is to say it; a load of a whole snapshot has written what it says (`loading`).
        replaces: as of `Member.begin_change`.
        """
        if self.folder is None:
            return
        with uninterrupted():
            if self.member is not None and notes:
                self.member.begin_change(replaces)
            if self.folder.clean_marker is not None:
                self.folder.clear_clean_marker()
        if not self._on_disk:
            self.folder.discard_live()  # this frees space: rows in memory are written again at the close

    def _clean_marker_of(self, table: OpenTable) -> dict[str, Any]:
        assert table.stack is not None
        bottom = table.stack.bottom
        live: dict[str, Any] = {"live": "rows"}
        if isinstance(bottom, RocksDB):
            live = {"live": "rocksdb", "shards": bottom.shards, FILES: bottom.versions()}
        counts = table.counts.known_by_table
        known = {} if counts is None else {FIELD: counts.tolist()}
        share = {} if self.life is None else {SHARE: self.life.described()}
        version = {} if self.member is None or self.life is not None else {LIVE: self.member.version}
        return {**table.describe(), **live, "rows": table.counts.rows, **known, **share, **version}


def _drop(table: OpenTable, place: Path | None) -> None:
    """Close and remove a table that was built in `place`, next to the live rows."""
    table.close()
    if place is not None:
        with contextlib.suppress(OSError):  # the first error is the one to raise, and the next open removes the folder
            remove_folder(place)
