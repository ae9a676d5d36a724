"""The folder of a model, which has several store folders: commands save and load all of them at the same moment."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.errors import SnapshotError, StoreError, TierbedError
from .arguments import locked
from .output import IN_USE, ProgressCallback, fail

if TYPE_CHECKING:
    from ..snapshots.files.format import Manifest


def stores_at(path: Path) -> dict[Path, str]:
    """The stores in the folder of a model, each with its name, or the store folder `path`, with "". Raises StoreError.

    What commands print of several stores begins with these names.
    """
    from ..snapshots.store.status import existing_store, stores_in

    return {store: store.name for store in stores_in(path)} or {existing_store(path): ""}


def serving_processes(stores: Iterable[Path], timeout: float, as_json: bool) -> dict[Path, int]:
    """By store, the process that has it open and answers requests.

    Exits with `IN_USE` if a process has one open and does not serve it, such as a command. Raises StoreError if it is
    stopped.
    """
    from ..snapshots.control.client import request_status
    from ..snapshots.store.folder_state import holder

    serving = {store: process for store in stores if (process := holder(store)) is not None}
    for store in [store for store in serving if request_status(store, timeout) is None]:
        with locked([store], as_json):  # exits and names the process, unless it has closed the store by now
            del serving[store]
    return serving


def save_together(
    stores: list[Path], name: str, kind: str, overwrite: bool, timeout: float, advance: ProgressCallback, as_json: bool
) -> list[Manifest]:
    """Save a snapshot of each store: of open stores by their process, together; then of closed stores by this one.

    Exits with `IN_USE` if several processes have stores open. Raises StoreError, SnapshotError, OptionError.
    """
    from ..snapshots.control.client import request_save
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.store.closed_store import save_closed_stores

    serving = serving_processes(stores, timeout, as_json)
    if len({*serving.values()}) > 1:
        those = ", ".join(f"{str(store)!r} in process {process}" for store, process in serving.items())
        message = (
            f"several processes have these stores open, and they share no step: {those}; save each store by itself"
        )
        fail(message, IN_USE, as_json)
    done = 0

    def advance_to(rows: int, of: int | None) -> None:
        nonlocal done
        advance(rows - done)
        done = rows

    first = next(iter(serving), None)
    if first is not None and request_save(first, name, kind, advance_to, timeout, overwrite, [*serving]) is None:
        raise StoreError(f"process {serving[first]} has closed {str(first)!r}: save again")
    closed = [store for store in stores if store not in serving]
    try:  # after the open ones: while those are saved, their step may open one of these
        with locked(closed, as_json, exits=not serving) as folders:
            save_closed_stores(folders, name, advance, kind, overwrite)
    except TierbedError as error:
        if not serving:
            raise
        saved, left = (", ".join(store.name for store in some) for some in (serving, closed))
        raise SnapshotError(f"snapshot {name!r} was saved of {saved}, but not of {left}: {error}") from error
    return [Snapshot.open(store / "snapshots" / name).manifest for store in stores]
