"""Named arrays in memory, in NumPy's `.npz` or in safetensors, read together and in order.

Both files are written in bounded memory, which the safetensors library cannot do, and `.npz` without pickle.
Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from ...engine.durable import MAX_SEALED
from ...engine.errors import InputError
from .columns import Columns

METADATA = "tierbed"  # the name of the description in a file, as JSON
_SUFFIX = ".npy"
_COPY_BYTES = 1 << 20
_NAMES = {"float32": "F32", "int32": "I32", "int64": "I64", "uint32": "U32", "uint64": "U64"}


class Column(Protocol):
    """An array [n, ...] that is read by rows in ascending order, each row once."""

    @property
    def dtype_name(self) -> str:
        """NumPy's name of the dtype, if it has one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """The rows from `begin` to `end`, begin < end <= n; bfloat16, which NumPy lacks, as float32."""


class ArrayColumn:
    """An array in memory or mapped from a file."""

    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self.dtype_name = str(array.dtype)
        self.shape = array.shape

    def read(self, begin: int, end: int) -> NDArray[Any]:
        return np.asarray(self._array[begin:end])


class TensorColumn:
    """A tensor on any device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self.dtype_name = str(tensor.dtype).removeprefix("torch.")
        self.shape = tuple(tensor.shape)

    def read(self, begin: int, end: int) -> NDArray[Any]:
        return as_array(self._tensor[begin:end])


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A tensor on any device; bfloat16 as float32."""
    array: NDArray[Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()
    return array


class NamedArrays:
    """The arrays of an open file. `metadata`: the text stored under METADATA."""

    def __init__(self, columns: Mapping[str, Column], metadata: str | None = None) -> None:
        self.columns = columns
        self.metadata = metadata
        self.shapes = {name: (column.dtype_name, column.shape) for name, column in columns.items()}

    def batches(self, names: Iterable[str], max_rows: int) -> Iterator[dict[str, NDArray[Any]]]:
        """The arrays with these `names`, all of one length, `max_rows` rows at a time."""
        chosen = {name: self.columns[name] for name in names}
        count = next(iter(chosen.values())).shape[0]
        for begin in range(0, count, max_rows):
            end = min(begin + max_rows, count)
            yield {name: column.read(begin, end) for name, column in chosen.items()}


@dataclass
class SpilledColumn:
    """A column in a temporary file. The file has no name, so the kernel removes it when the process ends."""

    file: IO[bytes]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class SpilledColumns(dict[str, SpilledColumn]):
    """The columns of rows by name, each file at its start. `place`: a folder with space for all rows."""

    def __init__(self, place: Path, columns: Columns, chunks: Iterable[NDArray[np.void]]) -> None:
        super().__init__()
        with ExitStack() as files:
            for name, (dtype, shape) in columns.shapes().items():
                file = files.enter_context(tempfile.TemporaryFile(dir=place))
                self[name] = SpilledColumn(file, dtype, (0, *shape))
            count = 0
            for rows in chunks:
                count += len(rows)
                for name, array in columns.split(rows).items():
                    self[name].file.write(array.data)
            for column in self.values():
                column.shape = (count, *column.shape[1:])
                column.file.seek(0)
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()


def write_npz(path: Path, columns: SpilledColumns, metadata: str) -> None:
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
    return archive.open(ZipInfo(name + _SUFFIX), "w", force_zip64=True)  # a fixed date: equal rows make equal bytes


def _write_header(file: IO[bytes], dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    header = {"descr": npy.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    npy.write_array_header_1_0(file, header)


@contextmanager
def open_npz(path: Path) -> Iterator[NamedArrays]:
    """The arrays of a `.npz`, compressed or not. Each can be read once, from start to end."""
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
        raise ValueError(f"its array {METADATA!r} is not the description of an export")
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
            raise InputError(f"array {self._name!r} is requested twice, but a .npz is read once: name another")
        self._at = end
        row = int(np.prod(self.shape[1:], dtype=np.int64))
        return self.read_items((end - begin) * row).reshape(end - begin, *self.shape[1:])

    def read_items(self, count: int) -> NDArray[Any]:
        """The next `count` numbers."""
        if self.dtype.hasobject:
            raise InputError(f"array {self._name!r} holds Python objects, which need pickle; save plain numbers")
        wanted = count * self.dtype.itemsize
        data = self._file.read(wanted)
        if len(data) != wanted:
            raise ValueError(f"array {self._name!r} was cut off")
        return np.frombuffer(data, self.dtype)


_DTYPES = {name: numpy for numpy, name in _NAMES.items()} | {"F64": "float64", "I16": "int16"}
_DTYPES |= {"F16": "float16", "BF16": "bfloat16"}


def write_safetensors(path: Path, columns: SpilledColumns, metadata: str) -> None:
    """Write columns as tensors, and `metadata` in the file's metadata."""
    header: dict[str, Any] = {"__metadata__": {METADATA: metadata}}
    end = 0
    for name, column in columns.items():  # keys are first, so that all tensors are aligned
        begin, end = end, end + column.dtype.itemsize * int(np.prod(column.shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[str(column.dtype)], "shape": column.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for column in columns.values():
            shutil.copyfileobj(column.file, file, 1 << 20)


@contextmanager
def open_safetensors(path: Path) -> Iterator[NamedArrays]:
    """The tensors of a file, read when they are sliced."""
    with safe_open(path, "np") as file, safe_open(path, "pt") as of_torch:
        columns: dict[str, Column] = {}
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_slice(name)
            columns[name] = _Slices(of_torch.get_slice(name) if tensor.get_dtype() == "BF16" else tensor)
        yield NamedArrays(columns, (file.metadata() or {}).get(METADATA))


class _Slices:
    """A tensor in a file."""

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.dtype_name = _DTYPES.get(tensor.get_dtype(), tensor.get_dtype())
        self.shape = tuple(tensor.get_shape())

    def read(self, begin: int, end: int) -> NDArray[Any]:
        rows = self._tensor[begin:end]
        array: NDArray[Any] = rows if isinstance(rows, np.ndarray) else as_array(rows)
        return array
