"""Writes, reads and verifies row files. docs/serving.md describes the format; lookups read files in native code."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine import _core
from ..engine.checksum import crc32
from ..engine.errors import InputError, ServingError, StoreError
from ..engine.row_format import to_float32
from .merging import PIECE_ROWS, Piece, Pieces

ENCODINGS = ("float32", "float16", "bfloat16", "int8")  # numbered as in the trailer
TRAILER_BYTES = 4096
_TRAILER = struct.Struct("<8s6I4Q")  # magic, format, encoding, dim, table, is_delta, crc32 of the rest; counts
_MAGIC, _FORMAT = b"TBROWS\r\n", 1
_LINE_BYTES = 64
_PIECE_LINES = 1 << 16
_HUGE_PAGE = 1 << 21

hash_rows = _core.hash_table_rows  # (table, keys [n]) -> hashes [n]; two keys of a table never have the same hash

Hashes = NDArray[np.uint64]
Encoded = NDArray[np.uint8]  # [n, row bytes]


def count_row_bytes(encoding: str, dim: int) -> int:
    """Returns the size of an encoded row: a multiple of 4."""
    bytes_ = dim * 4 if encoding == "float32" else dim + 4 if encoding == "int8" else dim * 2
    return -(-bytes_ // 4) * 4


def encode(values: NDArray[np.float32], encoding: str, table: int | str, keys: NDArray[Any]) -> Encoded:
    """Encode rows [n, dim]. The table's number or description, and the rows' ids `keys` [n], are for error messages.

    Raises:
        InputError: If a value is not finite or overflows the encoding. The message names the table and the id.
    """
    rows = np.empty((len(values), count_row_bytes(encoding, values.shape[1])), np.uint8)
    if (bad := _core.encode_rows(values, encoding, rows)) < len(values):
        row, remedy = values[bad], "delete or overwrite this row, then publish again"
        value, problem = row[np.abs(row).argmax()], "is not finite"  # argmax finds NaN too
        if np.isfinite(value):
            problem, remedy = f"overflows {encoding}", f"publish with encoding='float32', or {remedy}"
        raise InputError(f"row {keys[bad]} of table {table} has the value {value}, which {problem}: {remedy}")
    return rows


def decode(rows: Encoded, encoding: str, dim: int) -> NDArray[np.float32]:
    """Returns the values [n, dim] of encoded rows, as lookups return them."""
    if encoding == "int8":
        header = to_float32(rows[:, :4].copy().view(np.float16), "float16")
        return header[:, :1] * rows[:, 4 : 4 + dim] + header[:, 1:]
    dtype = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[encoding]
    return to_float32(np.ascontiguousarray(rows).view(dtype)[:, :dim], encoding)


def compute_bound(values: NDArray[np.float32], encoding: str) -> NDArray[np.float64]:
    """Returns how far an encoded value may be from each of the values [n, dim], at most."""
    exact = np.abs(values.astype(np.float64))
    if encoding != "int8":
        bounds = {"float32": (0.0, 0.0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
        relative, absolute = bounds[encoding]
        return exact * relative + absolute
    low, high = values.min(axis=1, keepdims=True).astype(np.float64), values.max(axis=1, keepdims=True)
    # half a step; scale and offset are rounded to float16, whose smallest number is 2^-24
    width = high - low + np.abs(low) * 2**-11
    row_bound = width / 510 + width * 2**-10 + np.abs(low) * 2**-10 + 2.0**-16
    return np.broadcast_to(row_bound, exact.shape)


class RowFileWriter:
    """Writes a row file, which must not exist. Its memory does not depend on the number of rows.

    dim: the rows' width. kind: "base", or "delta", which can also hold marks of deleted rows. table: its number.
    """

    def __init__(self, path: str | os.PathLike[str], dim: int, encoding: str, kind: str, table: int) -> None:
        self.path, self.row_bytes = Path(path), count_row_bytes(encoding, dim)
        self._fields = ENCODINGS.index(encoding), dim, table, int(kind == "delta")
        mark = [("mark", "<u4")] if kind == "delta" else []  # not 0 if the row was deleted
        self._dtype = np.dtype([("hash", "<u8"), *mark, ("row", "u1", (self.row_bytes,))])
        self._num_records = self._num_deleted = self._checksum = 0
        self._last_hash = -1
        self._buffer = bytearray()
        self._file = self.path.open("xb+")

    def append_encoded(self, hashes: Hashes, rows: Encoded, is_deleted: NDArray[np.bool_] | None = None) -> None:
        """Append rows [n, row_bytes] that `encode` returned. Hashes [n] ascend, and exceed all hashes before."""
        if not len(hashes):
            return
        if int(hashes[0]) <= self._last_hash or (hashes[1:] <= hashes[:-1]).any():
            raise ValueError("hashes must ascend")
        records = np.zeros(len(hashes), self._dtype)
        records["hash"], records["row"] = hashes, rows
        if is_deleted is not None and is_deleted.any():
            records["mark"] = is_deleted  # raises ValueError in a base
            self._num_deleted += int(is_deleted.sum())
        self._last_hash = int(hashes[-1])
        self._num_records += len(hashes)
        self._write(records.data.cast("B"))

    def close(self) -> tuple[int, int, int, int]:
        """Complete and sync the file. Returns its size, crc32, and numbers of rows and of marks. Raises OSError."""
        if self._num_records >= 2**32:
            raise ServingError(f"{str(self.path)!r} would have {self._num_records:,} rows: split the table")
        with self._file:
            size = self._num_records * self._dtype.itemsize
            self._write(bytes(-size % _LINE_BYTES), is_last=True)
            records = np.memmap(self._file, np.uint8, "r", shape=size) if size else np.empty(0, np.uint8)
            builder = _core.DirectoryBuilder(records, self._num_records, self._dtype.itemsize)
            num_lines = 0
            while lines := builder.next(_PIECE_LINES):
                num_lines += len(lines) // _LINE_BYTES
                self._write(lines)
            counts = self._num_records, self._num_deleted, builder.num_root_lines, num_lines
            fields = _TRAILER.pack(_MAGIC, _FORMAT, *self._fields, self._checksum, *counts)
            trailer = fields.ljust(TRAILER_BYTES - 4, b"\0")
            self._write(trailer + crc32(trailer).to_bytes(4, "little"), is_last=True)
            os.fsync(self._file.fileno())
            return self._file.tell(), self._checksum, self._num_records - self._num_deleted, self._num_deleted

    def abort(self) -> None:
        """Close an incomplete file. Does nothing after `close`."""
        with suppress(OSError):  # of a full disk
            self._file.close()

    def _write(self, data: bytes | memoryview, is_last: bool = False) -> None:
        """Append to the file. Whole huge pages are written at once, because the kernel then maps them as such."""
        self._checksum = crc32(data, self._checksum)
        self._buffer += data
        size = len(self._buffer) if is_last else len(self._buffer) // _HUGE_PAGE * _HUGE_PAGE
        with memoryview(self._buffer) as view:
            self._file.write(view[:size])
        del self._buffer[:size]
        if is_last:
            self._file.flush()


class RowFile:
    """An open row file. Raises ServingError if it is truncated, foreign, or its trailer is damaged."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._native = _core.RowFile(str(path))
        except StoreError as error:
            raise ServingError(f"{error}. Publish again with rebase=True, or restore the file from a copy") from error
        shape = self._native.shape
        # NumPy maps no empty arrays
        self._records = np.memmap(path, np.uint8, "r", shape=shape) if shape[0] else np.empty(shape, np.uint8)

    def find(self, hashes: Hashes) -> tuple[NDArray[np.bool_], Encoded]:
        """Look up rows as lookups do. Returns which hashes have a row, and the rows [n, row bytes] of these."""
        numbers = self._native.find(hashes)
        is_present = numbers >= 0
        found = self._copy_records(self._records[numbers[is_present]])
        is_present[is_present] = ~found.is_deleted
        return is_present, found.rows[~found.is_deleted]

    def pieces(self, max_rows: int = PIECE_ROWS) -> Pieces:
        """Yields the records, by ascending hash."""
        for begin in range(0, len(self._records), max_rows):
            yield self._copy_records(self._records[begin : begin + max_rows])

    def _copy_records(self, mapped: NDArray[np.uint8]) -> Piece:
        records, row_offset = np.array(mapped), self._native.row_offset
        hashes = records[:, :8].copy().view(np.uint64)[:, 0]
        return Piece(hashes, records[:, row_offset:].copy(), records[:, 8:row_offset].sum(axis=1) != 0)
