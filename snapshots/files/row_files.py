"""The files of rows in a snapshot: their names, their headers, what the manifest says of each, and what is in each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...engine import _core
from ...engine.row_format import BUCKETS, KEY, RowForm, Rows

_HEADER_STEP = 256  # bytes
MOST_PARTS = 1024

_NAME = re.compile(r"(bucket|deleted)-([0-9]{2})(?:-([0-9]{4}))?\.npy")
_MAX_COUNT = 1 << 62
_PLACES = 1 << 16  # the values that the bits of a hash which choose a part can have


class Part(NamedTuple):
    """One of the parts that all rows fall into, by an interval of their hashes: part `number`, from 0, of `of`."""

    number: int
    of: int

    @property
    def begin(self) -> int:
        """The first of 2^16 places that belongs to the part."""
        return -(-self.number * _PLACES // self.of)

    @property
    def end(self) -> int:
        """The place behind the last of the part."""
        return Part(self.number + 1, self.of).begin

    def meets(self, other: Part) -> bool:
        """Whether a row may be in both parts."""
        return max(self.begin, other.begin) < min(self.end, other.end)

    def rows(self, rows: Rows) -> Rows:
        """Those of rows, or of names of rows, that are in the part."""
        owners = _core.owners(rows["table"].copy(), rows["key"].copy(), self.of)
        return rows[owners == self.number]


@dataclass(frozen=True)
class RowFile:
    """A file of rows, or of keys of deleted rows: how many, its bytes with the header, the crc32 behind the header."""

    rows: int
    bytes: int
    crc32: int


def bucket_file(bucket: int, part: int | None = None) -> str:
    """The name of the file of a bucket's rows, or of those in one part."""
    return f"bucket-{bucket:02d}.npy" if part is None else f"bucket-{bucket:02d}-{part:04d}.npy"


def deleted_file(bucket: int, part: int | None = None) -> str:
    """The name of the file of the keys of a bucket's deleted rows, or of those in one part."""
    return bucket_file(bucket, part).replace("bucket", "deleted")


def is_deleted(name: str) -> bool:
    """Whether a file that a manifest names holds keys of deleted rows, not rows."""
    return name.startswith("deleted")


def bucket_of(name: str) -> int:
    """The bucket of a file that a manifest names."""
    return int(name.split("-")[1][:2])


def part_of(name: str) -> int | None:
    """The number of the part that a file which a manifest names is of; None where there are no parts."""
    words = name.removesuffix(".npy").split("-")
    return int(words[2]) if len(words) > 2 else None


def decode_file(name: str, entry: Any, form: RowForm, parts: int | None) -> RowFile:
    """What a manifest says of a file, of so many parts. Raises ValueError."""
    match = _NAME.fullmatch(name)
    if match is None or int(match[2]) >= BUCKETS or (parts is None) != (match[3] is None):
        raise ValueError(f"it names a foreign file {name!r}")
    if match[3] is not None and parts is not None and int(match[3]) >= parts:
        raise ValueError(f"it names {name!r}, and it has {parts} parts")
    if type(entry) is not dict or entry.keys() != {"rows", "bytes", "crc32"}:
        raise ValueError(f"the entry of {name} is not one")
    if not all(type(number) is int and 0 <= number < _MAX_COUNT for number in entry.values()):
        raise ValueError(f"the entry of {name} is not made of counts")
    file = RowFile(**entry)
    if file.rows == 0 or file.bytes != file_bytes(dtype_of(name, form), file.rows):
        raise ValueError(f"rows and bytes of {name} disagree")
    return file


def row_check(description: dict[str, Any], bucket: int, part: Part | None = None) -> _core.RowCheck:
    """The check that finds rows of a bucket, or keys of deleted rows, which no table of a description can have.

    With `part`, rows of another part as well.
    """
    number, of = part or (0, 1)
    return _core.RowCheck(bucket, len(description["tables"]), description["key_type"] == "int32", number, of)


def dtype_of(name: str, form: RowForm) -> np.dtype[np.void]:
    """The dtype of the array in a file that a manifest names."""
    return KEY if is_deleted(name) else form.dtype


def header_bytes(dtype: np.dtype[np.void]) -> int:
    """The bytes of the header of a row file, whatever the count of its rows: 256 where all numbers are float32."""
    return -(-(len(_description(dtype, _MAX_COUNT)) + 11) // _HEADER_STEP) * _HEADER_STEP


def file_bytes(dtype: np.dtype[np.void], rows: int) -> int:
    """The bytes of a row file."""
    return header_bytes(dtype) + rows * dtype.itemsize


def npy_header(dtype: np.dtype[np.void], rows: int) -> bytes:
    """The header of a row file, the same for every NumPy version."""
    size = header_bytes(dtype)
    magic = b"\x93NUMPY\x01\x00" + (size - 10).to_bytes(2, "little")
    return magic + _description(dtype, rows).ljust(size - len(magic) - 1) + b"\n"


def _description(dtype: np.dtype[np.void], rows: int) -> bytes:
    return f"{{'descr': {dtype.descr!r}, 'fortran_order': False, 'shape': ({rows},), }}".encode()
