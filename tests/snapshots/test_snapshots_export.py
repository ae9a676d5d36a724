from __future__ import annotations

import json
import os
import tracemalloc
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from torch import Tensor

from support.embeddings import make, rows_by_key, train
from support.exchange import FILES, whole
from support.refusals import check_refusal
from support.small_snapshots import chunked, description, flip_bit, least_keys, make_buckets
from support.stores import options
from tierbed.engine.errors import InputError, SnapshotError
from tierbed.engine.row_format import LAST_STEP
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.exchange.export import FORMATS, export_snapshot


def saved(folder: Path, width: int = 6, counts: dict[int, int] | None = None, **changes: Any) -> Snapshot:
    """A snapshot with every kind of float; tables 0 to 2."""
    buckets = make_buckets(width, {0: 20, 5: 1, 63: 9} if counts is None else counts)
    if changes.get("key_type") == "int32":
        for bucket, rows in buckets.items():
            for table in range(3):
                places = np.flatnonzero(rows["table"] == table)
                rows["key"][places] = least_keys(bucket, len(places), table)
    tables = [{"type": "constant", "value": 0.0}] * 3
    write_snapshot(folder, description(width, tables=tables, step=LAST_STEP, **changes), chunked(buckets))
    return Snapshot.open(folder)


def read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The columns of an export and its description, by the libraries of the formats alone."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        return columns, json.loads(str(columns.pop("tierbed")))
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, "np") as opened:
            return load_file(path), json.loads(opened.metadata()["tierbed"])
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    columns = {}
    for name in table.column_names:
        column = table[name].combine_chunks()
        if pyarrow.types.is_fixed_size_list(column.type):
            columns[name] = column.flatten().to_numpy().reshape(-1, column.type.list_size)
        else:
            columns[name] = column.to_numpy()
    return columns, json.loads(table.schema.metadata[b"tierbed"])


