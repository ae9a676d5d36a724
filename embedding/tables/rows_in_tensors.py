"""All rows of an embedding as tensors, which its `state_dict()` holds where it has no store folder."""

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
from ...engine.row_format import EMBEDDING, Chunks, RowArray, RowForm
from ...engine.table.table import OpenTable
from ...snapshots.files.format import check_description

FIELDS = ("table", "key", "embedding", "state", "updates", "step", "description")
NOT_WHOLE = "on_another_rank"  # of a description: rank 0 has the rows of the state
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHUNK = 1 << 16  # rows
_WHOLE = ("table", "key", "updates", "step")  # fields of whole numbers


@dataclass(frozen=True)
class RowTensors:
    """Rows, as they are stored, in the order of a scan.

    tensors, by field: `table`, `key` (its 64 bits), `updates` and `step` int64 [n]; `embedding` [n, dim] of the rows'
    dtype; `state` float32 [n, numbers of all states]; `description` uint8, JSON.
    """

    description: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def of(cls, table: OpenTable) -> RowTensors:
        """The rows of a table, copied, as of its last step."""
        with table.lock:
            table.check()
            return cls.filled(table.describe(), table.counts.rows, (rows for _, rows in table.scan()))

    @classmethod
    def none(cls, spec: TableSpec) -> RowTensors:
        """Those of an embedding that was not used yet."""
        return cls.filled(spec.describe(RowState(), [], 0), 0, [])

    @classmethod
    def filled(cls, description: dict[str, Any], count: int, chunks: Iterable[RowArray]) -> RowTensors:
        """Of `count` rows, chunk by chunk. StoreError if there are fewer."""
        form = RowForm.described(description)
        made = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in _shapes(form, count).items()}
        numbers, at = {name: _numbers(tensor) for name, tensor in made.items()}, 0
        for rows in chunks:
            part = slice(at, at + len(rows))
            for name in _WHOLE:
                numbers[name][part] = rows[name]
            numbers["embedding"][part] = _embedding(form, rows)
            for field, places in _places(form):
                numbers["state"][part, places] = form.numbers(rows, field)
            at += len(rows)
        if at != count:
            raise StoreError(f"embedding {description['name']!r}: {at} rows were found, not {count}")
        made["description"] = torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)
        return cls(description, made)

    def __len__(self) -> int:
        return len(self.tensors["table"])

    def stored(self) -> dict[str, Any]:
        """The description, as of a snapshot."""
        return {**self.description, "rows": len(self)}

    def chunks(self) -> Chunks:
        form = RowForm.described(self.description)
        numbers = {name: _numbers(tensor) for name, tensor in self.tensors.items()}
        for begin in range(0, len(self), _CHUNK):
            part = slice(begin, min(begin + _CHUNK, len(self)))
            rows = np.zeros(part.stop - begin, form.dtype)
            for name in _WHOLE:
                rows[name] = numbers[name][part]
            _embedding(form, rows)[:] = numbers["embedding"][part]
            for field, places in _places(form):
                form.set_numbers(rows, field, numbers["state"][part, places])
            yield 0, rows

    @classmethod
    def parse(cls, tensors: Mapping[str, Any]) -> RowTensors:
        """From `tensors`. Raises SnapshotError that says what is wrong with them."""
        try:
            return cls._parse(tensors)
        except ValueError as error:
            raise SnapshotError(str(error)) from error

    @classmethod
    def _parse(cls, tensors: Mapping[str, Any]) -> RowTensors:
        lacking = [name for name in FIELDS if not isinstance(tensors.get(name), Tensor)]
        if lacking:
            raise ValueError(f"rows lack the tensors {lacking}")
        given = {name: tensors[name].detach().cpu().contiguous() for name in FIELDS}
        try:
            description = json.loads(given["description"].numpy().tobytes())
        except (ValueError, TypeError) as error:
            raise ValueError(f"their description cannot be read: {error}") from error
        check_description(description)
        if description.get(NOT_WHOLE):
            raise ValueError("it has no rows: those of all ranks are in the state_dict() of rank 0; load that")
        for name, (dtype, shape) in _shapes(RowForm.described(description), len(given["table"])).items():
            if given[name].dtype != dtype or list(given[name].shape) != shape:
                raise ValueError(
                    f"rows.{name} is {given[name].dtype} {list(given[name].shape)}, and is to be {dtype} {shape}"
                )
        for name in ("table", "updates", "step"):
            numbers = given[name].numpy()
            if len(numbers) and not (numbers.min() >= 0 and numbers.max() < 2**32):
                raise ValueError(f"rows.{name} has numbers from {numbers.min()} to {numbers.max()}, not of 32 bits")
        table, key = given["table"].numpy(), given["key"].numpy()
        order = np.lexsort((key, table))
        table, key = table[order], key[order]
        if ((table[1:] == table[:-1]) & (key[1:] == key[:-1])).any():
            raise ValueError("a row is in them twice")
        return cls(description, given)


def _shapes(form: RowForm, count: int) -> dict[str, tuple[torch.dtype, list[int]]]:
    """The dtype and the shape of each tensor of numbers, for `count` rows."""
    shapes = {name: (torch.int64, [count]) for name in _WHOLE}
    shapes["embedding"] = _DTYPES[form.fields[0].type], [count, form.dim]
    shapes["state"] = torch.float32, [count, sum(field.count for field in form.fields[1:])]
    return shapes


def _places(form: RowForm) -> Iterator[tuple[str, slice]]:
    """Each state of an optimizer, and its columns in the tensor of all."""
    begin = 0
    for field in form.fields[1:]:
        yield field.name, slice(begin, begin + field.count)
        begin += field.count


def _numbers(tensor: Tensor) -> NDArray[Any]:
    """The numbers of a tensor, as rows have them: those that NumPy lacks by their bits."""
    bits: NDArray[Any] = (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return bits


def _embedding(form: RowForm, rows: RowArray) -> NDArray[Any]:
    """The numbers of the embeddings as they are stored, a view [n, dim]."""
    found: NDArray[Any] = rows[EMBEDDING] if form.is_narrow else rows["values"][:, : form.dim]
    return found
