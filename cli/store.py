"""`tierbed store stat | compact | get | detach`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import InputError
from . import output
from .arguments import Json, Store, Timeout, complete_names, lock_stores, open_snapshot, parse_table

if TYPE_CHECKING:
    from ..snapshots.store.status import MemberStatus, Restart, StoreStatus

_STATES = {"closed": "closed cleanly", "unclean": "not closed", "new": "new", "elsewhere": "in shards on other hosts"}


def stat(store: Store, as_json: Json = False) -> None:
    """Print a store's contents, the process that has it open, and how the next training run would start.

    Example: tierbed store stat store/users
    """
    from ..snapshots.store.status import read_store_status

    status = read_store_status(store)
    if as_json:
        output.print_json(make_document(status))
        return
    by_table = status.rows_by_table or {}
    tables = {"rows by table": ", ".join(f"{output.escape(name)}: {rows:,}" for name, rows in by_table.items())}
    in_use = f"open in process {status.holder or 'unknown'}"
    output.print_fields(
        {
            "state": {"open": in_use, **_STATES}[status.state],
            "live rows": _describe_live_rows(status),
            **({} if status.marker is None else {"dtype": output.format_dtypes(status.marker)}),
            "rows": "unknown" if status.rows is None else f"{status.rows:,}",
            **(tables if len(by_table) > 1 else {}),
            "step": "unknown" if status.step is None else f"{status.step:,}",
            "on disk": ", ".join(f"{output.format_size(count)} {part}" for part, count in status.bytes.items()),
            "recovery": output.escape(status.recovery_snapshot or "none"),
            **({"trained together with": ", ".join(map(output.escape, status.partners))} if status.partners else {}),
            **{f"record of {output.escape(member.name)}": _describe_member(member) for member in status.group},
            "a restart": _describe_restart(status),
        }
    )


def detach(store: Store, as_json: Json = False) -> None:
    """Take a closed store out of its training group, so that it is recovered alone.

    Keeps the rows. Use this for a copied store, a store that moves to another model, or a store whose group is lost.

    Example: tierbed store detach copy/users
    """
    from ..snapshots.store.detach import detach

    with lock_stores([store], as_json) as (folder,):
        result = detach(folder)
    if as_json:
        output.print_json({"detached": result.problem is not None or bool(result.others), **result._asdict()})
    elif result.problem is not None:
        print(f"detached; the group's record could not be used: {output.escape(result.problem)}")
    elif result.others:
        print(f"detached from {', '.join(map(output.escape, result.others))}")
    else:
        print("nothing to detach: this store is not in a training group")


def compact(
    store: Store,
    rocksdb_options: Annotated[
        str, typer.Option(help="The store's `rocksdb_options`, if any. New files are written with them.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Merge the files of a cleanly closed store on SSD, to free the space of replaced rows.

    Example: tierbed store compact store/users
    """
    from ..snapshots.store.closed_store import compact_live

    begin = time.monotonic()
    try:
        with lock_stores([store], as_json) as (folder,), output.show_progress("merging") as advance:
            sizes = _run_in_thread(lambda: compact_live(folder, rocksdb_options), advance)
    except KeyboardInterrupt:
        output.print_interrupted(as_json)
        os._exit(output.EXIT_INTERRUPTED)  # RocksDB's threads still run, but RocksDB's files are valid at any time
    seconds = time.monotonic() - begin
    if as_json:
        before, after = sizes or (None, None)
        output.print_json({"merged": bool(sizes), "bytes_before": before, "bytes_after": after, "seconds": seconds})
    elif sizes is None:
        print("nothing to merge: this store does not use RocksDB. Its row files are rewritten at every close")
    else:
        old, new = map(output.format_size, sizes)
        print(f"merged: {old} before, {new} after, in {output.format_seconds(seconds)}")


