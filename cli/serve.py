"""`tierbed serve publish | list | verify | rollback | release | prune | pull`."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..engine.errors import ServingError
from . import output
from .arguments import Json

if TYPE_CHECKING:
    from .. import serving

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A serving folder.", show_default=False)]
Keep = Annotated[int, typer.Option(help="Number of latest versions to keep.", min=1)]
Encoding = StrEnum("Encoding", ["int8", "float32", "bfloat16", "float16"])  # ENCODINGS of serving/version.py
_HEADER = ["version", "", "encoding", "rows", "size", "new size", "step", "age"]


def publish(
    folder: Folder,
    snapshots: Annotated[
        list[Path],
        typer.Argument(
            metavar="SNAPSHOT...",
            help="Folders of snapshots, one of each embedding: <store>/snapshots/<name>.",
            show_default=False,
        ),
    ],
    encoding: Annotated[Encoding, typer.Option(help="How rows are stored.")] = Encoding.int8,
    keep: Keep = 3,
    rebase: Annotated[bool, typer.Option("--rebase", help="Write all rows again.")] = False,
    allow_older: Annotated[
        bool, typer.Option("--allow-older", help="Accept snapshots that are older than the last version's.")
    ] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Accept an embedding that has lost more than half its rows.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Publish snapshots' rows as a new version. After a rollback, readers take it only after `release`.

    Example: tierbed serve publish serving store/users/snapshots/monday store/items/snapshots/monday
    """
    from .. import serving

    begin = time.monotonic()
    check: Literal[False] | None = False if no_check else None
    version = serving.publish(
        folder, snapshots, encoding.value, keep=keep, check=check, rebase=rebase, allow_older=allow_older
    )
    seconds = time.monotonic() - begin
    size = output.format_size(sum(file.bytes for file in version.files))
    contents = f"{version.rows:,} rows, {size}, step {version.step:,}"
    text = f"published version {version.version}: {contents}, in {output.format_seconds(seconds)}"
    _report({**_make_entry(version), "seconds": round(seconds, 3)}, text, as_json)


def list_(folder: Folder, as_json: Json = False) -> None:
    """List versions, oldest first, and mark the one that readers take.

    Example: tierbed serve list serving
    """
    from .. import serving

    opened = serving.ServingFolder(folder)
    current, versions = opened.read_current(), [opened.read_version(number) for number in opened.list_versions()]
    if as_json:
        entries = [_make_entry(version) for version in versions]
        output.print_json({"current": current.version, "hold": current.hold, "versions": entries})
        return
    lines, before = [_HEADER], set[str]()
    for version in versions:
        state = ("held" if current.hold else "current") if version.version == current.version else ""
        size = sum(file.bytes for file in version.files)
        new_size = sum(file.bytes for file in version.files if file.name not in before)
        before = {file.name for file in version.files}
        sizes = output.format_size(size), output.format_size(new_size)
        cells = str(version.version), state, version.encoding, f"{version.rows:,}", *sizes
        lines.append([*cells, f"{version.step:,}", output.format_age(version.created)])
    output.print_table(lines, {0, 3, 4, 5, 6, 7})


def verify(folder: Folder, as_json: Json = False) -> None:
    """Read all files, and compare them with their checksums. Exits with 1 if a version is damaged.

    Example: tierbed serve verify serving
    """
    from .. import serving

    opened = serving.ServingFolder(folder)
    damaged: dict[str, Exception] = {}
    sound = []
    problems: dict[str, str] = {}  # by file, since versions share files
    numbers = opened.list_versions()
    if not numbers:
        opened.read_current()  # a missing folder is not damaged: this raises
    for number in numbers:
        try:
            files = opened.read_version(number).files
            problems |= {file.name: opened.check_file(file) for file in files if file.name not in problems}
            if found := [problems[file.name] for file in files if problems[file.name]]:
                raise ServingError("; ".join(found))
            sound.append(str(number))
        except ServingError as error:
            damaged[str(number)] = error
    try:
        opened.read_version(opened.read_current().version)
    except ServingError as error:
        damaged.setdefault("CURRENT", error)
    output.report_sound(sound, damaged, as_json)


def rollback(
    folder: Folder,
    version: Annotated[int, typer.Argument(help="The version's number.", min=1, show_default=False)],
    as_json: Json = False,
) -> None:
    """Move readers to an older version, and hold them there until `release`. Later publishes only write versions.

    Example: tierbed serve rollback serving 11
    """
    from .. import serving

    serving.ServingFolder(folder).rollback(version)
    _report({"current": version, "hold": True}, f"readers are held at version {version}", as_json)


def release(folder: Folder, as_json: Json = False) -> None:
    """Move readers to the latest version, and end a rollback.

    Example: tierbed serve release serving
    """
    from .. import serving

    version = serving.ServingFolder(folder).release().version
    _report({"current": version, "hold": False}, f"readers take version {version} and later ones", as_json)


def prune(folder: Folder, keep: Keep = 3, as_json: Json = False) -> None:
    """Remove versions but the latest and the one that readers take, and files that no version needs.

    Example: tierbed serve prune serving --keep 1
    """
    from .. import serving

    removed = serving.ServingFolder(folder).prune(keep)
    _report({"removed": removed}, f"removed versions: {', '.join(map(str, removed)) or 'none'}", as_json)


def pull(
    source: Annotated[Path, typer.Argument(metavar="SOURCE", help="A serving folder.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The copy.", show_default=False)],
    as_json: Json = False,
) -> None:
    """Copy the version that readers of SOURCE take to FOLDER. Only files that FOLDER lacks are copied.

    Example: tierbed serve pull /mnt/models/serving serving
    """
    from .. import serving

    version = serving.pull(source, folder)
    _report(_make_entry(version), f"{str(folder)!r} has version {version.version}", as_json)


def _report(document: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        output.print_json(document)
    else:
        print(text)


def _make_entry(version: serving.Version) -> dict[str, Any]:
    """Return a version's entry in JSON output."""
    return {
        "version": version.version,
        "encoding": version.encoding,
        "step": version.step,
        "rows": version.rows,
        "bytes": sum(file.bytes for file in version.files),
        "created": output.format_time(version.created),
        "embeddings": [embedding.name for embedding in version.embeddings],
    }
