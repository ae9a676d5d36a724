"""What commands print: text for people and JSON for scripts on stdout, progress bars and problems on stderr."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from io import TextIOWrapper
from typing import Any, NoReturn

import typer

PROBLEM, USAGE, IN_USE, NO_ROW, INTERRUPTED = 1, 2, 3, 4, 130  # exit codes

Progress = Callable[[int], None]

BAR_AFTER = 1.0  # seconds; shorter work shows no bar


def print_json(value: Any, indent: int | None = 2) -> None:
    """One document on stdout; names of foreign files come out as ASCII, NaN and infinities as text."""
    print(json.dumps(_plain(value), indent=indent, allow_nan=False, default=str), flush=True)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it, since a mark may have any content."""
    if isinstance(value, dict):
        return {name if isinstance(name, str) else str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def print_error(message: str) -> None:
    """The document of an error on stdout, in one line, as readers of lines need it."""
    print_json({"error": message}, indent=None)


def print_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """Print the lines of `aligned`."""
    for line in aligned(rows, right):
        print(line)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Columns aligned, those of `right` to the right; a cell that is not printable comes out as JSON."""
    from rich.cells import cell_len

    cells = [[text(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    result = []
    for row in cells:
        gaps = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        padded = (gap + cell if i in right else cell + gap for i, (cell, gap) in enumerate(zip(row, gaps, strict=True)))
        result.append("  ".join(padded).rstrip())
    return result


def print_fields(fields: dict[str, Any]) -> None:
    """Print a line for each field."""
    print_table([[name, words(value)] for name, value in fields.items()])


def complain(message: str) -> None:
    """Print a line on stderr."""
    print(text(message), file=sys.stderr)


@contextmanager
def checked_stdout() -> Iterator[None]:
    """A block that prints. Ends with `PROBLEM` and a message if stdout takes no more, such as on a full disk.

    Characters that its encoding lacks are printed as escapes. Without a message where a pipe was closed.
    """
    stdout = sys.stdout
    if not isinstance(stdout, TextIOWrapper):  # none, or one of a program that runs commands in itself
        yield
        return
    stdout.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())  # what is buffered goes there at the end
        if error.errno != errno.EPIPE:
            complain(f"tierbed: stdout: {error.strerror}")
        raise SystemExit(PROBLEM) from None


def fail(message: str, code: int = PROBLEM, as_json: bool = False) -> NoReturn:
    """End with a message on stderr, and as the document of --json."""
    complain(f"tierbed: {message}")
    if as_json:
        print_error(message)
    raise typer.Exit(code)


def tell_interrupted(as_json: bool) -> None:
    """Print what Ctrl-C leaves on stdout: the document of --json, or nothing."""
    if as_json:
        print_error("interrupted")


def text(value: Any) -> str:
    """A value as printable text: names and descriptions may come from a foreign file."""
    return value if isinstance(value, str) and value.isprintable() else json.dumps(value, default=str)


def words(value: Any) -> str:
    """A plain value as people read it; what is nested in more than one container comes out as JSON."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.9g}"  # as many digits as float32 has
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if any(isinstance(item, (dict, list, tuple)) for item in inner):
        return text(value)
    if isinstance(value, dict):
        return ", ".join(f"{text(name)}: {words(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(words(item) for item in value)
    return text(value)


def size(count: int) -> str:
    """Bytes in the unit that suits, of powers of 1000 as disks are sold and `df -H` has them."""
    if count < 1000:
        return f"{count} B"
    value, unit = float(count), 0
    while value >= 999.5 and unit < 5:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {'kMGTP'[unit - 1]}B" if value < 100 else f"{value:.0f} {'kMGTP'[unit - 1]}B"


def span(seconds: float) -> str:
    """A time in the unit that suits."""
    if seconds < 10:
        return f"{max(seconds, 0):.1f} s"
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def age(created: int) -> str:
    """How long ago, of nanoseconds since 1970, UTC."""
    return span(time.time() - created / 1e9)


def when(created: int) -> str:
    """ISO 8601 of nanoseconds since 1970, UTC."""
    return datetime.fromtimestamp(created // 10**9, UTC).isoformat()


@contextmanager
def progress(title: str, rows: int | None = None) -> Iterator[Progress]:
    """Takes counts of rows; shows them, of `rows` where that is known, once it has lasted for over a second.

    A bar on stderr with rate and time left, where that is a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    begin, done, bar = time.monotonic(), 0, None

    def told(count: int) -> None:
        nonlocal done, bar
        done += count
        if bar is not None:
            bar.show(done)
        elif time.monotonic() - begin > BAR_AFTER:
            from .bar import Bar  # only where it is needed: rich takes a while

            bar = Bar(title, rows, done)

    try:
        yield told
    finally:
        if bar is not None:
            bar.close()
