"""`tierbed store options`."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..engine.errors import OptionError, TierbedError
from .arguments import Json, find_nearest_existing
from .output import EXIT_PROBLEM, escape, format_size, print_error, print_fields, print_json

if TYPE_CHECKING:
    from ..engine.options.store_options import StoreOptions

MB = 1 << 20


def options(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A TOML file of store options.", show_default=False)],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Embeddings to check. All by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check a store options file, and show each embedding's resulting options, memory and disk space.

    FILE is a TOML file for `load_store_options`. Opens no store, creates no folder. Exits with 1 for invalid options.

    Example: tierbed store options deploy.toml
    """
    from ..engine.host_memory import read_free_host_memory
    from ..engine.options.store_options import load_store_options, read_store_options
    from ..engine.options.table_spec import check_name

    results: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    tables = read_store_options(file)
    if not tables:
        remedy = "add a table [name] with store options for each embedding"
        raise OptionError(f"store options file {str(file)!r} is empty; {remedy}")
    for name in names or tables:
        try:
            store = load_store_options(file, check_name(name))
            memory, disk = _compute_memory(store), _measure_disk(store, name)
            results[name] = {"options": store.as_dict(), "memory_bytes": memory, "disk": disk}
        except TierbedError as error:
            problems[name] = str(error)
    known_bytes = sum(n for result in results.values() for n in result["memory_bytes"].values() if isinstance(n, int))
    disks = _sum_disks(results)
    for disk in disks:
        if disk["rows_bytes"] > disk["free_bytes"]:
            problems[disk["path"]] = (
                f"the rows of {', '.join(disk['embeddings'])} need {format_size(disk['rows_bytes'])}, and the disk has "
                f"{format_size(disk['free_bytes'])} for them; use a larger disk, or lower capacities"
            )
    host_memory = read_free_host_memory()
    if as_json:
        memory = {"memory_bytes": known_bytes, "free_memory_bytes": None if host_memory is None else host_memory.bytes}
        print_json({"embeddings": results, "wrong": problems, **memory, "disks": disks})
    else:
        for name, result in results.items():
            print(f"[{escape(name)}]")
            memory = {part.replace("_", " "): amount for part, amount in result["memory_bytes"].items()}
            parts = [f"{part} {_format_amount(amount, _format_mib)}" for part, amount in memory.items()]
            print_fields({**result["options"], "memory": ", ".join(parts), "disk": _format_disk(result["disk"])})
            print()
        free_memory = "" if host_memory is None else f"; {_format_mib(host_memory.bytes)} free {host_memory.location}"
        print(f"total memory, as far as known: {_format_mib(known_bytes)}{free_memory}")
        for disk in disks:
            rows_and_space = f"{format_size(disk['rows_bytes'])}; {format_size(disk['free_bytes'])} free"
            print(f"rows on the disk of {escape(disk['path'])}: {rows_and_space}")
    for name, problem in problems.items():
        print_error(f"wrong: {escape(name)}: {problem}")
    if problems:
        raise typer.Exit(EXIT_PROBLEM)


def _compute_memory(options: StoreOptions) -> dict[str, int | str | None]:
    """Return {part of the store: bytes of memory}. "auto" stands for a share of free memory, None for unknown.

    On a machine without a GPU, the device cache is in host memory and needs an overflow area.
    """
    from ..engine.cache.memory_split import compute_index_bytes, compute_thread_bytes
    from ..engine.options.store_options import CachedHostMemOptions, CachedSsdOptions
    from ..engine.row_format import compute_line_bytes
    from ..engine.store.full_tier import compute_full_table_bytes
    from ..engine.store.rocksdb import READ_THREADS, WRITE_BUFFER_BYTES

    parts: dict[str, int | str | None] = {}
    if isinstance(options, CachedHostMemOptions):
        caches = {"": options.cache_budget_mb, "host_cache_": options.get("host_cache_budget_mb")}
        for cache, mb in caches.items():
            if mb:
                parts[cache.removesuffix("_") or "cache"] = mb if isinstance(mb, str) else int(mb * MB)
                parts[f"{cache}overflow"] = mb if isinstance(mb, str) else int(options.compute_overflow_mb(mb) * MB)
    if isinstance(options, CachedSsdOptions):
        index_bytes = None if options.index_mb is None else int(options.index_mb * MB)
        if index_bytes is None and options.capacity is not None and options.storage_dim is not None:
            row_index_bytes = compute_index_bytes(4 * options.storage_dim + 8, options.physical_block_size)
            index_bytes = int(options.capacity * row_index_bytes)
        return parts | {
            "write_buffers": WRITE_BUFFER_BYTES,
            "index_and_filters": index_bytes,
            "data_blocks": int((options.rocksdb_cache_mb or 0) * MB),
            "look_ahead": int(options.look_ahead_mb * MB),
            "changed_keys_at_most": int(options.changed_keys_mb * MB),
            "threads": compute_thread_bytes(0, options.physical_block_size, options.io_threads or READ_THREADS),
        }
    if options.capacity is None or options.storage_dim is None:
        return parts | {"table": None}
    return parts | {"table": compute_full_table_bytes(options.capacity, compute_line_bytes(options.storage_dim))}


