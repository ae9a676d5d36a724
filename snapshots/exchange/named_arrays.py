"""Arrays by name, in memory or in a file, read together and in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

METADATA = "tierbed"  # the name under which a file keeps the description of its rows, as JSON


class Column(Protocol):
    """An array [n, ...] that is read by rows in ascending order, each row once."""

    @property
    def dtype_name(self) -> str:
        """NumPy's name of the dtype, where it has one."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, begin: int, end: int) -> NDArray[Any]:
        """The rows from `begin` to `end`, begin < end <= n; bfloat16, which NumPy has not, as float32."""


class ArrayColumn:
    """An array in memory, or a mapped one."""

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
    """The arrays of an open file. `metadata`: the text that the file keeps under METADATA."""

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
