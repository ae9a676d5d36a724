"""`tierbed checkpoint list | inspect | verify | prune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import SnapshotError
from . import output
from .arguments import Json

if TYPE_CHECKING:
    from ..graph.state.folders import StoredCheckpoint

CheckpointPath = Annotated[
    Path,
    typer.Argument(
        metavar="PATH",
        help="A checkpoint from graph.save or save_checkpoint, or a folder of checkpoints.",
        show_default=False,
    ),
]


def list_(path: CheckpointPath, as_json: Json = False) -> None:
    """List checkpoints, oldest first, with each embedding's step. Exits with 1 if a checkpoint is damaged.

    Example: tierbed checkpoint list runs/
    """
    from ..graph.state.folders import list_checkpoints

    checkpoints, damaged = list_checkpoints(path)
    if as_json:
        errors = {name: str(error) for name, error in damaged.items()}
        output.print_json({"checkpoints": [*map(_make_entry, checkpoints)], "damaged": errors})
    else:
        lines = [["name", "of", "embeddings and steps", "size", "age"]]
        for checkpoint in checkpoints:
            steps = ", ".join(f"{path} {s.description['step']:,}" for path, s in checkpoint.snapshots.items())
            size, age = output.format_size(checkpoint.total_bytes), output.format_age(checkpoint.created_ns)
            lines.append([checkpoint.path.name, checkpoint.kind, steps, size, age])
        output.print_table(lines, {3, 4})
    output.report_damaged(damaged)


def inspect(path: CheckpointPath, as_json: Json = False) -> None:
    """Print a checkpoint's tensors, and the step, row count and size of each embedding.

    Example: tierbed checkpoint inspect runs/epoch-3
    """
    from ..graph.state.folders import list_checkpoints

    checkpoints, damaged = list_checkpoints(path)
    names = sorted([*(checkpoint.path.name for checkpoint in checkpoints), *damaged])
    if len(names) > 1:
        output.fail(f"{str(path)!r} holds the checkpoints {', '.join(names)}; give the path of one", as_json=as_json)
    for error in damaged.values():
        raise error
    (checkpoint,) = checkpoints
    tensors = {name: [entry["dtype"], *entry["shape"]] for name, entry in checkpoint.read_tensors().items()}
    entry = _make_entry(checkpoint)
    if as_json:
        output.print_json({**entry, "tensors": tensors})
        return
    size = output.format_size(entry["bytes"])
    output.print_fields({**{field: entry[field] for field in ("name", "of", "created")}, "size": size})
    print()
    lines = [["embedding", "name", "rows", "step", "size"]]
    for embedding, rows in entry["embeddings"].items():
        size = output.format_size(rows["bytes"])
        lines.append([embedding, rows["name"], f"{rows['rows']:,}", f"{rows['step']:,}", size])
    output.print_table(lines, {2, 3, 4})
    print()
    shapes = ([name, dtype, "x".join(map(str, shape))] for name, (dtype, *shape) in tensors.items())
    output.print_table([["tensor", "dtype", "shape"], *shapes])


def verify(path: CheckpointPath, as_json: Json = False) -> None:
    """Read checkpoints and compare each file with its checksum. Exits with 1 if a checkpoint is damaged.

    Example: tierbed checkpoint verify runs/
    """
    from ..graph.state.folders import list_checkpoints

    checkpoints, damaged = list_checkpoints(path)
    for checkpoint in checkpoints:
        try:
            checkpoint.verify()
        except SnapshotError as error:
            damaged[checkpoint.path.name] = error
    names = [checkpoint.path.name for checkpoint in checkpoints]
    output.report_sound([name for name in names if name not in damaged], damaged, as_json)


def prune(
    path: CheckpointPath,
    keep_last: Annotated[int, typer.Option(help="Number of latest checkpoints to keep.", min=1)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    as_json: Json = False,
) -> None:
    """Remove old checkpoints from a folder. For snapshots of a store, use `tierbed snapshot prune`.

    Example: tierbed checkpoint prune runs/ --keep-last 3
    """
    from ..graph.state.folders import STATE_FILE
    from ..graph.state.folders import prune as prune_checkpoints

    if (path / STATE_FILE).exists():
        output.fail(f"{str(path)!r} is one checkpoint; give the folder that holds all", as_json=as_json)
    retained, removed = prune_checkpoints(path, keep_last, dry_run)
    if as_json:
        names = {"removed": [c.path.name for c in removed], "kept": [c.path.name for c in retained]}
        output.print_json({**names, "dry_run": dry_run})
        return
    for checkpoint in removed:
        print(f"{'would remove' if dry_run else 'removed'} {output.escape(checkpoint.path.name)}")
    print(f"{len(removed)} of {len(retained) + len(removed)} checkpoints")


def _make_entry(checkpoint: StoredCheckpoint) -> dict[str, Any]:
    embeddings = {}
    for path, snapshot in checkpoint.snapshots.items():
        names = {field: snapshot.description[field] for field in ("name", "step")}
        embeddings[path] = {**names, "rows": snapshot.manifest.rows, "bytes": snapshot.manifest.total_bytes}
    return {
        "name": checkpoint.path.name,
        "of": checkpoint.kind,
        "created": output.format_time(checkpoint.created_ns),
        "bytes": checkpoint.total_bytes,
        "embeddings": embeddings,
    }
