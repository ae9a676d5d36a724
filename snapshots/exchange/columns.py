"""Converts stored rows to named arrays and back, for exports and imports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.checks import as_int
from ...engine.errors import InputError, SnapshotError
from ...engine.options.table_names import find_table, format_choices, read_table_names
from ...engine.row_format import EMBEDDING as EMBEDDING
from ...engine.row_format import RowFormat, find_overflows

TABLE, KEY, UPDATES, STEP = "table", "key", "updates", "step"
TABLE_NAME = "table_name"  # an extra column in formats that can store text
VALUES = "values"  # one array with embeddings and optimizer states, instead of an array for each
KEY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(name) for name in ("int32", "int64", "uint64")}

_OTHER_COLUMNS = {TABLE, TABLE_NAME, KEY, EMBEDDING, UPDATES, STEP, VALUES}
_CHUNK_ROWS = 65536
_CHUNK_BYTES = 1 << 25

Arrays = Mapping[str, Any]  # maps column names to NumPy arrays of n rows; "table" may also be one table for all rows


def compute_chunk_rows(row_bytes: int) -> int:
    """Return how many rows of `row_bytes` to process together: at most 65,536 rows and about 32 MiB."""
    return max(1, min(_CHUNK_ROWS, _CHUNK_BYTES // row_bytes))


class Columns:
    """The columns of a table's rows, listed by `list_types`. The embedding and the optimizer states are float32."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        """`description` must be valid. Raises SnapshotError for an unknown key type or a duplicate column name."""
        if description["key_type"] not in KEY_DTYPES:
            raise SnapshotError(
                f"key_type {description['key_type']!r} is unknown: use the version of tierbed that wrote the snapshot"
            )
        self.description = description
        self.key_dtype: np.dtype[Any] = KEY_DTYPES[description["key_type"]]
        self.dim = sum(description["columns"])
        self.table_names = read_table_names(description)
        for state, times in Counter(description["states"]).items():
            if state in _OTHER_COLUMNS or times > 1:
                raise SnapshotError(f"optimizer state {state!r} has the name of another column: use state=False")
        self.row_format = RowFormat.from_description(description)
        self.storage_dim = sum(self.row_format.counts.values())  # how many numbers a row has

    def list_types(self) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
        """Return each column's dtype, and the shape of one row's value in this column."""
        integer, single = np.dtype(np.uint32), np.dtype(np.float32)
        return {
            KEY: (self.key_dtype, ()),
            TABLE: (integer, ()),
            **{name: (single, (count,)) for name, count in self.row_format.counts.items()},
            UPDATES: (integer, ()),
            STEP: (integer, ()),
        }

    def split(self, rows: NDArray[np.void]) -> dict[str, NDArray[Any]]:
        """Split rows [n] of dtype `row_format.dtype` into contiguous columns."""
        columns = {
            KEY: self.to_user_keys(rows["key"]),
            TABLE: rows["table"],
            **{name: self.row_format.values(rows, name) for name in self.row_format.counts},
            UPDATES: rows["updates"],
            STEP: rows["step"],
        }
        return {name: np.ascontiguousarray(column) for name, column in columns.items()}

    def to_user_keys(self, stored: NDArray[np.uint64]) -> NDArray[Any]:
        """Convert stored 64-bit keys [n] to the key type that users see."""
        return stored.astype(np.int64).astype(self.key_dtype) if self.key_dtype.kind == "i" else stored.copy()

    def make_rows(self, arrays: Arrays, label: str) -> Iterator[NDArray[np.void]]:
        """Check named arrays, and convert them to chunks of rows with dtype `row_format.dtype`. Raises InputError.

        If the array "table" is missing, rows belong to the only table. If "updates" is missing, every row gets the
        value 1. If "step" is missing, every row gets the description's step. label: names the source in error messages.
        """
        keys = arrays[KEY]
        _check(keys, self.key_dtype, (None,), f"{label}: {KEY}")
        count = len(keys)
        for name, width in ({VALUES: self.storage_dim} if VALUES in arrays else self.row_format.counts).items():
            _check(arrays[name], np.dtype(np.float32), (count, width), f"{label}: {name}")
        if VALUES in arrays:
            ends = np.cumsum(list(self.row_format.counts.values())).tolist()
            fields = np.split(arrays[VALUES], ends[:-1], axis=1)
            arrays = {**arrays, **dict(zip(self.row_format.counts, fields, strict=True))}
        self._check_range(keys, arrays, label)
        padding = self.description["padding_idx"]
        if padding is not None and (keys == padding).any():
            raise InputError(f"{label}: keys contain padding_idx={padding}, but padding is not a row; leave it out")
        self._check_counters(arrays, count, label)
        return self._pack({**arrays, TABLE: self._read_table_ids(arrays.get(TABLE), count, f"{label}: {TABLE}")})

    def _pack(self, arrays: Arrays) -> Iterator[NDArray[np.void]]:
        values = {UPDATES: 1, STEP: self.description["step"], **arrays}
        limit = compute_chunk_rows(self.row_format.dtype.itemsize)
        for begin in range(0, len(values[KEY]), limit):
            chunk = slice(begin, begin + limit)
            keys = values[KEY][chunk]
            rows = np.zeros(len(keys), self.row_format.dtype)
            rows["key"] = keys.astype(np.int64).view(np.uint64) if keys.dtype.kind == "i" else keys
            for name in self.row_format.counts:
                self.row_format.set_values(rows, name, values[name][chunk])
            for name in (TABLE, UPDATES, STEP):
                value = values[name]
                rows[name] = value[chunk] if isinstance(value, np.ndarray) else value
            yield rows

    def _check_range(self, keys: NDArray[Any], arrays: Arrays, label: str) -> None:
        for field in self.row_format.fields if self.row_format.has_16bit_floats else ():
            flags = find_overflows(arrays[field.name], field.type)
            if flags.any():
                row, column = np.argwhere(flags)[0].tolist()
                raise InputError(
                    f"{label}: {field.name} holds {arrays[field.name][row, column]!s} for key {keys[row]}, which "
                    f"overflows {field.type}; give smaller numbers, or dtype=torch.float32"
                )

    def _read_table_ids(self, tables: Any, count: int, label: str) -> int | NDArray[Any]:
        num_tables = len(self.table_names)
        if tables is None:
            if num_tables != 1:
                raise InputError(
                    f"{label}: there are {num_tables} tables, and nothing says to which table a row belongs; give a "
                    f"column {TABLE!r}, or table_ids"
                )
            return 0
        if isinstance(tables, np.ndarray):
            if tables.dtype.kind not in "iu" or tables.shape != (count,):
                raise InputError(f"{label} is {_describe(tables)}; give an array of whole numbers of shape ({count},)")
            bad = tables[(tables < 0) | (tables >= num_tables)]
            if not len(bad):
                return tables
            tables = bad[0]
        elif (one := find_table(tables, self.table_names)) is not None:
            return one
        elif not isinstance(tables, str) and as_int(tables) is None:
            raise InputError(f"{label} is {tables!r}; give one table for all keys, or a NumPy array of table ids")
        raise InputError(f"{label} holds {tables}; give table ids from {format_choices(self.table_names)}")

    def _check_counters(self, arrays: Arrays, count: int, label: str) -> None:
        for name in (UPDATES, STEP):
            if name in arrays:
                _check(arrays[name], np.dtype(np.uint32), (count,), f"{label}: {name}")
        if UPDATES in arrays and not arrays[UPDATES].all():
            raise InputError(f"{label}: {UPDATES} holds 0, but a stored row was written at least once; give 1 or more")
        last = int(arrays[STEP].max(initial=0)) if STEP in arrays else 0
        if last > self.description["step"]:
            raise InputError(
                f"{label}: {STEP} holds {last}, but the table is at step {self.description['step']}; give a "
                f"description with step={last} or more"
            )


def _check(array: Any, dtype: np.dtype[Any], shape: tuple[int | None, ...], label: str) -> None:
    """Raises InputError if `array` is not an array of this dtype and shape. None in `shape` allows any length."""
    is_valid = isinstance(array, np.ndarray) and array.dtype == dtype and array.ndim == len(shape)
    if not is_valid or any(expected not in (None, actual) for expected, actual in zip(shape, array.shape, strict=True)):
        expected = ", ".join("n" if length is None else str(length) for length in shape)
        comma = "," if len(shape) == 1 else ""
        raise InputError(f"{label} is {_describe(array)}; give a NumPy array of {dtype} ({expected}{comma})")


def _describe(value: Any) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value).__name__
