"""Printing for commands: text or JSON on stdout, progress bars and problems on stderr."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:
    from rich.progress import Progress

    from ..snapshots.files.format import Manifest
    from ..snapshots.files.reader import Snapshot

EXIT_PROBLEM, EXIT_USAGE, EXIT_IN_USE, EXIT_NO_ROW, EXIT_INTERRUPTED = 1, 2, 3, 4, 130  # exit codes
ProgressCallback = Callable[[int], None]
BAR_DELAY = 1.0  # seconds until a progress bar appears
SNAPSHOT_HEADER = ["name", "kind", "parent", "dtype", "rows", "size", "step", "age"]
NUMBER_COLUMNS = {4, 5, 6, 7}  # the columns of SNAPSHOT_HEADER that are aligned to the right


def print_json(value: Any, indent: int | None = 2) -> None:
    """Print one document on stdout. Non-ASCII characters are escaped; NaN and infinities are written as text."""
    print(json.dumps(_to_plain(value), indent=indent, allow_nan=False, default=str), flush=True)


def _to_plain(value: Any) -> Any:
    """Convert a value to something that JSON can represent, because MARK may contain any value."""
    if isinstance(value, dict):
        return {str(name): _to_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_table(rows: Sequence[Sequence[str]], right_columns: Collection[int] = ()) -> None:
    for line in align(rows, right_columns):
        print(line)


def align(rows: Sequence[Sequence[str]], right_columns: Collection[int] = ()) -> list[str]:
    """Return rows as lines of aligned text. `right_columns` are aligned right. Unprintable cells become JSON."""
    from rich.cells import cell_len

    cells = [[escape(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        padded = (
            gap + cell if i in right_columns else cell + gap
            for i, (cell, gap) in enumerate(zip(row, gaps, strict=True))
        )
        lines.append("  ".join(padded).rstrip())
    return lines


def print_fields(fields: dict[str, Any]) -> None:
    print_table([[name, format_value(value)] for name, value in fields.items()])


def print_error(message: str) -> None:
    print(escape(message), file=sys.stderr)


@contextmanager
def check_stdout() -> Iterator[None]:
    """Exit with code `EXIT_PROBLEM` if the `with` block cannot write to stdout, for example because the disk is full.

    Prints the error on stderr, except for a closed pipe. Characters that stdout cannot encode are printed as escapes.
    """
    stdout = sys.stdout
    if not isinstance(stdout, TextIOWrapper):  # stdout does not exist, or the program that calls `main` replaced it
        yield
        return
    stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # so that Python can flush stdout at exit
        if error.errno != errno.EPIPE:
            print_error(f"tierbed: stdout: {error.strerror}")
        raise SystemExit(EXIT_PROBLEM) from None


def fail(message: str, code: int = EXIT_PROBLEM, as_json: bool = False) -> NoReturn:
    """Exit with a message on stderr. With --json, also print the message as JSON on stdout."""
    print_error(f"tierbed: {message}")
    if as_json:
        print_json({"error": message}, indent=None)
    raise SystemExit(code) from None


def print_interrupted(as_json: bool) -> None:
    """With --json, report Ctrl-C as a JSON document on stdout."""
    if as_json:
        print_json({"error": "interrupted"}, indent=None)


def escape(value: Any) -> str:
    """Return printable text unchanged. Convert anything else to JSON, because a foreign file may contain any name."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


def format_value(value: Any) -> str:
    """Format a plain value for people. A container that contains other containers is shown as JSON."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.9g}"  # 9 digits identify any float32
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(item, (dict, list, tuple)) for item in inner):
        return escape(value)
    if isinstance(value, dict):
        return ", ".join(f"{escape(name)}: {format_value(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(format_value(item) for item in value)
    return escape(value)


def format_size(count: int) -> str:
    """Format bytes in a suitable unit, with powers of 1000 like `df -H`."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {'kMGTP'[unit - 1]}B" if value < 100 else f"{value:.0f} {'kMGTP'[unit - 1]}B"


def format_seconds(seconds: float) -> str:
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def format_age(created_ns: int) -> str:
    """Format the time since `created_ns`, in ns since 1970 (UTC)."""
    return format_seconds(time.time() - created_ns / 1e9)


