from __future__ import annotations

import json
import os
import pickle
import struct
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


@pytest.mark.parametrize("what", NO_ARRAYS)
def test_a_file_of_numpy_that_is_no_array_of_numbers(tmp_path: Path, what: str) -> None:
    """The error names the argument, the file and the remedy, whatever NumPy's readers raise."""
    path = tmp_path / "x.npy"
    path.write_bytes(NO_ARRAYS[what])
    calls: dict[str, dict[str, Any]] = {
        "source": {"source": path},
        "keys": {"keys": path},
        "table_ids": {"keys": np.arange(40), "table_ids": path},
        r"states\['m'\]": {"states": {"m": path}},
    }
    for argument, call in calls.items():
        with pytest.raises(SnapshotError, match=rf"^{argument}='{path}' cannot be read: .*; give a \.npy file that"):
            import_snapshot(tmp_path / "t", "s", **{"source": VALUES, **call})
    path = path.with_suffix(".npz")
    for column in ("key", "embedding"):
        with ZipFile(path, "w") as archive:
            for name, array in {"key": np.arange(4), "embedding": VALUES[:4]}.items():
                archive.writestr(f"{name}.npy", NO_ARRAYS[what] if name == column else saved(np.save, array))
        with pytest.raises(TierbedError, match=f"^source='{path}'(:| cannot be read:| has) .*[;,:] "):
            import_snapshot(tmp_path / "t", "s", path)
    assert not (tmp_path / "t" / "snapshots" / "s").exists()


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


