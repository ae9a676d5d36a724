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
_KINDS = "a NumPy array, list, or column of Arrow or pandas, of str or bytes"


def hash_keys(values: Any, seed: int = 0, null: int | None = None) -> Tensor:
    """Ids of strings, int64 of the shape of `values`, on the CPU: XXH64 of their UTF-8 bytes, as signed numbers.

    values: a NumPy array of str (`U`, `StringDType`), bytes (`S`) or objects, nested lists of str and bytes, a column
    of pandas, or one of Arrow: strings or binary of any layout, dictionaries of them, chunked or not. A str has the id
    of its UTF-8 bytes. NumPy's `U` and `S` cannot tell zeros at the end of a string from its end, so none count.
    seed: of the hash, 64 bits. null: the id of None, NaN, pandas' NA, Arrow's nulls and what a mask hides.

    Raises InputError for other values, for a null where `null` is not given, and for text that is no Unicode.
    OptionError for a `seed` or `null` that is no whole number of 64 bits.
    """
    seed = int_option("seed", seed, "a whole number of 64 bits", -(2**63), 2**64 - 1) % 2**64
    if null is not None:
        null = int_option("null", null, "a whole number of 64 bits, or None", -(2**63), 2**63 - 1)
    if (arrow := _arrow_chunks(values)) is not None:
        parts = [_of_arrow(chunk, seed, null) for chunk in arrow]
        ids = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return torch.from_numpy(_without_nulls(ids, arrow, null))
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
        raise InputError(f"values: element {wrong} holds a character that is no Unicode, which has no UTF-8")
    return ids


def _of_objects(values: list[Any], seed: int, null: int | None) -> Ids:
    parts: list[bytes] = []
    nulls: list[int] = []
    for place, value in enumerate(values):
        if isinstance(value, str):
            try:
                parts.append(value.encode())
            except UnicodeEncodeError as error:
                raise InputError(f"values: element {place}, {value!r}, has no UTF-8: {error.reason}") from None
        elif isinstance(value, bytes):
            parts.append(value)
        elif value is None or (isinstance(value, float) and value != value) or type(value).__name__ == "NAType":
            nulls.append(place)
            parts.append(b"")
        else:
            raise InputError(f"values: element {place} is {value!r}; give {_KINDS}")
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    ids = np.empty(len(parts), np.int64)
    _core.hash_parts(np.frombuffer(b"".join(parts), np.uint8), offsets, seed, ids)
    if nulls:
        ids[nulls] = _id_of(nulls[0], null)
    return ids


def _id_of(place: int, null: int | None) -> int:
    if null is None:
        raise InputError(
            f"values: element {place} is null; give null=, the id of all nulls, or leave such elements out"
        )
    return null


def _refuse(values: Any, what: str = "") -> NoReturn:
    raise InputError(f"values: got {type(values).__name__}{what}; give {_KINDS}")


def _arrow_chunks(values: Any) -> list[Any] | None:
    """The arrays of a column of pyarrow, None for anything else."""
    pyarrow = sys.modules.get("pyarrow")  # who has a column of it has loaded it
    if pyarrow is None or not isinstance(values, pyarrow.Array | pyarrow.ChunkedArray):
        return None
    return [values] if isinstance(values, pyarrow.Array) else list(values.chunks)


def _without_nulls(ids: Ids, chunks: list[Any], null: int | None) -> Ids:
    """The ids, with that of nulls where there are some."""
    begin = 0
    for chunk in chunks:
        if chunk.null_count:
            places = begin + np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))
            ids[places] = _id_of(int(places[0]), null)
        begin += len(chunk)
    return ids


def _of_arrow(column: Any, seed: int, null: int | None) -> Ids:
    """The ids of an array of Arrow by its buffers; of nulls, anything."""
    pyarrow = sys.modules["pyarrow"]
    kind, types = column.type, pyarrow.types
    if types.is_dictionary(kind):
        ids = _of_arrow(column.dictionary, seed, null)
        if column.dictionary.null_count:  # a null by another name
            ids = _without_nulls(ids, [column.dictionary], null)
        places = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return ids[places] if len(ids) else np.zeros(len(column), np.int64)
    if types.is_string_view(kind) or types.is_binary_view(kind):
        column = column.cast(pyarrow.large_string() if types.is_string_view(kind) else pyarrow.large_binary())
        kind = column.type
    if types.is_null(kind):
        return np.zeros(len(column), np.int64)
    is_large = types.is_large_string(kind) or types.is_large_binary(kind)
    if not (is_large or types.is_string(kind) or types.is_binary(kind)):
        _refuse(column, f" of {kind}")
    ids = np.empty(len(column), np.int64)
    if not len(column):
        return ids
    _, ends, data = column.buffers()
    offsets = np.frombuffer(ends, np.int64 if is_large else np.int32)[column.offset :][: len(column) + 1]
    bytes_ = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    _core.hash_parts(bytes_, np.ascontiguousarray(offsets, np.int64), seed, ids)
    return ids
