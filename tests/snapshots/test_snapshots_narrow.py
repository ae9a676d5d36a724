"""Snapshots of narrow rows, by each way there is, and rows of one type that become those of another as torch casts."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.docs import reader_of_the_docs
from support.embeddings import DIM, contents, make, train
from support.examples import examples
from support.exchange import VALUES
from support.forged import change, command
from support.records import last_snapshot
from support.refusals import check_refusal
from support.small_snapshots import NARROW, TYPES, chunked, description, form_of, make_buckets, make_rows, save, whole
from support.snapshot_parts import in_parts
from support.stores import STORES, options
from tierbed import InputError, MultiTableEmbedding, SnapshotError, StoreError, row_optimizer
from tierbed.engine import _core
from tierbed.engine.row_format import RowFormat, find_overflows, to_float32, to_stored
from tierbed.snapshots import Manifest, Snapshot, write_snapshot
from tierbed.snapshots.exchange.descriptions import description_for
from tierbed.snapshots.exchange.export import export_snapshot
from tierbed.snapshots.exchange.importing import import_snapshot
from tierbed.snapshots.exchange.persistent_table import make_persistent_table_reader, make_persistent_table_writer
from tierbed.snapshots.files.writer import check_parent, write_incremental
from tierbed.snapshots.inspection.comparison import compare
from tierbed.snapshots.inspection.row import read_live_row, read_snapshot_row, to_plain_row
from tierbed.snapshots.inspection.summary import summarise
from tierbed.snapshots.store.closed_store import load_into_stores
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.selection import LoadReport, Selection, Types

Dtypes = tuple[torch.dtype, torch.dtype]
HALVES = ["float16", "bfloat16"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def saved(folder: Path, types: Types) -> Snapshot:
    """A snapshot with every kind of number; each NaN is the one that rows have."""
    buckets = make_buckets(6, {0: 20, 5: 1, 63: 9}, types)
    form = form_of(6, types)
    for rows in buckets.values():
        rows["step"] %= 13
        for name in form.counts:
            form.set_values(rows, name, form.values(rows, name))
    constant = {"type": "constant", "value": 0.0}
    write_snapshot(folder, description(6, types, tables=[constant] * 3), chunked(buckets))
    return Snapshot.open(folder)


def numbers(snapshot: Snapshot, rows: NDArray[np.void] | None = None) -> NDArray[np.float32]:
    """The numbers of each row [n, 6]."""
    form, present = snapshot.manifest.row_format, whole(snapshot) if rows is None else rows
    return np.concatenate([form.values(present, name) for name in form.counts], axis=1)


@pytest.mark.parametrize("types", NARROW, ids="-".join)
def test_an_export_has_float32_and_one_without_state_the_same_embeddings(tmp_path: Path, types: Types) -> None:
    snapshot = saved(tmp_path / "s", types)
    export_snapshot(snapshot, tmp_path / "x.npz", "npz")
    with np.load(tmp_path / "x.npz") as file:
        assert [file[name].dtype for name in ("embedding", "sum")] == [np.float32] * 2
        found = np.concatenate([file["embedding"], file["sum"]], axis=1)
    assert found.tobytes() == numbers(snapshot).tobytes()
    export_snapshot(snapshot, tmp_path / "bare", "snapshot", tables=[0, 2], state=False)
    bare, rows = Snapshot.open(tmp_path / "bare"), whole(snapshot)
    bare.verify()
    narrow = types[0] != "float32"
    assert ("state_dtypes" in bare.description, bare.manifest.row_format.has_16bit_floats) == (narrow, narrow)
    assert numbers(bare).tobytes() == numbers(snapshot, rows[rows["table"] != 1])[:, :3].tobytes()
    assert not whole(bare)["step"].any()


@pytest.mark.parametrize("types", NARROW, ids="-".join)
def test_every_way_to_look_reads_the_same_numbers(tmp_path: Path, types: Types) -> None:
    snapshot = saved(tmp_path / "rows" / "snapshots" / "s", types)
    (tmp_path / "rows" / "LOCK").touch()
    rows, wanted = whole(snapshot), numbers(snapshot)
    read = reader_of_the_docs()(snapshot.folder)
    in_parts(snapshot, snapshot.folder.with_name("parts"), 3)
    of_parts = reader_of_the_docs()(snapshot.folder.with_name("parts"))
    kinds = torch.int64, torch.float32
    with make_persistent_table_reader(tmp_path / "rows", "s", *kinds, storage_dim=6, table_ids=True) as reader:
        chunks = list(reader)
    assert np.concatenate([values for _, values, _ in chunks]).tobytes() == wanted.tobytes()
    assert summarise(snapshot).num_not_finite == (~np.isfinite(wanted[:, :3])).any(axis=1).sum()
    for row, values in zip(rows, wanted, strict=True):
        table, key = int(row["table"]), int(row["key"])
        for found in (read, of_parts):
            np.testing.assert_array_equal(found[table, key], values)
        one = read_snapshot_row(snapshot, table, int(np.array(key, np.uint64).astype(np.int64)))
        assert one is not None
        assert one.tobytes() == row.tobytes()
        plain = to_plain_row(row, snapshot.description)
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
    with make_persistent_table_writer(tmp_path / "t", "w", torch.int64, torch.float32, 2 * DIM, description=about) as w:
        w.write(arrays["key"], np.concatenate([arrays["embedding"], arrays["sum"]], axis=1))
    wanted = [
        to_float32(to_stored(arrays[name], type), type) for name, type in zip(("embedding", "sum"), types, strict=True)
    ]
    for name in "sw":
        snapshot = Snapshot.open(tmp_path / "t" / "snapshots" / name)
        present = whole(snapshot)
        found = numbers(snapshot, present[np.argsort(present["key"])])
        assert found.tobytes() == np.concatenate(wanted, axis=1).tobytes()


def test_a_number_that_no_narrow_row_can_hold_is_named_with_its_key_and_nothing_is_made(tmp_path: Path) -> None:
    values = VALUES.copy()
    values[3, 1] = -65520
    about, keys = description_for("t", DIM, dtype=torch.float16), np.arange(40) - 10
    named = "embedding holds -65520.0 for key -7", "overflows float16", "dtype="
    call = partial(import_snapshot, tmp_path / "t", "s", values, keys=keys, description=about)
    check_refusal((call, InputError, *named))
    kinds = torch.int64, torch.float32
    with make_persistent_table_writer(tmp_path / "t", "s", *kinds, DIM, description=about) as writer:
        check_refusal((lambda: writer.write(keys, values), InputError, *named))
        writer.discard()
    assert not (tmp_path / "t" / "snapshots" / "s").exists()
    values[3, 1] = -65519.996  # rounds to the largest
    call()
    rows = whole(Snapshot.open(tmp_path / "t" / "snapshots" / "s"))
    assert rows["embedding"].dtype == np.float16
    assert rows["embedding"].min() == -65504


@pytest.mark.parametrize(
    ("store", "types"), [("ssd", NARROW[3]), pytest.param("host", NARROW[1], marks=pytest.mark.slow)]
)
def test_commands_on_a_store_of_narrow_rows(tmp_path: Path, store: str, types: Types) -> None:
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
        live, _ = read_live_row(folder, 0, 5)
        assert live is not None
        assert live.tobytes() == rows[rows["key"] == 5].tobytes()
    assert command("load", path, "full")[1]["rows"] == 12
    with make(options(store, tmp_path, open="error"), "adagrad", **of) as embedding:
        assert contents(embedding).tobytes() == whole(Snapshot.open(path / "snapshots" / "full")).tobytes()


def test_states_that_would_share_a_place_are_told_apart_by_name(tmp_path: Path) -> None:
    """A chain of narrow rows whose states have other names is none: NumPy would read them as one."""
    about = description(6, NARROW[1])
    other = about | {"optimizer": "another", "states": ["other"], "hyper": []}
    assert RowFormat.from_description(about).width == RowFormat.from_description(other).width
    write_snapshot(tmp_path / "s", about, [])
    with pytest.raises(SnapshotError, match="other optimizer state"):
        write_incremental(tmp_path / "t", Snapshot.open(tmp_path / "s"), other, 0, [])
    write_incremental(tmp_path / "t", Snapshot.open(tmp_path / "s"), about, 0, [])
    Snapshot.open(tmp_path / "t").verify()
    change(tmp_path / "t", lambda content: content.update(description=other))
    with pytest.raises(SnapshotError, match="'t' does not fit its parent 's'"):
        Snapshot.open(tmp_path / "t").verify()


SPECIAL = [0, 1, 0x33000000, 0x33000001, 0x387FE000, 0x477FEFFF, 0x477FF000, 0x477FF001, 0x7F7F7FFF, 0x7F7F8000]
SPECIAL += [0x7F800000, 0x7F800001, 0x7FC00000, 0x3F808000, 0x3F818000, 0x3F801000, 0x3F803000, 0x3F801001]

words = st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(SPECIAL), min_size=1, max_size=64)


def same_numbers(found: NDArray[Any], wanted: NDArray[Any]) -> None:
    """Of the same bits, but for NaN, which is any NaN."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), nan)
    bits = f"u{wanted.dtype.itemsize}"
    np.testing.assert_array_equal(found[~nan].view(bits), wanted[~nan].view(bits))


