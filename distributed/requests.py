"""Snapshots of rows of all ranks for other processes: rank 0 is asked, and the ranks save at their next step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from ..engine.errors import GroupError, StoreError, TierbedError
from ..snapshots.files.reader import Snapshot, list_snapshots
from .agreement import told

if TYPE_CHECKING:
    from ..engine.persist.held_table import HeldTable
    from ..snapshots.files.format import Manifest
    from .group import Group
    from .home import Home
    from .saves import RankSnapshots

_LOOK_AGAIN = 0.05  # seconds between two looks whether the asker still waits


class Requests:
    """What a `StoreServer` of rank 0 is asked to do by the ranks. The other ranks have one that nobody asks.

    A thread of the server leaves a request, which the ranks take in the thread of their steps: rank 0 sets a flag in
    the headers of the next call of all ranks.
    """

    def __init__(self, world: Group, own: HeldTable, home: Home | None, saves: RankSnapshots, name: str) -> None:
        self._world, self._own, self._home, self._saves, self._name = world, own, home, saves, name
        self._request: _Request | None = None
        self._taking = Lock()

    @property
    def wanted(self) -> bool:
        """Whether rank 0 was asked for a snapshot, and its rows are of a whole number of steps."""
        if self._request is None or self._own.table.in_step:
            return False
        return self._saves.membership is None or not self._saves.membership.is_amid_step

    def serve(self) -> None:
        """Save what rank 0 was asked for. Called by all ranks, where `wanted` was true on one. GroupError."""
        op = f"a snapshot of embedding {self._name!r} for another process"
        request = self._take(begin=True)
        given = None if request is None else [request.name, request.kind, request.overwrite]
        wish: list[Any] | None = told(self._world, op, lambda: given)[0]
        if wish is None:
            return
        name, kind, overwrite = wish
        error: BaseException | None = None
        try:
            self._saves.save(name, kind, overwrite, None if request is None else request.progress)
        except BaseException as caught:
            error = caught
            if self._world.failure is not None or not isinstance(error, TierbedError):
                raise
        finally:
            if request is not None:
                request.end(error)

    def save_between_steps(
        self,
        name: str,
        kind: str,
        progress: Callable[[int], None],
        give_up: Callable[[], bool],
        overwrite: bool = False,
        stores: Sequence[str] = (),
    ) -> Manifest | None:
        """Let the ranks save a snapshot at their next step, as `Served.save_between_steps` says."""
        if len(stores) > 1:
            raise StoreError(
                "ranks save one embedding for another process at a time: ask for each, or let the training script call "
                "save_snapshot of its graph"
            )
        request = _Request(name, kind, overwrite, progress, give_up)
        self._request = request
        while not request.done.wait(_LOOK_AGAIN):
            if give_up():
                self._take()  # unless the ranks have
        if not request.begun:
            return None
        if request.error is not None:
            raise request.error
        assert self._home is not None
        return Snapshot.open(self._home.snapshots / name).manifest

    def prune_between_steps(self, keep_last: int, keep_every: int | None) -> tuple[list[str], list[str]]:
        """Prune on rank 0, which has the folder of the snapshots, as `Served.prune_between_steps` says."""
        assert self._home is not None
        with self._own.table.lock:
            removed = self._saves.prune_here(self._home, keep_last, keep_every)
        return removed, [one.name for one in list_snapshots(self._home.snapshots).snapshots]

    def row_between_steps(self, table: int | str, key: int, give_up: Callable[[], bool]) -> dict[str, Any] | None:
        """StoreError: rank 0 has not all rows."""
        raise StoreError(
            f"the rows of embedding {self._name!r} are spread over {self._world.size} ranks, which train: give "
            "--snapshot, or get the row in the training script"
        )

    def status(self) -> dict[str, Any]:
        """The name, the step and the rows of rank 0, for another process."""
        table = self._own.table
        return {"name": self._name, "step": table.step, "rows": table.counts.rows, "ranks": self._world.size}

    def _take(self, begin: bool = False) -> _Request | None:
        """The request, if there is one that somebody waits for; with `begin`, to do it. One that is not is over."""
        with self._taking:
            request, self._request = self._request, None
            if request is None:
                return None
            request.begun = begin and not request.give_up()
            if not request.begun:
                request.done.set()
            return request if request.begun else None


class _Request:
    """A snapshot that was asked for. `begun`: whether the ranks took it. `done` is set when it is over."""

    def __init__(
        self, name: str, kind: str, overwrite: bool, progress: Callable[[int], None], give_up: Callable[[], bool]
    ) -> None:
        self.name, self.kind, self.overwrite = name, kind, overwrite
        self.progress, self.give_up = progress, give_up
        self.begun = False
        self.done = Event()
        self.error: TierbedError | None = None

    def end(self, error: BaseException | None) -> None:
        """The ranks are done with it, or have failed."""
        if isinstance(error, TierbedError):
            self.error = error
        elif error is not None:
            self.error = GroupError(f"the ranks did not save {self.name!r}: {error!r}")
        self.done.set()
