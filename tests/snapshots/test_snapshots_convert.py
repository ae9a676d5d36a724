"""Numbers that become those of another type, against torch's casts, and snapshots whose rows are converted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support.embeddings import DIM, contents, make, train
from support.examples import examples
from support.records import last_snapshot
from support.small_snapshots import TYPES, description, form_of, make_rows, save
from support.stores import STORES, options
from tierbed import InputError, MultiTableEmbedding, SnapshotError, StoreError
from tierbed.engine import _core
from tierbed.engine.row_format import RowForm, narrowed, overflows, widened
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.files.writer import check_parent
from tierbed.snapshots.inspection.comparison import compare
from tierbed.snapshots.store.closed_store import load_into_stores
from tierbed.snapshots.store.folder import StoreFolder
from tierbed.snapshots.store.selection import LoadReport, Selection, Types

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
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
    half: NDArray[np.float32] = torch.from_numpy(values.copy()).to(HALVES[type]).to(torch.float32).numpy()
    return half


@pytest.mark.parametrize("type", HALVES)
def test_every_narrow_number_is_widened_as_torch_does_and_back_to_itself(type: str) -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    numbers = bits.view(np.float16) if type == "float16" else bits
    wide = widened(numbers, type)
    same_numbers(wide, torch.from_numpy(bits.copy()).view(HALVES[type]).to(torch.float32).numpy())
    back = narrowed(wide, type).view(np.uint16)
    nan = np.isnan(wide)
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    assert {*back[nan].tolist()} == {0x7FC0 if type == "bfloat16" else 0x7E00}
    assert not overflows(wide, type).any()


@pytest.mark.parametrize("type", HALVES)
@examples(2)
@given(bits=words)
@example(bits=SPECIAL)
@example(bits=[bit | 1 << 31 for bit in SPECIAL])
def test_a_number_is_narrowed_as_torch_does(type: str, bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    wanted = by_torch(values, type)
    same_numbers(widened(narrowed(values, type), type), wanted)
    np.testing.assert_array_equal(overflows(values, type), np.isfinite(values) & np.isinf(wanted))


def converted(snapshot: Snapshot, types: Types, **more: Any) -> tuple[NDArray[np.void], RowForm]:
    """The rows of a snapshot in another type, and their form."""
    selection = Selection(convert=True, types=types, **more)
    form = RowForm.described(selection.description(snapshot.description))
    chunks = [rows for _, rows in selection.rows_of(snapshot, LoadReport())]
    return np.concatenate([np.empty(0, form.dtype), *chunks]), form


def finite(rows: NDArray[np.void], form: RowForm) -> None:
    """Give each number that a narrower type cannot hold another value."""
    for name in form.counts:
        values = form.numbers(rows, name).copy()
        values[np.isfinite(values) & (np.abs(values) > 60000)] = 1.0009
        form.set_numbers(rows, name, values)


@pytest.mark.parametrize("after", TYPES, ids="-".join)
@pytest.mark.parametrize("before", TYPES, ids="-".join)
def test_rows_of_each_type_become_those_of_each(tmp_path: Path, before: Types, after: Types) -> None:
    old = form_of(6, before)
    rows = make_rows(6, 200, seed=3, bucket=9, types=before)
    finite(rows, old)
    write_snapshot(tmp_path / "s", description(6, before), [(9, rows)])
    snapshot = Snapshot.open(tmp_path / "s")
    found, new = converted(snapshot, after)
    assert new.dtype == form_of(6, after).dtype
    assert Selection(types=after).description(snapshot.description) == description(6, after)
    for name, type in zip(("embedding", "sum"), after, strict=True):
        was = old.numbers(rows, name)
        same_numbers(new.numbers(found, name), was if type == "float32" else by_torch(was, type))
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
        assert (differs.counts["changed"].total(), differs.same) == (0, 200)


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


def test_a_number_beyond_the_largest_is_named_with_its_key(tmp_path: Path) -> None:
    snapshot = hostile(tmp_path / "s")
    with pytest.raises(
        InputError,
        match=r"convert=True: embedding of key -5 in table 2 holds 65520.0, which overflows float16; load it into rows "
        "of torch.float32",
    ):
        converted(snapshot, ("float16", "float32"))
    for types in (("bfloat16", "bfloat16"), ("bfloat16", "float32")):
        rows, form = converted(snapshot, types)
        assert np.isfinite(form.numbers(rows, "embedding")).all()


def test_rows_and_state_that_are_not_loaded_are_not_converted(tmp_path: Path) -> None:
    snapshot = hostile(tmp_path / "s")
    types = "float16", "float32"
    assert len(converted(snapshot, types, tables=[0, 1])[0]) == 2
    assert len(converted(snapshot, types, where=lambda tables, keys: keys > 0)[0]) == 2
    rows = make_rows(6, 1, bucket=0)
    rows["values"] = [[1.0, 2.0, 3.0, 3.4e38, 1.0, 1.0]]  # rounds to infinity in bfloat16
    write_snapshot(tmp_path / "t", description(6), [(0, rows)])
    bare, form = converted(Snapshot.open(tmp_path / "t"), ("bfloat16", "bfloat16"), state=False)
    assert list(form.counts) == ["embedding"]
    assert form.numbers(bare, "embedding").tolist() == [[1.0, 2.0, 3.0]]
    with pytest.raises(InputError, match=r"sum of key .* holds 3.4e\+38, which overflows bfloat16"):
        converted(Snapshot.open(tmp_path / "t"), ("bfloat16", "bfloat16"))


def test_an_incremental_snapshot_goes_over_none_of_another_type(tmp_path: Path) -> None:
    for types in TYPES:
        save(tmp_path / "-".join(types), types=types)
    for types in TYPES:
        parent = Snapshot.open(tmp_path / "-".join(types))
        check_parent(tmp_path / "new", parent, description(6, types))
        for other in TYPES:
            if other != types:
                with pytest.raises(SnapshotError, match=r'another dtype\. Save it with kind="full"'):
                    check_parent(tmp_path / "new", parent, description(6, other))


DTYPES = [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)]


def open_embedding(path: Path, store: str, types: tuple[torch.dtype, torch.dtype], **more: Any) -> MultiTableEmbedding:
    return make(options(store, path, **more), "adagrad", dtype=types[0], state_dtype=types[1])


@pytest.mark.parametrize("types", DTYPES, ids=str)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.rotated("types")
def test_an_embedding_of_another_dtype_loads_a_snapshot_where_it_is_told_to(
    tmp_path: Path, store: str, types: tuple[torch.dtype, torch.dtype]
) -> None:
    wide = torch.float32, torch.float32
    with open_embedding(tmp_path, store, wide) as embedding:
        train(embedding, torch.arange(100))
        embedding.save_snapshot("wide")
        rows = contents(embedding)
    with pytest.raises(StoreError, match=r"load_snapshot\(name, convert=True\)"):
        open_embedding(tmp_path, store, types).size()
    with open_embedding(tmp_path, store, types, open="fresh") as embedding:
        with pytest.raises(SnapshotError, match="; or load it with convert=True;"):
            embedding.load_snapshot("wide")
        assert embedding.load_snapshot("wide", convert=True).rows == 100
        assert embedding.last_snapshot is None
        narrow = contents(embedding)
        form = Snapshot.open(tmp_path / "rows" / "snapshots" / "wide").manifest.form
        names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
        for name, dtype in zip(("embedding", "sum"), types, strict=True):
            was = form.numbers(rows, name)
            wanted = was if dtype is torch.float32 else by_torch(was, names[dtype])
            same_numbers(embedding.table_handle().table.form.numbers(narrow, name), wanted)
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
            narrowest = form_like(types).numbers(narrow, name)
            same_numbers(form.numbers(back, name).copy(), narrowest)


def form_like(types: tuple[torch.dtype, torch.dtype]) -> RowForm:
    names = [str(dtype).removeprefix("torch.") for dtype in types]
    return RowForm(DIM, names[0], ["sum"], [DIM], names[1:])


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[StoreFolder]:
    """The folder of an embedding of bfloat16 rows, with a snapshot "narrow" of it, and "wide" and "half" of others."""
    for name, types in {"wide": (torch.float32, torch.float32), "half": (torch.float16, torch.bfloat16)}.items():
        with open_embedding(tmp_path / name, "host", types) as embedding:
            train(embedding, torch.arange(20))
            embedding.save_snapshot(name)
    with open_embedding(tmp_path, "host", DTYPES[0]) as embedding:
        train(embedding, torch.arange(9))
        embedding.save_snapshot("narrow")
    for name in ("wide", "half"):
        (tmp_path / "rows" / "snapshots" / name).symlink_to(tmp_path / name / "rows" / "snapshots" / name)
    with StoreFolder(tmp_path / "rows", "a test") as folder:
        yield folder


def test_a_closed_store_takes_rows_of_another_dtype_where_it_is_told_to(closed: StoreFolder) -> None:
    for name, said in {"wide": "float32 with states of float32", "half": "float16 with states of bfloat16"}.items():
        snapshot = Snapshot.open(closed.snapshots / name)
        with pytest.raises(
            SnapshotError,
            match=f"is of rows of dtype {said}, .* of bfloat16 with states of bfloat16.*convert=True.*dtype=",
        ):
            load_into_stores([closed], [snapshot])
        [(live, report)] = load_into_stores([closed], [snapshot], selection=Selection(convert=True))
        assert (live.form.dtype, report.rows) == (form_like(DTYPES[0]).dtype, 20)
    assert last_snapshot(closed.path) == "narrow"
    [(live, _)] = load_into_stores(
        [closed], [Snapshot.open(closed.snapshots / "wide")], selection=Selection(state=False, convert=True)
    )
    assert list(live.form.counts) == ["embedding"]
    load_into_stores([closed], [Snapshot.open(closed.snapshots / "narrow")])  # rows without states take those of any
    [(live, _)] = load_into_stores(
        [closed], [Snapshot.open(closed.snapshots / "narrow")], selection=Selection(convert=True)
    )
    assert live.description == Snapshot.open(closed.snapshots / "narrow").description
    closed.clear_clean_marker()
    with pytest.raises(SnapshotError, match=r"convert=True: .* has no clean live rows, so their dtype is unknown"):
        load_into_stores([closed], [Snapshot.open(closed.snapshots / "wide")], selection=Selection(convert=True))
