"""All rows of an embedding as tensors, for the `state_dict()` of an embedding without a store folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...engine.errors import SnapshotError, StoreError
from ...engine.optim.row_state import RowState
from ...engine.options.table_spec import TableSpec
from ...engine.row_format import EMBEDDING, Chunks, RowArray, RowFormat
from ...engine.table.table import OpenTable
from ...snapshots.files.format import check_description

TENSOR_NAMES = ("table", "key", "embedding", "state", "updates", "step", "description")
ON_OTHER_RANK_FIELD = "on_another_rank"  # a description's key: True if only rank 0's state_dict holds the rows
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHUNK = 1 << 16  # rows per chunk
_INTEGERS = ("table", "key", "updates", "step")


@dataclass(frozen=True)
class RowTensors:
    """Rows in their stored form, in the order of a scan.

    `tensors` contains a tensor for each of TENSOR_NAMES. `embedding` is [n, dim] in the rows' dtype. `state` is float32
    [n, total width of states]. `description` is JSON as uint8. Other tensors are int64 [n]; `key` stores uint64 bits.
    """

    description: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def copy_from(cls, table: OpenTable) -> RowTensors:
        """Return a copy of a table's rows at its last step."""
        with table.lock:
            table.raise_deferred_error()
            return cls.from_chunks(table.describe(), table.counts.num_rows, (rows for _, rows in table.scan()))

    @classmethod
    def make_empty(cls, spec: TableSpec) -> RowTensors:
        """Return the empty rows of an embedding that was not used yet."""
        return cls.from_chunks(spec.describe(RowState(), [], 0), 0, [])

    @classmethod
    def from_chunks(cls, description: dict[str, Any], count: int, chunks: Iterable[RowArray]) -> RowTensors:
        """Return `count` rows, copied from chunks. Raises StoreError if the chunks have fewer rows."""
        row_format = RowFormat.from_description(description)
        shapes = _make_shapes(row_format, count)
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        numbers, begin = {name: _view_numbers(tensor) for name, tensor in tensors.items()}, 0
        for rows in chunks:
            span = slice(begin, begin + len(rows))
            for name in _INTEGERS:
                numbers[name][span] = rows[name]
            numbers["embedding"][span] = _view_embeddings(row_format, rows)
            for field, columns in _list_state_columns(row_format):
                numbers["state"][span, columns] = row_format.values(rows, field)
            begin += len(rows)
        if begin != count:
            raise StoreError(f"embedding {description['name']!r}: {begin} rows were found, not {count}")
        tensors["description"] = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        return cls(description, tensors)

    def __len__(self) -> int:
        return len(self.tensors["table"])

    def describe(self) -> dict[str, Any]:
        """Return the rows' description in a snapshot's format, with the row count."""
        return {**self.description, "rows": len(self)}

    def chunks(self) -> Chunks:
        row_format = RowFormat.from_description(self.description)
        numbers = {name: _view_numbers(tensor) for name, tensor in self.tensors.items()}
        for begin in range(0, len(self), _CHUNK):
            span = slice(begin, min(begin + _CHUNK, len(self)))
            rows = np.zeros(span.stop - begin, row_format.dtype)
            for name in _INTEGERS:
                rows[name] = numbers[name][span]
            _view_embeddings(row_format, rows)[:] = numbers["embedding"][span]
            for field, columns in _list_state_columns(row_format):
                row_format.set_values(rows, field, numbers["state"][span, columns])
            yield 0, rows

    @classmethod
    def parse(cls, tensors: Mapping[str, Any]) -> RowTensors:
        """Return the rows in `tensors`. Raises SnapshotError if a tensor is missing or invalid."""
        try:
            return cls._parse(tensors)
        except ValueError as error:
            raise SnapshotError(str(error)) from error

    @classmethod
    def _parse(cls, tensors: Mapping[str, Any]) -> RowTensors:
        missing_names = [name for name in TENSOR_NAMES if not isinstance(tensors.get(name), Tensor)]
        if missing_names:
            raise ValueError(f"rows lack the tensors {missing_names}")
        tensors = {name: tensors[name].detach().cpu().contiguous() for name in TENSOR_NAMES}
        try:
            description = json.loads(tensors["description"].numpy().tobytes())
        except (ValueError, TypeError) as error:
            raise ValueError(f"the rows' description cannot be read: {error}") from error
        check_description(description)
        if description.get(ON_OTHER_RANK_FIELD):
            raise ValueError("it has no rows: the rows of all ranks are in the state_dict() of rank 0; load that one")
        row_format = RowFormat.from_description(description)
        for name, (dtype, shape) in _make_shapes(row_format, len(tensors["table"])).items():
            if tensors[name].dtype != dtype or list(tensors[name].shape) != shape:
                raise ValueError(
                    f"rows.{name} is {tensors[name].dtype} {list(tensors[name].shape)}; it must be {dtype} {shape}"
                )
        for name in ("table", "updates", "step"):
            numbers = tensors[name].numpy()
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < 2**32):
                found = f"values from {numbers.min()} to {numbers.max()}"
                raise ValueError(f"rows.{name} has {found}; all values must be from 0 to 2**32 - 1")
        if len(tensors["step"]) and (last := int(tensors["step"].max())) > description["step"]:
            raise ValueError(f"rows.step has {last}, but the table's step is {description['step']}")
        table, key = tensors["table"].numpy(), tensors["key"].numpy()
        order = np.lexsort((key, table))
        table, key = table[order], key[order]
        if ((table[1:] == table[:-1]) & (key[1:] == key[:-1])).any():
            raise ValueError("the state contains one row twice")
        return cls(description, tensors)


def _make_shapes(row_format: RowFormat, count: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """Return the dtype and shape of each tensor except `description`, for `count` rows."""
    shapes = {name: (torch.int64, [count]) for name in _INTEGERS}
    shapes["embedding"] = _DTYPES[row_format.fields[0].type], [count, row_format.dim]
    shapes["state"] = torch.float32, [count, sum(field.count for field in row_format.fields[1:])]
    return shapes


def _list_state_columns(row_format: RowFormat) -> Iterator[tuple[str, slice]]:
    """Yield each optimizer state's name with its columns in the tensor `state`."""
    begin = 0
    for field in row_format.fields[1:]:
        yield field.name, slice(begin, begin + field.count)
        begin += field.count


def _view_numbers(tensor: Tensor) -> NDArray[Any]:
    """Return a tensor as a NumPy array. NumPy lacks bfloat16, so a bfloat16 tensor becomes a uint16 array."""
    bits: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return bits


def _view_embeddings(row_format: RowFormat, rows: RowArray) -> NDArray[Any]:
    """Return a view [n, dim] of the rows' embeddings in their stored dtype."""
    embedding: NDArray[Any] = rows[EMBEDDING] if row_format.has_16bit_floats else rows["values"][:, : row_format.dim]
    return embedding
