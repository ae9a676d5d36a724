"""Snapshots of narrow rows, exported, imported, merged and read by each way there is."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.docs import reader_of_the_docs
from support.embeddings import DIM, contents, make, train
from support.exchange import VALUES, whole
from support.forged import change, command
from support.small_snapshots import NARROW, chunked, description, form_of, make_buckets
from support.snapshot_parts import in_parts
from support.stores import options
from tierbed import InputError, SnapshotError, row_optimizer
from tierbed.engine.row_format import RowForm, narrowed, widened
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.exchange.descriptions import description_for
from tierbed.snapshots.exchange.export import FORMATS, export_snapshot
from tierbed.snapshots.exchange.importing import import_snapshot
from tierbed.snapshots.exchange.persistent_table import make_persistent_table_reader, make_persistent_table_writer
from tierbed.snapshots.files.writer import write_incremental
from tierbed.snapshots.inspection.row import live_row, plain_row, snapshot_row
from tierbed.snapshots.inspection.summary import summarise
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.selection import Types

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def saved(folder: Path, types: Types) -> Snapshot:
    """A snapshot with every kind of number; each NaN is the one that rows have."""
    buckets = make_buckets(6, {0: 20, 5: 1, 63: 9}, types)
    form = form_of(6, types)
    for rows in buckets.values():
        rows["step"] %= 13
        for name in form.counts:
            form.set_numbers(rows, name, form.numbers(rows, name))
    constant = {"type": "constant", "value": 0.0}
    write_snapshot(folder, description(6, types, tables=[constant] * 3), chunked(buckets))
    return Snapshot.open(folder)


def numbers(snapshot: Snapshot, rows: NDArray[np.void] | None = None) -> NDArray[np.float32]:
    """The numbers of each row [n, 6]."""
    form, present = snapshot.manifest.form, whole(snapshot) if rows is None else rows
    return np.concatenate([form.numbers(present, name) for name in form.counts], axis=1)


@pytest.mark.parametrize("types", NARROW, ids="-".join)
@pytest.mark.parametrize("format", FORMATS)
def test_an_export_comes_back_to_the_bit(tmp_path: Path, format: str, types: Types) -> None:
    snapshot = saved(tmp_path / "s", types)
    path = tmp_path / f"x.{format}"
    assert export_snapshot(snapshot, path, format) == 30
    if format == "npz":
        with np.load(path) as file:
            assert [file[name].dtype for name in ("embedding", "sum")] == [np.float32] * 2
            found = np.concatenate([file["embedding"], file["sum"]], axis=1)
        assert found.tobytes() == numbers(snapshot).tobytes()
    import_snapshot(tmp_path / "t", "s", path)
    back = Snapshot.open(tmp_path / "t" / "snapshots" / "s")
    back.verify()
    assert back.description == snapshot.description
    assert whole(back).tobytes() == whole(snapshot).tobytes()


@pytest.mark.parametrize("types", NARROW, ids="-".join)
def test_weights_alone_of_narrow_rows(tmp_path: Path, types: Types) -> None:
    snapshot = saved(tmp_path / "s", types)
    export_snapshot(snapshot, tmp_path / "bare", "snapshot", tables=[0, 2], state=False)
    bare = Snapshot.open(tmp_path / "bare")
    bare.verify()
    narrow = types[0] != "float32"
    assert ("state_dtypes" in bare.description, bare.manifest.form.is_narrow) == (narrow, narrow)
    rows = whole(snapshot)
    kept = rows[rows["table"] != 1]
    assert numbers(bare).tobytes() == numbers(snapshot, kept)[:, :3].tobytes()
    assert not whole(bare)["step"].any()


@pytest.mark.parametrize("types", NARROW, ids="-".join)
def test_every_way_to_look_reads_the_same_numbers(tmp_path: Path, types: Types) -> None:
    snapshot = saved(tmp_path / "rows" / "snapshots" / "s", types)
    (tmp_path / "rows" / "LOCK").touch()
    rows, wanted = whole(snapshot), numbers(snapshot)
    read = reader_of_the_docs()(snapshot.folder)
    in_parts(snapshot, snapshot.folder.with_name("parts"), 3)
    of_parts = reader_of_the_docs()(snapshot.folder.with_name("parts"))
    reader = make_persistent_table_reader(
        tmp_path / "rows", "s", torch.int64, torch.float32, storage_dim=6, table_ids=True
    )
    with reader:
        chunks = list(reader)
    assert np.concatenate([values for _, values, _ in chunks]).tobytes() == wanted.tobytes()
    assert summarise(snapshot).not_finite == (~np.isfinite(wanted[:, :3])).any(axis=1).sum()
    for row, values in zip(rows, wanted, strict=True):
        table, key = int(row["table"]), int(row["key"])
        for found in (read, of_parts):
            np.testing.assert_array_equal(found[table, key], values)
        one = snapshot_row(snapshot, table, int(np.array(key, np.uint64).astype(np.int64)))
        assert one is not None
        assert one.tobytes() == row.tobytes()
        plain = plain_row(row, snapshot.description)
        found_values = np.array([float(x) for x in [*plain["embedding"], *plain["states"]["sum"]]], np.float32)
        np.testing.assert_array_equal(found_values, values)
    code, said = command("inspect", tmp_path / "rows", "s", "--rows", 2)
    assert (code, said["description"]["dtype"], len(said["first_rows"])) == (0, types[0], 2)


@pytest.mark.parametrize("types", NARROW, ids="-".join)
def test_arrays_are_rounded_to_nearest_even(tmp_path: Path, types: Types) -> None:
    dtype, state = (DTYPES[type] for type in types)
    trained = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rows = row_optimizer(trained, trained.param_groups[0])
    about = description_for("t", DIM, optimizer=rows, step=1, dtype=dtype, state_dtype=state)
    arrays: dict[str, Any] = {"key": np.arange(40), "embedding": VALUES, "sum": VALUES**2}
    np.savez(tmp_path / "x.npz", **arrays)
    import_snapshot(tmp_path / "t", "s", tmp_path / "x.npz", description=about)
    snapshot = Snapshot.open(tmp_path / "t" / "snapshots" / "s")
    present = whole(snapshot)
    present = present[np.argsort(present["key"])]
    for name, type in zip(("embedding", "sum"), types, strict=True):
        wanted = widened(narrowed(arrays[name], type), type)
        assert snapshot.manifest.form.numbers(present, name).tobytes() == wanted.tobytes()
    with make_persistent_table_writer(tmp_path / "t", "w", torch.int64, torch.float32, 2 * DIM, description=about) as w:
        w.write(arrays["key"], np.concatenate([arrays["embedding"], arrays["sum"]], axis=1))
    assert numbers(Snapshot.open(tmp_path / "t" / "snapshots" / "w")).tobytes() == numbers(snapshot).tobytes()
    with make(options("host", tmp_path), "adagrad", "t", tables=1, dtype=dtype, state_dtype=state) as embedding:
        embedding.load_snapshot("s")
        train(embedding, [1, 2])
        assert embedding.get([5]).tolist() == [widened(narrowed(VALUES[5:6], types[0]), types[0])[0].tolist()]


def test_a_number_that_no_narrow_row_can_hold_is_named_with_its_key_and_nothing_is_made(tmp_path: Path) -> None:
    values = VALUES.copy()
    values[3, 1] = -65520
    about = description_for("t", DIM, dtype=torch.float16)
    problem = r"embedding holds -65520.0 for key -7, which overflows float16; give smaller numbers, or dtype="
    with pytest.raises(InputError, match=problem):
        import_snapshot(tmp_path / "t", "s", values, keys=np.arange(40) - 10, description=about)
    with make_persistent_table_writer(
        tmp_path / "t", "s", torch.int64, torch.float32, DIM, description=about
    ) as writer:
        with pytest.raises(InputError, match=problem):
            writer.write(np.arange(40) - 10, values)
        writer.discard()
    assert not (tmp_path / "t" / "snapshots" / "s").exists()
    values[3, 1] = -65519.996  # rounds to the largest
    import_snapshot(tmp_path / "t", "s", values, keys=np.arange(40) - 10, description=about)
    rows = whole(Snapshot.open(tmp_path / "t" / "snapshots" / "s"))
    assert rows["embedding"].dtype == np.float16
    assert rows["embedding"].min() == -65504


def test_a_description_whose_dtype_alone_was_changed_is_refused(tmp_path: Path) -> None:
    about = description_for("t", DIM) | {"dtype": "bfloat16"}
    with pytest.raises(InputError, match="'state_dtypes', which its 'dtype' needs; make the description"):
        import_snapshot(tmp_path / "t", "s", VALUES, description=about)


@pytest.mark.parametrize("store", ["host", "ssd"])
@pytest.mark.parametrize("types", NARROW, ids="-".join)
@pytest.mark.rotated("types")
def test_commands_on_a_store_of_narrow_rows(tmp_path: Path, types: Types, store: str) -> None:
    """Save, merge, diff, show and load, of live rows in files of rows and in RocksDB."""
    path = tmp_path / "rows"
    dtype, state = (DTYPES[type] for type in types)
    of: dict[str, Any] = {"tables": 1, "dtype": dtype, "state_dtype": state}
    with make(options(store, tmp_path), "adagrad", **of) as embedding:
        train(embedding, range(12))
        embedding.save_snapshot("full")
        train(embedding, range(6))
        embedding.delete([3])
        embedding.save_snapshot("incremental", "incremental")
        rows = contents(embedding)
    kinds = ["full", "incremental"] + ["checkpoint"] * (store == "ssd")
    for kind in kinds:
        assert command("save", path, f"of {kind}", "--kind", kind)[0] == 0
    assert command("merge", path, "incremental", "merged")[0] == 0
    assert command("verify", path)[0] == 0
    for name in (*(f"of {kind}" for kind in kinds), "merged"):
        snapshot = Snapshot.open(path / "snapshots" / name)
        assert whole(snapshot).tobytes() == rows.tobytes()
        code, said = command("diff", path, "incremental", name)
        assert (code, said["same"]) == (0, 11)
    with StoreFolder(path, "a test") as folder:
        live, _ = live_row(folder, 0, 5)
        assert live is not None
        assert live.tobytes() == rows[rows["key"] == 5].tobytes()
    assert command("load", path, "full")[1]["rows"] == 12
    with make(options(store, tmp_path, open="error"), "adagrad", **of) as embedding:
        assert contents(embedding).tobytes() == whole(Snapshot.open(path / "snapshots" / "full")).tobytes()


def test_a_command_converts_to_the_dtype_of_the_live_rows(tmp_path: Path) -> None:
    with make(options("host", tmp_path / "wide"), "adagrad", tables=1) as embedding:
        train(embedding, range(20))
        embedding.save_snapshot("wide")
    of: dict[str, Any] = {"tables": 1, "dtype": torch.bfloat16}
    with make(options("host", tmp_path), "adagrad", **of) as embedding:
        train(embedding, range(9))
    path = tmp_path / "rows"
    shutil.copytree(tmp_path / "wide" / "rows" / "snapshots", path / "snapshots", dirs_exist_ok=True)
    code, said = command("load", path, "wide")
    assert code == 1
    assert "--convert" in said["error"]
    assert command("load", path, "wide", "--convert")[1]["rows"] == 20
    with make(options("host", tmp_path, open="error"), "adagrad", **of) as embedding:
        assert embedding.size() == 20
        train(embedding, range(9))
        embedding.save_snapshot("narrow")
    code, said = command("diff", path, "wide", "narrow")
    assert code == 1
    assert said["fields"]["dtype"] == ["float32", "bfloat16"]


def test_states_that_would_share_a_place_are_told_apart_by_name(tmp_path: Path) -> None:
    """A chain of narrow rows whose states have other names is none: NumPy would read them as one."""
    about = description(6, NARROW[1])
    other = about | {"optimizer": "another", "states": ["other"], "hyper": []}
    assert RowForm.described(about).width == RowForm.described(other).width
    write_snapshot(tmp_path / "s", about, [])
    with pytest.raises(SnapshotError, match="other optimizer state"):
        write_incremental(tmp_path / "t", Snapshot.open(tmp_path / "s"), other, 0, [])
    write_incremental(tmp_path / "t", Snapshot.open(tmp_path / "s"), about, 0, [])
    Snapshot.open(tmp_path / "t").verify()
    change(tmp_path / "t", lambda content: content.update(description=other))
    with pytest.raises(SnapshotError, match="'t' does not fit its parent 's'"):
        Snapshot.open(tmp_path / "t").verify()
