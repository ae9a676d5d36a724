"""The format of a stored row, in a scan and in a snapshot: its fields, its bucket and its key.

Tiers move rows as 4-byte words (`row_dtype`); `RowForm` says what the words mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

BUCKETS = 64
WORD = 4  # bytes; lines consist of words
RECORD_BYTES = 8  # of a line: the counters `updates` and `last step` of its row
EMBEDDING = "embedding"  # the field of a row that lookups return
STATE_TYPES = "state_dtypes"  # of a description: the types of states, if a field is not float32
NUMBERS: dict[str, np.dtype[Any]] = {  # as they are stored
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
}
LAST_STEP = 2**32 - 2  # of a table: rows hold a step as u32, and the number after it is needed

TableIds = NDArray[np.uint32]  # [n]
Keys = NDArray[np.uint64]  # [n]
RowArray = NDArray[np.void]  # [n] of `row_dtype`, or of KEY
Chunks = Iterator[tuple[int, RowArray]]  # (bucket, rows of `row_dtype`), as `Tier.scan` yields them
Change = tuple[int, RowArray, RowArray]  # (bucket, new or changed rows, keys [n] of KEY of erased rows)

KEY = np.dtype([("table", "<u4"), ("key", "<u8")])  # identifies a row


def row_dtype(width: int) -> np.dtype[np.void]:
    """The NumPy dtype of one stored row of float32 numbers, packed, or of `width` words that a tier moves."""
    return np.dtype(
        [("table", "<u4"), ("key", "<u8"), ("values", "<f4", (width,)), ("updates", "<u4"), ("step", "<u4")]
    )


def words_of(type: str, count: int) -> int:
    """How many words `count` numbers of a type of NUMBERS take, padding included."""
    return -(-count * NUMBERS[type].itemsize // WORD)


def line_bytes_of(width: int) -> int:
    """The bytes of a line of `width` words in memory, record and padding included."""
    return -(-(width * WORD + RECORD_BYTES) // 16) * 16


@dataclass(frozen=True)
class Field:
    """One field of a row's line: `count` numbers of `type`, from byte `begin` of the line, padded to whole words."""

    name: str
    count: int
    type: str  # of NUMBERS
    begin: int

    @property
    def is_padded(self) -> bool:
        """Whether a padding number, 0, follows."""
        return self.count * NUMBERS[self.type].itemsize % WORD != 0

    @property
    def end(self) -> int:
        """The byte of the line after the field, padding included."""
        return self.begin + (self.count + self.is_padded) * NUMBERS[self.type].itemsize


class RowForm:
    """The fields of a row's line: the embedding, then each state of the optimizer, with the types of their numbers.

    `fields`: the embedding first, then each state. `counts`: how many numbers each has, by name. `width`: 4-byte words
    of all fields. `dtype`: of stored rows. If all numbers are float32 it is `row_dtype(width)`; else it has a NumPy
    field of the same name for each field, with bfloat16 as `<u2`, the upper half of a float32, and a field for padding
    after each padded one.
    """

    def __init__(
        self,
        dim: int,
        type: str = "float32",
        states: Sequence[str] = (),
        state_widths: Sequence[int] = (),
        state_types: Sequence[str] | None = None,
    ) -> None:
        """type: of the embedding: float32, float16 or bfloat16. state_types: of each state; None is float32 for all."""
        self.dim, fields = dim, [Field(EMBEDDING, dim, type, 0)]
        types = ["float32"] * len(states) if state_types is None else state_types
        for name, count, of in zip(states, state_widths, types, strict=True):
            fields.append(Field(name, count, of, fields[-1].end))
        self.fields = tuple(fields)
        self._by_name = {field.name: field for field in fields}
        self.counts = {field.name: field.count for field in fields}
        self.width = fields[-1].end // WORD
        self.is_narrow = any(field.type != "float32" for field in fields)
        if not self.is_narrow:
            self.dtype = row_dtype(self.width)
            return
        named: list[tuple[Any, ...]] = [("table", "<u4"), ("key", "<u8")]
        for field in fields:
            named.append((field.name, NUMBERS[field.type], (field.count,)))
            if field.is_padded:  # as a separate field, since NumPy copies no bytes between fields
                named.append((f"{field.name}_padding", NUMBERS[field.type]))
        self.dtype = np.dtype([*named, ("updates", "<u4"), ("step", "<u4")])

    @staticmethod
    def described(description: Mapping[str, Any]) -> RowForm:
        """The row format of a table, from its valid description."""
        return RowForm(
            sum(description["columns"]),
            description["dtype"],
            description["states"],
            description["state_widths"],
            description.get(STATE_TYPES),
        )

    def of_words(self, chunks: Chunks) -> Chunks:
        """Rows of `dtype`, from rows of `row_dtype(width)`."""
        for bucket, rows in chunks:
            yield bucket, rows.view(self.dtype)

    def numbers(self, rows: RowArray, name: str) -> NDArray[np.float32]:
        """Field `name` of rows [n] of `dtype`: float32 [n, count], exact. The memory may be that of the rows."""
        field = self._by_name[name]
        if not self.is_narrow:
            values: NDArray[np.float32] = rows["values"][:, field.begin // WORD : field.end // WORD]
            return values
        return widened(rows[name], field.type)

    def set_numbers(self, rows: RowArray, name: str, values: NDArray[np.float32]) -> None:
        """Set field `name` of rows [n] of `dtype` to values [n, count], rounded to nearest even."""
        field = self._by_name[name]
        if not self.is_narrow:
            rows["values"][:, field.begin // WORD : field.end // WORD] = values
        else:
            rows[name] = narrowed(values, field.type)


def narrowed(values: NDArray[np.float32], type: str) -> NDArray[Any]:
    """float32 numbers as stored in `type`: each rounded to nearest even, and every NaN the same NaN."""
    if type == "float32":
        return values
    if type == "float16":
        with np.errstate(over="ignore", invalid="ignore"):  # a signalling NaN is invalid to aarch64
            return np.where(np.isnan(values), np.uint16(0x7E00).view(np.float16), values.astype(np.float16))
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def widened(numbers: NDArray[Any], type: str) -> NDArray[np.float32]:
    """Stored numbers of `type` as float32 numbers, exactly."""
    if type != "bfloat16":
        return numbers.astype(np.float32)
    widened: NDArray[np.float32] = (numbers.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return widened


def overflows(values: NDArray[np.float32], type: str) -> NDArray[np.bool_]:
    """Which finite numbers become infinite in `narrowed`."""
    flags: NDArray[np.bool_] = np.isfinite(values) & ~np.isfinite(widened(narrowed(values, type), type))
    return flags


def keys_of(rows: RowArray) -> RowArray:
    """The keys [n] of KEY of rows [n]."""
    keys = np.empty(len(rows), KEY)
    keys["table"], keys["key"] = rows["table"], rows["key"]
    return keys
