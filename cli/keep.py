"""`tierbed snapshot merge | prune`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from .arguments import Json, Name, NewName, Overwrite, Store, hold, open_snapshot
from .entries import report
from .model import stores_at
from .output import print_json, progress, size, text


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
    as_json: Json = False,
) -> None:
    """Remove old snapshots, but none that a kept one or the live rows go over or back to.

    Example: tierbed snapshot prune store/users --keep-last 5 --keep-every 100000
    """
    from ..snapshots.store.linked import REPLACED

    stores = stores_at(store)
    found = {one: _pruned(one, keep_last, keep_every, dry_run, as_json) for one in stores}
    if as_json:
        documents = {
            one.name: {
                "removed": done.removed,
                "kept": done.kept,
                "kept_for_live_rows": done.for_live_rows,
                "removed_bytes": done.bytes,
                "dry_run": dry_run,
            }
            for one, done in found.items()
        }
        print_json(documents[store.name] if stores == [store] else {"stores": documents})
        return
    for one, done in found.items():
        prefix = "" if stores == [store] else f"{text(one.name)}/"
        for name in done.removed:
            print(f"{'would remove' if dry_run else 'removed'} {prefix}{text(name)}")
        for name in done.for_live_rows:
            why = "a save replaced it, and " if name.startswith(REPLACED) else ""
            kept = "would keep" if dry_run else "kept"
            print(f"{kept} {prefix}{text(name)}: {why}live rows go back to it after a kill")
        count = len(done.removed) + len(done.kept)
        print(f"{prefix and prefix + ' '}{len(done.removed)} of {count} snapshots, {size(done.bytes)}")


class _Pruned(NamedTuple):
    """Names of snapshots, and the bytes of those removed."""

    removed: list[str]
    kept: list[str]
    for_live_rows: list[str]
    bytes: int


def _pruned(store: Path, keep_last: int, keep_every: int | None, dry_run: bool, as_json: bool) -> _Pruned:
    """Prune one store: by this process, or by the one that has it open."""
    from ..engine.store.folder_state import FolderState, holder
    from ..snapshots.asking.asking import ask_prune
    from ..snapshots.store.retention import plan_for
    from ..snapshots.store.retention import prune as prune_store

    if dry_run or holder(store) is not None:
        plan = plan_for(FolderState(store), keep_last, keep_every)
    if not dry_run and holder(store) is not None:
        answer = ask_prune(store, keep_last, keep_every)
        if answer is not None:
            sizes = {s.name: s.manifest.total_bytes for s in plan.removed}
            removed, kept = answer
            for_live = [s.name for s in plan.for_live_rows if s.name in kept]
            return _Pruned(removed, kept, for_live, sum(sizes.get(name, 0) for name in removed))
    if not dry_run:
        with hold(store, as_json) as folder:
            plan = prune_store(folder, keep_last, keep_every)
    removed_bytes = sum(s.manifest.total_bytes for s in plan.removed)
    removed, kept, for_live = ([s.name for s in part] for part in (plan.removed, plan.kept, plan.for_live_rows))
    return _Pruned(removed, kept, for_live, removed_bytes)
