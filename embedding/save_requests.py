"""What other processes ask of ranks: rank 0 is asked, and the ranks do it at their next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from ..engine.errors import GroupError, TierbedError
from ..snapshots.files.reader import Snapshot, list_snapshots
from .group_snapshots import save_together
from .rows_reference import check_not_awaiting

if TYPE_CHECKING:
    from ..distributed.world import World
    from ..snapshots.files.format import Manifest

_LOOK_AGAIN = 0.05  # seconds between two looks whether the asker still waits


class SaveRequests:
    """What a `StoreServer` of rank 0 is asked to do by the ranks. The other ranks have one that nobody asks.

    A thread of the server leaves a request, which the ranks take in the thread of their steps: rank 0 sets a flag in
    the headers of the next call of all ranks.
    """

    def __init__(self, world: World, held: Any, find: Callable[[str], Any]) -> None:
        """held: the `ShardedTableHandle`, whose file imports this one. find: gives that of a store by its real path."""
        self._world, self._held, self._find = world, held, find
        self._request: _SaveRequest | None = None
        self._taking, self._asking = Lock(), Lock()

    def is_wanted(self) -> bool:
        """Whether rank 0 was asked for something, and the rows are of a whole number of steps."""
        request = self._request
        if request is None or any(held.own.table.in_step for held in request.tables):
            return False
        return all(held.membership is None or not held.membership.is_amid_step for held in request.tables)

    def serve(self) -> None:
        """Do what rank 0 was asked for. Called by all ranks, where `wanted` was true on one. GroupError."""
        op = f"a wish of another process to embedding {self._held.name!r}"
        request = self._take(begin=True)
        wish: list[Any] | None = self._world.call_on_rank_0(op, lambda: None if request is None else request.wish)
        if wish is None:
            return
        error: BaseException | None = None
        try:
            self._do(op, wish, request)
        except BaseException as caught:
            error = caught
            if self._world.failure is not None or not isinstance(error, TierbedError):
                raise
        finally:
            if request is not None:
                request.end(error)

    def _do(self, op: str, wish: list[Any], request: _SaveRequest | None) -> None:
        match wish:
            case ["save", name, kind, overwrite, []]:
                self._held.save_snapshot(name, kind, overwrite, None if request is None else request.progress)
            case ["save", name, kind, overwrite, stores]:
                tables = self._world.call_on_all_ranks(op, lambda: [self._find(store) for store in stores])
                progress = None if request is None else request.progress
                save_together(self._world, tables, name, kind, overwrite, progress=progress)
            case ["get", table, key]:
                rows = self._world.all_gather_object(op, lambda: self._held.own.row(table, key))
                if request is not None:
                    request.row = next((row for row in rows if row), {})

    def save_between_steps(
        self,
        name: str,
        kind: str,
        progress: Callable[[int], None],
        give_up: Callable[[], bool],
        overwrite: bool = False,
        stores: Sequence[str] = (),
    ) -> Manifest | None:
        """Let the ranks save at their next step, as `SaveTarget.save_between_steps` says."""
        several = list(stores) if len(stores) > 1 else []
        tables = [self._find(store) for store in several] or [self._held]
        for one in tables:
            check_not_awaiting(one.name, one.awaited)
        if self._asked(_SaveRequest(["save", name, kind, overwrite, several], tables, give_up, progress)) is None:
            return None
        return Snapshot.open(self._held.folder / name).manifest

    def prune_between_steps(self, keep_last: int, keep_every: int | None) -> tuple[list[str], list[str]]:
        """Prune on rank 0, which has the folder of the snapshots, as `SaveTarget.prune_between_steps` says."""
        home = self._held.home
        assert home is not None
        with self._held.own.table.lock:
            removed = self._held.prune_here(home, keep_last, keep_every)
        return removed, [one.name for one in list_snapshots(home.snapshots).snapshots]

    def row_between_steps(self, table: int | str, key: int, give_up: Callable[[], bool]) -> dict[str, Any] | None:
        """Let the rank that has a row tell it at the next step, as `SaveTarget.row_between_steps` says."""
        request = self._asked(_SaveRequest(["get", table, key], [self._held], give_up))
        return None if request is None else request.row

    def status(self) -> dict[str, Any]:
        """The name, the step and the rows of rank 0, for another process."""
        table = self._held.own.table
        return {"name": self._held.name, "step": table.step, "rows": table.counts.rows, "ranks": self._world.size}

    def _asked(self, request: _SaveRequest) -> _SaveRequest | None:
        """The request, once the ranks have done it; None where they had not begun when the asker gave up."""
        while not self._asking.acquire(timeout=_LOOK_AGAIN):  # one at a time
            if request.give_up():
                return None
        try:
            self._request = request
            while not request.done.wait(_LOOK_AGAIN):
                if request.give_up():
                    self._take()  # unless the ranks have
        finally:
            self._asking.release()
        if request.error is not None:
            raise request.error
        return request if request.begun else None

    def _take(self, begin: bool = False) -> _SaveRequest | None:
        """The request, if there is one that somebody waits for; with `begin`, to do it. One that is not is over."""
        with self._taking:
            request, self._request = self._request, None
            if request is None:
                return None
            request.begun = begin and not request.give_up()
            if not request.begun:
                request.done.set()
            return request if request.begun else None


class _SaveRequest:
    """What was asked for. `begun`: whether the ranks took it. `done` is set when it is over."""

    def __init__(
        self,
        wish: list[Any],
        tables: Sequence[Any],
        give_up: Callable[[], bool],
        progress: Callable[[int], None] = lambda rows: None,
    ) -> None:
        """wish: for all ranks. tables: those that must be between two steps."""
        self.wish, self.tables, self.give_up, self.progress = wish, tables, give_up, progress
        self.begun = False
        self.done = Event()
        self.error: TierbedError | None = None
        self.row: dict[str, Any] = {}

    def end(self, error: BaseException | None) -> None:
        """The ranks are done with it, or have failed."""
        if isinstance(error, TierbedError):
            self.error = error
        elif error is not None:
            self.error = GroupError(f"the ranks did not do {self.wish}: {error!r}")
        self.done.set()
