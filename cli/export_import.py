"""`tierbed snapshot export | import`."""

from __future__ import annotations

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ..engine.errors import StoreError
from .arguments import (
    Json,
    Name,
    NewName,
    Overwrite,
    Store,
    Tables,
    exit_if_in_use,
    open_snapshot,
    parse_table,
    parse_tables,
)
from .output import escape, format_seconds, format_size, print_json, report, show_progress

Format = StrEnum("Format", ["parquet", "npz", "safetensors", "snapshot"])  # as in snapshots.exchange.FORMATS
Dtype = StrEnum("Dtype", ["float32", "float16", "bfloat16"])


def export(
    store: Store,
    name: Name,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The file or folder to write.", show_default=False)],
    format: Annotated[Format | None, typer.Option(help="File format. Default: by the suffix of PATH.")] = None,
    table: Tables = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave out optimizer state.")] = False,
    overwrite: Overwrite = False,
    as_json: Json = False,
) -> None:
    """Write a snapshot's rows in a format for other programs, or as another full snapshot.

    Example: tierbed snapshot export store/users monday users.parquet
    """
    from ..snapshots.exchange.export import export_snapshot

    try:
        chosen_format = format or Format(path.suffix[1:].lower())
    except ValueError:
        raise typer.BadParameter(f"{str(path)!r} has no known suffix; give --format {' | '.join(Format)}") from None
    begin = time.monotonic()
    snapshot = open_snapshot(store, name)
    tables = parse_tables(table, snapshot)
    with show_progress("exporting", snapshot.manifest.rows) as advance:
        rows = export_snapshot(
            snapshot, path, chosen_format.value, advance, tables=tables, state=not weights_only, overwrite=overwrite
        )
    seconds = time.monotonic() - begin
    size = sum(file.stat().st_size for file in (path.iterdir() if path.is_dir() else [path]))
    if as_json:
        print_json({"path": str(path), "format": chosen_format.value, "rows": rows, "bytes": size, "seconds": seconds})
    else:
        details = f"{rows:,} rows, {format_size(size)}, in {format_seconds(seconds)}"
        print(f"exported {escape(name)} to {escape(str(path))}: {details}")


def import_(
    store: Store,
    name: NewName,
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="An export, a snapshot's folder, or a dense table: .npy, .npz, .safetensors, or a torch file.",
            show_default=False,
        ),
    ],
    tensor: Annotated[
        list[str] | None,
        typer.Option(help="The tensor of SOURCE that is a table; repeat it for more tables.", show_default=False),
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(
            help="A .npy file with each row's key. By default, a row's key is its number.",
            exists=True,
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    table_ids: Annotated[
        str | None,
        typer.Option(
            help="The table of all rows, by id or name, or a .npy file with a table id per row.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="The rows' dtype. By default, SOURCE's dtype, or the store's if SOURCE has none."),
    ] = None,
    create: Annotated[bool, typer.Option("--create", help="Create the store folder if it does not exist.")] = False,
    as_json: Json = False,
) -> None:
    """Make a snapshot from rows that `export` or another program wrote. Load the snapshot to use the rows.

    Example: tierbed snapshot import store/users pretrained model.pt --tensor emb.weight
    """
    import torch

    from ..snapshots.exchange.importing import import_snapshot
    from ..snapshots.store.status import require_store

    if not create:
        try:
            require_store(store)
        except StoreError as error:
            raise StoreError(f"{error}; or add --create to create it") from None
    begin = time.monotonic()
    names: str | list[str] | None = tensor[0] if tensor and len(tensor) == 1 else tensor or None
    ids = None if table_ids is None else parse_table(table_ids)
    if isinstance(ids, str) and ids.endswith(".npy") and not Path(ids).is_file():
        raise typer.BadParameter(f"--table-ids {ids!r}: give a table id or name, or a .npy file that exists")
    torch_dtype = None if dtype is None else getattr(torch, dtype)
    with exit_if_in_use([store], as_json), show_progress("importing") as advance:
        manifest = import_snapshot(
            store, name, source, keys=keys, table_ids=ids, tensor=names, dtype=torch_dtype, progress=advance
        )
    rate = round(manifest.rows / (time.monotonic() - begin))
    report("imported", name, {"": manifest}, begin, as_json, rows_per_second=rate)
