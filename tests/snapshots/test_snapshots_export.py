"""Rows of snapshots as NumPy arrays, read and written, and as files of other programs."""

from __future__ import annotations

import json
import os
import tracemalloc
from contextlib import closing
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from support.embeddings import DIM, contents, make, rows_by_key, train
from support.refusals import check_refusal
from support.rows import any_key
from support.small_snapshots import chunked, description, flip_bit, keys_of_few_files, least_keys, make_buckets, whole
from support.stores import STORES, options
from tierbed.engine.errors import ClosedError, InputError, OptionError, SnapshotError, StoreError
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.row_format import MAX_STEP, row_dtype
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.exchange import sorting
from tierbed.snapshots.exchange.columns import Columns
from tierbed.snapshots.exchange.descriptions import description_for
from tierbed.snapshots.exchange.export import FORMATS, export_snapshot
from tierbed.snapshots.exchange.persistent_table import make_persistent_table_reader, make_persistent_table_writer
from tierbed.snapshots.exchange.sorting import RowSorter

KINDS = (torch.int64, torch.float32)


def ordered(keys: NDArray[Any], values: NDArray[np.float32], tables: Any = 0) -> list[tuple[int, int, bytes]]:
    tables = np.broadcast_to(tables, keys.shape).tolist()
    return sorted((t, int(k), v.tobytes()) for t, k, v in zip(tables, keys, values, strict=True))


def read_all(path: Path, *arguments: Any, **options: Any) -> list[tuple[int, int, bytes]]:
    with make_persistent_table_reader(path, *arguments, **options) as reader:
        return sorted(row for chunk in reader for row in ordered(*chunk))


@given(st.data(), st.sampled_from([torch.int32, torch.int64, torch.uint64]))
def test_what_is_written_is_read_and_the_last_of_a_key_stands(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, key_type: torch.dtype
) -> None:
    path = tmp_path_factory.mktemp("store")
    dtype = str(key_type).removeprefix("torch.")
    bits = st.lists(st.tuples(st.integers(0, 2), any_key, st.integers(0, 2**32 - 1)), max_size=20)
    expected: dict[tuple[int, int], bytes] = {}
    about = description_for("store", 2, key_type, [make_constant_initializer(0.0)] * 3)
    with make_persistent_table_writer(path, "s", key_type, torch.float32, 2, description=about) as writer:
        for batch in data.draw(st.lists(bits, max_size=4)):
            tables = np.array([table for table, _, _ in batch], np.int64)
            keys = np.array([key for _, key, _ in batch], np.uint64).astype(dtype)
            values = np.array([[pattern, 1] for *_, pattern in batch], np.uint32).view(np.float32).reshape(-1, 2)
            writer.write(keys, values, tables)
            for table, key, value in zip(tables.tolist(), keys.tolist(), values, strict=True):
                expected[table, key] = value.tobytes()
    wanted = sorted((table, key, value) for (table, key), value in expected.items())
    assert read_all(path, "s", key_type, torch.float32, 2, table_ids=True) == wanted
    Snapshot.open(path / "snapshots" / "s").verify()


@pytest.mark.parametrize("store", STORES)
def test_every_store_loads_what_was_written(tmp_path: Path, store: str) -> None:
    keys = keys_of_few_files(400).numpy()
    values = np.random.default_rng(0).normal(size=(400, DIM)).astype(np.float32)
    with make_persistent_table_writer(tmp_path / "rows", "s", *KINDS, DIM) as writer:
        writer.write(keys[::-1].copy(), values[::-1].copy())
    with make(options(store, tmp_path), "adam", tables=1) as embedding:
        embedding.load_snapshot("s")
        assert embedding.size() == 400
        assert embedding.get(keys).numpy().tobytes() == values.tobytes()
        train(embedding, keys.tolist())  # with the state of an optimizer that begins
        assert embedding.get(keys).numpy().tobytes() != values.tobytes()


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_rows_with_state_make_the_same_table_again(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path / "a"), "adam") as embedding:
        train(embedding, torch.arange(30), torch.arange(30) % 3)
        embedding.save_snapshot("s")
        about = Snapshot.open(tmp_path / "a" / "rows" / "snapshots" / "s").description
        train(embedding, torch.arange(20))
        wanted = contents(embedding)
    arguments = "s", *KINDS, 3 * DIM
    with (
        make_persistent_table_reader(tmp_path / "a" / "rows", *arguments, table_ids=True) as reader,
        make_persistent_table_writer(tmp_path / "b" / "rows", *arguments, description=about) as writer,
    ):
        for keys, values, tables in reader:
            writer.write(keys, values, tables)
    with make(options(store, tmp_path / "b"), "adam") as embedding:
        embedding.load_snapshot("s")
        train(embedding, torch.arange(20))
        assert contents(embedding).tobytes() == wanted.tobytes()


