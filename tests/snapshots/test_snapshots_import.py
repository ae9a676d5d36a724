"""What an import makes of tables as others write them, and what it refuses."""

from __future__ import annotations

import json
import os
import pickle
import struct
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from support.embeddings import DIM, make, train
from support.examples import examples
from support.exchange import FILES, VALUES, columns_of, dense, imported, write_columns
from support.refusals import check_refusal
from support.small_snapshots import TYPES, description, make_rows, whole
from support.stores import STORES, options
from tierbed import EagerOptimizer, MultiTableEmbedding, make_host_mem_store_options, make_table_options, row_optimizer
from tierbed.engine import _core
from tierbed.engine.errors import InputError, OptionError, SnapshotError, StoreError, TierbedError
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.row_format import MAX_STEP, RowFormat
from tierbed.optim import RowWiseAdagrad
from tierbed.snapshots import Snapshot, write_snapshot
from tierbed.snapshots.exchange.descriptions import description_for
from tierbed.snapshots.exchange.export import FORMATS, export_snapshot
from tierbed.snapshots.exchange.importing import import_snapshot
from tierbed.snapshots.exchange.sources import open_source

CONSTANTS = [{"type": "constant", "value": 0.0}] * 3
FOREIGN = {"optimizer": "foreign", "columns": [1, 1], "states": ["m", "row"], "state_widths": [2, 1]}
FOREIGN |= {"initial": [0.5, 0.5], "hyper": [0.1, 1e300, 1e-300]}


@pytest.mark.parametrize("format", FORMATS)
@examples(0.5)
@given(
    form=st.sampled_from([*((6, types, {}) for types in TYPES), (3, TYPES[0], {}), (5, TYPES[0], FOREIGN)]),
    key_type=st.sampled_from(["int32", "int64", "uint64"]),
    count=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_what_was_exported_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, format: str, form: Any, key_type: str, count: int, seed: int
) -> None:
    path = tmp_path_factory.mktemp("store")
    width, types, changes = form
    about = description(width, types, key_type=key_type, tables=CONSTANTS, seed=-(2**63), step=MAX_STEP, **changes)
    rows, row_form = make_rows(width, count, seed, types=types), RowFormat.from_description(about)
    if key_type == "int32":
        rows["key"] = rows["key"].astype(np.int32).astype(np.int64).astype(np.uint64)
    if row_form.has_16bit_floats:
        for name in row_form.counts:  # each NaN is the one that rows have
            row_form.set_values(rows, name, row_form.values(rows, name))
    buckets = _core.buckets(rows["table"].copy(), rows["key"].copy())
    order = np.lexsort((rows["key"], rows["table"], buckets))
    write_snapshot(path / "s", about, ((int(buckets[i]), rows[i : i + 1]) for i in order))
    export_snapshot(Snapshot.open(path / "s"), path / f"x.{format}", format)
    manifest = import_snapshot(path / "store", "back", path / f"x.{format}")
    found = Snapshot.open(path / "store" / "snapshots" / "back")
    found.verify()
    assert (found.manifest, found.description) == (manifest, about)
    assert whole(found).tobytes() == rows[order].tobytes()


