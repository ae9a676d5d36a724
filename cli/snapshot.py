"""`tierbed snapshot save | load | list | inspect`."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from .arguments import Json, Name, NewName, Overwrite, Store, Timeout, check_tables, hold, open_snapshot, told_in_use
from .entries import HEADER, RIGHT, complain_of, entry, lines, list_all, report, report_all
from .model import held_together, load_together, save_together, since, stores_at
from .output import print_fields, print_json, print_table, progress


class Kind(StrEnum):
    """The kind of a snapshot, one of KINDS of snapshots/files/format.py."""

    full = "full"
    incremental = "incremental"
    checkpoint = "checkpoint"


def save(
    store: Store,
    name: NewName,
    kind: Annotated[Kind, typer.Option(help="What it holds: see docs/snapshots.md.")] = Kind.full,
    timeout: Timeout = 60,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Save the live rows: of a closed store by itself, of one that is in use by the process that has it.

    That process saves between two steps, and trains on. Of the folder of a model, all stores in it are saved at one
    instant.

    Example: tierbed snapshot save store/users before-retraining
    """
    from ..snapshots.control.client import ask_save
    from ..snapshots.store.closed_ranks import save_closed
    from ..snapshots.store.folder_state import holder

    begin = time.monotonic()
    stores = stores_at(store)
    if stores != [store]:
        with progress("saving") as told:
            saved = save_together(stores, name, kind.value, overwrite, timeout, told, as_json)
        report_all("saved", name, dict(zip(stores, saved, strict=True)), begin, as_json)
        return
    manifest = None
    with progress("saving") as told:
        if holder(store) is not None:
            manifest = ask_save(store, name, kind.value, since(told), timeout, overwrite)
    if manifest is None:
        with hold(store, as_json) as folder:
            mark = folder.read_mark() or {}
            with progress("saving", mark.get("rows")) as told:
                manifest = save_closed(folder, name, told, kind.value, overwrite)
    report("saved", name, manifest, begin, as_json)


def load(
    store: Store,
    name: Name,
    table: Annotated[
        list[str] | None,
        typer.Option(
            "--table",
            help="Replace all live rows by those of this table alone, by id or name: rows of tables not given are gone."
            " May be given again.",
            show_default=False,
        ),
    ] = None,
    weights_only: Annotated[
        bool, typer.Option("--weights-only", help="Leave optimizer state out, to train on with another optimizer.")
    ] = False,
    convert: Annotated[
        bool, typer.Option("--convert", help="Convert numbers to the dtype of the live rows, where theirs is another.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a snapshot the live rows, in place of those there: the next training run resumes from it.

    It is checked while it is copied: where it is damaged or of another table, the live rows stay as they were.

    Example: tierbed snapshot load store/users before-retraining
    """
    from ..snapshots.store.closed_store import load_live
    from ..snapshots.store.selection import Selection

    begin = time.monotonic()
    stores = stores_at(store)
    if stores != [store]:
        if table or weights_only or convert:
            raise typer.BadParameter("--table, --weights-only and --convert are of one store: give its folder")
        with told_in_use(stores, as_json), held_together(stores) as folders, progress("loading") as told:
            loaded = load_together(folders, name, told)
        report_all("loaded", name, dict(zip(stores, loaded, strict=True)), begin, as_json)
        return
    with hold(store, as_json) as folder:
        snapshot = open_snapshot(store, name)
        selection = Selection(tables=check_tables(table, snapshot), state=not weights_only, convert=convert)
        with progress("loading", snapshot.manifest.rows) as told:
            live, taken = load_live(folder, snapshot, told, selection)
    report("loaded", name, live, begin, as_json, left_out=taken.left_out)


def list_(store: Store, as_json: Json = False) -> None:
    """List the snapshots from the oldest to the latest. Exits with 1 if a manifest is damaged.

    Example: tierbed snapshot list store/users
    """
    from ..snapshots.files.reader import list_snapshots

    stores = stores_at(store)
    if stores != [store]:
        list_all(stores, as_json)
        return
    listing = list_snapshots(store / "snapshots")
    if as_json:
        damaged = {name: str(error) for name, error in listing.damaged.items()}
        print_json({"snapshots": [entry(s.name, s.manifest) for s in listing.snapshots], "damaged": damaged})
    else:
        print_table([HEADER, *lines(listing.snapshots)], RIGHT)
    complain_of(listing.damaged)


def inspect(
    store: Store,
    name: Name,
    rows: Annotated[int, typer.Option(help="Show this many rows, the first.", min=0)] = 0,
    plot: Annotated[
        Path | None, typer.Option(help="Draw row norms, update counts and rows of each table to this file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what a snapshot holds: its table, rows for each table id, how often they were updated, how large they are.

    Example: tierbed snapshot inspect store/users before-retraining --plot users.png
    """
    from ..engine.options.tables import label_of, names_in
    from ..snapshots.files.format import with_named_hyper
    from ..snapshots.inspection.row import plain_row
    from ..snapshots.inspection.summary import summarise

    if plot is not None:
        from ..snapshots.inspection.plots import check_plot, draw

        check_plot(plot)
    snapshot = open_snapshot(store, name)
    with progress("reading", snapshot.manifest.rows) as told:
        summary = summarise(snapshot, told, first=rows)
    names = names_in(snapshot.description)
    if plot is not None:
        draw(summary, f"{name}, step {snapshot.description['step']:,}", plot, names)
    figures = {**entry(name, snapshot.manifest), **summary.figures}
    first = [plain_row(row, snapshot.description) for row in summary.first]
    description = with_named_hyper(snapshot.description)
    if as_json:
        print_json({**figures, "description": description, "first_rows": first})
        return
    described = {"embedding" if field == "name" else field: of for field, of in description.items()}
    figures["rows_by_table"] = {label_of(table, names): count for table, count in figures["rows_by_table"].items()}
    print_fields({**figures, **described})
    for row in first:
        print()
        print_fields(row)