def test_storage_dim_tells_whether_optimizer_state_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with make(options("host", tmp_path), "catch-up", tables=1) as embedding:
        for step in range(4):
            train(embedding, torch.arange(step, 6))
        embedding.save_snapshot("s")
        seen = embedding.get(torch.arange(6)).numpy()
        snapshot = Snapshot.open(path / "snapshots" / "s")
        raw = np.concatenate([rows for _, rows in snapshot.chunks()])
        width = snapshot.manifest.row_format.width
        assert read_all(path, "s", *KINDS, DIM) == ordered(np.arange(6), seen)
        assert read_all(path, "s", *KINDS, width) == ordered(raw["key"], raw["values"])
        check_refusal(
            (lambda: make_persistent_table_writer(path, "t", *KINDS, DIM), StoreError, "Close embedding 'rows'")
        )
    check_refusal((lambda: make_persistent_table_reader(path, "s", *KINDS, 7), InputError, "storage_dim=7", f"{width}"))


def test_the_description_is_the_stores(tmp_path: Path) -> None:
    of: dict[str, Any] = {"seed": 9, "padding_idx": 3}
    with make(options("host", tmp_path), "adam", **of) as embedding:
        train(embedding, [1, 2])
        embedding.save_snapshot("before")
    zeros = np.zeros((2, 3 * DIM), np.float32)
    with make_persistent_table_writer(tmp_path / "rows", "state", *KINDS, 3 * DIM) as writer:
        writer.write(np.array([1, 2]), zeros, 1)
        for arguments, *named in (
            ((np.array([4, 3]), zeros, 1), "padding_idx=3"),
            ((np.array([4, 5]), zeros), "there are 3 tables"),
            ((np.array([4, 5]), zeros, np.array([0, 3])), "table holds 3", "from 0 to 2"),
        ):
            check_refusal((partial(writer.write, *arguments), InputError, *named))
    with make_persistent_table_writer(tmp_path / "rows", "bare", *KINDS, DIM) as writer:
        writer.write(np.array([1, 2]), zeros[:, :DIM], 1)
    snapshots = tmp_path / "rows" / "snapshots"
    before, state, bare = (Snapshot.open(snapshots / name) for name in ("before", "state", "bare"))
    assert state.description == before.description
    assert {step for _, rows in state.chunks() for step in rows["step"].tolist()} == {1}
    assert (bare.description["optimizer"], bare.description["seed"]) == (None, 9)
    with make(options("host", tmp_path), "adam", **of) as embedding:
        embedding.load_snapshot("state")
        assert embedding.size() == 2
        embedding.load_snapshot("bare")
        train(embedding, [1, 2], 1)


