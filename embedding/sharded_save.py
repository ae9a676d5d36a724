"""One snapshot that all ranks write: each its shard, and rank 0 the manifest once all shards are durable."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

from ..distributed.world import World, catch
from ..engine.durable import fsync_dir, temporary_path
from ..engine.errors import StoreError
from ..engine.row_format import Change, Chunks
from ..engine.store.image import MAX_BEFORE_IMAGE_BYTES
from ..engine.table.background_save import BackgroundSave
from ..engine.table.change_observers import ChangeObservers
from ..snapshots.files.format import HashShard, RowFile
from ..snapshots.files.reader import Snapshot
from ..snapshots.files.writer import (
    Files,
    ProgressCallback,
    Together,
    finish,
    new_snapshot,
    write_changes,
    write_shard,
)

log = logging.getLogger("tierbed")


class ShardedSave:
    """A snapshot that has begun on all ranks, as of the step at which this object was made.

    folder: where it will be. parent: the snapshot that it is based on, None for a full one. Raises SnapshotError on all
    ranks if rank 0 cannot begin it. It ends with `commit`, on all ranks, or with `drop`.
    """

    def __init__(
        self,
        world: World,
        op: str,
        folder: Path,
        description: dict[str, Any],
        rows: int,
        overwrite: bool = False,
        parent: Snapshot | None = None,
        together: Together | None = None,
    ) -> None:
        """rows: of this rank. together: on rank 0, of a store that is trained together with others."""
        self._world, self._op, self._folder, self._place = world, op, folder, temporary_path(folder)
        self._description, self._rows, self._parent = description, rows, parent
        self.shard, self._saved_with = HashShard(world.rank, world.size), together
        self.files: Files = {}
        self._parts: list[Any] = []  # of all ranks
        self._id = ""
        self._open = ExitStack()  # on rank 0, the temporary folder
        world.call_on_all_ranks(f"{op}: begun", lambda: self._begin(overwrite))

    def _begin(self, overwrite: bool) -> None:
        if self._world.rank == 0:
            self._open.enter_context(new_snapshot(self._folder, self._description, overwrite, self._saved_with))

    def write(self, chunks: Chunks, progress: ProgressCallback | None = None) -> None:
        """Write the rows of this rank."""
        self.files = write_shard(self._place, self._description, self.shard, chunks, progress)

    def write_changes(self, changes: Iterable[Change], progress: ProgressCallback | None = None) -> None:
        """Write what changed of the rows of this rank since `parent`."""
        self.files = write_shard(self._place, self._description, self.shard, changes, progress, write_changes)

    def commit(self, error: BaseException | None = None, then: Callable[[], None] | None = None) -> str:
        """Complete the snapshot, once every rank has written. Returns its id.

        error: what this rank failed with, which is raised on all ranks, and no files are left. then: called on rank 0
        when it is complete.
        """
        self.gather(error)
        return self.put_in_place(then)

    def gather(self, error: BaseException | None = None) -> None:
        """Wait until every rank has written. Raises `error` on all ranks, and no files are left."""
        try:
            self._parts = self._world.all_gather_object(self._op, lambda: self._written(error))
        except BaseException:
            self._open.__exit__(*sys.exc_info())
            raise

    def put_in_place(self, then: Callable[[], None] | None = None) -> str:
        """Complete a snapshot that all ranks have written. Returns its id. then: as of `commit`."""
        try:
            made: str = self._world.call_on_rank_0(f"{self._op}: in place", lambda: self._finish(then))
        except BaseException:
            self._open.__exit__(*sys.exc_info())
            raise
        return made

    def drop(self) -> None:
        """Drop the snapshot on this rank. Rank 0 removes what was written. Waits for no other rank."""
        dropped = StoreError(f"{self._op}: it was dropped")
        with suppress(Exception):  # what cannot be removed is removed by the next open, save or prune
            self._open.__exit__(StoreError, dropped, None)

    def _written(self, error: BaseException | None) -> list[Any]:
        if error is not None:
            raise error
        files = {name: [file.rows, file.bytes, file.crc32] for name, file in self.files.items()}
        return [self._rows, files]

    def write_manifest(self) -> None:
        """On rank 0, write the manifest: the snapshot is complete but for its name."""
        if self._world.rank == 0:
            entries = sorted((name, entry) for _, part in self._parts for name, entry in part.items())
            files = {name: RowFile(*entry) for name, entry in entries}
            rows, parts, own = sum(rows for rows, _ in self._parts), len(self._parts), self._saved_with
            made = finish(
                self._place, self._description, rows, files=files, parent=self._parent, parts=parts, together=own
            )
            self._id = made.id
            fsync_dir(self._place)
            if self._saved_with is not None:
                fsync_dir(self._folder.parent)  # the name by which it is found when another has committed it

    def _finish(self, then: Callable[[], None] | None) -> str | None:
        if self._world.rank != 0:
            return None
        if not self._id:
            self.write_manifest()
        self._open.close()
        if then is not None:
            try:
                then()
            except StoreError as error:
                raise StoreError(
                    f"{self._op}: the snapshot is saved, but the store folder could not record which rows it has: "
                    f"{error}; make room, and save again before another number of ranks opens the rows"
                ) from error
        return self._id


def commit_together(
    world: World,
    op: str,
    saves: Sequence[ShardedSave],
    errors: Sequence[BaseException | None],
    then: Sequence[Callable[[], None]],
) -> list[str]:
    """Do `ShardedSave.commit` of several snapshots, all or none: all exist once the first does. Returns their ids."""
    try:
        for save, error in zip(saves, errors, strict=True):
            save.gather(error)
        if len(saves) > 1:
            for save in saves:
                world.call_on_all_ranks(f"{op}: manifest", save.write_manifest)
        return [save.put_in_place(noted) for save, noted in zip(saves, then, strict=True)]
    except BaseException:
        for save in saves:
            save.drop()
        raise


class BackgroundShardedSave:
    """Snapshots that a thread of each rank for each of them writes while steps go on: a `SaveHandle` of all ranks.

    They are complete, all or none, when all ranks have called `at_step` or `wait` after the last of them had written.
    `wait` is called by all ranks.
    """

    def __init__(
        self,
        world: World,
        op: str,
        parts: Sequence[tuple[ChangeObservers, ShardedSave]],
        then: Sequence[Callable[[], None]],
        what: str,
    ) -> None:
        """parts: of each table, this rank's observers and save. then: called on rank 0 once it is complete."""
        self.what = what
        self._world, self._op, self._then = world, op, then
        self._saves = [save for _, save in parts]
        self._watches = [watch for watch, _ in parts]
        self._dropped = Event()
        self._has_ended = False
        self._error: BaseException | None = None
        self._threads: list[BackgroundSave] = []
        _, error = catch(self._begin)
        try:
            world.handshake(f"{op}: threads", error)
        except BaseException:
            self.drop()
            raise

    def _begin(self) -> None:
        for watch, save in zip(self._watches, self._saves, strict=True):
            write = partial(self._write, save)
            self._threads.append(watch.save_in_background(self.what, write, MAX_BEFORE_IMAGE_BYTES // len(self._saves)))

    def _write(self, save: ShardedSave, chunks: Chunks) -> None:
        save.write(self._rows(chunks))

    def _rows(self, chunks: Chunks) -> Chunks:
        for chunk in chunks:
            if self._dropped.is_set():
                raise StoreError("the embedding was closed before all ranks had written it")
            yield chunk

    @property
    def done(self) -> bool:
        """Whether the save has ended on all ranks, with or without an error."""
        return self._has_ended

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all ranks have written, for `timeout` seconds at most; False if one has not.

        Raises the error of a rank on all ranks: then there is no snapshot. All ranks call it.
        """
        if not self._has_ended:
            end = None if timeout is None else monotonic() + timeout
            error = None
            for thread in self._threads:
                thread.hurry()
            for thread in self._threads:
                _, failed = catch(partial(thread.wait, None if end is None else max(end - monotonic(), 0)))
                error = error or failed
            self.at_step()  # which raises the error of the save on all ranks
            if error is not None and not isinstance(error, Exception):
                raise error  # Ctrl-C, which ends the wait alone
        if self._error is not None:
            raise self._error
        return self._has_ended

    def at_step(self) -> None:
        """Complete the snapshots if every rank has written. All ranks call it, between two steps."""
        if self._has_ended:
            return
        is_writing = not all(thread.done for thread in self._threads)
        if any(self._world.handshake(f"{self._op}: written", note=is_writing).notes):
            return
        self._has_ended = True
        failures = [catch(partial(thread.wait, 0))[1] for thread in self._threads]
        made, self._error = catch(lambda: commit_together(self._world, self._op, self._saves, failures, self._then))
        if self._error is None:
            for watch, id in zip(self._watches, made, strict=True):
                watch.changes_saved(id)
        elif self._error is not self._world.shared_error:
            raise self._error
        else:
            log.error("saving %s failed: %s", self.what, self._error)

    def drop(self) -> None:
        """Drop the save, unless the snapshots are complete. Waits for this rank's threads alone."""
        if self._has_ended:
            return
        self._has_ended = True
        self._error = StoreError(f"{self.what} was not saved: the embedding was closed before all ranks had written it")
        self._dropped.set()
        for watch in self._watches:
            watch.finish_saving()
        for save in self._saves:
            save.drop()
        log.error("%s", self._error)
