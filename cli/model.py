"""The folder of a model, which has several store folders in it: what commands do with all of them at one instant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import exit_if_in_use, locked_store
from .output import IN_USE, Progress, fail

if TYPE_CHECKING:
    from ..snapshots.files.format import Manifest
    from ..snapshots.store.folder import StoreFolder


def stores_at(path: Path) -> list[Path]:
    """The store folder `path`, or those in the folder of a model. Raises StoreError."""
    from ..snapshots.store.status import existing_store, stores_in

    return stores_in(path) or [existing_store(path)]


@contextmanager
def held_together(stores: list[Path]) -> Iterator[list[StoreFolder]]:
    """All stores, held by this process. Raises StoreError."""
    from ..snapshots.store.folder import StoreFolder

    with ExitStack() as holding:
        yield [holding.enter_context(StoreFolder(store)) for store in stores]


def served(stores: Iterable[Path], timeout: float, as_json: bool) -> dict[Path, int]:
    """The processes that have stores open and answer, by the store.

    Ends with `IN_USE` if a process has one and does not serve it, such as a command. StoreError if one is stopped.
    """
    from ..snapshots.control.client import ask_status
    from ..snapshots.store.folder_state import holder

    held = {store: process for store in stores if (process := holder(store)) is not None}
    for store in [store for store in held if ask_status(store, timeout) is None]:
        with locked_store(store, as_json):  # unless it was closed by now, this says who has it
            del held[store]
    return held


def save_together(
    stores: list[Path], name: str, kind: str, overwrite: bool, timeout: float, told: Progress, as_json: bool
) -> list[Manifest]:
    """Save a snapshot of each store: by the process that has some open, all of these or none, then closed ones by this.

    Ends with `IN_USE` for stores of several processes. Raises StoreError, SnapshotError, OptionError.
    """
    from ..engine.errors import SnapshotError, StoreError, TierbedError
    from ..snapshots.control.client import request_save
    from ..snapshots.files.reader import Snapshot

    held = served(stores, timeout, as_json)
    if len({*held.values()}) > 1:
        those = ", ".join(f"{str(store)!r} in process {process}" for store, process in held.items())
        message = f"several processes have these stores open, and no step is one of all: {those}; save each"
        fail(message, IN_USE, as_json)
    first = next(iter(held), None)
    if first is not None and request_save(first, name, kind, since(told), timeout, overwrite, [*held]) is None:
        raise StoreError(f"process {held[first]} has closed {str(first)!r}: save again")
    closed = [store for store in stores if store not in held]
    try:  # after the others: while they are saved, their step may open one of these
        with exit_if_in_use(() if held else closed, as_json), held_together(closed) as folders:
            _save_closed(folders, name, kind, overwrite, told)
    except TierbedError as error:
        if not held:
            raise
        saved, left = (", ".join(store.name for store in some) for some in (held, closed))
        raise SnapshotError(f"snapshot {name!r} was saved of {saved}, and not of {left}: {error}") from error
    return [Snapshot.open(store / "snapshots" / name).manifest for store in stores]


def _save_closed(folders: list[StoreFolder], name: str, kind: str, overwrite: bool, told: Progress) -> None:
    from ..snapshots.store.all_or_none import Decided, OfAll, all_or_none
    from ..snapshots.store.closed_store import save_closed

    def save(folder: StoreFolder, commit: Decided) -> None:
        own = kind if kind != "incremental" or folder.noting.base else "full"
        save_closed(folder, name, told, own, overwrite, OfAll(name, folders[0].path, commit))

    if folders:
        all_or_none(folders[0].snapshots / name, [partial(save, folder) for folder in folders])


def load_together(folders: list[StoreFolder], name: str, told: Progress) -> list[Manifest]:
    """Make a snapshot of each store its live rows, verified before any is replaced; a kill is finished by the next run.

    Raises SnapshotError, also for snapshots that were saved apart; StoreError.
    """
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.files.versions import Instant
    from ..snapshots.store.closed_store import check_load, load_live
    from ..snapshots.store.instants import ClosedStore, Group, check_one_instant, rows_of

    snapshots = [Snapshot.open(folder.snapshots / name) for folder in folders]
    check_one_instant([folder.path.name for folder in folders], snapshots)
    for folder, snapshot in zip(folders, snapshots, strict=True):
        check_load(folder, snapshot)
        snapshot.verify()
    groups = [Group(folder.path, {}) for folder in folders]  # not all of one, if the folder has several models
    number = 1 + max(group.number for group in groups)
    loaded = {group.first: rows_of(snapshot).now for group, snapshot in zip(groups, snapshots, strict=True)}
    made = []
    for folder, snapshot, group in zip(folders, snapshots, groups, strict=True):
        versions = {id: loaded.get(id, member.present) for id, member in group.members.items()}
        together = Instant(number, versions) if versions else None
        made.append(load_live(folder, snapshot, told, together=together)[0])
    for folder in folders:
        ClosedStore(folder).rest()
    return made


def since(told: Progress) -> Callable[[int, int | None], None]:
    """A function of the rows done in all, and of how many, which calls `told` with the rows that came since."""
    done = 0

    def all_told(rows: int, of: int | None) -> None:
        nonlocal done
        told(rows - done)
        done = rows

    return all_told
