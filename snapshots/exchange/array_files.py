"""Reads and writes files of named arrays (NumPy's `.npz`, safetensors). All arrays are read together, row by row.

Writing uses no pickle. It needs only bounded memory, so it cannot use the safetensors library. The layout of
safetensors files is described at https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import IO, Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile, ZipInfo

import numpy as np
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from ...engine.durable import MAX_SEALED_BYTES
from ...engine.errors import InputError
from .columns import Columns

METADATA = "tierbed"  # files store the table's description, as JSON, under this name
_SUFFIX = ".npy"
_COPY_BYTES = 1 << 20
_TYPE_NAMES = {"float32": "F32", "int32": "I32", "int64": "I64", "uint32": "U32", "uint64": "U64"}


class Column(NamedTuple):
    """An array [n, ...] that is read from the first to the last row, each row once."""

    dtype_name: str  # NumPy's name for the dtype, or torch's name if NumPy lacks the dtype
    shape: tuple[int, ...]
    read: Callable[[int, int], NDArray[Any]]  # returns the rows from `begin` to `end`; bfloat16 becomes float32


def make_column(array: NDArray[Any] | Tensor) -> Column:
    """Wrap an array (possibly mapped from a file) or a tensor on any device."""
    return Column(str(array.dtype).removeprefix("torch."), tuple(array.shape), partial(_read, array))


def _read(array: Any, begin: int, end: int) -> NDArray[Any]:
    rows = array[begin:end]
    if isinstance(rows, Tensor):
        rows = rows.detach()
        return np.asarray((rows.float() if rows.dtype is torch.bfloat16 else rows).cpu().numpy())
    return np.asarray(rows)


def map_npy(path: Path) -> NDArray[Any]:
    """Memory-map the array in a `.npy` file. Raises OSError, or ValueError if the file is not a `.npy` file."""
    try:
        return npy.open_memmap(path, "r")
    except (OSError, ValueError):
        raise
    except Exception as error:  # NumPy evaluates the header as Python code, so any exception is possible
        raise ValueError(f"the file's header is damaged: {error}") from error


class NamedArrays:
    """The arrays in an open file, by name. metadata: the text that the file stores under the name METADATA."""

    def __init__(self, columns: Mapping[str, Column], metadata: str | None = None) -> None:
        self.columns, self.metadata = columns, metadata
        self.column_types = {name: (column.dtype_name, column.shape) for name, column in columns.items()}

    def batches(self, names: Iterable[str], max_rows: int) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields rows of the arrays called `names`, `max_rows` rows at a time. The arrays must be equally long."""
        columns = {name: self.columns[name] for name in names}
        count = next(iter(columns.values())).shape[0]
        for begin in range(0, count, max_rows):
            yield {name: column.read(begin, min(begin + max_rows, count)) for name, column in columns.items()}


class SpilledColumn(NamedTuple):
    """A column in a nameless temporary file. The kernel removes nameless files when the process ends."""

    file: IO[bytes]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


SpilledColumns = Mapping[str, SpilledColumn]


@contextmanager
def spill_columns(folder: Path, columns: Columns, chunks: Iterable[NDArray[np.void]]) -> Iterator[SpilledColumns]:
    """Write each column of the rows to a temporary file in `folder`. Yield the files by column name, ready to read."""
    with ExitStack() as stack:
        files = {name: stack.enter_context(tempfile.TemporaryFile(dir=folder)) for name in columns.list_types()}
        count = 0
        for rows in chunks:
            count += len(rows)
            for name, array in columns.split(rows).items():
                files[name].write(array.data)
        for file in files.values():
            file.seek(0)
        shapes = columns.list_types().items()
        yield {name: SpilledColumn(files[name], dtype, (count, *shape)) for name, (dtype, shape) in shapes}


def write_npz(path: Path, columns: SpilledColumns, metadata: str) -> None:
    """Write columns as arrays in an uncompressed `.npz`, and the metadata as a 0-d text array."""
    text = np.array(metadata)
    arrays = {**columns, METADATA: SpilledColumn(BytesIO(text.tobytes()), text.dtype, text.shape)}
    with ZipFile(path, "x", ZIP_STORED) as archive:
        for name, column in arrays.items():
            header = {"descr": npy.dtype_to_descr(column.dtype), "fortran_order": False, "shape": column.shape}
            member = ZipInfo(name + _SUFFIX)  # ZipInfo's date is fixed, so equal rows make equal files
            with archive.open(member, "w", force_zip64=True) as file:
                npy.write_array_header_1_0(file, header)
                shutil.copyfileobj(column.file, file, _COPY_BYTES)


