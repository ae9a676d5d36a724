"""`tierbed checkpoint list | inspect | verify | prune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import SnapshotError
from .arguments import Json
from .output import age, fail, print_fields, print_json, print_table, report_damaged, report_sound, size, text, when

if TYPE_CHECKING:
    from ..graph.state.kept import Kept

Place = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint of graph.save or save_checkpoint, or a folder of checkpoints.",
        show_default=False,
    ),
]


def list_(path: Place, as_json: Json = False) -> None:
    """List checkpoints from the oldest to the latest, with the step of each embedding. Exits with 1 if one is damaged.

    Example: tierbed checkpoint list runs/
    """
    from ..graph.state.kept import kept_at

    found, damaged = kept_at(path)
    if as_json:
        print_json({"checkpoints": [_entry(one) for one in found], "damaged": {n: str(e) for n, e in damaged.items()}})
    else:
        lines = [["name", "of", "embeddings and steps", "size", "age"]]
        for one in found:
            steps = ", ".join(f"{path} {snapshot.description['step']:,}" for path, snapshot in one.rows.items())
            lines.append([one.path.name, one.of, steps, size(one.bytes), age(one.created)])
        print_table(lines, {3, 4})
    report_damaged(damaged)


def inspect(path: Place, as_json: Json = False) -> None:
    """Print what a checkpoint holds: embeddings with steps, rows and sizes, and tensors.

    Example: tierbed checkpoint inspect runs/epoch-3
    """
    from ..graph.state.kept import kept_at

    found, damaged = kept_at(path)
    names = sorted([*(one.path.name for one in found), *damaged])
    if len(names) > 1:
        fail(f"{str(path)!r} holds the checkpoints {', '.join(names)}: give the path of one", as_json=as_json)
    for error in damaged.values():
        raise error
    (one,) = found
    tensors = {name: [of["dtype"], *of["shape"]] for name, of in one.tensors().items()}
    if as_json:
        print_json({**_entry(one), "tensors": tensors})
        return
    print_fields({"name": one.path.name, "of": one.of, "created": when(one.created), "size": size(one.bytes)})
    print()
    header = ["embedding", "name", "rows", "step", "size"]
    rows = [
        [at, s.description["name"], f"{s.manifest.rows:,}", f"{s.description['step']:,}", size(s.manifest.total_bytes)]
        for at, s in one.rows.items()
    ]
    print_table([header, *rows], {2, 3, 4})
    print()
    shapes = ([name, dtype, "x".join(map(str, shape))] for name, (dtype, *shape) in tensors.items())
    print_table([["tensor", "dtype", "shape"], *shapes])


def verify(path: Place, as_json: Json = False) -> None:
    """Read checkpoints and compare every file with its checksum. Exits with 1 if one is damaged.

    Example: tierbed checkpoint verify runs/
    """
    from ..graph.state.kept import kept_at

    found, damaged = kept_at(path)
    for one in found:
        try:
            one.verify()
        except SnapshotError as error:
            damaged[one.path.name] = error
    report_sound([one.path.name for one in found if one.path.name not in damaged], damaged, as_json)


def prune(
    path: Place,
    keep_last: Annotated[int, typer.Option(help="How many of the latest to keep.", min=1)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Remove all but the latest checkpoints of a folder. For snapshots in store folders: `tierbed snapshot prune`.

    Example: tierbed checkpoint prune runs/ --keep-last 3
    """
    from ..graph.state.kept import STATE
    from ..graph.state.kept import prune as prune_kept

    if (path / STATE).exists():
        fail(f"{str(path)!r} is one checkpoint: give the folder that holds several", as_json=as_json)
    kept, removed = prune_kept(path, keep_last, dry_run)
    if as_json:
        names = {"removed": [one.path.name for one in removed], "kept": [one.path.name for one in kept]}
        print_json({**names, "dry_run": dry_run})
        return
    for one in removed:
        print(f"{'would remove' if dry_run else 'removed'} {text(one.path.name)}")
    print(f"{len(removed)} of {len(kept) + len(removed)} checkpoints")


def _entry(one: Kept) -> dict[str, Any]:
    rows = {
        path: {
            "name": snapshot.description["name"],
            "step": snapshot.description["step"],
            "rows": snapshot.manifest.rows,
            "bytes": snapshot.manifest.total_bytes,
        }
        for path, snapshot in one.rows.items()
    }
    return {
        "name": one.path.name,
        "of": one.of,
        "created": when(one.created),
        "bytes": one.bytes,
        "embeddings": rows,
    }