@pytest.mark.parametrize("format", FILES)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding": VALUES[:9].astype(np.float64)}, r"embedding is float64 \(9, 5\); rows are \(n, dim\) of"),
        ({"embedding": VALUES[:9, 0]}, r"embedding is float32 \(9,\); rows are \(n, dim\)"),
        ({"key": np.arange(9, dtype=np.int16)}, "key is int16; save keys as one of int32, int64, uint64"),
        ({"key": np.zeros(9, np.float32)}, "key is float32"),
        ({"updates": np.zeros(9, np.uint32)}, "updates holds 0, but a stored row was written at least once"),
        ({"updates": np.ones(9, np.int64)}, "updates is int64"),
        (
            {"step": np.full(9, 6, np.uint32), "m": VALUES[:9], "v": VALUES[:9]},
            "step holds 6, but the table is at step 5",
        ),
        ({"table": np.full(9, 3, np.uint32)}, "table holds 3; give table ids from 0 to 2"),
        ({"table": np.zeros(9, np.float32)}, "table is float32"),
        ({"m": VALUES[:9]}, "lacks optimizer state v: give all states, or none"),
        ({"m": VALUES[:9, :2], "v": VALUES[:9]}, r"m is float32 \(9, 2\); give a NumPy array of float32 \(9, 5\)"),
    ],
)
def test_columns_that_cannot_be_rows(tmp_path: Path, format: str, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / f"x.{format}"
    write_columns(path, columns_of(9, table=np.zeros(9, np.int64)) | changes)
    about = description_for("t", DIM, tables=[make_constant_initializer(0.0)] * 3, step=5)
    about |= {"optimizer": "foreign", "states": ["m", "v"], "state_widths": [DIM, DIM], "initial": [0.0, 0.0]}
    about |= {"width": 3 * DIM}
    with pytest.raises(InputError, match=message):
        import_snapshot(tmp_path / "t", "s", path, description=about)
    assert not (tmp_path / "t" / "snapshots" / "s").exists()


def test_parquet_rows_without_a_value(tmp_path: Path) -> None:
    list_type = pyarrow.list_(pyarrow.float32())
    for values, message in (
        ([[1.0, 2.0], None], "column 'embedding' has rows without a value"),
        ([[1.0, 2.0], [1.0, None]], "column 'embedding' has rows without a value"),
        ([[1.0, 2.0], [1.0]], "column 'embedding' has lists of several lengths, the first 2"),
    ):
        table = pyarrow.table({"key": pyarrow.array([1, 2]), "embedding": pyarrow.array(values, list_type)})
        pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
        with pytest.raises(InputError, match=message):
            import_snapshot(tmp_path / "t", "s", tmp_path / "x.parquet")


def test_npz_in_fortran_order_and_of_unequal_lengths(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", key=np.arange(4), embedding=np.asfortranarray(VALUES[:4]))
    with pytest.raises(InputError, match=r"'embedding' is in Fortran order: save np\.ascontiguousarray of it"):
        import_snapshot(tmp_path / "t", "s", tmp_path / "x.npz")
    np.savez(tmp_path / "y.npz", key=np.arange(3), embedding=VALUES[:4])
    with pytest.raises(InputError, match=r"key has shape \(3,\) and embedding \(4, 5\)"):
        import_snapshot(tmp_path / "t", "s", tmp_path / "y.npz")


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


def refused(tmp_path: Path, *cases: tuple[Any, dict[str, Any], str]) -> None:
    for source, extra, message in cases:
        with pytest.raises(InputError, match=message):
            import_snapshot(tmp_path / "t", "s", source, **extra)


def test_arguments_that_are_wrong_or_do_not_go_together(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="snapshot name"):
        import_snapshot(tmp_path / "t", "../s", VALUES)
    refused(
        tmp_path,
        ([1.0], {}, "source: got list; give a path, a NumPy array"),
        (VALUES[0], {}, r"values is float32 \(5,\)"),
        (torch.zeros(2, 3, dtype=torch.int16), {}, "values is int16"),
        ("model.onnx", {}, r"source='model.onnx': its suffix is unknown"),
    )
    assert os.listdir(tmp_path) == []
    write_columns(tmp_path / "x.npz", columns_of(4))
    write_columns(tmp_path / "x.parquet", columns_of(4))
    refused(
        tmp_path,
        (VALUES, {"table_ids": np.zeros(40, np.int64)}, "an array of ids needs keys"),
        (tmp_path / "x.npz", {"keys": np.arange(4)}, "keys and table_ids need a dense tensor"),
        (tmp_path / "x.parquet", {"tensor": "embedding"}, "tensor= is for .npz"),
        (tmp_path / "x.npz", {"tensor": ["embedding"], "table_ids": 1}, "a list with one name for each table"),
        (
            VALUES,
            {"description": {}},
            "description: description has no valid 'name'; make the description",
        ),
        (VALUES, {"table_ids": 1}, "table holds 1; give table ids from 0 to 0"),
        (VALUES, {"keys": np.arange(39)}, r"key has shape \(39,\)"),
    )


def test_a_taken_name_and_a_store_in_use(tmp_path: Path) -> None:
    import_snapshot(tmp_path / "rows", "s", VALUES)
    before = Snapshot.open(tmp_path / "rows" / "snapshots" / "s").manifest
    with pytest.raises(SnapshotError, match="exists: choose another name"):
        import_snapshot(tmp_path / "rows", "s", VALUES)
    assert Snapshot.open(tmp_path / "rows" / "snapshots" / "s").manifest == before
    with make(options("host", tmp_path), tables=1) as embedding:
        assert embedding.size() == 40
        with pytest.raises(StoreError, match="this one, where embedding 'rows' has it open: close that first"):
            import_snapshot(tmp_path / "rows", "t", VALUES)


def test_a_description_with_bad_arguments() -> None:
    for change in ({"name": "a/b"}, {"embedding_dim": 0}, {"key_type": torch.int16}, {"seed": 0.5}):
        with pytest.raises(OptionError):
            description_for(**{"name": "a", "embedding_dim": 2} | change)


def test_a_dtype_that_is_no_torch_dtype_is_refused_without_options_that_an_import_lacks(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"dtype='bfloat16'"):
        import_snapshot(tmp_path / "store", "s", VALUES, dtype="bfloat16")  # type: ignore[arg-type]
