"""The snapshots of rows that ranks share. Every call is collective unless marked local."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from ..distributed.world import catch
from ..engine.errors import StoreError
from ..engine.table.change_observers import still_saving
from ..snapshots.files.format import HashShard
from ..snapshots.files.reader import Snapshot
from ..snapshots.files.versions import EMPTY, Instant, Version
from ..snapshots.files.writer import NewSnapshots, Together
from ..snapshots.store.folder import StoreFolder
from ..snapshots.store.folder_state import FolderState
from ..snapshots.store.instants import rows_of
from ..snapshots.store.linked import OF_STATE
from ..snapshots.store.retention import state_snapshot
from ..snapshots.store.save import note_state
from ..snapshots.store.selection import ALL, LoadReport, Selection
from .rank_recovery import check_row_count
from .rows_reference import RowsReference, reference_at, saved_as
from .saving import BackgroundSaving, commit, locked
from .table_handle import LocalTableHandle
from .table_snapshots import TableSnapshots, open_snapshot

log = logging.getLogger("tierbed")


class ShardedSnapshots(TableSnapshots):
    """The part of `ShardedTableHandle` that saves and loads snapshots: each rank writes and reads its shard."""

    own: LocalTableHandle
    _saving: BackgroundSaving | None = None

    def close(self) -> None:
        """Close the rows of this rank."""
        raise NotImplementedError

    def rows_reference(self) -> RowsReference:
        return reference_at(self.own.rows_reference().step, self.place, self.base, self._now())

    def _now(self) -> Version | None:
        """The version of the rows, known to each rank by what rank 0 notes; None without a folder. Local."""
        record = None if self.place is None else FolderState(self.place.parent).mark.ranks
        if record is None or (record.run, record.saved) != (self.own.life.run, self.own.life.writes):
            return None if self.place is None else (self.own.life.run, self.own.life.writes)
        saved = saved_as(self.place, record.snapshot) if record.snapshot else RowsReference(0, version=EMPTY)
        return (record.run, record.saved) if saved is None else saved.version

    def before_save(self, background: bool) -> None:
        self.at_step()

    def at_step(self) -> None:
        """Between two steps: complete the snapshot in the background, if all ranks have written it."""
        if self._saving is not None:
            self._saving.at_step()
            if self._saving.done:
                self._saving = None

    def drop_saving(self) -> None:
        """Drop the snapshot in the background, before the rows are closed. Local."""
        if self._saving is not None:
            self._saving.drop()

    def save_for_state(self, keep: int | None) -> RowsReference:
        op = self.op("saving rows for a state_dict")
        self.world.handshake(op, same={"state_dict_snapshots": keep})
        self.at_step()
        table, member = self.own.table, self.membership
        with locked([self]), NewSnapshots() as new:
            self.world.call_on_all_ranks(op, table.check)
            together = Together(new.new_id(), None)

            def find() -> tuple[str, bool, str | None]:
                """The snapshot of these rows, "" for none; whether it is to be made; the digest of the instant."""
                nonlocal together
                assert member is not None
                now = member.versions.rows.now
                if now == EMPTY:
                    return "", False, None
                place = state_snapshot(self.checked_store(), now, keep)
                if place is not None:
                    return place.name, False, None if member.record is None else member.seen().digest
                together = self._group_fields(new)
                instant = None if together.saved is None else together.saved.instant.digest
                return OF_STATE + together.id, True, instant

            name, is_new, instant = self.world.call_on_rank_0(f"{op}: its place", find)
            if is_new:
                save = self.begin_at(op, self.folder / name, self._source(together), new)
                (made,) = commit(self.world, op, [save], new, catch(save.write)[1])
                if member is not None:
                    member.saved_as(made)
            if name:
                self._on_rank_0(f"{op}: noted", lambda store: self._note_state(store, self.folder / name))
        found = saved_as(self.place, name) or RowsReference(table.step, version=self._now() if name else EMPTY)
        return found._replace(instant=instant)

    def _note_state(self, store: StoreFolder, place: Path) -> None:
        if note_state(store, place):
            store.note_saved(self.own.life.writes)

    def _load_for_state(self, name: str, instant: str | None) -> None:
        op = f"loading snapshot {name!r} of embedding {self.name!r} for a state_dict"
        member = self.membership

        def find() -> tuple[Snapshot, Instant | None]:
            snapshot = self.snapshot(name)
            return snapshot, None if member is None else member.instant_with(snapshot, instant)

        self.finish_saving()
        snapshot, together = self.world.call_on_all_ranks(op, find)
        self._load(op, snapshot, ALL, True, name, together)

    def load_snapshot(self, name: str, selection: Selection, strict: bool) -> LoadReport:
        """As `LocalTableHandle.load_snapshot`. `rows` and `left_out` of the report are of all ranks."""
        return self._open_and_load(name, lambda: self.snapshot(name), selection, strict)

    def load_rows(self, place: Path, selection: Selection = ALL) -> None:
        with ExitStack() as linking:
            read = self.link_in(place, linking) if self.place is not None and selection.can_recover else place
            self._open_and_load(place.name, lambda: open_snapshot(read), selection, True)

    def _open_and_load(self, name: str, find: Callable[[], Snapshot], selection: Selection, strict: bool) -> LoadReport:
        op = f"loading snapshot {name!r} of embedding {self.name!r}"  # also if a rank is at another step
        self.finish_saving()
        snapshot: Snapshot = self.world.call_on_all_ranks(op, find)
        return self._load(op, snapshot, selection, strict, name if selection.can_recover else None)

    def load_from(self, snapshot: Snapshot, together: Instant | None = None) -> LoadReport:
        op = f"loading snapshot {snapshot.name!r} of embedding {self.name!r}"  # also if a rank is at another step
        return self._load(op, snapshot, ALL, True, snapshot.name, together)

    def check_not_saving(self) -> None:
        if self._saving is not None:  # also if this rank has written its shard
            raise StoreError(still_saving(self._saving.what))

    @property
    def _is_saving(self) -> bool:
        return self._saving is not None  # also if this rank has written its shard

    def check_fit(self, snapshot: Snapshot, selection: Selection = ALL) -> Selection:
        return self.own.check_fit(snapshot, selection)

    def note_saving(self, saving: BackgroundSaving) -> None:
        self._saving = saving

    def _when_saved(self, store: StoreFolder, new: NewSnapshots) -> None:
        writes = self.own.life.writes

        def note() -> None:
            try:
                store.note_saved(writes)
            except StoreError as error:
                raise StoreError(
                    f"embedding {self.name!r}: the snapshot is saved, but the store folder could not record which rows "
                    f"it has: {error}; make room, and save again before another number of ranks opens the rows"
                ) from error

        new.then(note)

    @property
    def _shard(self) -> HashShard:
        return HashShard(self.world.rank, self.world.size)

    def finish_saving(self) -> None:
        if self._saving is not None:
            _, error = catch(self._saving.wait)
            if error is not None and self.world.failure is not None:
                raise error
            interrupted = not isinstance(error, Exception | None)
            self.world.handshake(f"{self._saving.what}: waited for", error if interrupted else None)
            self._saving = None

    def _part_of(self, snapshot: Snapshot) -> Snapshot:
        return snapshot.of_shard(self._shard)

    def _load(
        self,
        op: str,
        snapshot: Snapshot,
        selection: Selection,
        strict: bool,
        base: str | None,
        together: Instant | None = None,
    ) -> LoadReport:
        """Load this rank's part. base: the recovery snapshot from here on, None to keep it.

        together: on rank 0, if embeddings that are trained together are loaded, the instant to which all go.
        """
        world, snapshot, voted = self.world, self._part_of(snapshot), False
        given = selection.tables  # whatever the user gave: errors in it are raised below
        same = {
            "the snapshot's id": snapshot.manifest.id,
            "strict": bool(strict),
            "tables": sorted(map(str, given)) if isinstance(given, Collection) else repr(given),
            "where": selection.where is not None,
            "weights_only": not selection.state,
            "convert": selection.convert,
        }
        world.handshake(op, same=same)

        def verified() -> None:
            nonlocal voted
            voted = True
            check_row_count(world, op, snapshot, lambda: snapshot.shard_rows)
            marks = world.all_gather_object(f"{op}: marks", lambda: [self._begin_write(), secrets.token_hex(8)])
            self.own.count_write(max(writes for writes, _ in marks))  # a rank that failed may have missed some
            self.own.begin_run(marks[0][1] if base is not None else self.own.life.run)
            note = partial(self._note_base, base=base, snapshot=snapshot, together=together)
            self._on_rank_0(f"{op}: noted", note)

        report, error = catch(lambda: self.own.load_part(snapshot, selection, strict, verified))
        if error is not None and voted and not world.must_report(error):
            if error is not world.shared_error:
                self._lose(snapshot.name)
            raise error
        if error is not None and not voted:
            world.handshake(f"{op}: its rows", error)

        def loaded() -> list[int]:
            if report is None:
                raise error or AssertionError("a load without a report")
            return [report.rows, report.left_out]

        try:
            counts = world.all_gather_object(f"{op}: done", loaded)
        except BaseException:
            said = self._lose(snapshot.name)
            if world.failure is None:  # else each rank closes when it likes
                self._close_all(said)
            raise
        if self.membership is not None:
            self.membership.reformed()
        assert report is not None
        report.rows, report.left_out = (sum(column) for column in zip(*counts, strict=True))
        return report

    def _begin_write(self) -> int:
        """Clear the clean marker of this rank's rows. Returns how many writes it has counted."""
        self.own.begin_write()
        return self.own.life.writes

    def _lose(self, name: str) -> str:
        """Let the rows close without a clean marker, so that old rows of one rank do not pass for those of a load."""
        said = f"embedding {self.name!r}: loading snapshot {name!r} failed during its changes, and the rows are closed"
        if self.own.is_open:
            self.own.table.failure = self.own.table.failure or StoreError(said)
        return said

    def _close_all(self, said: str) -> None:
        """Close the rows, if some ranks have those of a load and others do not: every rank calls it."""
        base = f"recovers from snapshot {self.base!r}" if self.base else "begins empty"
        log.error("%s on all ranks; create it again, and it %s", said, base)
        _, error = catch(self.close)
        if error is not None:
            log.error("closing the rows of embedding %r failed as well: %s", self.name, error)

    def _note_base(self, store: StoreFolder, base: str | None, snapshot: Snapshot, together: Instant | None) -> None:
        if base is None:
            return
        noted = {} if self.membership is None else self.membership.loaded(rows_of(snapshot), "load", together)
        store.set_recovery_snapshot(base, **noted)
        store.note_saved(self.own.life.writes, self.own.life.run)
