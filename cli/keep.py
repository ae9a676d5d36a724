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
        if overwrite and folder.noting.base == new != name:
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
    from ..snapshots.store.retention import all_in, plan_prune
    from ..snapshots.store.retention import prune as prune_store
    from ..snapshots.store.status import store_status

    if dry_run:
        plan = plan_prune(all_in(store / "snapshots"), keep_last, keep_every, store_status(store).base)
    else:
        with hold(store, as_json) as folder:
            plan = prune_store(folder, keep_last, keep_every)
    freed = sum(s.manifest.total_bytes for s in plan.removed)
    if as_json:
        names = {"removed": [s.name for s in plan.removed], "kept": [s.name for s in plan.kept]}
        print_json({**names, "removed_bytes": freed, "dry_run": dry_run})
        return
    for snapshot in plan.removed:
        print(f"{'would remove' if dry_run else 'removed'} {text(snapshot.name)}")
    print(f"{len(plan.removed)} of {len(plan.removed) + len(plan.kept)} snapshots, {size(freed)}")