def by_torch(values: NDArray[np.float32], type: str) -> NDArray[np.float32]:
    """The values rounded to a type."""
    half: NDArray[np.float32] = torch.from_numpy(values.copy()).to(DTYPES[type]).to(torch.float32).numpy()
    return half


@pytest.mark.parametrize("type", HALVES)
def test_every_narrow_number_is_widened_as_torch_does_and_back_to_itself(type: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = bits.view(np.float16) if type == "float16" else bits
    wide = to_float32(numbers, type)
    same_numbers(wide, torch.from_numpy(bits.copy()).view(DTYPES[type]).to(torch.float32).numpy())
    back = to_stored(wide, type).view(np.uint16)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert {*back[nan].tolist()} == {0x7FC0 if type == "bfloat16" else 0x7E00}
    assert not find_overflows(wide, type).any()


@pytest.mark.parametrize("type", HALVES)
@examples(2)
@given(bits=words)
@example(bits=SPECIAL)
@example(bits=[bit | 1 << 31 for bit in SPECIAL])
def test_a_number_is_narrowed_as_torch_does(type: str, bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    wanted = by_torch(values, type)
    same_numbers(to_float32(to_stored(values, type), type), wanted)
    np.testing.assert_array_equal(find_overflows(values, type), np.isfinite(values) & np.isinf(wanted))


def converted(snapshot: Snapshot, types: Types, **more: Any) -> tuple[NDArray[np.void], RowFormat]:
    """The rows of a snapshot in another type, and their form."""
    selection = Selection(converts=True, target_dtypes=types, **more)
    form = RowFormat.from_description(selection.describe(snapshot.description))
    chunks = [rows for _, rows in selection.read_rows(snapshot, LoadReport())]
    return np.concatenate([np.empty(0, form.dtype), *chunks]), form


def finite(rows: NDArray[np.void], form: RowFormat) -> None:
    """Give each number that a narrower type cannot hold another value."""
    for name in form.counts:
        values = form.values(rows, name).copy()
        values[np.isfinite(values) & (np.abs(values) > 60000)] = 1.0009
        form.set_values(rows, name, values)


@pytest.mark.parametrize("after", TYPES, ids="-".join)
@pytest.mark.parametrize("before", TYPES, ids="-".join)
@pytest.mark.rotated("after")
def test_rows_of_each_type_become_those_of_each(tmp_path: Path, before: Types, after: Types) -> None:
    old = form_of(6, before)
    rows = make_rows(6, 200, seed=3, bucket=9, types=before)
    finite(rows, old)
    write_snapshot(tmp_path / "s", description(6, before), [(9, rows)])
    snapshot = Snapshot.open(tmp_path / "s")
    found, new = converted(snapshot, after)
    assert new.dtype == form_of(6, after).dtype
    assert Selection(target_dtypes=after).describe(snapshot.description) == description(6, after)
    for name, type in zip(("embedding", "sum"), after, strict=True):
        was = old.values(rows, name)
        same_numbers(new.values(found, name), was if type == "float32" else by_torch(was, type))
    for name in ("table", "key", "updates", "step"):
        assert found[name].tolist() == rows[name].tolist()
    padding = [name for name in found.dtype.names or () if name.endswith("_padding")]
    assert len(padding) == sum(type != "float32" for type in after)  # three numbers each
    assert not any(found[name].any() for name in padding)
    assert found.tobytes() == rows.tobytes() or before != after
    write_snapshot(tmp_path / "t", description(6, after), [(9, found)])
    differs = compare(snapshot, Snapshot.open(tmp_path / "t"))
    assert differs.fields.keys() == ({"dtype", "state_dtypes", "width"} & differs.fields.keys())
    assert differs.counts["added"] == differs.counts["gone"] == {}
    exact = all(type in ("float32", of) for of, type in zip(before, after, strict=True))
    if exact:
        assert (differs.counts["changed"].total(), differs.num_equal) == (0, 200)


def hostile(folder: Path) -> Snapshot:
    """A row of each table, of keys -5, 7 and 9; the last has a number beyond float16, in its state too."""
    rows = make_rows(6, 3)
    rows["table"], rows["key"] = [0, 1, 2], np.array([7, 9, -5]).astype(np.uint64)
    rows["values"] = 1.5
    rows["values"][2] = [1.0, 65520.0, 2.0, 1.0, 3e38, 1e38]
    buckets = _core.buckets(rows["table"].copy(), rows["key"].copy())
    order = np.argsort(buckets, kind="stable")
    write_snapshot(folder, description(6), [(int(buckets[place]), rows[place : place + 1]) for place in order])
    return Snapshot.open(folder)


def test_a_number_beyond_the_largest_is_named_with_its_key_where_it_is_loaded(tmp_path: Path) -> None:
    snapshot, half = hostile(tmp_path / "s"), ("float16", "float32")
    named = "convert=True", "key -5 in table 2 holds 65520.0", "overflows float16"
    check_refusal((lambda: converted(snapshot, half), InputError, *named))
    for types in (("bfloat16", "bfloat16"), ("bfloat16", "float32")):
        rows, form = converted(snapshot, types)
        assert np.isfinite(form.values(rows, "embedding")).all()
    assert len(converted(snapshot, half, tables=[0, 1])[0]) == 2
    assert len(converted(snapshot, half, where=lambda tables, keys: keys > 0)[0]) == 2
    rows = make_rows(6, 1, bucket=0)
    rows["values"] = [[1.0, 2.0, 3.0, 3.4e38, 1.0, 1.0]]  # rounds to infinity in bfloat16
    write_snapshot(tmp_path / "t", description(6), [(0, rows)])
    other, narrow = Snapshot.open(tmp_path / "t"), ("bfloat16", "bfloat16")
    bare, form = converted(other, narrow, includes_state=False)
    assert list(form.counts) == ["embedding"]
    assert form.values(bare, "embedding").tolist() == [[1.0, 2.0, 3.0]]
    check_refusal((lambda: converted(other, narrow), InputError, "sum of key", "holds 3.4e+38", "overflows bfloat16"))


def test_an_incremental_snapshot_goes_over_none_of_another_type(tmp_path: Path) -> None:
    for types in TYPES:
        save(tmp_path / "-".join(types), types=types)
        parent = Snapshot.open(tmp_path / "-".join(types))
        check_parent(tmp_path / "new", parent, description(6, types))
        for other in set(TYPES) - {types}:
            with pytest.raises(SnapshotError, match=r'another dtype\. Save the snapshot with kind="full"'):
                check_parent(tmp_path / "new", parent, description(6, other))


PAIRS = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]


def open_embedding(path: Path, store: str, types: Dtypes, **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), "adagrad", dtype=types[0], state_dtype=types[1])


