"""`hash_keys`: ids of strings, by XXH64 of their bytes, the same in every version and on every machine."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from ..checks import int_option
from ..errors import InputError

Ids = NDArray[np.int64]
_TEXT = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"}  # types of Arrow
_KINDS = "a NumPy array, list, or column of Arrow or pandas, of str or bytes"


def hash_keys(values: Any, seed: int = 0, null: int | None = None) -> Tensor:
    """Ids of strings, int64 of the shape of `values`, on the CPU: XXH64 of their UTF-8 bytes, as signed numbers.

    values: a NumPy array of str (`U`, `StringDType`), bytes (`S`) or objects, nested lists of str and bytes, a column
    of pandas, or one of Arrow: strings or binary of any layout, dictionaries of them, chunked or not. A str has the id
    of its UTF-8 bytes. NumPy pads `U` and `S` with zeros, so zeros at the end of such a string do not count.
    seed: of the hash, 64 bits. null: the id of None, NaN, pandas' NA, Arrow's nulls and masked elements.

    Raises InputError for other values, for a null if `null` is not given, and for text that is not Unicode.
    OptionError for a `seed` or `null` that is not a whole number of 64 bits.
    """
    seed = int_option("seed", seed, "a whole number of 64 bits", -(2**63), 2**64 - 1) % 2**64
    if null is not None:
        null = int_option("null", null, "a whole number of 64 bits, or None", -(2**63), 2**63 - 1)
    if (column := _arrow_column(values)) is not None:
        return torch.from_numpy(_of_arrow(column, seed, null))
    given = _array(values)
    flat = given.reshape(-1)
    ids = _of_rows(flat, seed) if given.dtype.kind in "SU" else _of_objects(flat.tolist(), seed, null)
    return torch.from_numpy(ids.reshape(given.shape))


def _array(values: Any) -> NDArray[Any]:
    """The values as an array of strings or objects."""
    if not isinstance(values, np.ndarray | list | tuple | Tensor) and hasattr(values, "to_numpy"):
        values = values.to_numpy()
    if isinstance(values, np.ma.MaskedArray):
        hidden, values = np.ma.getmaskarray(values), np.array(values.data, object)
        values[hidden] = None
    if isinstance(values, np.ndarray):
        given = values.astype(object) if values.dtype.kind == "T" else values
    elif isinstance(values, list | tuple):
        given = np.array(values, object)  # of strings of one length, too, each is one element
    else:
        _refuse(values)
    if given.dtype.kind not in "SUO":
        _refuse(values, f" of {given.dtype}")
    return given


def _of_rows(values: NDArray[Any], seed: int) -> Ids:
    native = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))
    ids = np.empty(len(native), np.int64)
    if native.dtype.itemsize == 0:
        native = native.astype(native.dtype.kind + "1")
    is_text = native.dtype.kind == "U"
    wrong = _core.hash_rows(native.view(np.uint8), native.dtype.itemsize, is_text, seed, ids)
    if wrong < len(ids):
        raise InputError(f"values: element {wrong} has a character that is not Unicode, so it has no UTF-8")
    return ids


def _of_objects(values: list[Any], seed: int, null: int | None) -> Ids:
    parts: list[bytes] = []
    nulls: list[int] = []
    for position, value in enumerate(values):
        if isinstance(value, str):
            try:
                parts.append(value.encode())
            except UnicodeEncodeError as error:
                raise InputError(f"values: element {position}, {value!r}, has no UTF-8: {error.reason}") from None
        elif isinstance(value, bytes):
            parts.append(value)
        elif value is None or (isinstance(value, float) and value != value) or type(value).__name__ == "NAType":
            nulls.append(position)
            parts.append(b"")
        else:
            raise InputError(f"values: element {position} is {value!r}; give {_KINDS}")
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    ids = np.empty(len(parts), np.int64)
    _core.hash_parts(np.frombuffer(b"".join(parts), np.uint8), offsets, seed, ids)
    if nulls:
        ids[nulls] = _id_of(nulls[0], null)
    return ids


def _id_of(position: int, null: int | None) -> int:
    if null is None:
        raise InputError(
            f"values: element {position} is null; give null=, the id of all nulls, or leave such elements out"
        )
    return null


def _refuse(values: Any, what: str = "") -> NoReturn:
    raise InputError(f"values: got {type(values).__name__}{what}; give {_KINDS}")


def _arrow_column(values: Any) -> Any:
    """A column of pyarrow or of pandas as an array of Arrow; None for anything else, and without pyarrow."""
    pyarrow = sys.modules.get("pyarrow")  # loaded by whoever made such a column
    if pyarrow is None:
        return None
    if isinstance(values, pyarrow.Array | pyarrow.ChunkedArray):
        return values
    if isinstance(getattr(values, "dtype", None), np.dtype):
        return None  # objects, whose nulls and bytes are the same with and without pyarrow
    if hasattr(values, "to_numpy") and getattr(values, "ndim", None) == 1:
        try:
            column = pyarrow.array(values, from_pandas=True)
        except (ValueError, TypeError, OverflowError, NotImplementedError):
            return None
        return column if _element_type(column) in _TEXT else None
    return None


def _of_arrow(column: Any, seed: int, null: int | None) -> Ids:
    if _element_type(column) not in _TEXT:
        _refuse(column, f" of {_element_type(column)}")
    ids_of = _ids_of_dictionary if hasattr(column.type, "value_type") else _ids_of_text
    chunks = getattr(column, "chunks", [column])
    ids = np.concatenate([np.empty(0, np.int64), *(ids_of(chunk, seed, null) for chunk in chunks)])
    if column.null_count:
        nulls = np.flatnonzero(column.is_null())
        ids[nulls] = _id_of(int(nulls[0]), null)
    return ids


def _ids_of_text(column: Any, seed: int, null: int | None) -> Ids:
    column = column.cast("large_binary")
    ids = np.empty(len(column), np.int64)
    _, ends, data = column.buffers()
    offsets = np.frombuffer(ends or bytes(8), np.int64)[column.offset :][: len(column) + 1]
    _core.hash_parts(np.frombuffer(data or b"", np.uint8), offsets, seed, ids)
    return ids


def _ids_of_dictionary(column: Any, seed: int, null: int | None) -> Ids:
    """The values are hashed once each."""
    ids = _of_arrow(column.dictionary, seed, null)
    positions = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return ids[positions] if len(ids) else np.zeros(len(column), np.int64)


def _element_type(column: Any) -> str:
    """The type of a column's elements, of a dictionary that of its values."""
    name = str(column.type)
    return str(column.type.value_type) if name.startswith("dictionary<") else name
