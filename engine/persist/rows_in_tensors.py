"""All rows of an embedding as tensors, which its `state_dict()` holds where it has no store folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...snapshots.files.format import check_description
from ..errors import SnapshotError
from ..optim.row_state import RowState
from ..row_format import EMBEDDING, Chunks, RowForm, Rows
from ..spec.table_spec import TableSpec
from ..table.table import OpenTable

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem

FIELDS = ("table", "key", "embedding", "state", "updates", "step", "description")
NOT_WHOLE = "on_another_rank"  # of a description: rank 0 has the rows of the state
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CHUNK = 1 << 16  # rows


class StateTensor(Tensor):
    """A tensor that torch.distributed.checkpoint loads at any size: it writes it as an object, not as a tensor."""

    is_whole = True  # False on a rank whose rows are in the state of rank 0

    @classmethod
    def of(cls, tensor: Tensor, is_whole: bool) -> StateTensor:
        made = tensor.as_subclass(cls)
        made.is_whole = is_whole
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __create_write_items__(self, name: str, value: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex  # takes a second
        from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

        return [WriteItem(index=MetadataIndex(name), type=WriteItemType.BYTE_IO)] if self.is_whole else []

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # pickled it is a plain tensor

    def __deepcopy__(self, memo: Any) -> StateTensor:
        return StateTensor.of(self.clone(), self.is_whole)


@dataclass(frozen=True)
class RowTensors:
    """Rows, as they are stored. rows: [n] in the order of a scan, of the dtype of the form of `description`."""

    description: dict[str, Any]
    rows: Rows

    @classmethod
    def of(cls, table: OpenTable) -> RowTensors:
        """The rows of a table, copied, as of its last step."""
        with table.lock:
            table.check()
            rows = np.empty(table.counts.rows, table.form.dtype)
            at = 0
            for _, chunk in table.scan():
                rows[at : at + len(chunk)] = chunk
                at += len(chunk)
            return cls(table.describe(), rows[:at])

    @classmethod
    def none(cls, spec: TableSpec) -> RowTensors:
        """Those of an embedding that was not used yet."""
        return cls(spec.describe(RowState(), [], 0), np.empty(0, spec.form(RowState()).dtype))

    @property
    def step(self) -> int:
        return int(self.description["step"])

    def stored(self) -> dict[str, Any]:
        """The description, as of a snapshot."""
        return {**self.description, "rows": len(self.rows)}

    def chunks(self) -> Chunks:
        for begin in range(0, len(self.rows), _CHUNK):
            yield 0, self.rows[begin : begin + _CHUNK]

    def tensors(self) -> dict[str, Tensor]:
        """By field: `table`, `key` (its 64 bits), `updates` and `step` int64 [n]; `embedding` [n, dim] of the rows'
        dtype; `state` float32 [n, numbers of all states]; `description` uint8, JSON.
        """
        form = RowForm.described(self.description)
        dtype = _DTYPES[form.fields[0].type]
        states = [np.ascontiguousarray(form.numbers(self.rows, field.name)) for field in form.fields[1:]]
        state = np.concatenate(states, 1) if states else np.empty((len(self.rows), 0), np.float32)
        said = np.frombuffer(json.dumps(self.description).encode(), np.uint8).copy()
        made = {
            "table": torch.from_numpy(self.rows["table"].astype(np.int64)),
            "key": torch.from_numpy(self.rows["key"].copy().view(np.int64)),
            "embedding": torch.from_numpy(np.ascontiguousarray(self._embedding(form))).view(dtype),
            "state": torch.from_numpy(state),
            "updates": torch.from_numpy(self.rows["updates"].astype(np.int64)),
            "step": torch.from_numpy(self.rows["step"].astype(np.int64)),
            "description": torch.from_numpy(said),
        }
        is_whole = not self.description.get(NOT_WHOLE)
        return {name: StateTensor.of(tensor, is_whole) for name, tensor in made.items()}

    @classmethod
    def parse(cls, tensors: Mapping[str, Any]) -> RowTensors:
        """From `tensors()`. Raises SnapshotError that says what is wrong with them."""
        try:
            return cls._parse(tensors)
        except ValueError as error:
            raise SnapshotError(str(error)) from error

    @classmethod
    def _parse(cls, tensors: Mapping[str, Any]) -> RowTensors:
        lacking = [name for name in FIELDS if not isinstance(tensors.get(name), Tensor)]
        if lacking:
            raise ValueError(f"rows lack the tensors {lacking}")
        held = {name: tensors[name].detach().cpu().contiguous() for name in FIELDS}
        try:
            description = json.loads(held["description"].numpy().tobytes())
        except (ValueError, TypeError) as error:
            raise ValueError(f"their description cannot be read: {error}") from error
        check_description(description)
        if description.get(NOT_WHOLE):
            raise ValueError("it has no rows: those of all ranks are in the state_dict() of rank 0; load that")
        form, count = RowForm.described(description), len(held["table"])
        numbers = sum(field.count for field in form.fields[1:])
        shapes = dict.fromkeys(("table", "key", "updates", "step"), (torch.int64, [count]))
        shapes["embedding"] = _DTYPES[form.fields[0].type], [count, form.dim]
        shapes["state"] = torch.float32, [count, numbers]
        for name, (dtype, shape) in shapes.items():
            if held[name].dtype != dtype or list(held[name].shape) != shape:
                raise ValueError(
                    f"rows.{name} is {held[name].dtype} {list(held[name].shape)}, and is to be {dtype} {shape}"
                )
        rows = np.zeros(count, form.dtype)
        for name in ("table", "key", "updates", "step"):
            rows[name] = held[name].numpy().view(np.uint64) if name == "key" else held[name].numpy()
        made = cls(description, rows)
        numbers_held = held["embedding"]
        made._embedding(form)[:] = (
            numbers_held.view(torch.uint16) if numbers_held.dtype == torch.bfloat16 else numbers_held
        ).numpy()
        begin = 0
        for field in form.fields[1:]:
            form.set_numbers(rows, field.name, held["state"].numpy()[:, begin : begin + field.count])
            begin += field.count
        return made

    def _embedding(self, form: RowForm) -> NDArray[Any]:
        """The numbers of the embeddings as they are stored, a view [n, dim]."""
        found: NDArray[Any] = self.rows[EMBEDDING] if form.is_narrow else self.rows["values"][:, : form.dim]
        return found
