"""Snapshots as commands print them: an entry of JSON, a line of a table, a report of what was done."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from .output import PROBLEM, age, complain, print_json, print_table, size, span, text, when

if TYPE_CHECKING:
    from ..snapshots.files.format import Manifest
    from ..snapshots.files.reader import Snapshot

HEADER = ["name", "kind", "over", "dtype", "rows", "size", "step", "age"]
RIGHT = {4, 5, 6, 7}


def entry(name: str, manifest: Manifest) -> dict[str, Any]:
    """The entry of a snapshot. `bytes` counts its own files."""
    return {
        "name": name,
        "kind": manifest.kind,
        "parent": None if manifest.parent is None else manifest.parent.name,
        **dtypes(manifest.description),
        "rows": manifest.rows,
        "bytes": manifest.total_bytes,
        "step": manifest.description["step"],
        "created": when(manifest.created),
    }


def dtypes(description: Mapping[str, Any]) -> dict[str, str | None]:
    """The dtypes of rows, by their valid description: of the embedding, and of state, None where rows have none."""
    from ..snapshots.store.selection import types_of

    dtype, state_dtype = types_of(description)
    return {"dtype": dtype, "state_dtype": state_dtype}


def dtype_words(description: Mapping[str, Any]) -> str:
    """The dtypes of rows, as people read them: one name where all numbers have it."""
    dtype, state_dtype = dtypes(description).values()
    return f"{dtype}, state {state_dtype}" if state_dtype not in (None, dtype) else str(dtype)


def lines(snapshots: Iterable[Snapshot]) -> list[list[str]]:
    """The lines of a table of snapshots, without the header."""
    return [_line(s.name, s.manifest) for s in snapshots]


def _line(name: str, manifest: Manifest) -> list[str]:
    over = "" if manifest.parent is None else manifest.parent.name
    figures = f"{manifest.rows:,}", size(manifest.total_bytes), f"{manifest.description['step']:,}"
    return [name, manifest.kind, over, dtype_words(manifest.description), *figures, age(manifest.created)]


def report(done: str, name: str, manifest: Manifest, begin: float, as_json: bool, **more: Any) -> None:
    """Print what a command did since `begin`, a time of time.monotonic."""
    seconds = time.monotonic() - begin
    if as_json:
        print_json({**entry(name, manifest), **more, "seconds": round(seconds, 3)})
        return
    kind = "" if manifest.kind == "full" else f"{manifest.kind}, "
    held = f"{kind}{manifest.rows:,} rows, {size(manifest.total_bytes)}, step {manifest.description['step']:,}"
    left = f", {more['left_out']:,} rows left out" if more.get("left_out") else ""
    print(f"{done} {text(name)}: {held}, in {span(seconds)}{left}")


def report_all(done: str, name: str, made: Mapping[Path, Manifest], begin: float, as_json: bool) -> None:
    """Print what a command did with all stores of a model."""
    seconds = time.monotonic() - begin
    if as_json:
        stores = {store.name: entry(name, manifest) for store, manifest in made.items()}
        print_json({"stores": stores, "seconds": round(seconds, 3)})
        return
    for store, manifest in made.items():
        step = manifest.description["step"]
        print(f"{done} {text(name)} of {text(store.name)}: {manifest.rows:,} rows, step {step:,}")


def list_all(stores: Iterable[Path], as_json: bool) -> None:
    """Print the snapshots of all stores of a model. Ends with `PROBLEM` where a manifest is damaged."""
    from ..snapshots.files.reader import list_snapshots

    listings = {store.name: list_snapshots(store / "snapshots") for store in stores}
    damaged = {f"{store}/{name}": error for store, one in listings.items() for name, error in one.damaged.items()}
    if as_json:
        found = {store: [entry(s.name, s.manifest) for s in one.snapshots] for store, one in listings.items()}
        print_json({"stores": found, "damaged": {name: str(error) for name, error in damaged.items()}})
    else:
        every = ([text(store), *line] for store, one in listings.items() for line in lines(one.snapshots))
        print_table([["store", *HEADER], *every], {column + 1 for column in RIGHT})
    complain_of(damaged)


def report_sound(sound: Iterable[str], damaged: Mapping[str, Exception], as_json: bool) -> None:
    """Print what is sound and what is damaged, and then end with `PROBLEM` where something is."""
    if as_json:
        print_json({"sound": [*sound], "damaged": {name: str(error) for name, error in damaged.items()}})
    else:
        for name in sound:
            print(f"sound: {text(name)}")
    complain_of(damaged)


def complain_of(damaged: Mapping[str, Exception]) -> None:
    """Name damaged snapshots on stderr, and then end with `PROBLEM`."""
    for name, error in damaged.items():
        complain(f"damaged: {text(name)}: {error}")
    if damaged:
        raise typer.Exit(PROBLEM)