def test_an_error_inside_the_with_makes_no_snapshot_and_what_is_closed_refuses_use(tmp_path: Path) -> None:
    values = np.zeros((1000, 2), np.float32)
    writer = make_persistent_table_writer(tmp_path, "s", *KINDS, 2)
    writer.write(np.arange(1000), values)
    with pytest.raises(InputError), writer:
        writer.write(np.arange(3), values)
    assert os.listdir(tmp_path / "snapshots") == []
    writer = make_persistent_table_writer(tmp_path, "s", *KINDS, 2)  # neither the name nor the lock was kept
    writer.write(np.arange(1000), values)
    writer.close()
    writer.close()
    reader = make_persistent_table_reader(tmp_path, "s", *KINDS, 2)
    keys, found = next(reader)
    assert (keys.dtype, found.shape) == (np.int64, (len(keys), 2))
    reader.close()
    check_refusal((lambda: next(reader), ClosedError, "reader of snapshot 's'"))
    check_refusal((lambda: writer.write(np.arange(1000), values), ClosedError, "writer of snapshot 's'"))
    check_refusal((lambda: make_persistent_table_writer(tmp_path, "s", *KINDS, 2), SnapshotError, "s' exists"))


def test_rows_wait_in_files_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "compute_chunk_rows", lambda width: 100)
    rows = np.zeros(64 * 150, row_dtype(2))
    rows["key"] = np.random.default_rng(0).permutation(len(rows))
    with closing(RowSorter(tmp_path / "new", row_dtype(2))) as sorter:
        for begin in range(0, len(rows), 1000):
            sorter.add(rows[begin : begin + 1000])
        assert os.listdir(tmp_path / "new") == []
        buckets, sizes = zip(*((bucket, len(part)) for bucket, part in sorter.chunks()), strict=True)
    assert list(buckets) == sorted(buckets)
    assert 0 < min(sizes) <= max(sizes) <= 100
    assert sum(sizes) == len(rows)


KEYS, VALUES = np.zeros(2, np.int64), np.zeros((2, 2), np.float32)
WRONG_ARRAYS = [
    (np.zeros(2, np.int32), VALUES, "key is int32 (2,)", "int64 (n,)"),
    (np.zeros((2, 1), np.int64), VALUES, "key is int64 (2, 1)"),
    (np.zeros(2, object), VALUES, "key is object"),
    ([1, 2], VALUES, "key is list"),
    (KEYS, np.zeros((2, 2)), "values is float64 (2, 2)", "float32 (2, 2)"),
    (KEYS, np.zeros((3, 2), np.float32), "values is float32 (3, 2)"),
    (KEYS, np.zeros((2, 3), np.float32), "values is float32 (2, 3)"),
    (KEYS, np.zeros(2, np.float32), "values is float32 (2,)"),
    (KEYS, np.zeros((2, 2), ">f4"), "values is >f4"),
]


def test_wrong_arrays_are_refused_and_none_of_them_is_added(tmp_path: Path) -> None:
    with make_persistent_table_writer(tmp_path, "s", *KINDS, 2) as writer:
        for keys, values, *named in WRONG_ARRAYS:
            check_refusal((partial(writer.write, keys, values), InputError, *named))
        for tables in (np.zeros(3, np.int64), np.zeros(2), np.array([0, -1]), 1, "a", True):
            check_refusal((partial(writer.write, KEYS, VALUES, tables), InputError, "table"))
    assert Snapshot.open(tmp_path / "snapshots" / "s").manifest.rows == 0


def test_arguments_that_are_not_the_tables_are_refused(tmp_path: Path) -> None:
    with make(options("host", tmp_path), "adam", key_type=torch.uint64) as embedding:
        train(embedding, [1, 2])
        embedding.save_snapshot("s")
    path, kinds = tmp_path / "rows", (torch.uint64, torch.float32)
    for name, maker in (("s", make_persistent_table_reader), ("new", make_persistent_table_writer)):
        for arguments, kind, *named in (
            ((path, name, torch.int64, torch.float32, DIM), InputError, "key_type=torch.int64", "uint64"),
            ((path, name, *kinds, 6), InputError, "storage_dim=6"),
            ((path, name, torch.uint64, torch.float16, DIM), OptionError, "value_type="),
            ((path, name, torch.int16, torch.float32, DIM), OptionError, "key_type="),
            ((path, "../x", *kinds, DIM), SnapshotError, "snapshot name"),
        ):
            check_refusal((partial(maker, *arguments), kind, *named))
    read = make_persistent_table_reader
    check_refusal((lambda: read(path, "s", *kinds, DIM), InputError, "has 3 tables", "table_ids=True"))
    check_refusal((lambda: read(path, "t", *kinds, DIM), SnapshotError, "no snapshot 't'"))
    assert not (path / "snapshots" / "new").exists()


