"""Saves in the background: one thread per table writes the table's snapshot while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock
from time import monotonic

from ...distributed.world import World, try_call
from ...engine.errors import StoreError, undo_on_error
from ...engine.row_format import Chunks
from ...engine.store.image import MAX_BEFORE_IMAGE_BYTES
from ...engine.table.background_save import BackgroundSave
from ...engine.threads import POLL_SECONDS
from ...snapshots.files.writer import NewSnapshots
from .table_save import TableSave, commit

log = logging.getLogger("tierbed")


@dataclass
class CheckpointPart:
    """What a checkpoint adds to its rows' background save. `label` names the checkpoint in messages."""

    label: str
    write: Callable[[], None]  # writes everything except rows; called by one thread on each rank
    ending: ExitStack  # closed once all snapshots are complete, or with the error for which the save failed
    yields_to_saves: bool = False  # True for a publish: the next save waits for it


class BackgroundSnapshotJob:
    """Writes snapshots in threads while training continues. Implements `SaveHandle`.

    In one process, the last thread to finish writing gives all snapshots their names. With several ranks,
    `try_complete` or `wait` names the snapshots once all ranks wrote their rows. `part` writes nothing unless the
    snapshots belong to a checkpoint.
    """

    def __init__(
        self, world: World, op: str, saves: list[TableSave], new_snapshots: NewSnapshots, part: CheckpointPart
    ) -> None:
        self.label, self._part = part.label, part
        self.yields_to_saves = part.yields_to_saves
        self._world, self._op, self._saves, self._new_snapshots = world, op, saves, new_snapshots
        self._threads: list[BackgroundSave] = []
        self._lock, self._ended_tables = Lock(), set[int | None]()
        self._snapshot_ids: list[str] = []
        self._error: BaseException | None = None
        self._drop_event, self._end_event = Event(), Event()
        _, error = try_call(self._start)
        with undo_on_error(self.drop):
            world.handshake(f"{op}: threads", error)

    def _start(self) -> None:
        max_bytes = MAX_BEFORE_IMAGE_BYTES // max(len(self._saves), 1)
        try:
            if not self._saves:
                self._part.write()
            for index, save in enumerate(self._saves):
                self._threads.append(save.begin_in_background(partial(self._write, save, index), max_bytes))
        except BaseException as error:
            for index in range(len(self._threads), len(self._saves)):
                self._report_ended(index, error)
            self._report_ended(None, error)
            raise
        self._report_ended(None)

    def _write(self, save: TableSave, index: int, chunks: Chunks) -> None:
        """Write the rows of one table, then wait for the other tables' threads. Runs in the table's thread."""

        def write() -> None:
            save.write(parts=[self._raise_if_dropped(chunks)])
            if index == 0:
                self._part.write()

        _, error = try_call(write)
        if self._world.size == 1:
            self._report_ended(index, error)
            while not self._end_event.wait(POLL_SECONDS):
                for other, thread in enumerate(self._threads):
                    if thread.done:  # the other thread has reported, or died before it could
                        self._report_ended(other, StoreError(f"{self.label}: a thread that writes rows has died"))
            error = self._error
        if error is not None:
            raise error
        if self._world.size == 1:
            save.end(self._snapshot_ids[index], from_image=True)

    def _raise_if_dropped(self, chunks: Chunks) -> Chunks:
        for chunk in chunks:
            if self._drop_event.is_set():
                raise StoreError("the embedding was closed before all ranks wrote their rows")
            yield chunk

    def _report_ended(self, index: int | None, error: BaseException | None = None) -> None:
        """Called when the thread of table `index` has ended, and with index=None once all threads are started.

        The last of these calls completes the save. With several ranks, this method does nothing.
        """
        if self._world.size > 1:
            return
        with self._lock:
            if index in self._ended_tables:
                return
            self._ended_tables.add(index)
            self._error = self._error or error
            is_last = len(self._ended_tables) == len(self._saves) + 1
        if error is not None:
            self._drop_event.set()
        if is_last:
            self._commit(self._error)
            self._end_event.set()

    def _commit(self, error: BaseException | None) -> None:
        def complete() -> list[str]:
            with self._part.ending, self._new_snapshots:
                return commit(self._world, self._op, self._saves, self._new_snapshots, error)

        ids, self._error = try_call(complete)
        self._snapshot_ids = ids or []

    @property
    def done(self) -> bool:
        """True if the save has ended on all ranks, with or without an error."""
        return self._end_event.is_set() if self._world.size > 1 else all(thread.done for thread in self._threads)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds until all snapshots are complete. Returns False if the save continues.

        Ctrl-C ends only the wait, not the save. All ranks call `wait`. If the save failed, `wait` raises the save's
        error on all ranks, and no snapshot exists, unless the error says otherwise.
        """
        end = None if timeout is None else monotonic() + timeout
        error = None
        for thread in self._threads:
            thread.skip_pauses()
        for thread in self._threads:
            if not (self._world.size > 1 and self._end_event.is_set()):
                _, thread_error = try_call(partial(thread.wait, None if end is None else max(end - monotonic(), 0)))
                error = error or thread_error
                if self._world.size == 1 and not isinstance(error, Exception | None):
                    raise error
        self.try_complete()  # raises the save's error on all ranks
        if error is not None and (self._world.size == 1 or not isinstance(error, Exception)):
            raise error
        if self._error is not None:
            raise self._error
        return self.done

    def try_complete(self) -> None:
        """Complete the snapshots if every rank has written its rows. All ranks call this between two steps."""
        if self._world.size == 1 or self._end_event.is_set():
            return
        is_writing = not all(thread.done for thread in self._threads)
        if any(self._world.handshake(f"{self._op}: written", payload=is_writing).payloads):
            return
        self._end_event.set()
        errors = (try_call(partial(thread.wait, 0))[1] for thread in self._threads)
        self._commit(next((error for error in errors if error is not None), None))
        if self._error is None:
            for save, id in zip(self._saves, self._snapshot_ids, strict=True):
                save.end(id, from_image=True)
        elif self._error is not self._world.shared_error:
            raise self._error
        else:
            log.error("saving %s failed: %s", self.label, self._error)

    def drop(self) -> None:
        """With several ranks, drop the save if it is not complete. Waits only for this rank's threads."""
        if self._world.size == 1 or self._end_event.is_set():
            return
        self._end_event.set()
        problem = "its embeddings were closed, or the program ended, before all ranks wrote their rows"
        self._error = StoreError(f"{self.label} was not saved: {problem}; call its wait() first")
        self._drop_event.set()
        with suppress(StoreError), self._part.ending, self._new_snapshots:
            for save in self._saves:
                save.table.observers.finish_saving()
            raise self._error
        log.error("%s", self._error)