def get(
    store: Annotated[
        Path,
        typer.Argument(
            metavar="STORE",
            help="A store folder, <persistent_path>/<embedding name>, or the folder of a snapshot.",
            show_default=False,
        ),
    ],
    key: Annotated[int, typer.Argument(metavar="KEY", help="The id.", show_default=False)],
    table: Annotated[str, typer.Option(help="The table, by id or name.")] = "0",
    snapshot: Annotated[
        str | None,
        typer.Option(
            help="Read this snapshot instead of the live rows.", show_default=False, autocompletion=complete_names
        ),
    ] = None,
    timeout: Timeout = 60,
    as_json: Json = False,
) -> None:
    """Print a row from a store or a snapshot. Exits with 4 if the row was never written.

    If the store is open in a process, that process reads the row between two steps.

    Example: tierbed store get store/users 42 --table 1
    """
    from ..snapshots.control.client import request_row
    from ..snapshots.files.reader import Snapshot
    from ..snapshots.inspection.row import read_live_row, read_snapshot_row, to_plain_row
    from ..snapshots.store.folder_state import find_holder
    from ..snapshots.store.status import is_snapshot, require_store

    fields: dict[str, Any] = {}
    try:
        if snapshot is not None or is_snapshot(store):
            source = Snapshot.open(store) if snapshot is None else open_snapshot(store, snapshot)
            row, description = read_snapshot_row(source, parse_table(table), key), source.description
        elif find_holder(require_store(store)) is not None and (
            (row_fields := request_row(store, parse_table(table), key, timeout)) is not None
        ):
            fields, row = row_fields, None
        else:
            with lock_stores([store], as_json) as (folder,):
                row, description = read_live_row(folder, parse_table(table), key)
    except InputError as error:
        raise typer.BadParameter(str(error)) from error
    if row is not None:
        fields = to_plain_row(row[0], description)
    if not fields:
        problem = f"there is no row of table {table}, key {key}; a lookup returns the initial row"
        output.fail(problem, output.EXIT_NO_ROW, as_json)
    if as_json:
        output.print_json(fields)
    else:
        states = fields.pop("states")
        output.print_fields({**fields, **states})


def make_document(status: StoreStatus) -> dict[str, Any]:
    """Convert a store's status to plain values for JSON."""
    restart = dict(vars(status.restart))
    return {
        "state": status.state,
        "holder": status.holder,
        "live": status.live_kind,
        "ranks": status.num_ranks,
        "together": list(status.partners),
        "group": [{n.replace("has_live_rows", "live"): v for n, v in m._asdict().items()} for m in status.group],
        **({"dtype": None, "state_dtype": None} if status.marker is None else output.make_dtype_fields(status.marker)),
        "rows": status.rows,
        "rows_by_table": status.rows_by_table,
        "step": status.step,
        "base": status.recovery_snapshot,
        "bytes": status.bytes,
        "restart": {"from": restart.pop("origin"), **restart},
    }


def _describe_live_rows(status: StoreStatus) -> str | None:
    if status.num_ranks is not None:
        return f"shards of {status.num_ranks} ranks"
    return {None: "none", "rows": "row files", "rocksdb": "RocksDB"}.get(status.live_kind, status.live_kind)


def _describe_member(member: MemberStatus) -> str:
    step = "an unknown step" if member.step is None else f"step {member.step:,}"
    snapshot = [f"snapshot {output.escape(member.snapshot)}"] if member.snapshot else []
    saved_parts = " and ".join(["live rows"] * member.has_live_rows + snapshot)
    current = f"{saved_parts or 'no rows'} of {step}" if saved_parts or member.step == 0 else "rows that are not saved"
    common_snapshot = output.escape(member.common or "no rows")
    common_step = "" if member.common_step is None else f" of step {member.common_step:,}"
    return f"{current}; after a kill, it restarts from {common_snapshot}{common_step}"


def _describe_restart(status: StoreStatus) -> str:
    if status.restart.origin == "elsewhere":
        return (
            f"{status.num_ranks} ranks resume from their shards, which are on other hosts; a single process must load "
            "a snapshot first"
        )
    prefix = "" if status.holder is None else "after a close, resumes from the live rows; after a kill, "
    return prefix + _describe_origin(status.restart)


def _describe_origin(restart: Restart) -> str:
    match restart.origin:
        case "live":
            return f"resumes from the live rows, at step {restart.step:,}"
        case "snapshot":
            start = f"rolls back to snapshot {output.escape(restart.snapshot)}, at step {restart.step:,}"
        case "empty":
            start = "starts empty"
        case _:
            return f"cannot start: {restart.problem}"
    if restart.lost_steps is None:
        return f"{start}, and loses all later writes"
    steps = "1 step" if restart.lost_steps == 1 else f"{restart.lost_steps:,} steps"
    return f"{start}, and loses {steps}" if restart.lost_steps else start


def _run_in_thread(work: Callable[[], Any], advance: Callable[[int], None]) -> Any:
    """Run `work` in a thread, so that the progress bar moves and Ctrl-C works meanwhile. Return the result."""
    from concurrent.futures import ThreadPoolExecutor, wait

    pool = ThreadPoolExecutor(1)  # not in a `with` block, because its end would wait for the thread even after Ctrl-C
    future = pool.submit(work)
    while not future.done():
        wait([future], 0.2)
        advance(0)
    pool.shutdown()
    return future.result()