@pytest.mark.parametrize("types", PAIRS, ids=str)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("types")
def test_an_embedding_of_another_dtype_loads_where_it_is_told_to(tmp_path: Path, store: str, types: Dtypes) -> None:
    wide = torch.float32, torch.float32
    with open_embedding(tmp_path, store, wide) as embedding:
        train(embedding, torch.arange(100))
        embedding.save_snapshot("wide")
        rows = contents(embedding)
    with pytest.raises(StoreError, match=r"load_snapshot\(name, convert=True\)"):
        open_embedding(tmp_path, store, types).size()
    form, narrow_form = form_like(wide), form_like(types)
    with open_embedding(tmp_path, store, types, open="fresh") as embedding:
        with pytest.raises(SnapshotError, match="; or load it with convert=True;"):
            embedding.load_snapshot("wide")
        assert embedding.load_snapshot("wide", convert=True).rows == 100
        assert embedding.last_snapshot is None
        narrow = contents(embedding)
        for name, type in zip(("embedding", "sum"), names_of(types), strict=True):
            was = form.values(rows, name)
            same_numbers(narrow_form.values(narrow, name), was if type == "float32" else by_torch(was, type))
        embedding.save_snapshot("narrow")
        train(embedding, [1, 2])
        assert embedding.load_snapshot("narrow", convert=True).rows == 100  # nothing to convert
        assert embedding.last_snapshot == "narrow"
        assert contents(embedding).tobytes() == narrow.tobytes()
        train(embedding, [1, 2])
        embedding.save_snapshot("later", "incremental")
    with open_embedding(tmp_path, store, wide, open="fresh") as embedding:
        embedding.load_snapshot("narrow", convert=True)
        back = contents(embedding)
        for name in ("embedding", "sum"):
            same_numbers(form.values(back, name).copy(), narrow_form.values(narrow, name))


