"""`tierbed snapshot save | load | list | inspect | merge | prune | verify`."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import SnapshotError, TierbedError
from . import output
from .arguments import (
    Json,
    Name,
    NewName,
    Overwrite,
    Store,
    Timeout,
    complete_names,
    exit_if_in_use,
    lock_stores,
    open_snapshot,
    parse_tables,
)
from .model import find_serving_processes, find_stores_at, save_together

if TYPE_CHECKING:
    from ..snapshots.store.retention import PrunePlan


def merge(store: Store, name: Name, new: NewName, overwrite: Overwrite = False, as_json: Json = False) -> None:
    """Merge an incremental snapshot and its parents into a new full snapshot. The old snapshots stay.

    Example: tierbed snapshot merge store/users tuesday tuesday-full
    """
    from ..snapshots.files.format import check_name
    from ..snapshots.files.writer import write_snapshot
    from ..snapshots.store.retention import list_needed_names

    begin = time.monotonic()
    check_name(new)
    with lock_stores([store], as_json) as (folder,):
        snapshot = open_snapshot(store, name)
        if overwrite and new != name and new in list_needed_names(folder):
            reason = "it is the recovery snapshot of live rows; choose another name"
            raise SnapshotError(f"snapshot {new!r} cannot be overwritten by the rows of {name!r}: {reason}")
        with output.show_progress("merging", snapshot.manifest.rows) as advance:
            id = snapshot.manifest.id  # keep the id: recovery finds rows by snapshot id
            contents = snapshot.description, snapshot.chunks()
            manifest = write_snapshot(folder.snapshots_path / new, *contents, advance, overwrite, id)
    output.report("merged", new, {"": manifest}, begin, as_json)


def prune(
    store: Store,
    keep_last: Annotated[int, typer.Option(help="Number of latest snapshots to keep.", min=1, show_default=False)],
    keep_every: Annotated[
        int | None, typer.Option(help="Also keep the first snapshot at or after each multiple of this step.", min=1)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    timeout: Timeout = 60,
    as_json: Json = False,
) -> None:
    """Remove old snapshots, except those that recovery needs. Parents of kept snapshots are kept, or folded into one.

    Example: tierbed snapshot prune store/users --keep-last 5 --keep-every 100000
    """
    from ..snapshots.store.folder_state import FolderState
    from ..snapshots.store.linking import BACKUP_PREFIX
    from ..snapshots.store.retention import plan_store_prune

    stores = find_stores_at(store)
    plans = {folder: plan_store_prune(FolderState(folder), keep_last, keep_every) for folder in stores}
    if not dry_run:
        _prune(plans, keep_last, keep_every, timeout, as_json)
    documents = {}
    for folder, store_name in stores.items():
        plan = plans[folder]
        removed = [snapshot.name for snapshot in plan.removed]
        folded = {snapshot.name: run[-1].name for run in plan.folds for snapshot in run[:-1]}
        kept = plan.retained, plan.retained_for_recovery
        retained, needed = ([snapshot.name for snapshot in part if snapshot.name not in folded] for part in kept)
        removed_bytes = sum(snapshot.manifest.total_bytes for snapshot in plan.removed)
        names = {"removed": removed, "folded": folded, "kept": retained, "kept_for_live_rows": needed}
        documents[store_name] = {**names, "removed_bytes": removed_bytes, "dry_run": dry_run}
        if as_json:
            continue
        prefix = store_name and f"{output.escape(store_name)}/"
        for name in removed:
            print(f"{'would remove' if dry_run else 'removed'} {prefix}{output.escape(name)}")
        for name, target in folded.items():
            verb = "would fold" if dry_run else "folded"
            print(f"{verb} {prefix}{output.escape(name)} into {prefix}{output.escape(target)}")
        for name in needed:
            reason = "a save replaced it, but " if name.startswith(BACKUP_PREFIX) else ""
            print(f"{'would keep' if dry_run else 'kept'} {prefix}{output.escape(name)}: {reason}recovery needs it")
        count = len(removed) + len(plan.retained)
        print(f"{prefix and prefix + ' '}{len(removed)} of {count} snapshots, {output.format_size(removed_bytes)}")
    if as_json:
        output.print_json(documents.get("") or {"stores": documents})


def _prune(plans: dict[Path, PrunePlan], keep_last: int, keep_every: int | None, timeout: float, as_json: bool) -> None:
    """Prune the stores. If another process has a store open, that process prunes it. Puts the results into `plans`."""
    from ..snapshots.control.client import request_prune
    from ..snapshots.store import retention
    from ..snapshots.store.folder import StoreFolder

    processes = find_serving_processes(plans, timeout, as_json)
    removed: list[str] = []
    with exit_if_in_use([store for store in plans if store not in processes], as_json):
        try:
            for store, plan in plans.items():
                if store in processes and (answer := request_prune(store, keep_last, keep_every, timeout)) is not None:
                    folds = [run for run in plan.folds if run[0].name in answer[0]]
                    gone = {*answer[0]}.difference(snapshot.name for run in folds for snapshot in run)
                    snapshots, needed = [*plan.retained, *plan.removed], plan.retained_for_recovery
                    pruned = [s for s in snapshots if s.name in gone]
                    retained, needed = ([s for s in part if s not in pruned] for part in (snapshots, needed))
                    plans[store] = retention.PrunePlan(retained, pruned, needed, folds)
                else:
                    with StoreFolder(store) as folder:
                        plans[store] = retention.prune(folder, keep_last, keep_every)
                pruned = [*plans[store].removed, *plans[store].folded]
                removed += [f"{store.name}/{snapshot.name}" for snapshot in pruned]
        except TierbedError as error:
            if not removed:
                raise
            raise type(error)(f"{error}. Removed before that: {', '.join(removed)}") from error


def verify(
    store: Store,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Snapshots to verify. All by default.", autocompletion=complete_names),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read snapshots and their parents, and compare each file with its checksum. Exits with 1 if a snapshot is damaged.

    Example: tierbed snapshot verify store/users
    """
    from ..snapshots.files.reader import Listing, list_snapshots
    from ..snapshots.files.verify import find_chains, verify_all

    damaged: dict[str, SnapshotError] = {}
    sound: list[str] = []
    for folder, store_name in find_stores_at(store).items():
        snapshots = [open_snapshot(folder, name) for name in dict.fromkeys(names or ())]
        listing = Listing(snapshots, {}) if names else list_snapshots(folder / "snapshots")
        chains, broken = find_chains(listing.snapshots)
        rows = {snapshot.name: snapshot.manifest.num_entries for chain in chains.values() for snapshot in chain}
        with output.show_progress("verifying", sum(rows.values())) as advance:
            errors = {**listing.damaged, **verify_all(chains, broken, advance)}
        prefix = store_name and f"{store_name}/"
        damaged |= {prefix + name: error for name, error in errors.items()}
        sound += [prefix + s.name for s in listing.snapshots if s.name not in errors]
    output.report_sound(sound, damaged, as_json)