@pytest.mark.parametrize("store", STORES)
def test_a_dense_embedding_becomes_rows_of_every_store(tmp_path: Path, store: str) -> None:
    source = nn.Embedding(40, DIM, padding_idx=7)
    import_snapshot(tmp_path / "rows", "dense", source)
    with make(options(store, tmp_path), "adam", tables=1, padding_idx=7) as embedding:
        embedding.load_snapshot("dense")
        assert embedding.size() == 39
        ids = torch.arange(40)
        assert torch.equal(embedding(ids), source(ids))
        train(embedding, ids)
        assert embedding.size() == 39


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_dense_tables_of_16_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    weight = torch.randn(30, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    torch.save({"w": weight}, tmp_path / "x.pt")
    save_file({"w": weight}, tmp_path / "x.safetensors")
    if dtype == torch.float16:  # NumPy has no bfloat16
        np.save(tmp_path / "x.npy", weight.numpy())
    files = {path: {} if path.suffix == ".npy" else {"tensor": "w"} for path in tmp_path.iterdir()}
    for number, (source, more) in enumerate({weight: {}, nn.Embedding.from_pretrained(weight): {}, **files}.items()):
        assert imported(tmp_path / str(number), source, **more) == dense(weight.float().numpy())


def test_numpy_arrays_and_their_files(tmp_path: Path) -> None:
    arrays = {"keys": np.array([-5, 2**40, -5, 0]), "table_ids": np.array([0, 1, 0, 1], np.uint8)}
    about = description_for("users", [2, 3], tables=[make_constant_initializer(0.0)] * 2)
    wanted = {(0, -5): VALUES[2].tolist(), (1, 2**40): VALUES[1].tolist(), (1, 0): VALUES[3].tolist()}
    files = {name: tmp_path / f"{name}.npy" for name in (*arrays, "values")}
    for name, array in {**arrays, "values": VALUES[:4]}.items():
        np.save(files[name], array)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    for number, (values, more) in enumerate(
        ((VALUES[:4], arrays), (str(files.pop("values")), files), (torch.from_numpy(VALUES[:4]), tensors))
    ):
        place = tmp_path / str(number)
        assert imported(place, values, **more, description=about) == wanted
        assert Snapshot.open(place / "snapshots" / "s").description == about
    one_table = {(1, key): row for (_, key), row in dense(VALUES[:4]).items()}
    assert imported(tmp_path / "d", VALUES[:4], table_ids=1, description=about) == one_table
    assert imported(tmp_path / "e", VALUES[:0]) == imported(tmp_path / "f", VALUES[:0], keys=np.arange(0)) == {}


@pytest.mark.parametrize("suffix", ["pt", "safetensors", "npz"])
def test_dense_tables_of_a_state_dict(tmp_path: Path, suffix: str) -> None:
    weights = {"emb.0.weight": VALUES, "emb.1.weight": VALUES[:7] + 1, "bias": np.zeros(3)}
    path = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save({"model": {name: torch.from_numpy(array) for name, array in weights.items()}, "epoch": 3}, path)
    else:
        write_columns(path, weights)
    outer = "model." if suffix == "pt" else ""
    names = [f"{outer}emb.{index}.weight" for index in (0, 1)]
    assert imported(tmp_path / "one", path, tensor=names[1]) == dense(VALUES[:7] + 1)
    assert imported(tmp_path / "two", path, tensor=names) == dense() | dense(VALUES[:7] + 1, 1)
    assert len(Snapshot.open(tmp_path / "two" / "snapshots" / "s").description["tables"]) == 2
    keys = np.arange(100, 140, dtype=np.uint64)
    assert imported(tmp_path / "keyed", path, tensor=names[0], keys=keys).keys() == {(0, k) for k in range(100, 140)}
    for tensor, *named in (
        ("other", "tensor='other' does not exist", names[0]),
        (None, "bias", "'key' and 'embedding' are needed", "tensor="),
        (f"{outer}bias", "bias has dtype float64 and shape (3,)", "(n, dim)"),
    ):
        call = partial(import_snapshot, tmp_path / "three", "s", path, tensor=tensor)
        check_refusal((call, InputError, *named))


@pytest.mark.parametrize("format", FILES)
def test_tables_that_others_wrote(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"x.{format}"
    write_columns(path, columns_of(9, other=np.arange(9)) | ({} if format == "parquet" else {"epoch": np.array(3)}))
    wanted = {(0, 8 - key): row for (_, key), row in dense(VALUES[:9]).items()}
    assert imported(tmp_path / "a", path) == wanted
    rows = whole(Snapshot.open(tmp_path / "a" / "snapshots" / "s"))
    assert set(rows["updates"].tolist()) == {1}
    path = tmp_path / f"y.{format}"
    write_columns(path, columns_of(9, table=np.full(9, 1, np.int32)))
    with pytest.raises(InputError, match="the number of tables is unknown; give description="):
        import_snapshot(tmp_path / "b", "s", path)
    about = description_for("b", DIM, tables=[make_constant_initializer(0.0)] * 2)
    assert imported(tmp_path / "b", path, description=about) == {(1, key): row for (_, key), row in wanted.items()}


def test_the_table_is_the_stores(tmp_path: Path) -> None:
    """The live rows of a clean store describe the table, else its snapshots."""
    with make(options("host", tmp_path), "adam", seed=3, tables=1) as embedding:
        train(embedding, [1, 2])
    path = tmp_path / "rows"
    for name in ("from the clean marker", "from a snapshot"):
        import_snapshot(path, name, VALUES)
        about = Snapshot.open(path / "snapshots" / name).description
        assert (about["seed"], about["optimizer"], about["step"]) == (3, None, 0)
        (path / "MARK").unlink(missing_ok=True)
    wrong_keys = np.arange(40, dtype=np.uint64)
    check_refusal((lambda: import_snapshot(path, "s", VALUES[:, :4]), InputError, "rows of 4 floats", "has 5"))
    check_refusal((lambda: import_snapshot(path, "s", VALUES, keys=wrong_keys), InputError, "uint64", "int64"))


def test_the_row_of_padding(tmp_path: Path) -> None:
    about, zeroed = description_for("t", DIM, padding_idx=3), VALUES.copy()
    zeroed[3] = 0
    assert imported(tmp_path / "t", zeroed, description=about).keys() == dense().keys() - {(0, 3)}
    for source, more, named in (
        (VALUES, {}, "row 3 must be zeros, because padding_idx=3"),
        (zeroed, {"keys": np.arange(40)}, "padding_idx=3"),
        (nn.Embedding(9, DIM, padding_idx=2), {}, "padding_idx=2, but the table has 3"),
    ):
        call = partial(import_snapshot, tmp_path / "u", "s", source, description=about, **more)
        check_refusal((call, InputError, named))


def written(folder: Path, format: str) -> Path:
    """A file of `VALUES`."""
    path = folder / f"x.{format}"
    if format == "npy":
        np.save(path, VALUES)
    elif format == "pt":
        torch.save({"w": torch.from_numpy(VALUES)}, path)
    else:
        write_columns(path, columns_of(40))
    return path


@pytest.mark.parametrize("format", ["parquet", "npz", "safetensors", "npy", "pt"])
def test_sources_are_read_a_chunk_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    from tierbed.snapshots.exchange import sources

    monkeypatch.setattr(sources, "compute_chunk_rows", lambda width: 16)
    path = written(tmp_path, format)
    source = open_source(path, tensor="w" if format == "pt" else None)
    assert (source.num_rows, source.dim) == (40, DIM)
    sizes = [len(batch["embedding"]) for batch in source.batches(["key", "embedding"])]
    assert sizes == [16, 16, 8]
    seen: list[int] = []
    import_snapshot(tmp_path / "t", "s", source, progress=seen.append)
    assert seen[:3] == [16, 16, 8]
    assert sum(seen) == 80  # read, then written


@pytest.mark.parametrize("kind", ["arrays", "npy", "file", "tables"])
@pytest.mark.parametrize(("name", "kind_of"), [("sum", torch.optim.Adagrad), ("scale", RowWiseAdagrad)])
def test_states_of_a_dense_table_come_with_its_rows(kind: str, name: str, kind_of: Any, tmp_path: Path) -> None:
    weights, state = torch.rand(20, DIM), torch.rand(20, DIM) if name == "sum" else torch.rand(20)
    tables = [make_table_options(make_constant_initializer(0.0))] * (1 + (kind == "tables"))
    about = description_for("rows", DIM, tables=tables, optimizer=optimizer_of(kind_of), step=3)
    file, npy = tmp_path / "x.pt", tmp_path / "x.npy"
    torch.save({"w": weights, "nested": {"s": state}}, file)
    np.save(npy, state.numpy())
    source, more = {
        "arrays": (weights, {"states": {"sum": state}}),
        "npy": (weights, {"states": {"sum": npy}}),
        "file": (file, {"tensor": "w", "states": {"sum": "nested.s"}}),
        "tables": (file, {"tensor": ["w", "w"], "states": {"sum": ["nested.s", "nested.s"]}}),
    }[kind]
    import_snapshot(tmp_path / "rows", "s", source, **more, description=about)  # type: ignore[arg-type]
    place = make_host_mem_store_options(persistent_path=tmp_path)
    with MultiTableEmbedding("rows", DIM, torch.float32, torch.int64, tables, place) as rows:
        kept = EagerOptimizer(kind_of(rows.parameters(), lr=0.1), rows)
        rows.load_snapshot("s")
        table = rows.table_handle().open_table
        assert (rows.size(), table.step) == (20 * len(tables), 3)
        for _, chunk in table.scan():
            keys = chunk["key"].astype("i8")
            for field, wanted in (("sum", state), ("embedding", weights)):
                found = torch.from_numpy(table.row_format.values(chunk, field).copy())
                assert torch.equal(found, wanted[keys].view(len(chunk), -1))
        del kept


def optimizer_of(kind: Any) -> Any:
    optimizer = kind([nn.Parameter(torch.zeros(1))], lr=0.1)
    return row_optimizer(optimizer, optimizer.param_groups[0])


def test_states_that_the_description_lacks_without_their_step_and_beyond_float32_are_refused(tmp_path: Path) -> None:
    weights, state = torch.rand(20, DIM), torch.rand(20, DIM, dtype=torch.float64)
    torch.save({"w": weights}, tmp_path / "x.pt")
    kinds = torch.optim.Adagrad, torch.optim.Adam
    adagrad, adam = (description_for("rows", DIM, optimizer=optimizer_of(kind)) for kind in kinds)
    states, two = {"exp_avg": state, "exp_avg_sq": state}, {"sum": ["a", "b"]}
    file = tmp_path / "x.pt"
    problems = {"overflows float32": state * 1e39, "has dtype int64": state.long(), "has dtype bool": state.bool()}
    for source, more, *named in (
        (weights, {"states": {"other": state}, "description": adagrad}, "states: 'other'"),
        (weights, {"states": {"sum": 1.0}, "description": adagrad}, "states['sum']=float"),
        (file, {"tensor": "w", "states": two, "description": adagrad}, "states['sum']=['a', 'b']", "['w']"),
        (weights, {"states": states, "description": adam}, "adam counts steps", "step=0"),
        *(
            (weights, {"states": {"sum": wrong}, "description": adagrad}, f"states['sum'] {problem}; give floats")
            for problem, wrong in problems.items()
        ),
    ):
        check_refusal((partial(import_snapshot, tmp_path / "t", "s", source, **more), InputError, *named))
    import_snapshot(tmp_path / "t", "s", weights, states=states, description=adam | {"step": 9})
    import_snapshot(tmp_path / "t", "t", weights, description=adam)  # without states


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    trap = np.array([Trap()] * 3, object)
    np.save(tmp_path / "x.npy", trap)
    np.savez(tmp_path / "x.npz", key=trap, embedding=VALUES[:3])
    np.savez(tmp_path / "y.npz", key=np.arange(3), embedding=VALUES[:3], tierbed=np.array(Trap(), object))
    torch.save({"w": Trap()}, tmp_path / "x.pt")
    for name in ("x.npy", "x.npz", "y.npz", "x.pt"):
        with pytest.raises((InputError, SnapshotError), match=name):
            import_snapshot(tmp_path / "t", "s", tmp_path / name, tensor="w" if name == "x.pt" else None)
    with pytest.raises(InputError, match="key is object"):
        import_snapshot(tmp_path / "t", "s", VALUES[:3], keys=trap)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("format", ["parquet", "npz", "safetensors", "npy", "pt"])
def test_damaged_and_foreign_files(tmp_path: Path, format: str) -> None:
    path = written(tmp_path, format)
    data = path.read_bytes()
    for content in (b"", b"nonsense" * 20, data[: len(data) // 2], data[:-5]):
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match=rf"x\.{format}' cannot be read"):
            import_snapshot(tmp_path / "t", "s", path, tensor="w" if format == "pt" else None)
    with pytest.raises(SnapshotError, match=rf"no\.{format}' cannot be read"):
        import_snapshot(tmp_path / "t", "s", tmp_path / f"no.{format}", tensor="w" if format == "pt" else None)
    assert not (tmp_path / "t" / "snapshots" / "s").exists()


def npy(header: str, numbers: bytes = bytes(64)) -> bytes:
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header.encode() + numbers


def bytes_of(save: Any, *arrays: Any, **named: Any) -> bytes:
    file = BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


WHOLE = bytes_of(np.save, np.arange(4))
FORM = "{'descr': %s, 'fortran_order': False, 'shape': %s}\n"
NO_ARRAYS = {
    "an archive": bytes_of(np.savez, key=np.arange(4)),
    "an empty archive": b"PK\x05\x06" + bytes(18),
    "an empty file": b"",
    "the start of a header": WHOLE[:20],
    "a file that was cut off": WHOLE[:-1],
    "a pickle": pickle.dumps([1]),
    "Python objects": bytes_of(np.save, np.array([1, None], object)),
    "text": b"1, 2, 3, 4, and more of it",
    "an unknown version": b"\x93NUMPY\x09" + WHOLE[7:],
    "an open bracket": npy("{'descr': (((\n"),
    "a header without names": npy("{1: 2, 'shape': 3}\n"),
    "deep brackets": npy("-" * 3000 + "1\n"),
    "an empty dtype": npy(FORM % ("()", "(4,)")),
    "a foreign dtype": npy(FORM % ("{'a': 1}", "(4,)")),
    "a negative length": npy(FORM % ("'<i8'", "(-4,)")),
    "more rows than there are": npy(FORM % ("'<i8'", f"({1 << 70},)")),
}


def test_a_file_of_numpy_that_is_no_array_of_numbers(tmp_path: Path) -> None:
    """The error names the argument, the file and the remedy, whatever NumPy's readers raise."""
    npy_file, npz = tmp_path / "x.npy", tmp_path / "x.npz"
    calls: dict[str, dict[str, Any]] = {
        "source": {"source": npy_file},
        "keys": {"keys": npy_file},
        "table_ids": {"keys": np.arange(40), "table_ids": npy_file},
        "states['m']": {"states": {"m": npy_file}},
    }
    for what, content in NO_ARRAYS.items():
        npy_file.write_bytes(content)
        for argument, more in calls.items():
            call = partial(import_snapshot, tmp_path / "t", "s", **{"source": VALUES, **more})
            check_refusal((call, SnapshotError, f"{argument}='{npy_file}' cannot be read: ", "give a .npy file that"))
        for column in ("key", "embedding"):
            with ZipFile(npz, "w") as archive:
                for name, array in {"key": np.arange(4), "embedding": VALUES[:4]}.items():
                    archive.writestr(f"{name}.npy", content if name == column else bytes_of(np.save, array))
            with pytest.raises(TierbedError, match=f"^source='{npz}'(:| cannot be read:| has) .*[;,:] "):
                import_snapshot(tmp_path / "t", "s", npz)
        assert not (tmp_path / "t" / "snapshots" / "s").exists(), what


@pytest.mark.parametrize("format", ["npz", "parquet"])
def test_a_flipped_bit_in_an_export_is_found(tmp_path: Path, format: str) -> None:
    import_snapshot(tmp_path / "t", "whole", np.random.default_rng(0).random((4000, DIM), np.float32))
    path = tmp_path / f"x.{format}"
    export_snapshot(Snapshot.open(tmp_path / "t" / "snapshots" / "whole"), path, format)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotError, match=rf"x\.{format}' cannot be read: (?i:.*CRC)"):
        import_snapshot(tmp_path / "t", "s", path)
    assert not (tmp_path / "t" / "snapshots" / "s").exists()


COLUMNS: list[tuple[dict[str, Any], *tuple[str, ...]]] = [
    ({"embedding": VALUES[:9].astype(np.float64)}, "embedding has dtype float64 and shape (9, 5)", "(n, dim)"),
    ({"embedding": VALUES[:9, 0]}, "embedding has dtype float32 and shape (9,)"),
    ({"key": np.arange(9, dtype=np.int16)}, "key is int16", "int32, int64, uint64"),
    ({"key": np.zeros(9, np.float32)}, "key is float32"),
    ({"updates": np.zeros(9, np.uint32)}, "updates holds 0"),
    ({"updates": np.ones(9, np.int64)}, "updates is int64"),
    ({"step": np.full(9, 6, np.uint32), "m": VALUES[:9], "v": VALUES[:9]}, "step holds 6", "at step 5"),
    ({"table": np.full(9, 3, np.uint32)}, "table holds 3", "from 0 to 2"),
    ({"table": np.zeros(9, np.float32)}, "table is float32"),
    ({"m": VALUES[:9]}, "lacks optimizer state v"),
    ({"m": VALUES[:9, :2], "v": VALUES[:9]}, "m is float32 (9, 2)", "float32 (9, 5)"),
]


@pytest.mark.parametrize("format", FILES)
def test_columns_that_cannot_be_rows(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"x.{format}"
    about = description_for("t", DIM, tables=[make_constant_initializer(0.0)] * 3, step=5)
    about |= {"optimizer": "foreign", "states": ["m", "v"], "state_widths": [DIM, DIM], "initial": [0.0, 0.0]}
    about |= {"width": 3 * DIM}
    for changes, *named in COLUMNS:
        write_columns(path, columns_of(9, table=np.zeros(9, np.int64)) | changes)
        check_refusal((partial(import_snapshot, tmp_path / "t", "s", path, description=about), InputError, *named))
    assert not (tmp_path / "t" / "snapshots" / "s").exists()


def test_parquet_rows_without_a_value_and_npz_in_fortran_order_or_of_unequal_lengths(tmp_path: Path) -> None:
    def refused(*named: str) -> None:
        check_refusal((lambda: import_snapshot(tmp_path / "t", "s", path), InputError, *named))

    path = tmp_path / "x.parquet"
    for values, named in (
        ([[1.0, 2.0], None], "without a value"),
        ([[1.0, 2.0], [1.0, None]], "without a value"),
        ([[1.0, 2.0], [1.0]], "lists of several lengths; the first has 2 items"),
    ):
        lists = pyarrow.array(values, pyarrow.list_(pyarrow.float32()))
        pyarrow.parquet.write_table(pyarrow.table({"key": pyarrow.array([1, 2]), "embedding": lists}), path)
        refused("column 'embedding'", named)
    path = tmp_path / "x.npz"
    np.savez(path, key=np.arange(4), embedding=np.asfortranarray(VALUES[:4]))
    refused("'embedding' is in Fortran order", "np.ascontiguousarray")
    np.savez(path, key=np.arange(3), embedding=VALUES[:4])
    refused("key has shape (3,)", "embedding has shape (4, 5)")


def test_a_foreign_description_is_checked(tmp_path: Path) -> None:
    for text in ("{", "[" * 100_000, json.dumps({"columns": [5]}), json.dumps(description(width=5, columns=[2**70]))):
        np.savez(tmp_path / "x.npz", tierbed=np.array(text), **columns_of(4))  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"x\.npz': its description"):
            import_snapshot(tmp_path / "t", "s", tmp_path / "x.npz")
    with ZipFile(tmp_path / "x.npz", "w", ZIP_DEFLATED) as archive, archive.open("tierbed.npy", "w") as file:
        header = {"descr": "<U500000000", "fortran_order": False, "shape": ()}
        np.lib.format.write_array_header_1_0(file, header)  # of which nothing is allocated
    with pytest.raises(SnapshotError, match="not a table's description"):
        import_snapshot(tmp_path / "t", "s", tmp_path / "x.npz")


def test_arguments_that_are_wrong_or_do_not_go_together(tmp_path: Path) -> None:
    columns = tmp_path / "x.npz", tmp_path / "x.parquet"
    for path in columns:
        write_columns(path, columns_of(4))
    import_snapshot(tmp_path / "rows", "s", VALUES)
    before = Snapshot.open(tmp_path / "rows" / "snapshots" / "s").manifest
    cases: list[tuple[Any, dict[str, Any], *tuple[str, ...]]] = [
        ([1.0], {}, "source: got list"),
        (VALUES[0], {}, "values has dtype float32 and shape (5,)"),
        (torch.zeros(2, 3, dtype=torch.int16), {}, "values has dtype int16"),
        ("model.onnx", {}, "source='model.onnx'", "suffix"),
        (VALUES, {"table_ids": np.zeros(40, np.int64)}, "an array of table ids needs keys"),
        (columns[0], {"keys": np.arange(4)}, "keys and table_ids are only for dense tables"),
        (columns[1], {"tensor": "embedding"}, "tensor= is only for .npz"),
        (columns[0], {"tensor": ["embedding"], "table_ids": 1}, "a list of names, one per table"),
        (VALUES, {"description": {}}, "description has no valid 'name'"),
        (VALUES, {"table_ids": 1}, "table holds 1", "from 0 to 0"),
        (VALUES, {"keys": np.arange(39)}, "key has shape (39,)"),
    ]
    for source, more, *named in cases:
        check_refusal((partial(import_snapshot, tmp_path / "t", "s", source, **more), InputError, *named))
    check_refusal((lambda: import_snapshot(tmp_path / "t", "../s", VALUES), SnapshotError, "snapshot name"))
    check_refusal((lambda: import_snapshot(tmp_path / "rows", "s", VALUES), SnapshotError, "s' exists"))
    with make(options("host", tmp_path), tables=1) as embedding:
        assert embedding.size() == 40
        check_refusal((lambda: import_snapshot(tmp_path / "rows", "t", VALUES), StoreError, "Close embedding 'rows'"))
    assert Snapshot.open(tmp_path / "rows" / "snapshots" / "s").manifest == before
    for change in ({"name": "a/b"}, {"embedding_dim": 0}, {"key_type": torch.int16}, {"seed": 0.5}):
        call = partial(description_for, **{"name": "a", "embedding_dim": 2} | change)  # type: ignore[arg-type]
        check_refusal((call, OptionError, *change))
