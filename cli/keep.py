"""`tierbed snapshot merge | prune`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from .arguments import Json, Name, NewName, Overwrite, Store, hold, open_snapshot
from .entries import report
from .output import print_json, progress, size, text


def merge(store: Store, name: Name, new: NewName, overwrite: Overwrite = False, as_json: Json = False) -> None:
    """Make one full snapshot of an incremental one and all that it goes over, which stay.

    Example: tierbed snapshot merge store/users tuesday tuesday-full
    """
    from ..engine.errors import SnapshotError
    from ..snapshots.files.format import check_name
    from ..snapshots.files.writer import write_snapshot

    begin = time.monotonic()
    check_name(new)
    with hold(store, as_json) as folder:
        snapshot = open_snapshot(store, name)
        place = folder.snapshots / new
        if overwrite and new != name and any(noting.base == new for noting in folder.all_noting):
            raise SnapshotError(
                f"snapshot {new!r} cannot be overwritten by the rows of {name!r}: live rows go back to it after a "
                "kill; choose another name"
            )
        with progress("merging", snapshot.manifest.rows) as told:
            manifest = write_snapshot(place, snapshot.description, snapshot.chunks(), told, overwrite)
    report("merged", new, manifest, begin, as_json)


def prune(
    store: Store,
    keep_last: Annotated[int, typer.Option(help="How many of the latest to keep.", min=1, show_default=False)],
    keep_every: Annotated[
        int | None, typer.Option(help="Keep the first that reached each multiple of so many steps as well.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; tell what would be.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old snapshots, but none that a kept one or the live rows go over or back to.

    Example: tierbed snapshot prune store/users --keep-last 5 --keep-every 100000
    """
    from ..engine.store.folder_state import FolderState
    from ..snapshots.store.retention import plan_for
    from ..snapshots.store.retention import prune as prune_store
    from ..snapshots.store.status import existing_store

    if dry_run:
        plan = plan_for(FolderState(existing_store(store)), keep_last, keep_every)
    else:
        with hold(store, as_json) as folder:
            plan = prune_store(folder, keep_last, keep_every)
    freed = sum(s.manifest.total_bytes for s in plan.removed)
    if as_json:
        names = {"removed": [s.name for s in plan.removed], "kept": [s.name for s in plan.kept]}
        names["kept_for_live_rows"] = [s.name for s in plan.for_live_rows]
        print_json({**names, "removed_bytes": freed, "dry_run": dry_run})
        return
    for snapshot in plan.removed:
        print(f"{'would remove' if dry_run else 'removed'} {text(snapshot.name)}")
    for snapshot in plan.for_live_rows:
        print(f"{'would keep' if dry_run else 'kept'} {text(snapshot.name)}: live rows go back to it after a kill")
    print(f"{len(plan.removed)} of {len(plan.removed) + len(plan.kept)} snapshots, {size(freed)}")
