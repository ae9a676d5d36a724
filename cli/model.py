"""Helpers for commands on a model's folder: its stores, one per embedding, are saved and loaded together."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..engine.errors import SnapshotError, StoreError, TierbedError
from .arguments import lock_stores
from .output import EXIT_IN_USE, ProgressCallback, fail

if TYPE_CHECKING:
    from ..snapshots.files.format import Manifest


def find_stores_at(path: Path) -> dict[Path, str]:
    """Return {store folder: embedding name} for a model's folder, or {path: ""} for one store. Raises StoreError."""
    from ..snapshots.store.status import find_stores, require_store

    return {store: store.name for store in find_stores(path)} or {require_store(path): ""}


def find_serving_processes(stores: Iterable[Path], timeout: float, as_json: bool) -> dict[Path, int]:
    """Return {store folder: process id} for the stores that are open in a process that answers requests.

    Some processes, such as other `tierbed` commands, answer no requests. Exits with code `EXIT_IN_USE` if one of them
    has a store open. Raises StoreError if a process does not answer in time, for example because it is suspended.
    """
    from ..snapshots.control.client import request_status
    from ..snapshots.store.folder_state import find_holder

    processes = {store: process for store in stores if (process := find_holder(store)) is not None}
    for store in [store for store in processes if request_status(store, timeout) is None]:
        with lock_stores([store], as_json):  # exits if the store is still open, and names the process
            del processes[store]
    return processes


def save_together(
    stores: list[Path], name: str, kind: str, overwrite: bool, timeout: float, advance: ProgressCallback, as_json: bool
) -> list[Manifest]:
    """Save a snapshot of each store. The process that has stores open saves them; this process saves the closed stores.

    Exits with code `EXIT_IN_USE` if several processes have stores open. Raises StoreError, SnapshotError, OptionError.
    """
    from ..snapshots.control.client import request_save
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.store.closed_store import save_closed_stores

    processes = find_serving_processes(stores, timeout, as_json)
    if len({*processes.values()}) > 1:
        holders = ", ".join(f"{str(store)!r} in process {process}" for store, process in processes.items())
        message = f"several processes have these stores open, so no step is common: {holders}; save each store alone"
        fail(message, EXIT_IN_USE, as_json)
    num_done = 0

    def advance_to(rows: int, total: int | None) -> None:
        nonlocal num_done
        advance(rows - num_done)
        num_done = rows

    first = next(iter(processes), None)
    if first is not None and request_save(first, name, kind, advance_to, timeout, overwrite, [*processes]) is None:
        raise StoreError(f"process {processes[first]} closed {str(first)!r} before the save; save again")
    closed_stores = [store for store in stores if store not in processes]
    try:  # save closed stores last, because the trainer may still open one of them in its current step
        with lock_stores(closed_stores, as_json, exits=not processes) as folders:
            save_closed_stores(folders, name, advance, kind, overwrite)
    except TierbedError as error:
        if not processes:
            raise
        saved, unsaved = (", ".join(store.name for store in part) for part in (processes, closed_stores))
        raise SnapshotError(f"snapshot {name!r} was saved for {saved}, but not for {unsaved}: {error}") from error
    return [Snapshot.open(store / "snapshots" / name).manifest for store in stores]
