"""Shared by the commands: arguments, shell completion, and functions that open stores and snapshots."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..engine.errors import StoreError
from .output import EXIT_IN_USE, fail

if TYPE_CHECKING:  # commands import the engine when they run, so that --help and completion do not load torch
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.store.folder import StoreFolder


def complete_names(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a snapshot's name in the shell. The name is an argument or an option's value, after the store's path."""
    # click has not yet parsed words that follow an option: they are in `ctx.args`, not in `ctx.params`
    store = ctx.params.get("store") or next(iter(ctx.args), ".")
    try:
        folders = [path.name for path in Path(store, "snapshots").glob("[!.]*/")]
    except OSError:  # the path is too long, or this user may not read it
        return []
    return sorted(name for name in folders if name.startswith(incomplete) and name.isprintable())


Store = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="A store folder: <persistent_path>/<embedding name>.", show_default=False),
]
Name = Annotated[str, typer.Argument(help="The name of a snapshot.", show_default=False, autocompletion=complete_names)]
NewName = Annotated[str, typer.Argument(help="The name of the new snapshot.", show_default=False)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace what has this name, atomically, once the new one is durable.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
Tables = Annotated[
    list[str] | None,
    typer.Option("--table", help="Only rows of this table, by id or name; may be repeated.", show_default=False),
]
Timeout = Annotated[
    float, typer.Option(help="Seconds to wait without progress from the process that has the store open.", min=0)
]


@contextmanager
def exit_if_in_use(stores: Sequence[Path], as_json: bool) -> Iterator[None]:
    """Exit with code `EXIT_IN_USE` if the `with` block raises StoreError while another process has locked a store."""
    from ..snapshots.store.folder_state import find_holder

    try:
        yield
    except StoreError as error:
        if all(find_holder(store) is None for store in stores):
            raise
        fail(str(error), EXIT_IN_USE, as_json)


@contextmanager
def lock_stores(stores: Sequence[Path], as_json: bool, exits: bool = True) -> Iterator[list[StoreFolder]]:
    """Lock stores. If a store is locked, exit with code `EXIT_IN_USE`, or raise StoreError if `exits` is False."""
    from ..snapshots.store.folder import StoreFolder
    from ..snapshots.store.status import require_store

    with exit_if_in_use(stores if exits else (), as_json), ExitStack() as locks:
        yield [locks.enter_context(StoreFolder(require_store(store))) for store in stores]


def parse_table(text: str) -> int | str:
    """Return a table id if the text is all digits, otherwise the text as a table name."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else text


def parse_tables(tables: list[str] | None, snapshot: Snapshot) -> list[int] | None:
    """Convert the --table options to table ids, or to None if none is given. Raises BadParameter for unknown tables."""
    from ..engine.options.table_names import find_table, format_choices, read_table_names

    names = read_table_names(snapshot.description)
    ids = []
    for table in tables or ():
        if (id := find_table(parse_table(table), names)) is None:
            raise typer.BadParameter(f"--table {table}: snapshot {snapshot.name!r} has tables {format_choices(names)}")
        ids.append(id)
    return ids or None


def find_nearest_existing(path: Path) -> Path:
    """Return the path if it exists, otherwise its nearest existing parent."""
    absolute = path.absolute()
    return next(folder for folder in (absolute, *absolute.parents) if os.path.lexists(folder))


def open_snapshot(store: Path, name: str) -> Snapshot:
    """Open a store's snapshot by name. Raises SnapshotError, StoreError."""
    from ..snapshots.files.format import check_name
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.store.status import require_store

    check_name(name)
    return Snapshot.open(require_store(store) / "snapshots" / name)
