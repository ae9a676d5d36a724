"""`tierbed snapshot merge | prune`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .arguments import Json, Name, NewName, Overwrite, Store, Timeout, hold, open_snapshot, told_in_use
from .entries import report
from .model import served, stores_at
from .output import print_json, progress, size, text

if TYPE_CHECKING:
    from ..snapshots.store.retention import Retained


def merge(store: Store, name: Name, new: NewName, overwrite: Overwrite = False, as_json: Json = False) -> None:
    """Make one full snapshot of an incremental one and all that it goes over, which stay.

    Example: tierbed snapshot merge store/users tuesday tuesday-full
    """
    from ..engine.errors import SnapshotError
    from ..snapshots.files.format import check_name
    from ..snapshots.files.writer import write_snapshot
    from ..snapshots.store.instants import needed_snapshots, with_same_rows

    begin = time.monotonic()
    check_name(new)
    with hold(store, as_json) as folder:
        snapshot = open_snapshot(store, name)
        place = folder.snapshots / new
        needed = {*needed_snapshots(folder.path), *(noting.base for noting in folder.all_noting)}
        if overwrite and new != name and new in needed:
            raise SnapshotError(
                f"snapshot {new!r} cannot be overwritten by the rows of {name!r}: live rows go back to it after a "
                "kill; choose another name"
            )
        with progress("merging", snapshot.manifest.rows) as told:
            same = with_same_rows(snapshot)
            manifest = write_snapshot(place, snapshot.description, snapshot.chunks(), told, overwrite, same)
    report("merged", new, manifest, begin, as_json)


def prune(
    store: Store,
    keep_last: Annotated[int, typer.Option(help="How many of the latest to keep.", min=1, show_default=False)],
    keep_every: Annotated[
        int | None, typer.Option(help="Keep the first that reached each multiple of so many steps as well.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; tell what would be.")] = False,
    timeout: Timeout = 60,
    as_json: Json = False,
) -> None:
    """Remove old snapshots, but none that a kept one or the live rows go over or back to.

    Example: tierbed snapshot prune store/users --keep-last 5 --keep-every 100000
    """
    from ..snapshots.store.folder_state import FolderState
    from ..snapshots.store.linked import REPLACED
    from ..snapshots.store.retention import plan_for

    stores = stores_at(store)
    plans = {one: plan_for(FolderState(one), keep_last, keep_every) for one in stores}
    if not dry_run:
        _prune(plans, keep_last, keep_every, timeout, as_json)
    if as_json:
        documents = {
            one.name: {
                "removed": [snapshot.name for snapshot in done.removed],
                "kept": [snapshot.name for snapshot in done.kept],
                "kept_for_live_rows": [snapshot.name for snapshot in done.for_live_rows],
                "removed_bytes": sum(snapshot.manifest.total_bytes for snapshot in done.removed),
                "dry_run": dry_run,
            }
            for one, done in plans.items()
        }
        print_json(documents[store.name] if stores == [store] else {"stores": documents})
        return
    for one, done in plans.items():
        prefix = "" if stores == [store] else f"{text(one.name)}/"
        for snapshot in done.removed:
            print(f"{'would remove' if dry_run else 'removed'} {prefix}{text(snapshot.name)}")
        for snapshot in done.for_live_rows:
            why = "a save replaced it, and " if snapshot.name.startswith(REPLACED) else ""
            kept = "would keep" if dry_run else "kept"
            print(f"{kept} {prefix}{text(snapshot.name)}: {why}live rows go back to it after a kill")
        count, bytes = len(done.removed) + len(done.kept), sum(s.manifest.total_bytes for s in done.removed)
        print(f"{prefix and prefix + ' '}{len(done.removed)} of {count} snapshots, {size(bytes)}")


def _prune(plans: dict[Path, Retained], keep_last: int, keep_every: int | None, timeout: float, as_json: bool) -> None:
    """Prune stores, by the process that has one open or by this, and let `plans` say what was done."""
    from ..engine.errors import TierbedError
    from ..snapshots.control.client import ask_prune
    from ..snapshots.store import retention
    from ..snapshots.store.folder import StoreFolder

    held = served(plans, timeout, as_json)
    removed: list[str] = []
    with told_in_use([one for one in plans if one not in held], as_json):
        try:
            for one, plan in plans.items():
                if one in held and (answer := ask_prune(one, keep_last, keep_every, timeout)) is not None:
                    gone, every = answer[0], [*plan.kept, *plan.removed]
                    kept, for_live = ([s for s in part if s.name not in gone] for part in (every, plan.for_live_rows))
                    plans[one] = retention.Retained(kept, [s for s in every if s.name in gone], for_live)
                else:
                    with StoreFolder(one) as folder:
                        plans[one] = retention.prune(folder, keep_last, keep_every)
                removed += [f"{one.name}/{snapshot.name}" for snapshot in plans[one].removed]
        except TierbedError as error:
            if not removed:
                raise
            raise type(error)(f"{error}. Removed before that: {', '.join(removed)}") from error
