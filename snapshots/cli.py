"""The command line tool `tierbed`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..engine.errors import SnapshotError, TierbedError
from ..engine.store.folder import StoreFolder
from .format import Manifest, check_name
from .live import existing_store, load_live, save_live
from .reader import Listing, Snapshot, list_snapshots
from .summary import summarise

app = typer.Typer(
    help="Tiered embedding tables for PyTorch.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
snapshot_app = typer.Typer(help="The snapshots of a store folder.", no_args_is_help=True)
app.add_typer(snapshot_app, name="snapshot")

Store = Annotated[Path, typer.Argument(help="A store folder: <persistent_path>/<embedding name>.", show_default=False)]
Name = Annotated[str, typer.Argument(help="The name of a snapshot.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]


def main(arguments: list[str] | None = None) -> None:
    """Run `tierbed`. Exits with 0 if all is well, 1 if a problem was found, 2 for wrong usage."""
    try:
        app(arguments, prog_name="tierbed")
    except TierbedError as error:
        print(f"tierbed: {error}", file=sys.stderr)
        if "--json" in (sys.argv if arguments is None else arguments):
            _print_json({"error": str(error)})
        raise SystemExit(1) from None


def _version(wanted: bool) -> None:
    if wanted:
        from ..engine import __version__

        print(f"tierbed {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


@app.callback()
def _root(version: Version = False) -> None:
    pass


@snapshot_app.command()
def save(store: Store, name: Name, as_json: Json = False) -> None:
    """Save the live rows of a store that no process has open and that was closed cleanly.

    Example: tierbed snapshot save /data/embeddings/users before-retraining
    """
    with StoreFolder(existing_store(store)) as folder, _progress("saving") as progress:
        manifest = save_live(folder, name, progress)
    _report("saved", name, manifest, as_json)


@snapshot_app.command()
def load(store: Store, name: Name, as_json: Json = False) -> None:
    """Make a snapshot the live rows, in place of those there: the next training run resumes from it.

    Example: tierbed snapshot load /data/embeddings/users before-retraining
    """
    with StoreFolder(existing_store(store)) as folder:
        snapshot = _open(store, name)
        with _progress("loading", snapshot.manifest.rows) as progress:
            load_live(folder, snapshot, progress)
    _report("loaded", name, snapshot.manifest, as_json)


@snapshot_app.command("list")
def list_(store: Store, as_json: Json = False) -> None:
    """List the snapshots from the oldest to the latest. Exits with 1 if a manifest is damaged.

    Example: tierbed snapshot list /data/embeddings/users
    """
    listing = list_snapshots(existing_store(store) / "snapshots")
    if as_json:
        entries = [_entry(s.name, s.manifest) for s in listing.snapshots]
        _print_json({"snapshots": entries, "damaged": {name: str(error) for name, error in listing.damaged.items()}})
    else:
        figures = (Column(title, justify="right") for title in ("rows", "bytes", "step"))
        table = Table("name", *figures, "created", box=None)
        for s in listing.snapshots:
            entry = _entry(s.name, s.manifest)
            table.add_row(*(_text(entry[field]) for field in ("name", "rows", "bytes", "step", "created")))
        _print_table(table)
    _exit_if(listing.damaged)


@snapshot_app.command()
def inspect(store: Store, name: Name, as_json: Json = False) -> None:
    """Print what a snapshot holds: its table, rows for each table id, bytes, step, and how often rows were updated.

    Example: tierbed snapshot inspect /data/embeddings/users before-retraining
    """
    snapshot = _open(store, name)
    with _progress("reading", snapshot.manifest.rows) as progress:
        figures = {**_entry(name, snapshot.manifest), **summarise(snapshot, progress)}
    if as_json:
        _print_json({**figures, "description": snapshot.description})
        return
    table = Table(show_header=False, box=None)
    for field, value in {**figures, **snapshot.description}.items():
        table.add_row(_text(field), _text(value))
    _print_table(table)


@snapshot_app.command()
def verify(
    store: Store,
    name: Annotated[str | None, typer.Argument(help="One snapshot; all by default.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """Read a snapshot, or all of them, and compare every file with its checksum. Exits with 1 if one is damaged.

    Example: tierbed snapshot verify /data/embeddings/users
    """
    listing = list_snapshots(existing_store(store) / "snapshots") if name is None else Listing([_open(store, name)], {})
    damaged = dict(listing.damaged)
    with _progress("verifying", sum(s.manifest.rows for s in listing.snapshots)) as progress:
        for s in listing.snapshots:
            try:
                s.verify(progress)
            except SnapshotError as error:
                damaged[s.name] = error
    sound = [s.name for s in listing.snapshots if s.name not in damaged]
    if as_json:
        _print_json({"sound": sound, "damaged": {name: str(error) for name, error in damaged.items()}})
    else:
        for sound_name in sound:
            print(f"sound: {_text(sound_name)}")
    _exit_if(damaged)


def _open(store: Path, name: str) -> Snapshot:
    check_name(name)
    return Snapshot.open(existing_store(store) / "snapshots" / name)


def _entry(name: str, manifest: Manifest) -> dict[str, Any]:
    created = datetime.fromtimestamp(manifest.created // 10**9, UTC).isoformat()
    step = manifest.description["step"]
    return {"name": name, "rows": manifest.rows, "bytes": manifest.total_bytes, "step": step, "created": created}


def _report(done: str, name: str, manifest: Manifest, as_json: bool) -> None:
    entry = _entry(name, manifest)
    if as_json:
        _print_json(entry)
    else:
        print(f"{done} {name}: {entry['rows']:,} rows, {entry['bytes']:,} bytes, step {entry['step']:,}")


def _exit_if(damaged: dict[str, SnapshotError]) -> None:
    for name, error in damaged.items():
        print(f"damaged: {_text(name)}: {error}", file=sys.stderr)
    if damaged:
        raise typer.Exit(1)


def _text(value: Any) -> str:
    """Printable whatever it is: names and descriptions may come from a foreign file."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


def _print_table(table: Table) -> None:
    console = Console(markup=False, highlight=False)
    console.print(table, soft_wrap=True)


def _print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, indent=2, default=str))


@contextmanager
def _progress(title: str, rows: int | None = None) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=rows)
        yield lambda count: progress.advance(task, count)
