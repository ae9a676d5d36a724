"""Serves requests from other processes: to save or prune snapshots of open rows, or to read a row.

A request is served between two steps. With several ranks, rank 0 receives it, and all ranks serve it at the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Event, Lock
from time import sleep
from typing import Any, TypeVar

from ...distributed.world import World
from ...engine.errors import GroupError, TierbedError
from ...engine.table.table import OpenTable
from ...snapshots.control.server import ClientSaveRequest
from ...snapshots.files.format import Manifest
from ...snapshots.files.reader import Snapshot, list_snapshots
from ...snapshots.inspection.row import read_row, resolve_row_key, to_plain_row
from ..tables.local_table import LocalTable
from .rows_reference import check_not_pending
from .save_and_load import save_together

Handle = Any  # a `TableHandle`; importing it here would be circular
T = TypeVar("T")

_POLL_SECONDS = 0.05  # pause between two checks that the client still waits


def read_plain_row(local: LocalTable, label: int | str, key: int) -> dict[str, Any]:
    """Return a row of this process as plain values, or {} if the row is missing. label: the table's index or name."""
    table = local.table
    with table.lock:
        table.raise_deferred_error()
        description = table.describe()
        row = read_row(table.prepare_top_tier(), table.row_format, *resolve_row_key(description, label, key))
    return {} if row is None else to_plain_row(row[0], description)


class LocalRequestHandler:
    """Serves requests for this process's rows in the server's thread. find_handle: finds a store's handle by path."""

    def __init__(self, handle: Handle, find_handle: Callable[[str], Handle]) -> None:
        self._handle, self._find_handle = handle, find_handle

    def save_between_steps(self, save: ClientSaveRequest) -> Manifest | None:
        others = [self._find_handle(path) for path in save.stores]
        handles = others if len(others) > 1 else [self._handle]

        def save_now() -> Manifest:
            for handle in others or handles:
                check_not_pending(handle.name, handle.pending_references)
            save.progress(0)
            managers = [handle.snapshot_manager for handle in handles]
            save_together(self._handle.world, managers, save.name, save.kind, save.overwrite, progress=save.progress)
            return managers[0].open_by_name(save.name).manifest

        return self._visit(save_now, save.is_given_up, others)

    def prune_between_steps(
        self, keep_last: int, keep_every: int | None, progress: Callable[[int], None]
    ) -> tuple[list[str], list[str]]:
        manager = self._handle.snapshot_manager
        pruned = manager.prune_on_rank_0(keep_last, keep_every, progress)
        return pruned, [snapshot.name for snapshot in list_snapshots(manager.folder).snapshots]

    def read_row_between_steps(self, table: int | str, key: int, give_up: Callable[[], bool]) -> dict[str, Any] | None:
        return self._visit(lambda: read_plain_row(self._handle.local, table, key), give_up)

    def status(self) -> dict[str, Any]:
        table = self._handle.local.table
        return {"name": self._handle.name, "step": table.step, "rows": table.counts.num_rows}

    def _visit(self, call: Callable[[], T], give_up: Callable[[], bool], others: Sequence[Handle] = ()) -> T | None:
        """Run `call` while no table of the group is in a step. Returns its result; None if the client gave up first."""
        while True:
            table = self._handle.table
            with table.step_gate.between_steps(lambda: self._list_tables(others), give_up) as entered:
                if not entered:
                    return None
                if table.stack is not None:
                    return call()
            sleep(_POLL_SECONDS)  # the table was closed; a new table is about to replace it

    def _list_tables(self, others: Sequence[Handle]) -> list[OpenTable]:
        groups = {handle.group for handle in (self._handle, *others) if handle.group is not None}
        handles = [self._handle, *others, *(handle for group in groups for handle in group.list_handles())]
        return list(dict.fromkeys(handle.local.table for handle in handles))