def same(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize("key_type", ["int32", "int64", "uint64"])
@pytest.mark.rotated("key_type")
def test_libraries_read_the_same_bits(tmp_path: Path, format: str, key_type: str) -> None:
    snapshot = saved(tmp_path / "s", key_type=key_type)
    path = tmp_path / "new" / f"x.{format}"
    seen: list[int] = []
    assert export_snapshot(snapshot, path, format, seen.append) == sum(seen) == 30
    assert os.listdir(path.parent) == [path.name]
    columns, about = read(path)
    assert about == snapshot.description
    rows = whole(snapshot)
    assert set(columns) == {"table", "key", "embedding", "sum", "updates", "step"}
    same(columns["key"], rows["key"].astype(key_type))
    same(columns["embedding"], rows["values"][:, :3].copy())
    same(columns["sum"], rows["values"][:, 3:].copy())
    for name in ("table", "updates", "step"):
        same(columns[name], rows[name].copy())


@pytest.mark.parametrize("kind", ["full", "incremental", "checkpoint"])
def test_every_kind_of_snapshot_of_a_trained_embedding_exports_as_a_full_one(tmp_path: Path, kind: str) -> None:
    with make(options("ssd", tmp_path), "rowwise", tables=2) as embedding:
        for step in range(3):
            train(embedding, torch.arange(-20, 40) * (step + 1), torch.arange(60) % 2)
            embedding.save_snapshot(f"s{step}", kind if step else "full")
            embedding.delete(torch.arange(5), 0)
        embedding.save_snapshot("s", kind)
        rows = rows_by_key(embedding)
    snapshot = Snapshot.open(tmp_path / "rows" / "snapshots" / "s")
    assert export_snapshot(snapshot, tmp_path / "open", "snapshot") == len(rows)
    found = Snapshot.open(tmp_path / "open")
    assert (found.kind, found.description) == ("full", snapshot.description)
    assert whole(found).tobytes() == whole(snapshot).tobytes()
    export_snapshot(snapshot, tmp_path / "x.npz", "npz")
    columns, about = read(tmp_path / "x.npz")
    assert (about["optimizer"], columns["sum"].shape) == ("rowwise_adagrad", (len(rows), 1))
    names = zip(columns["table"].tolist(), columns["key"].tolist(), strict=True)
    assert dict(zip(names, columns["embedding"].tolist(), strict=True)) == rows


@pytest.mark.parametrize("format", FORMATS)
def test_part_of_a_snapshot(tmp_path: Path, format: str) -> None:
    snapshot = saved(tmp_path / "s")
    rows = whole(snapshot)
    path = tmp_path / f"x.{format}"
    seen: list[int] = []
    count = export_snapshot(snapshot, path, format, seen.append, tables=[0, 2], state=False)
    kept = rows[rows["table"] != 1]
    assert (count, sum(seen)) == (len(kept), len(rows))
    assert 0 < len(kept) < len(rows)
    if format == "snapshot":
        found = Snapshot.open(path)
        about, part = found.description, whole(found)
        same(part["values"].copy(), kept["values"][:, :3].copy())
        same(part["key"].copy(), kept["key"].copy())
    else:
        columns, about = read(path)
        assert set(columns) == {"table", "key", "embedding", "updates", "step"}
        same(columns["embedding"], kept["values"][:, :3].copy())
        same(columns["table"], kept["table"].copy())
    none: dict[str, Any] = {field: [] for field in ("states", "state_widths", "initial", "hyper")}
    assert about == {**snapshot.description, **none, "width": 3, "optimizer": None, "step": 0}


def test_without_state_rows_are_as_a_lookup_sees_them(tmp_path: Path) -> None:
    with make(options("host", tmp_path), "catch-up", tables=1) as embedding:
        for step in range(6):
            train(embedding, torch.arange(step, 9))
        embedding.save_snapshot("s")
        wanted: Tensor = embedding.get(torch.arange(9))
    snapshot = Snapshot.open(tmp_path / "rows" / "snapshots" / "s")
    export_snapshot(snapshot, tmp_path / "x.npz", "npz", state=False)
    columns, _ = read(tmp_path / "x.npz")
    order = np.argsort(columns["key"])
    assert columns["embedding"][order].tolist() == wanted.tolist()
    rows = whole(snapshot)
    assert rows["values"][np.argsort(rows["key"]), :5].tolist() != wanted.tolist()


@pytest.mark.parametrize("format", FORMATS)
def test_an_existing_target_stays_and_a_damaged_snapshot_leaves_nothing(tmp_path: Path, format: str) -> None:
    snapshot = saved(tmp_path / "s")
    path = tmp_path / "x"
    path.write_text("mine")
    (tmp_path / "dangling").symlink_to("nowhere")
    for target in (path, tmp_path / "dangling", tmp_path):
        with pytest.raises(SnapshotError, match="exists: choose another"):
            export_snapshot(snapshot, target, format)
    if format != "snapshot":
        with pytest.raises(SnapshotError, match=r"was not exported to .*File exists"):
            export_snapshot(snapshot, path / "x", format)
    assert path.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["dangling", "s", "x"]
    flip_bit(tmp_path / "s" / "bucket-63.npy", 8 * 270)  # in the values of the first row
    with pytest.raises(SnapshotError, match=r"bucket-63\.npy.*checksum"):
        export_snapshot(snapshot, tmp_path / "out" / "x", format)
    assert os.listdir(tmp_path / "out") == []


def test_what_a_killed_export_left_is_replaced_and_what_others_have_beside_it_stays(tmp_path: Path) -> None:
    snapshot = saved(tmp_path / "s")
    (tmp_path / ".tmp-x.npz").write_text("half")
    (tmp_path / ".tmp-other").mkdir()
    export_snapshot(snapshot, tmp_path / "x.npz", "npz")
    export_snapshot(snapshot, tmp_path / "x", "snapshot")
    assert sorted(os.listdir(tmp_path)) == [".tmp-other", "s", "x", "x.npz"]


def test_row_groups_are_bounded_and_larger_than_a_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow.parquet

    from tierbed.snapshots.exchange import parquet

    monkeypatch.setattr(parquet, "_GROUP_ROWS", 25)
    snapshot = saved(tmp_path / "s", counts=dict.fromkeys(range(20), 5))
    export_snapshot(snapshot, tmp_path / "x.parquet", "parquet")
    metadata = pyarrow.parquet.read_metadata(tmp_path / "x.parquet")
    assert [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)] == [25] * 4


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_a_chunk_is_in_memory_at_a_time(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def growing() -> Any:
        rows = make_buckets(64, {0: 500})[0]
        rows["table"] = 0
        for keys in least_keys(0, 50_000).reshape(100, 500):
            rows["key"] = keys
            yield 0, rows.copy()

    write_snapshot(tmp_path / "s", description(64, step=LAST_STEP), growing())
    snapshot = Snapshot.open(tmp_path / "s")
    monkeypatch.setattr(Snapshot, "chunks", partialmethod(Snapshot.chunks, 500))
    tracemalloc.start()
    try:
        export_snapshot(snapshot, tmp_path / "x", format)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "x").stat().st_size > 13e6
    assert peak < 4e6


REFUSED: list[tuple[dict[str, Any], *tuple[str, ...]]] = [
    ({"format": "csv"}, "format='csv'", "'parquet', 'npz'"),
    ({"format": "npz", "tables": [3]}, "tables=[3]", "from 0 to 2"),
    ({"format": "snapshot", "tables": [True]}, "tables=[True]"),
]


def test_bad_arguments_and_a_state_with_the_name_of_a_column(tmp_path: Path) -> None:
    snapshot, path = saved(tmp_path / "s"), tmp_path / "x"
    for arguments, *named in REFUSED:
        check_refusal((partial(export_snapshot, snapshot, path, **arguments), InputError, *named))
    for state in ("key", "embedding", "values"):
        odd = saved(tmp_path / state, optimizer="foreign", states=[state])
        named = f"state '{state}' has the name of another column", "state=False"
        check_refusal((partial(export_snapshot, odd, path, "npz"), SnapshotError, *named))
    assert export_snapshot(odd, path, "npz", state=False) == 30