def names_of(types: Dtypes) -> list[str]:
    return [str(dtype).removeprefix("torch.") for dtype in types]


def form_like(types: Dtypes) -> RowFormat:
    dtype, *states = names_of(types)
    return RowFormat(DIM, dtype, ["sum"], [DIM], states)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[StoreFolder]:
    """The folder of an embedding of bfloat16 rows, with a snapshot "narrow" of it, and "wide" and "half" of others."""
    for name, types in {"wide": (torch.float32, torch.float32), "half": (torch.float16, torch.bfloat16)}.items():
        with open_embedding(tmp_path / name, "host", types) as embedding:
            train(embedding, torch.arange(20))
            embedding.save_snapshot(name)
    with open_embedding(tmp_path, "host", PAIRS[0]) as embedding:
        train(embedding, torch.arange(9))
        embedding.save_snapshot("narrow")
    for name in ("wide", "half"):
        (tmp_path / "rows" / "snapshots" / name).symlink_to(tmp_path / name / "rows" / "snapshots" / name)
    with StoreFolder(tmp_path / "rows", "a test") as folder:
        yield folder


def test_a_closed_store_takes_rows_of_another_dtype_where_it_is_told_to(closed: StoreFolder) -> None:
    def load(name: str, **more: Any) -> tuple[Manifest, LoadReport]:
        [found] = load_into_stores([closed], [Snapshot.open(closed.snapshots_path / name)], selection=Selection(**more))
        return found

    for name, said in {"wide": "float32 with states of float32", "half": "float16 with states of bfloat16"}.items():
        own = "of bfloat16 with states of bfloat16"
        check_refusal((partial(load, name), SnapshotError, f"dtype {said}", own, "convert=True"))
        live, report = load(name, converts=True)
        assert (live.row_format.dtype, report.rows) == (form_like(PAIRS[0]).dtype, 20)
    assert last_snapshot(closed.path) == "narrow"
    assert list(load("wide", includes_state=False, converts=True)[0].row_format.counts) == ["embedding"]
    load("narrow")  # rows without states take those of any
    assert load("narrow", converts=True)[0].description == Snapshot.open(closed.snapshots_path / "narrow").description
    closed.clear_clean_marker()
    check_refusal((lambda: load("wide", converts=True), SnapshotError, "convert=True", "has no clean live rows"))
