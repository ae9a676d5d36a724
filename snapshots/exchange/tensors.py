"""safetensors files: written in bounded memory, which the library's writer does not do, and read by the library.

Layout: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from .aside import ColumnsAside
from .named_arrays import METADATA, Column, NamedArrays, as_array

_NAMES = {"float32": "F32", "int32": "I32", "int64": "I64", "uint32": "U32", "uint64": "U64"}
_DTYPES = {name: numpy for numpy, name in _NAMES.items()} | {"F64": "float64", "I16": "int16"}
_DTYPES |= {"F16": "float16", "BF16": "bfloat16"}


def write_safetensors(path: Path, columns: ColumnsAside, metadata: str) -> None:
    """Write columns as tensors, and `metadata` in the file's metadata."""
    header: dict[str, Any] = {"__metadata__": {METADATA: metadata}}
    end = 0
    for name, column in columns.items():  # keys come first, so that all tensors are aligned
        begin, end = end, end + column.dtype.itemsize * int(np.prod(column.shape, dtype=np.int64))
        header[name] = {"dtype": _NAMES[str(column.dtype)], "shape": column.shape, "data_offsets": (begin, end)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for column in columns.values():
            shutil.copyfileobj(column.file, file, 1 << 20)


@contextmanager
def opened_safetensors(path: Path) -> Iterator[NamedArrays]:
    """The tensors of a file, which stays on the disk."""
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
