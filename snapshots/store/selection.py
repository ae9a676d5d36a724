"""Loading less than a whole snapshot, or rows of another number type.

A selection is some tables or keys, or the weights without the optimizer's state. Widening a number is exact, narrowing
rounds to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import InputError
from ...engine.optim.kernel import kernels
from ...engine.row_format import STATE_TYPES, Chunks, RowArray, RowForm, overflows

if TYPE_CHECKING:
    from ..files.reader import Snapshot


Types = tuple[str, str]  # of the embedding, and of the states that every element has
Where = Callable[[NDArray[np.uint32], NDArray[np.int64] | NDArray[np.uint64]], NDArray[np.bool_]]


def converted_description(description: dict[str, Any], types: Types) -> dict[str, Any]:
    """The description of the same rows, with numbers of those types."""
    dtype, state_type = types
    kernel = kernels().get(description["optimizer"])
    widths, dim = description["state_widths"], sum(description["columns"])
    of_elements = widths.count(dim) if kernel is None else len(kernel.element_states)
    of_states = [state_type] * of_elements + ["float32"] * (len(widths) - of_elements)
    kept = {name: value for name, value in description.items() if name != STATE_TYPES}
    kept["dtype"] = dtype
    if {dtype, *of_states} != {"float32"}:
        kept[STATE_TYPES] = of_states
    return {**kept, "width": RowForm.described(kept).width}


def types_of(description: Mapping[str, Any]) -> tuple[str, str | None]:
    """The types of the rows of a valid description, None for states that they lack."""
    widths = description["state_widths"]
    states = description.get(STATE_TYPES, ["float32"] * len(widths))
    return description["dtype"], states[0] if states else None


def converted(rows: RowArray, old: RowForm, new: RowForm, signed: bool) -> RowArray:
    """Rows [n] of one form as new rows of another, whose fields are the first of the other's.

    signed: whether keys are. Raises InputError for a finite number beyond the largest of its type.
    """
    out = np.zeros(len(rows), new.dtype)
    for name in ("table", "key", "updates", "step"):
        out[name] = rows[name]
    for number in new.fields:
        values = old.numbers(rows, number.name)
        _check_range(values, number.name, number.type, rows, signed)
        new.set_numbers(out, number.name, values)
    return out


def _check_range(values: NDArray[np.float32], name: str, type: str, rows: RowArray, signed: bool) -> None:
    flags = overflows(values, type)
    if flags.any():
        row, column = np.argwhere(flags)[0].tolist()
        keys = rows["key"].astype(np.int64) if signed else rows["key"]
        raise InputError(
            f"convert=True: {name} of key {keys[row]} in table {rows['table'][row]} holds {values[row, column]!s}, "
            f"which overflows {type}; load it into rows of torch.float32"
        )


@dataclass
class LoadReport:
    """What a load took: `rows` loaded, `left_out` not. `remarks` say what did not fit, and what was done about it."""

    rows: int = 0
    left_out: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """The part of a snapshot to load.

    `tables`: indexes, or names until `fitting` finds their indexes. `where`: a function of (tables [n], keys [n]) that
    gives bool [n], the rows to load. `state`: whether the optimizer's state is loaded. `convert`: whether numbers of
    another type are converted, to `types`, which `fitting` finds. `padding`: the 64 bits of the padding, which is no
    key of the table.
    """

    tables: Collection[int | str] | None = None
    where: Where | None = None
    state: bool = True
    padding: int | None = None
    convert: bool = False
    types: Types | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the selection is the whole snapshot, bit by bit."""
        return self.has_every_row and self.state and self.types is None

    @property
    def can_recover(self) -> bool:
        """Whether a snapshot that was loaded so has all rows, bit by bit: recovery may load it."""
        return self.is_whole and not self.convert

    @property
    def has_every_row(self) -> bool:
        """Whether no row is left out."""
        return self.tables is None and self.where is None and self.padding is None

    def description(self, description: dict[str, Any]) -> dict[str, Any]:
        """The description of the selected rows; without state, of a table that no optimizer has trained."""
        if self.types is not None:
            description = converted_description(description, self.types)
        if self.state:
            return description
        bare: dict[str, Any] = {
            "optimizer": None,
            "states": [],
            "state_widths": [],
            "initial": [],
            "hyper": [],
            "step": 0,
        }
        if description["dtype"] != "float32":
            bare[STATE_TYPES] = []
        kept = {name: value for name, value in description.items() if name != STATE_TYPES}
        return {**kept, **bare, "width": RowForm(sum(kept["columns"]), kept["dtype"]).width}

    def rows_of(self, snapshot: Snapshot, report: LoadReport, progress: Callable[[int], None] | None = None) -> Chunks:
        """The selected rows of a snapshot, counted in `report`; without state, as a lookup sees them.

        progress: called with how many rows were read for each chunk.
        """
        chunks = snapshot.chunks()
        if not self.state:
            from ...engine.table.row_scan import caught_up  # loads torch

            chunks = caught_up(snapshot.description, chunks)
        return self.chunks(_told(chunks, progress), snapshot.description, report)

    def chunks(self, chunks: Chunks, description: dict[str, Any], report: LoadReport) -> Chunks:
        """The selected rows of a snapshot, counted in `report`."""
        signed = description["key_type"] != "uint64"
        stored, loaded = (RowForm.described(of) for of in (description, self.description(description)))
        for bucket, rows in chunks:
            taken = self._taken(rows, signed)
            report.left_out += len(rows) - len(taken)
            report.rows += len(taken)
            if not self.state or loaded.dtype != stored.dtype:
                taken = converted(taken, stored, loaded, signed)
            if not self.state:
                taken["step"] = 0
            if len(taken):
                yield bucket, taken

    def _taken(self, rows: NDArray[np.void], signed: bool) -> NDArray[np.void]:
        if self.tables is not None:
            rows = rows[np.isin(rows["table"], list(self.tables))]
        if self.padding is not None:
            rows = rows[rows["key"] != np.uint64(self.padding)]
        if self.where is not None:
            keys = rows["key"].copy()
            wanted = np.asarray(self.where(rows["table"].copy(), keys.view(np.int64) if signed else keys))
            if wanted.dtype != bool or wanted.shape != keys.shape:
                raise InputError(
                    f"where gave {wanted.dtype} of shape {wanted.shape}: give bool of shape {keys.shape}, one for each "
                    "row"
                )
            rows = rows[wanted]
        return rows


ALL = Selection()


def _told(chunks: Chunks, progress: Callable[[int], None] | None) -> Chunks:
    for bucket, rows in chunks:
        yield bucket, rows
        if progress is not None:
            progress(len(rows))