def saved(folder: Path, width: int = 6, counts: dict[int, int] | None = None, **changes: Any) -> Snapshot:
    """A snapshot with every kind of float; tables 0 to 2."""
    buckets = make_buckets(width, {0: 20, 5: 1, 63: 9} if counts is None else counts)
    if changes.get("key_type") == "int32":
        for bucket, rows in buckets.items():
            for table in range(3):
                places = np.flatnonzero(rows["table"] == table)
                rows["key"][places] = least_keys(bucket, len(places), table)
    tables = [{"type": "constant", "value": 0.0}] * 3
    write_snapshot(folder, description(width, tables=tables, step=MAX_STEP, **changes), chunked(buckets))
    return Snapshot.open(folder)


def read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The columns of an export and its description, by the libraries of the formats alone."""
    if path.suffix == ".npz":
        with np.load(path, allow_pickle=False) as file:
            columns = {name: file[name] for name in file.files}
        return columns, json.loads(str(columns.pop("tierbed")))
    if path.suffix == ".safetensors":
        with safe_open(path, "np") as opened:
            return load_file(path), json.loads(opened.metadata()["tierbed"])
    table = pyarrow.parquet.read_table(path)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    for name, column in columns.items():
        lists = pyarrow.types.is_fixed_size_list(column.type)
        columns[name] = column.flatten().to_numpy().reshape(len(column), -1) if lists else column.to_numpy()
    return columns, json.loads(table.schema.metadata[b"tierbed"])


def same(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("key_type", ["int32", "int64", "uint64"])
@pytest.mark.rotated("key_type")
def test_libraries_read_the_same_bits(tmp_path: Path, format: str, key_type: str, part: bool) -> None:
    snapshot = saved(tmp_path / "s", key_type=key_type)
    path, rows = tmp_path / "new" / f"x.{format}", whole(snapshot)
    kept = rows[rows["table"] != 1] if part else rows
    seen: list[int] = []
    given: dict[str, Any] = {"tables": [0, 2], "state": False} if part else {}
    assert export_snapshot(snapshot, path, format, seen.append, **given) == len(kept) > 0
    assert sum(seen) == len(rows) == 30
    assert os.listdir(path.parent) == [path.name]
    if format == "snapshot":
        found = Snapshot.open(path)
        about, columns = found.description, Columns(found.description).split(whole(found))
    else:
        columns, about = read(path)
    none: dict[str, Any] = {field: [] for field in ("states", "state_widths", "initial", "hyper")}
    bare = {**none, "width": 3, "optimizer": None, "step": 0}
    assert about == snapshot.description | (bare if part else {})
    assert set(columns) == {"table", "key", "embedding", "updates", "step"} | ({"sum"} if not part else set())
    same(columns["key"], kept["key"].astype(key_type))
    same(columns["embedding"], kept["values"][:, :3].copy())
    if not part:
        same(columns["sum"], kept["values"][:, 3:].copy())
    for name in ("table", "updates") + ("step",) * (not part):
        same(columns[name], kept[name].copy())


@pytest.mark.parametrize("kind", ["incremental", "checkpoint"])
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


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_a_chunk_is_in_memory_at_a_time(tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def growing() -> Any:
        rows = make_buckets(64, {0: 500})[0]
        rows["table"] = 0
        for part in keys:
            rows["key"] = part
            yield 0, rows.copy()

    keys = least_keys(0, 40_000).reshape(80, 500)
    monkeypatch.setattr(Snapshot, "chunks", partialmethod(Snapshot.chunks, 500))
    tracemalloc.start()
    try:
        write_snapshot(tmp_path / "s", description(64, step=MAX_STEP), growing())
        export_snapshot(Snapshot.open(tmp_path / "s"), tmp_path / "x", format)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "x").stat().st_size > 10e6
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
