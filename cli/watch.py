"""`tierbed snapshot watch`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from .arguments import Store
from .output import NUMBER_COLUMNS, SNAPSHOT_HEADER, align, escape, make_cells, make_entry, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from ..snapshots.files.reader import Listing, Snapshot
    from ..snapshots.store.status import StoreStatus

_WATCHED_FIELDS = ("state", "holder", "step")  # a change of one of these fields of a store's status is an event


class View(NamedTuple):
    """A store's state at one poll."""

    status: StoreStatus
    snapshots: dict[str, Snapshot]
    damaged: dict[str, str]


def watch(
    store: Store,
    interval: Annotated[float, typer.Option(help="Seconds between two polls.", min=0.05)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each change.")] = False,
) -> None:
    """Show a store's snapshots, its step and the process that has it open, until you press Ctrl-C.

    With --json, or if stdout is not a terminal, print a line for each change.

    Example: tierbed snapshot watch store/users
    """
    show = partial(_print_changes, as_json=as_json) if as_json or not sys.stdout.isatty() else _show_table

    def poll_views() -> Iterator[View]:
        while True:
            yield poll(store)
            time.sleep(interval)

    with suppress(KeyboardInterrupt):
        show(poll_views())


def find_changes(previous: View | None, current: View) -> Iterator[dict[str, Any]]:
    """Yield the differences between two polls as dicts. The key `event` names what happened:

    - "store": `state`, `holder` or `step` changed, and the dict contains all three.
    - "saved": a snapshot is new, and the dict contains its entry. "removed": the snapshot `name` is gone.
    - "damaged": the snapshot `name` is damaged, and `error` tells how.
    """
    state, old_state = ({name: v and getattr(v.status, name) for name in _WATCHED_FIELDS} for v in (current, previous))
    if state != old_state or previous is None:
        yield {"event": "store", **state}
    old_snapshots = {} if previous is None else previous.snapshots
    for name in old_snapshots:
        if name not in current.snapshots and name not in current.damaged:
            yield {"event": "removed", "name": name}
    for name, snapshot in current.snapshots.items():
        if name not in old_snapshots or old_snapshots[name].manifest.id != snapshot.manifest.id:
            yield {"event": "saved", **make_entry(name, snapshot.manifest)}
    for name, error in current.damaged.items():
        if previous is None or name not in previous.damaged:
            yield {"event": "damaged", "name": name, "error": error}


def poll(store: Path) -> View:
    from ..snapshots.files.reader import list_snapshots
    from ..snapshots.store.status import read_store_status

    listing: Listing = list_snapshots(store / "snapshots")
    snapshots = {s.name: s for s in listing.snapshots}
    damaged = {name: str(e) for name, e in listing.damaged.items() if (store / "snapshots" / name).is_dir()}
    return View(read_store_status(store), snapshots, damaged)


def _print_changes(views: Iterator[View], as_json: bool) -> None:
    previous = None
    for current in views:
        for change in find_changes(previous, current):
            if as_json:
                print_json(change, indent=None)
            else:
                print(", ".join(f"{field} {escape(value)}" for field, value in change.items()), flush=True)
        previous = current


def _show_table(views: Iterator[View]) -> None:
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as live:
        for view in views:
            status = view.status
            state = status.state if status.holder is None else f"open in process {status.holder or 'unknown'}"
            step = "" if status.step is None else f", step {status.step:,}"
            table = align([SNAPSHOT_HEADER, *make_cells(view.snapshots.values())], NUMBER_COLUMNS)
            damaged = [f"damaged: {escape(name)}: {error}" for name, error in view.damaged.items()]
            live.update(Text("\n".join([f"{status.path}: {state}{step}", *table, *damaged])), refresh=True)
