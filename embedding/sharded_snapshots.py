"""The snapshots of rows that ranks share. Every call is collective unless marked local."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

from ..distributed.world import catch
from ..engine.errors import StoreError
from ..engine.table.change_observers import still_saving
from ..snapshots.files.format import HashShard
from ..snapshots.files.reader import Snapshot
from ..snapshots.files.writer import NewSnapshots
from ..snapshots.store.group import loading
from ..snapshots.store.linked import OF_STATE
from ..snapshots.store.record import EMPTY
from ..snapshots.store.retention import state_snapshot
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
    _came_as = 0, ""  # how many writes there were when the rows were opened or loaded, and their version then

    def close(self) -> None:
        """Close the rows of this rank."""
        raise NotImplementedError

    def rows_reference(self) -> RowsReference:
        return reference_at(self.own.rows_reference().step, self.place, self.base, self.version)

    @property
    def version(self) -> str | None:
        """The version of the rows, which all ranks know; None without a folder. Local."""
        since, version = self._came_as
        life = self.own.life
        return None if self.place is None else version if life.writes == since else f"{life.run}:{life.writes}"

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
        table, member = self.own.table, self.member
        with locked([self]), NewSnapshots() as new:
            self.world.call_on_all_ranks(op, table.check)
            source = self._source(new.new_id())

            def find() -> tuple[str, bool]:
                """The snapshot of these rows, "" for none, and whether it is to be made."""
                assert member is not None
                if member.now.snapshot == EMPTY:
                    return "", False
                place = state_snapshot(self.checked_store(), member.now.snapshot, keep)
                return (f"{OF_STATE}{source.id}", True) if place is None else (place.name, False)

            name, is_new = self.world.call_on_rank_0(f"{op}: its place", find)
            if is_new:
                save = self.begin_at(op, self.folder / name, source, new, member=member)
                commit(self.world, op, [save], new, catch(save.write)[1])
        found = saved_as(self.place, name) or RowsReference(table.step)
        return found._replace(version=self.version)

    def _load_for_state(self, name: str) -> None:
        op = f"loading snapshot {name!r} of embedding {self.name!r} for a state_dict"
        self.finish_saving()
        snapshot: Snapshot = self.world.call_on_all_ranks(op, lambda: self.snapshot(name))
        self._load(op, snapshot, ALL, True)

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
        return self._load(op, snapshot, selection, strict)

    def load_from(self, snapshot: Snapshot) -> LoadReport:
        op = f"loading snapshot {snapshot.name!r} of embedding {self.name!r}"  # also if a rank is at another step
        return self._load(op, snapshot, ALL, True)

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

    def when_saved(self) -> Callable[[str], None]:
        writes = self.own.life.writes

        def note(id: str) -> None:
            if self.own.life.writes == writes:
                self._came_as = writes, f"{id}:0"

        return note

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
    ) -> LoadReport:
        """Load this rank's part."""
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
            id, whole, member = snapshot.manifest.id, selection.is_whole, self.member
            with ExitStack() as noting:
                if whole:  # the next run loads it, from here on
                    loads = {} if member is None else {member: id}
                    world.call_on_all_ranks(f"{op}: noted", lambda: noting.enter_context(loading(loads)))
                writes = world.all_gather_object(f"{op}: marks", lambda: self.own.begin_load(notes=not whole))
                self.own.count_write(max(writes))  # a rank that failed may have missed some
                if whole:
                    self._came_as = self.own.life.writes, f"{id}:0"
                if member is not None:
                    member.replaced(id if whole else None)

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
        assert report is not None
        report.rows, report.left_out = (sum(column) for column in zip(*counts, strict=True))
        return report

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
