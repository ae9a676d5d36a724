"""The row format in scans and snapshots. Tiers move rows as 4-byte words (`row_dtype`); `RowFormat` interprets them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUCKETS = 64
WORD_BYTES = 4  # bytes per word; a line consists of words
COUNTER_BYTES = 8  # bytes of a line's counters `updates` and `last step`
EMBEDDING = "embedding"  # name of the row field that lookups return
STATE_DTYPES = "state_dtypes"  # key of state types in a table's stored description; absent if all fields are float32
STORED_DTYPES: dict[str, np.dtype[Any]] = {  # stored types
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # the upper half of a float32
}
MAX_STEP = 2**32 - 2  # a table's largest step: rows store steps as u32, and MAX_STEP + 1 must fit too

TableIds = NDArray[np.uint32]  # [n]
Keys = NDArray[np.uint64]  # [n]
RowArray = NDArray[np.void]  # [n], with dtype `row_dtype` or ROW_KEY_DTYPE
Chunks = Iterator[tuple[int, RowArray]]  # (bucket, rows with `row_dtype`), as `Tier.scan` yields them
Change = tuple[int, RowArray, RowArray]  # (bucket, new or changed rows, keys [n] of erased rows)

ROW_KEY_DTYPE = np.dtype([("table", "<u4"), ("key", "<u8")])  # the dtype of a row key


def row_dtype(width: int) -> np.dtype[np.void]:
    """Returns the packed NumPy dtype of a row with `width` 4-byte words. Their dtype is float32, whatever they hold."""
    values = ("values", "<f4", (width,))
    return np.dtype([("table", "<u4"), ("key", "<u8"), values, ("updates", "<u4"), ("step", "<u4")])


def count_words(type: str, count: int) -> int:
    """Returns how many words `count` numbers of a stored type need, including padding."""
    return -(-count * STORED_DTYPES[type].itemsize // WORD_BYTES)


def compute_line_bytes(width: int) -> int:
    """Returns how many bytes a line with `width` words takes in memory, including counters and padding."""
    return -(-(width * WORD_BYTES + COUNTER_BYTES) // 16) * 16


@dataclass(frozen=True)
class Field:
    """One field in a row's line, padded to whole words."""

    name: str
    count: int  # how many numbers the field holds
    type: str  # a key in STORED_DTYPES
    offset: int  # byte offset in the line

    @property
    def is_padded(self) -> bool:
        """True if one extra 0 is stored after the field's numbers, as padding."""
        return self.count * STORED_DTYPES[self.type].itemsize % WORD_BYTES != 0

    @property
    def end(self) -> int:
        """The byte offset in the line where the field and its padding end."""
        return self.offset + (self.count + self.is_padded) * STORED_DTYPES[self.type].itemsize


class RowFormat:
    """The fields in a row's line and their types: the embedding, then each optimizer state.

    `dtype` is the NumPy dtype of stored rows. If all numbers are float32, `dtype` is `row_dtype(width)`. Otherwise
    `dtype` has one NumPy field for each row field. If a row field is padded, its padding is a separate NumPy field.
    """

    def __init__(
        self,
        dim: int,
        type: str = "float32",
        states: Sequence[str] = (),
        state_widths: Sequence[int] = (),
        state_types: Sequence[str] | None = None,
    ) -> None:
        """`type` is the embedding's type, a key in STORED_DTYPES. By default all states are float32."""
        self.dim, fields = dim, [Field(EMBEDDING, dim, type, 0)]
        types = ["float32"] * len(states) if state_types is None else state_types
        for name, count, state_type in zip(states, state_widths, types, strict=True):
            fields.append(Field(name, count, state_type, fields[-1].end))
        self.fields = tuple(fields)
        self._by_name = {field.name: field for field in fields}
        self.counts = {field.name: field.count for field in fields}  # how many numbers each field holds
        self.width = fields[-1].end // WORD_BYTES  # width of all fields together, in words
        self.has_16bit_floats = any(field.type != "float32" for field in fields)
        if not self.has_16bit_floats:
            self.dtype = row_dtype(self.width)
            return
        numpy_fields: list[tuple[Any, ...]] = [("table", "<u4"), ("key", "<u8")]
        for field in fields:
            numpy_fields.append((field.name, STORED_DTYPES[field.type], (field.count,)))
            if field.is_padded:  # padding needs its own field, because NumPy does not copy bytes between fields
                numpy_fields.append((f"{field.name}_padding", STORED_DTYPES[field.type]))
        self.dtype = np.dtype([*numpy_fields, ("updates", "<u4"), ("step", "<u4")])

    @staticmethod
    def from_description(description: Mapping[str, Any]) -> RowFormat:
        """Read a table's row format from its valid description."""
        dim, types = sum(description["columns"]), description.get(STATE_DTYPES)
        return RowFormat(dim, description["dtype"], description["states"], description["state_widths"], types)

    def view_words(self, chunks: Chunks) -> Chunks:
        """View rows with `row_dtype(width)` as rows with `dtype`."""
        for bucket, rows in chunks:
            yield bucket, rows.view(self.dtype)

    def values(self, rows: RowArray, name: str) -> NDArray[np.float32]:
        """Returns a field's values in rows [n] as exact float32 [n, count]. The result may share the rows' memory."""
        field = self._by_name[name]
        if not self.has_16bit_floats:
            return rows["values"][:, field.offset // WORD_BYTES : field.end // WORD_BYTES]
        return to_float32(rows[name], field.type)

    def set_values(self, rows: RowArray, name: str, values: NDArray[np.float32]) -> None:
        """Set a field in rows [n] to values [n, count], rounded to nearest even."""
        field = self._by_name[name]
        if not self.has_16bit_floats:
            rows["values"][:, field.offset // WORD_BYTES : field.end // WORD_BYTES] = values
        else:
            rows[name] = to_stored(values, field.type)


def to_stored(values: NDArray[np.float32], type: str) -> NDArray[Any]:
    """Convert float32 numbers to the stored `type`. Rounds to nearest even. Every NaN becomes the same 16-bit NaN."""
    if type == "float32":
        return values
    if type == "float16":
        with np.errstate(over="ignore", invalid="ignore"):  # on aarch64, a signalling NaN raises "invalid"
            return np.where(np.isnan(values), np.uint16(0x7E00).view(np.float16), values.astype(np.float16))
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def to_float32(numbers: NDArray[Any], type: str) -> NDArray[np.float32]:
    """Convert stored numbers of `type` to float32, exactly."""
    if type != "bfloat16":
        return numbers.astype(np.float32)
    return (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)


def find_overflows(values: NDArray[np.float32], type: str) -> NDArray[np.bool_]:
    """Returns a mask that is True where `to_stored` makes a finite number infinite."""
    return np.isfinite(values) & ~np.isfinite(to_float32(to_stored(values, type), type))


def extract_row_keys(rows: RowArray) -> RowArray:
    """Returns the rows' keys [n], with dtype ROW_KEY_DTYPE."""
    keys = np.empty(len(rows), ROW_KEY_DTYPE)
    keys["table"], keys["key"] = rows["table"], rows["key"]
    return keys
