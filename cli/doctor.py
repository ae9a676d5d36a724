"""`tierbed doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .arguments import Json
from .output import PROBLEM, aligned, print_json


def doctor(
    path: Annotated[
        Path | None,
        typer.Argument(metavar="[PATH]", help="A persistent_path, to check its file system too.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell what this installation can do, and how to get what it lacks. Exits with 1 if the core cannot work.

    Example: tierbed doctor /data/embeddings
    """

    from .checks import checks, disk_checks

    found = [*checks(), *(disk_checks(path) if path is not None else ())]
    if as_json:
        print_json({"works": not any(c.fatal for c in found), "checks": [c.plain() for c in found]})
    else:
        names = aligned([["ok" if c.ok else "missing", c.name, c.value] for c in found])
        for check, line in zip(found, names, strict=True):
            print(line)
            if check.remedy:
                print(f"         -> {check.remedy}")
    if any(check.fatal for check in found):
        raise typer.Exit(PROBLEM)
