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

from support.embeddings import DIM, make
from support.exchange import FILES, VALUES, columns_of, write_columns
from support.refusals import check_refusal
from support.small_snapshots import description
from support.stores import options
from tierbed.engine.errors import InputError, OptionError, SnapshotError, StoreError, TierbedError
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.snapshots import Snapshot
from tierbed.snapshots.exchange.descriptions import description_for
from tierbed.snapshots.exchange.export import export_snapshot
from tierbed.snapshots.exchange.importing import import_snapshot


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
    path = tmp_path / f"x.{format}"
    if format == "npy":
        np.save(path, VALUES)
    elif format == "pt":
        torch.save({"w": torch.from_numpy(VALUES)}, path)
    else:
        write_columns(path, columns_of(40))
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


def saved(save: Any, *arrays: Any, **named: Any) -> bytes:
    file = BytesIO()
    save(file, *arrays, **named)
    return file.getvalue()


WHOLE = saved(np.save, np.arange(4))
FORM = "{'descr': %s, 'fortran_order': False, 'shape': %s}\n"
NO_ARRAYS = {
    "an archive": saved(np.savez, key=np.arange(4)),
    "an empty archive": b"PK\x05\x06" + bytes(18),
    "an empty file": b"",
    "the start of a header": WHOLE[:20],
    "a file that was cut off": WHOLE[:-1],
    "a pickle": pickle.dumps([1]),
    "Python objects": saved(np.save, np.array([1, None], object)),
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
        for argument, given in calls.items():
            call = partial(import_snapshot, tmp_path / "t", "s", **{"source": VALUES, **given})
            check_refusal((call, SnapshotError, f"{argument}='{npy_file}' cannot be read: ", "give a .npy file that"))
        for column in ("key", "embedding"):
            with ZipFile(npz, "w") as archive:
                for name, array in {"key": np.arange(4), "embedding": VALUES[:4]}.items():
                    archive.writestr(f"{name}.npy", content if name == column else saved(np.save, array))
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
    ({"embedding": VALUES[:9].astype(np.float64)}, "embedding is float64 (9, 5)", "(n, dim) of"),
    ({"embedding": VALUES[:9, 0]}, "embedding is float32 (9,)"),
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
        ([[1.0, 2.0], [1.0]], "lists of several lengths, the first 2"),
    ):
        lists = pyarrow.array(values, pyarrow.list_(pyarrow.float32()))
        pyarrow.parquet.write_table(pyarrow.table({"key": pyarrow.array([1, 2]), "embedding": lists}), path)
        refused("column 'embedding'", named)
    path = tmp_path / "x.npz"
    np.savez(path, key=np.arange(4), embedding=np.asfortranarray(VALUES[:4]))
    refused("'embedding' is in Fortran order", "np.ascontiguousarray")
    np.savez(path, key=np.arange(3), embedding=VALUES[:4])
    refused("key has shape (3,)", "embedding (4, 5)")


def test_a_foreign_description_is_checked(tmp_path: Path) -> None:
    for text in ("{", "[" * 100_000, json.dumps({"columns": [5]}), json.dumps(description(width=5, columns=[2**70]))):
        np.savez(tmp_path / "x.npz", tierbed=np.array(text), **columns_of(4))  # type: ignore[arg-type]
        with pytest.raises(InputError, match=r"x\.npz': its description"):
            import_snapshot(tmp_path / "t", "s", tmp_path / "x.npz")
    with ZipFile(tmp_path / "x.npz", "w", ZIP_DEFLATED) as archive, archive.open("tierbed.npy", "w") as file:
        header = {"descr": "<U500000000", "fortran_order": False, "shape": ()}
        np.lib.format.write_array_header_1_0(file, header)  # of which nothing is allocated
    with pytest.raises(SnapshotError, match="not the description of an export"):
        import_snapshot(tmp_path / "t", "s", tmp_path / "x.npz")


def test_arguments_that_are_wrong_or_do_not_go_together(tmp_path: Path) -> None:
    columns = tmp_path / "x.npz", tmp_path / "x.parquet"
    for path in columns:
        write_columns(path, columns_of(4))
    import_snapshot(tmp_path / "rows", "s", VALUES)
    before = Snapshot.open(tmp_path / "rows" / "snapshots" / "s").manifest
    cases: list[tuple[Any, dict[str, Any], *tuple[str, ...]]] = [
        ([1.0], {}, "source: got list"),
        (VALUES[0], {}, "values is float32 (5,)"),
        (torch.zeros(2, 3, dtype=torch.int16), {}, "values is int16"),
        ("model.onnx", {}, "source='model.onnx'", "suffix"),
        (VALUES, {"table_ids": np.zeros(40, np.int64)}, "an array of ids needs keys"),
        (columns[0], {"keys": np.arange(4)}, "keys and table_ids need a dense tensor"),
        (columns[1], {"tensor": "embedding"}, "tensor= is for .npz"),
        (columns[0], {"tensor": ["embedding"], "table_ids": 1}, "a list with one name for each table"),
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
        check_refusal((lambda: import_snapshot(tmp_path / "rows", "t", VALUES), StoreError, "'rows' has it open"))
    assert Snapshot.open(tmp_path / "rows" / "snapshots" / "s").manifest == before
    for change in ({"name": "a/b"}, {"embedding_dim": 0}, {"key_type": torch.int16}, {"seed": 0.5}):
        call = partial(description_for, **{"name": "a", "embedding_dim": 2} | change)  # type: ignore[arg-type]
        check_refusal((call, OptionError, *change))
