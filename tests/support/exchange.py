"""What the tests of imports share: tables as others write them, and what an import made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from numpy.typing import NDArray
from safetensors.numpy import save_file

from support.embeddings import DIM
from support.small_snapshots import whole
from tierbed.snapshots import Snapshot
from tierbed.snapshots.exchange.columns import Columns
from tierbed.snapshots.exchange.importing import import_snapshot

FILES = ["parquet", "npz", "safetensors"]
VALUES = np.random.default_rng(0).normal(size=(40, DIM)).astype(np.float32)


def imported(store: Path, *arguments: Any, **options: Any) -> dict[tuple[int, int], list[float]]:
    """The embeddings of what was imported as "s", by (table, key)."""
    import_snapshot(store, "s", *arguments, **options)
    snapshot = Snapshot.open(store / "snapshots" / "s")
    snapshot.verify()
    parts = Columns(snapshot.description).split(whole(snapshot))
    ids = zip(parts["table"].tolist(), parts["key"].tolist(), strict=True)
    return dict(zip(ids, parts["embedding"].tolist(), strict=True))


def dense(values: NDArray[np.float32] = VALUES, table: int = 0) -> dict[tuple[int, int], list[float]]:
    return {(table, key): row for key, row in enumerate(values.tolist())}


def columns_of(count: int, **changes: Any) -> dict[str, NDArray[Any]]:
    return {"key": np.arange(count)[::-1].copy(), "embedding": VALUES[:count]} | changes


def write_columns(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    if path.suffix == ".npz":
        np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    elif path.suffix == ".safetensors":
        save_file(arrays, path)
    else:
        lists = {name: array.tolist() if array.ndim > 1 else array for name, array in arrays.items()}
        plain = {name: pyarrow.from_numpy_dtype(array.dtype) for name, array in arrays.items()}
        types = {name: pyarrow.list_(kind) if arrays[name].ndim > 1 else kind for name, kind in plain.items()}
        table = {name: pyarrow.array(lists[name], types[name]) for name in arrays}
        pyarrow.parquet.write_table(pyarrow.table(table), path)
