"""The folder of a model, which has several store folders in it: what commands do with all of them at one instant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..engine.store.folder import StoreFolder
    from ..snapshots.files.format import Manifest


def stores_at(path: Path) -> list[Path]:
    """The store folder `path`, or those in the folder of a model. Raises StoreError."""
    from ..snapshots.store.status import existing_store, stores_in

    return stores_in(path) or [existing_store(path)]


@contextmanager
def held_together(stores: list[Path]) -> Iterator[list[StoreFolder]]:
    """All stores, held by this process. Raises StoreError."""
    from ..engine.store.folder import StoreFolder

    with ExitStack() as holding:
        yield [holding.enter_context(StoreFolder(store)) for store in stores]


def save_together(
    stores: list[Path], name: str, kind: str, overwrite: bool, timeout: float, told: Callable[[int], None]
) -> list[Manifest]:
    """Save a snapshot of each store, all or none: by the process that has them open, or of closed ones by this.

    Raises StoreError, also for stores of several processes; SnapshotError, OptionError.
    """
    from ..engine.errors import StoreError
    from ..engine.store.folder_state import holder
    from ..snapshots.asking.asking import ask_save
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.store.linked import remove_snapshot

    held = {store: process for store in stores if (process := holder(store)) is not None}
    if len({*held.values()}) > 1:
        those = ", ".join(f"{str(store)!r} in process {process}" for store, process in held.items())
        raise StoreError(f"several processes have these stores open, and no step is one of all: {those}; save each")
    closed = [store for store in stores if store not in held]
    with held_together(closed) as folders:
        made = _save_closed(folders, name, kind, overwrite, told) if folders else []
        try:
            if held:
                first, *others = held
                ask_save(first, name, kind, None, timeout, overwrite, [first, *others])
        except BaseException:
            for folder in folders:
                remove_snapshot(folder.snapshots / name)
            raise
    return made + [Snapshot.open(store / "snapshots" / name).manifest for store in held]


def _save_closed(
    folders: list[StoreFolder], name: str, kind: str, overwrite: bool, told: Callable[[int], None]
) -> list[Manifest]:
    from ..snapshots.store.all_or_none import Decided, all_or_none
    from ..snapshots.store.closed_ranks import save_closed
    from ..snapshots.store.closed_store import OfAll

    made: dict[int, Manifest] = {}

    def save(number: int, commit: Decided) -> None:
        folder = folders[number]
        own = kind if kind != "incremental" or folder.noting.base else "full"
        made[number] = save_closed(folder, name, told, own, overwrite, OfAll(folders[0].path, commit))

    all_or_none(folders[0].snapshots / name, [partial(save, number) for number in range(len(folders))])
    return [made[number] for number in range(len(folders))]


def load_together(folders: list[StoreFolder], name: str, told: Callable[[int], None]) -> list[Manifest]:
    """Make a snapshot of each store its live rows, verified before any is replaced; a kill is finished by the next run.

    Raises SnapshotError, also for snapshots that were saved apart; StoreError.
    """
    from ..engine.store.versions import Instant
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.store.closed_store import load_live
    from ..snapshots.store.instants import ClosedStore, Group, check_one_instant, rows_of

    snapshots = [Snapshot.open(folder.snapshots / name) for folder in folders]
    check_one_instant([folder.path.name for folder in folders], snapshots)
    for snapshot in snapshots:
        snapshot.verify()
    group = Group(folders[0].path, {})
    versions = {id: member.present for id, member in group.members.items()}
    for folder, snapshot in zip(folders, snapshots, strict=True):
        record = ClosedStore(folder).record
        if record is not None:
            versions[record.id] = rows_of(snapshot).now
    together = Instant(group.number + 1, versions) if versions else None
    made = [load_live(f, s, told, together=together)[0] for f, s in zip(folders, snapshots, strict=True)]
    for folder in folders:
        ClosedStore(folder).rest()
    return made