def format_time(created_ns: int) -> str:
    """Format `created_ns`, in ns since 1970 (UTC), as ISO 8601."""
    return datetime.fromtimestamp(created_ns // 10**9, UTC).isoformat()


@contextmanager
def show_progress(title: str, num_rows: int | None = None) -> Iterator[ProgressCallback]:
    """Show progress. Yields a function to call with each count of processed rows. num_rows: the total count, if known.

    If stderr is a terminal, a progress bar appears there after a second, with the rate and the remaining time.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    start, num_done, bar = time.monotonic(), 0, None

    def advance(count: int) -> None:
        nonlocal num_done, bar
        num_done += count
        if bar is None and time.monotonic() - start > BAR_DELAY:
            bar = _start_bar(title, num_rows)
        if bar is not None:
            speed = bar.tasks[0].speed
            bar.update(bar.task_ids[0], completed=num_done, rate=f"{speed:,.0f}/s" if speed else "")

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()


def _start_bar(title: str, num_rows: int | None) -> Progress:
    """Start and return a progress bar on stderr that disappears when it is stopped."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    count = TextColumn("{task.completed:,.0f}" + ("" if num_rows is None else " of {task.total:,.0f}") + " rows")
    clock = TimeElapsedColumn() if num_rows is None else TimeRemainingColumn(compact=True)
    columns = TextColumn("{task.description}"), BarColumn(), count, TextColumn("{task.fields[rate]}"), clock
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    bar.add_task(title, total=num_rows, rate="")
    bar.start()
    return bar


def make_entry(name: str, manifest: Manifest) -> dict[str, Any]:
    """Return a snapshot's entry in JSON output. `bytes` counts the snapshot's own files, without its parents."""
    return {
        "name": name,
        "kind": manifest.kind,
        "parent": None if manifest.parent is None else manifest.parent.name,
        **make_dtype_fields(manifest.description),
        "rows": manifest.rows,
        "bytes": manifest.total_bytes,
        "step": manifest.description["step"],
        "created": format_time(manifest.created),
    }


def make_dtype_fields(description: Mapping[str, Any]) -> dict[str, str | None]:
    """Return `dtype` and `state_dtype` from a snapshot's description. `state_dtype` is None if there is no state."""
    from ..snapshots.store.selection import read_dtypes

    dtype, state_dtype = read_dtypes(description)
    return {"dtype": dtype, "state_dtype": state_dtype}


def format_dtypes(description: Mapping[str, Any]) -> str:
    """Format the dtypes of embeddings and optimizer state, as one name if they are equal or there is no state."""
    dtype, state_dtype = make_dtype_fields(description).values()
    return f"{dtype}, state {state_dtype}" if state_dtype not in (None, dtype) else str(dtype)


def make_cells(snapshots: Iterable[Snapshot]) -> list[list[str]]:
    """Return each snapshot's cells for a printed table with the columns of SNAPSHOT_HEADER."""
    rows = []
    for name, manifest in ((snapshot.name, snapshot.manifest) for snapshot in snapshots):
        kind_cells = manifest.kind, manifest.parent.name if manifest.parent else "", format_dtypes(manifest.description)
        number_cells = f"{manifest.rows:,}", format_size(manifest.total_bytes), f"{manifest.description['step']:,}"
        rows.append([name, *kind_cells, *number_cells, format_age(manifest.created)])
    return rows


def report(action: str, name: str, manifests: dict[str, Manifest], begin: float, as_json: bool, **fields: Any) -> None:
    """Print what a command did to a snapshot.

    action: a verb in the past tense, such as "saved". manifests: {store name: manifest}. begin: from time.monotonic.
    """
    seconds = time.monotonic() - begin
    if as_json:
        entries = {store: make_entry(name, manifest) for store, manifest in manifests.items()}
        print_json({**(entries.get("") or {"stores": entries}), **fields, "seconds": round(seconds, 3)})
        return
    details = f" ({fields['rows_per_second']:,} rows/s)" if "rows_per_second" in fields else ""
    details += f", {fields['left_out']:,} rows skipped" if fields.get("left_out") else ""
    for store, manifest in manifests.items():
        store_text = f" of {escape(store)}" if store else ""
        kind = "" if manifest.kind == "full" else f"{manifest.kind}, "
        size, step = format_size(manifest.total_bytes), manifest.description["step"]
        contents = f"{kind}{manifest.rows:,} rows, {size}, step {step:,}"
        print(f"{action} {escape(name)}{store_text}: {contents}, in {format_seconds(seconds)}{details}")


def report_sound(sound: Iterable[str], damaged: Mapping[str, Exception], as_json: bool) -> None:
    """Print names of sound and damaged snapshots or checkpoints. Exit with code `EXIT_PROBLEM` if one is damaged."""
    if as_json:
        print_json({"sound": [*sound], "damaged": {name: str(error) for name, error in damaged.items()}})
    else:
        for name in sound:
            print(f"sound: {escape(name)}")
    report_damaged(damaged)


def report_damaged(damaged: Mapping[str, Exception]) -> None:
    """Print damaged snapshots or checkpoints on stderr, and exit with code `EXIT_PROBLEM` if there are any."""
    for name, error in damaged.items():
        print_error(f"damaged: {escape(name)}: {error}")
    if damaged:
        raise typer.Exit(EXIT_PROBLEM)
