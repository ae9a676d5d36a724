"""`hash_keys` turns strings into ids by XXH64. The ids are the same in every version and on every machine."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from ..checks import check_int
from ..errors import InputError

Ids = NDArray[np.int64]
_TEXT = {"string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null"}  # Arrow types
_KINDS = "a NumPy array, list, or column of Arrow or pandas, of str or bytes"


def hash_keys(values: Any, seed: int = 0, null: int | None = None) -> Tensor:
    """Hash strings or bytes to ids with XXH64. A str is hashed as its UTF-8 bytes.

    Args:
        values: A NumPy array of str (`U`, `StringDType`), bytes (`S`) or objects; nested lists of str and bytes; a
            pandas column; or an Arrow column of strings or binary in any layout (also dictionary-encoded or chunked).
            NumPy pads `U` and `S` strings with zeros, so trailing zeros of such strings are ignored.
        seed: The hash's seed, 64 bits.
        null: The id for None, NaN, pandas' NA, Arrow nulls and masked elements.

    Returns:
        The hashes as a signed int64 tensor on the CPU, with the shape of `values`.

    Raises:
        InputError: For an unsupported type, for invalid Unicode, or for a missing value (None, NaN, NA) without `null`.
        OptionError: If `seed` or `null` is not a 64-bit integer.
    """
    seed = check_int("seed", seed, "a whole number of 64 bits", -(2**63), 2**64 - 1) % 2**64
    if null is not None:
        null = check_int("null", null, "a whole number of 64 bits, or None", -(2**63), 2**63 - 1)
    if (column := _convert_to_arrow(values)) is not None:
        return torch.from_numpy(_hash_arrow(column, seed, null))
    array = _convert_to_array(values)
    flat = array.reshape(-1)
    ids = _hash_padded(flat, seed) if array.dtype.kind in "SU" else _hash_objects(flat.tolist(), seed, null)
    return torch.from_numpy(ids.reshape(array.shape))


def _convert_to_array(values: Any) -> NDArray[Any]:
    if not isinstance(values, np.ndarray | list | tuple | Tensor) and hasattr(values, "to_numpy"):
        values = values.to_numpy()
    if isinstance(values, np.ma.MaskedArray):
        mask, values = np.ma.getmaskarray(values), np.array(values.data, object)
        values[mask] = None
    if isinstance(values, np.ndarray):
        array = values.astype(object) if values.dtype.kind == "T" else values
    elif isinstance(values, list | tuple):
        array = np.array(values, object)  # NumPy does not split strings of equal length into characters
    else:
        _raise_input_error(values)
    if array.dtype.kind not in "SUO":
        _raise_input_error(values, f" of {array.dtype}")
    return array


def _hash_padded(values: NDArray[Any], seed: int) -> Ids:
    native = np.ascontiguousarray(values.astype(values.dtype.newbyteorder("="), copy=False))
    ids = np.empty(len(native), np.int64)
    if native.dtype.itemsize == 0:
        native = native.astype(native.dtype.kind + "1")
    is_text = native.dtype.kind == "U"
    first_invalid = _core.hash_padded_strings(native.view(np.uint8), native.dtype.itemsize, is_text, seed, ids)
    if first_invalid < len(ids):
        raise InputError(f"values: element {first_invalid} has a character that is not Unicode; give valid text")
    return ids


def _hash_objects(values: list[Any], seed: int, null: int | None) -> Ids:
    parts: list[bytes] = []
    null_positions: list[int] = []
    for position, value in enumerate(values):
        if isinstance(value, str):
            try:
                parts.append(value.encode())
            except UnicodeEncodeError as error:
                raise InputError(f"values: element {position}, {value!r}, is not Unicode: {error.reason}") from None
        elif isinstance(value, bytes):
            parts.append(value)
        elif value is None or (isinstance(value, float) and value != value) or type(value).__name__ == "NAType":
            null_positions.append(position)
            parts.append(b"")
        else:
            raise InputError(f"values: element {position} is {value!r}; give {_KINDS}")
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    ids = np.empty(len(parts), np.int64)
    _core.hash_strings(np.frombuffer(b"".join(parts), np.uint8), offsets, seed, ids)
    if null_positions:
        ids[null_positions] = _require_null_id(null_positions[0], null)
    return ids


def _require_null_id(position: int, null: int | None) -> int:
    if null is None:
        remedy = "give null=, the id of all nulls, or leave such elements out"
        raise InputError(f"values: element {position} is null; {remedy}")
    return null


def _raise_input_error(values: Any, detail: str = "") -> NoReturn:
    raise InputError(f"values: got {type(values).__name__}{detail}; give {_KINDS}")


def _convert_to_arrow(values: Any) -> Any:
    """Convert a pyarrow or pandas column to an Arrow array. Returns None for other values, or without pyarrow."""
    pyarrow = sys.modules.get("pyarrow")  # a caller with an Arrow column has imported pyarrow
    if pyarrow is None:
        return None
    if isinstance(values, pyarrow.Array | pyarrow.ChunkedArray):
        return values
    if isinstance(getattr(values, "dtype", None), np.dtype):
        return None  # `_hash_objects` gives the same ids with and without pyarrow
    if hasattr(values, "to_numpy") and getattr(values, "ndim", None) == 1:
        try:
            column = pyarrow.array(values, from_pandas=True)
        except (ValueError, TypeError, OverflowError, NotImplementedError):
            return None
        return column if _find_element_type(column) in _TEXT else None
    return None


def _hash_arrow(column: Any, seed: int, null: int | None) -> Ids:
    if _find_element_type(column) not in _TEXT:
        _raise_input_error(column, f" of {_find_element_type(column)}")
    hash_chunk = _hash_dictionary if hasattr(column.type, "value_type") else _hash_text
    chunks = getattr(column, "chunks", [column])
    ids = np.concatenate([np.empty(0, np.int64), *(hash_chunk(chunk, seed, null) for chunk in chunks)])
    if column.null_count:
        null_positions = np.flatnonzero(column.is_null())
        ids[null_positions] = _require_null_id(int(null_positions[0]), null)
    return ids


def _hash_text(column: Any, seed: int, null: int | None) -> Ids:
    column = column.cast("large_binary")
    ids = np.empty(len(column), np.int64)
    _, ends, data = column.buffers()
    offsets = np.frombuffer(ends or bytes(8), np.int64)[column.offset :][: len(column) + 1]
    _core.hash_strings(np.frombuffer(data or b"", np.uint8), offsets, seed, ids)
    return ids


def _hash_dictionary(column: Any, seed: int, null: int | None) -> Ids:
    """Hash each of the dictionary's values once."""
    ids = _hash_arrow(column.dictionary, seed, null)
    positions = column.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return ids[positions] if len(ids) else np.zeros(len(column), np.int64)


def _find_element_type(column: Any) -> str:
    """Return the type name of a column's elements (for a dictionary column, of the dictionary's values)."""
    name = str(column.type)
    return str(column.type.value_type) if name.startswith("dictionary<") else name