Kind = StrEnum("Kind", ["full", "incremental", "checkpoint"])  # KINDS of snapshots/files/format.py


def save(
    store: Store,
    name: NewName,
    kind: Annotated[Kind, typer.Option(help="The snapshot's kind; see docs/snapshots.md.")] = Kind.full,
    timeout: Timeout = 60,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Save the live rows as a snapshot. If a process has the store open, that process saves the rows.

    A training process saves between two steps. Given a model's folder, the command saves all its stores at one moment.

    Example: tierbed snapshot save store/users before-retraining
    """
    begin = time.monotonic()
    stores = find_stores_at(store)
    with output.show_progress("saving") as advance:
        manifests = save_together([*stores], name, kind.value, overwrite, timeout, advance, as_json)
    output.report("saved", name, dict(zip(stores.values(), manifests, strict=True)), begin, as_json)


def load(
    store: Store,
    name: Name,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            help="Load only this table, by id or name. All live rows are replaced, so other tables' rows are lost."
            " May be repeated.",
            show_default=False,
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave optimizer state out, to train with another optimizer.")
    ] = False,
    convert: Annotated[bool, typer.Option("--convert", help="Convert numbers to the live rows' dtype.")] = False,
    as_json: Json = False,
) -> None:
    """Replace the live rows by a snapshot. The next training run resumes from that snapshot.

    The snapshot is verified while it is copied. A damaged or unsuitable snapshot leaves the live rows unchanged.

    Example: tierbed snapshot load store/users before-retraining
    """
    from ..snapshots.store.closed_store import load_into_stores
    from ..snapshots.store.group_file import check_one_moment
    from ..snapshots.store.selection import Selection

    begin = time.monotonic()
    stores = find_stores_at(store)
    is_single = "" in stores.values()
    if not is_single and (table or weights_only or convert):
        raise typer.BadParameter("--table, --weights-only and --convert need the folder of one store")
    with lock_stores([*stores], as_json) as folders:
        snapshots = [open_snapshot(path, name) for path in stores]
        check_one_moment([path.name for path in stores], snapshots)
        selection = Selection(parse_tables(table, snapshots[0]), includes_state=not weights_only, converts=convert)
        with output.show_progress("loading", sum(snapshot.manifest.rows for snapshot in snapshots)) as advance:
            manifests, selections = zip(*load_into_stores(folders, snapshots, advance, selection), strict=True)
    left_out = {"left_out": selections[0].left_out} if is_single else {}
    output.report("loaded", name, dict(zip(stores.values(), manifests, strict=True)), begin, as_json, **left_out)


def list_(store: Store, as_json: Json = False) -> None:
    """List snapshots, oldest first. Exits with 1 if a manifest is damaged.

    Example: tierbed snapshot list store/users
    """
    from ..snapshots.files.reader import list_snapshots

    entries, lines = {}, [output.SNAPSHOT_HEADER]
    damaged: dict[str, SnapshotError] = {}
    for folder, store_name in find_stores_at(store).items():
        listing, prefix = list_snapshots(folder / "snapshots"), store_name and f"{store_name}/"
        entries[store_name] = [output.make_entry(s.name, s.manifest) for s in listing.snapshots]
        lines += [[prefix + name, *cells] for name, *cells in output.make_cells(listing.snapshots)]
        damaged |= {prefix + name: error for name, error in listing.damaged.items()}
    if as_json:
        document = {"snapshots": entries[""]} if "" in entries else {"stores": entries}
        output.print_json({**document, "damaged": {name: str(error) for name, error in damaged.items()}})
    else:
        output.print_table(lines, output.NUMBER_COLUMNS)
    output.report_damaged(damaged)


def inspect(
    store: Store,
    name: Name,
    rows: Annotated[int, typer.Option(help="Number of rows to show.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw row norms, update counts and rows by table to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a snapshot's description, rows by table, update counts and row norms.

    Example: tierbed snapshot inspect store/users before-retraining --plot users.png
    """
    from ..engine.options.table_names import label_table, read_table_names
    from ..snapshots.files.format import name_hyperparams
    from ..snapshots.inspection.row import to_plain_row
    from ..snapshots.inspection.summary import check_plot, draw, summarise

    if plot is not None:
        check_plot(plot)
    snapshot = open_snapshot(store, name)
    with output.show_progress("reading", snapshot.manifest.rows) as advance:
        summary = summarise(snapshot, advance, num_first_rows=rows)
    names = read_table_names(snapshot.description)
    if plot is not None:
        draw(summary, f"{name}, step {snapshot.description['step']:,}", plot, names)
    figures = {**output.make_entry(name, snapshot.manifest), **summary.statistics}
    first_rows = [to_plain_row(row, snapshot.description) for row in summary.first_rows]
    description = name_hyperparams(snapshot.description)
    if as_json:
        output.print_json({**figures, "description": description, "first_rows": first_rows})
        return
    fields = {"embedding" if field == "name" else field: value for field, value in description.items()}
    figures["rows_by_table"] = {label_table(table, names): count for table, count in figures["rows_by_table"].items()}
    output.print_fields({**figures, **fields})
    for row in first_rows:
        print()
        output.print_fields(row)