def _measure_disk(options: StoreOptions, name: str) -> dict[str, Any] | None:
    """Return the paths of rows and snapshots, the free bytes at each path, and the rows' total bytes (None if unknown).

    Return None if rows are not stored on disk. Raises OptionError for an invalid path or if the disk is too small.
    """
    from ..engine.row_format import row_dtype

    if options.persistent_path is None:
        return None
    row_path, snapshot_path = Path(options.persistent_path), Path(options.snapshot_path or options.persistent_path)
    usage = shutil.disk_usage(_find_writable("persistent_path", row_path))
    free_bytes = shutil.disk_usage(_find_writable("snapshot_path", snapshot_path)).free
    row_bytes = None
    if options.capacity is not None and options.storage_dim is not None:
        row_bytes = options.capacity * row_dtype(options.storage_dim).itemsize
        if row_bytes > usage.total:
            raise OptionError(
                f"capacity={options.capacity}: rows of storage_dim={options.storage_dim} need "
                f"{format_size(row_bytes)}, and the disk of persistent_path={str(row_path)!r} has "
                f"{format_size(usage.total)}; use a larger disk, or lower capacity"
            )
    return {
        "store": str(row_path / name),
        "free_bytes": usage.free,
        "snapshots": str(snapshot_path / name / "snapshots"),
        "free_bytes_of_snapshots": free_bytes,
        "rows_bytes": row_bytes,
    }


def _sum_disks(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """For each file system, return the bytes that rows of its embeddings need (if known), and the bytes available.

    Space used by a store's current files counts as available, but space used by its snapshots does not.
    """
    disks: dict[int, dict[str, Any]] = {}
    for name, disk in ((name, result["disk"]) for name, result in results.items()):
        if disk is None or disk["rows_bytes"] is None:
            continue
        store = Path(disk["store"])
        new_entry = {"path": str(store.parent), "free_bytes": disk["free_bytes"], "rows_bytes": 0, "embeddings": []}
        entry = disks.setdefault(_find_writable("persistent_path", store.parent).stat().st_dev, new_entry)
        entry["rows_bytes"] += disk["rows_bytes"]
        entry["embeddings"].append(name)
        for folder, folders, files in os.walk(store):
            folders[:] = [name for name in folders if name != "snapshots"]
            for file in files:
                with contextlib.suppress(FileNotFoundError):  # a process that uses the store may remove files
                    entry["free_bytes"] += os.lstat(os.path.join(folder, file)).st_size
    return list(disks.values())


def _find_writable(option: str, path: Path) -> Path:
    """Return the path or its nearest existing parent. Raises OptionError if this user cannot create folders there."""
    folder = find_nearest_existing(path)
    if not folder.is_dir():
        raise OptionError(f"{option}={str(path)!r}: {str(folder)!r} is not a folder; give another path")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise OptionError(f"{option}={str(path)!r}: this user cannot write {str(folder)!r}; change its mode or owner")
    return folder


def _format_mib(bytes: int) -> str:
    """Format bytes in MiB, the unit of store options such as `cache_budget_mb`."""
    return f"{bytes / MB:,.0f} MiB" if bytes >= 1000 * MB else f"{bytes / MB:.4g} MiB"


def _format_amount(bytes: int | str | None, format_bytes: Callable[[int], str] = format_size) -> str:
    if bytes is None:
        return "unknown without capacity and storage_dim"
    return bytes if isinstance(bytes, str) else format_bytes(bytes)


def _format_disk(disk: dict[str, Any] | None) -> str:
    if disk is None:
        return "none: rows are lost when the process ends"
    rows = f"rows {_format_amount(disk['rows_bytes'])}, and as much again for each full snapshot"
    free = f"{format_size(disk['free_bytes'])} free in {disk['store']}"
    return f"{rows}; {free}, {format_size(disk['free_bytes_of_snapshots'])} for {disk['snapshots']}"