@contextmanager
def open_npz(path: Path) -> Iterator[NamedArrays]:
    """Yield the arrays in a compressed or plain `.npz`. Each array can be read once, from start to end."""
    with ZipFile(path) as archive:
        columns: dict[str, Column] = {}
        metadata = None
        for member in archive.namelist():
            if member.endswith(_SUFFIX):
                name = member.removesuffix(_SUFFIX)
                array = _NpyColumn(archive.open(member), name)
                if name != METADATA:
                    columns[name] = Column(str(array.dtype), array.shape, array.read)
                elif array.dtype.kind != "U" or array.shape != () or array.dtype.itemsize > MAX_SEALED_BYTES:
                    raise ValueError(f"array {METADATA!r} is not a table's description")
                else:
                    metadata = str(array.read_items(1)[0])
        yield NamedArrays(columns, metadata)


class _NpyColumn:
    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        version = npy.read_magic(file)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"array {name!r} has the unknown .npy version {version}")
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        try:
            self.shape, is_column_major, self.dtype = read_header(file)
        except Exception as error:  # as in `map_npy`
            raise ValueError(f"the header of array {name!r} is damaged: {error}") from error
        if min(self.shape, default=0) < 0:
            raise ValueError(f"array {name!r} has the invalid shape {self.shape}")
        self._is_column_major = is_column_major and len(self.shape) > 1
        self._name, self._position = name, 0

    def read(self, begin: int, end: int) -> NDArray[Any]:
        if self._is_column_major:
            raise InputError(f"array {self._name!r} is in Fortran order: save np.ascontiguousarray(array)")
        if begin != self._position:
            raise InputError(f"array {self._name!r} is named twice, but an .npz array is read only once: name another")
        self._position = end
        return self.read_items((end - begin) * math.prod(self.shape[1:])).reshape(end - begin, *self.shape[1:])

    def read_items(self, count: int) -> NDArray[Any]:
        """Return the next `count` numbers in the array."""
        if self.dtype.hasobject:
            raise InputError(f"array {self._name!r} holds Python objects, which need pickle; save plain numbers")
        size = count * self.dtype.itemsize
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError(f"the data of array {self._name!r} is truncated")
        return np.frombuffer(data, self.dtype)


_NUMPY_DTYPES = {name: numpy for numpy, name in _TYPE_NAMES.items()} | {"F64": "float64", "I16": "int16"}
_NUMPY_DTYPES |= {"F16": "float16", "BF16": "bfloat16"}


def write_safetensors(path: Path, columns: SpilledColumns, metadata: str) -> None:
    """Write columns as tensors of a safetensors file, and store `metadata` in the file's metadata."""
    header: dict[str, Any] = {"__metadata__": {METADATA: metadata}}
    end = 0
    for name, column in columns.items():  # the keys come first, so all tensors are aligned
        begin, end = end, end + column.dtype.itemsize * int(np.prod(column.shape, dtype=np.int64))
        header[name] = {"dtype": _TYPE_NAMES[str(column.dtype)], "shape": column.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for column in columns.values():
            shutil.copyfileobj(column.file, file, _COPY_BYTES)


@contextmanager
def open_safetensors(path: Path) -> Iterator[NamedArrays]:
    """Yield the tensors in a safetensors file. Rows of a tensor are read only when the tensor is sliced."""
    with safe_open(path, "np") as file, safe_open(path, "pt") as torch_file:
        columns: dict[str, Column] = {}
        for name in file.keys():  # noqa: SIM118
            tensor = file.get_slice(name)
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            source = torch_file.get_slice(name) if dtype == "BF16" else tensor
            columns[name] = Column(_NUMPY_DTYPES.get(dtype, dtype), shape, partial(_read, source))
        yield NamedArrays(columns, (file.metadata() or {}).get(METADATA))