class RankRequestHandler(LocalRequestHandler):
    """Serves requests for an embedding that is sharded across ranks. Only rank 0 receives requests.

    The server's thread stores a request in this object. Rank 0 sets a flag in the header of the next collective, and
    all ranks then serve the request in the training thread.
    """

    def __init__(self, world: World, handle: Handle, find_handle: Callable[[str], Handle]) -> None:
        super().__init__(handle, find_handle)
        self._world = world
        self._request: _PendingRequest | None = None
        self._take_lock, self._request_lock = Lock(), Lock()

    def can_serve(self) -> bool:
        """True if rank 0 got a request, and no table of this request is in a step."""
        request = self._request
        if request is None or any(handle.local.table.is_in_step for handle in request.handles):
            return False
        return all(handle.local.group is None or not handle.local.group.is_mid_step for handle in request.handles)

    def serve(self) -> None:
        """Serve rank 0's request. All ranks call this once `can_serve` is true on one rank. Raises GroupError."""
        op = f"a request of another process to embedding {self._handle.name!r}"
        request = self._take_request(begin=True)
        call: list[Any] | None = self._world.call_on_rank_0(op, lambda: None if request is None else request.call)
        if call is None:
            return
        error: BaseException | None = None
        try:
            self._execute(op, call, request)
        except BaseException as caught:
            error = caught
            if self._world.failure is not None or not isinstance(error, TierbedError):
                raise
        finally:
            if request is not None:
                request.end(error)

    def _execute(self, op: str, call: list[Any], request: _PendingRequest | None) -> None:
        match call:
            case ["save", name, kind, overwrite, stores]:
                managers, find = [self._handle.snapshot_manager], self._find_handle
                if stores:
                    handles = self._world.call_on_all_ranks(op, lambda: [find(path) for path in stores])
                    managers = [handle.snapshot_manager for handle in handles]
                progress = None if request is None else request.progress
                save_together(self._world, managers, name, kind, overwrite, progress=progress)
            case ["get", table, key]:
                rows = self._world.all_gather_object(op, lambda: read_plain_row(self._handle.local, table, key))
                if request is not None:
                    request.row = next((row for row in rows if row), {})

    def save_between_steps(self, save: ClientSaveRequest) -> Manifest | None:
        store_paths = list(save.stores) if len(save.stores) > 1 else []
        handles = [self._find_handle(path) for path in store_paths] or [self._handle]
        for handle in handles:
            check_not_pending(handle.name, handle.pending_references)
        call = ["save", save.name, save.kind, save.overwrite, store_paths]
        if self._submit(_PendingRequest(call, handles, save.is_given_up, save.progress)) is None:
            return None
        return Snapshot.open(self._handle.snapshot_manager.folder / save.name).manifest

    def read_row_between_steps(self, table: int | str, key: int, give_up: Callable[[], bool]) -> dict[str, Any] | None:
        request = self._submit(_PendingRequest(["get", table, key], [self._handle], give_up))
        return None if request is None else request.row

    def status(self) -> dict[str, Any]:
        return super().status() | {"ranks": self._world.size}

    def _submit(self, request: _PendingRequest) -> _PendingRequest | None:
        """Wait until the ranks have served `request`. Returns `request`, or None if the client gave up before that."""
        while not self._request_lock.acquire(timeout=_POLL_SECONDS):  # one request at a time
            if request.give_up():
                return None
        try:
            self._request = request
            while not request.done.wait(_POLL_SECONDS):
                if request.give_up():
                    self._take_request()  # does nothing if the ranks have taken the request
        finally:
            self._request_lock.release()
        if request.error is not None:
            raise request.error
        return request if request.is_begun else None

    def _take_request(self, begin: bool = False) -> _PendingRequest | None:
        """Remove the request. Returns it if `begin` is True and the client still waits, else marks it as done."""
        with self._take_lock:
            request, self._request = self._request, None
            if request is not None:
                request.is_begun = begin and not request.give_up()
                if request.is_begun:
                    return request
                request.done.set()
            return None


@dataclass(eq=False)
class _PendingRequest:
    """A request to all ranks."""

    call: list[Any]  # the name and arguments of the call to make
    handles: Sequence[Any]  # the request runs when all these tables are between two steps
    give_up: Callable[[], bool]
    progress: Callable[[int], None] | None = None
    is_begun = False  # True once the ranks serve the request
    done: Event = field(default_factory=Event)  # set when the request has ended
    error: TierbedError | None = None
    row: dict[str, Any] = field(default_factory=dict)

    def end(self, error: BaseException | None) -> None:
        """Called when the ranks have served the request or failed."""
        if isinstance(error, TierbedError):
            self.error = error
        elif error is not None:
            self.error = GroupError(f"the ranks could not serve the request {self.call}: {error!r}")
        self.done.set()
