"""NumPy's `.npz`: arrays of any length written and read in bounded memory, without pickle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ...engine.durable import MAX_SEALED
from ...engine.errors import InputError
from .aside import ColumnsAside
from .named_arrays import METADATA, Column, NamedArrays

_SUFFIX = ".npy"
_COPY_BYTES = 1 << 20


def write_npz(path: Path, columns: ColumnsAside, metadata: str) -> None:
    """Write columns as the arrays of an uncompressed `.npz`, and the metadata as a 0-d array of text."""
    with ZipFile(path, "x", ZIP_STORED) as archive:
        for name, column in columns.items():
            with _member(archive, name) as file:
                _write_header(file, column.dtype, column.shape)
                while data := column.file.read(_COPY_BYTES):
                    file.write(data)
        text = np.array(metadata)
        with _member(archive, METADATA) as file:
            _write_header(file, text.dtype, text.shape)
            file.write(text.tobytes())


def _member(archive: ZipFile, name: str) -> IO[bytes]:
    return archive.open(ZipInfo(name + _SUFFIX), "w", force_zip64=True)  # a fixed date: same rows, same bytes


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, header)


@contextmanager
def opened_npz(path: Path) -> Iterator[NamedArrays]:
    """The arrays of a `.npz`, compressed or not, each read from its beginning to its end once."""
    with ZipFile(path) as archive:
        columns: dict[str, Column] = {}
        metadata = None
        for member in archive.namelist():
            if member == METADATA + _SUFFIX:
                metadata = _text(_NpyColumn(archive.open(member), METADATA))
            elif member.endswith(_SUFFIX):
                name = member.removesuffix(_SUFFIX)
                columns[name] = _NpyColumn(archive.open(member), name)
        yield NamedArrays(columns, metadata)


def _text(column: _NpyColumn) -> str:
    if column.dtype.kind != "U" or column.shape != () or column.dtype.itemsize > MAX_SEALED:
        raise ValueError(f"its array {METADATA!r} is not the description that an export has")
    return str(column.read_items(1)[0])


class _NpyColumn:
    """An array in a `.npy` stream."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"array {name!r} is of .npy version {version}")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        self.shape, by_columns, self.dtype = read_header(file)
        self._by_columns = by_columns and len(self.shape) > 1
        self._name = name
        self._at = 0

    @property
    def dtype_name(self) -> str:
        return str(self.dtype)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        if self._by_columns:
            raise InputError(f"array {self._name!r} is in Fortran order: save np.ascontiguousarray of it")
        if begin != self._at:
            raise InputError(f"array {self._name!r} is asked for twice, and a .npz is read once: name another")
        self._at = end
        row = int(np.prod(self.shape[1:], dtype=np.int64))
        return self.read_items((end - begin) * row).reshape(end - begin, *self.shape[1:])

    def read_items(self, count: int) -> NDArray[Any]:
        """The next `count` numbers."""
        if self.dtype.hasobject:
            raise InputError(f"array {self._name!r} holds Python objects, which take pickle; save plain numbers")
        wanted = count * self.dtype.itemsize
        data = self._file.read(wanted)
        if len(data) != wanted:
            raise ValueError(f"array {self._name!r} was cut off")
        return np.frombuffer(data, self.dtype)
