"""Selects what to load of a snapshot: some tables or keys, or weights without optimizer state, or converted numbers.

Widening a number is exact, narrowing rounds to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import InputError
from ...engine.optim.kernel import kernels
from ...engine.row_format import STATE_TYPES, Chunks, RowArray, RowForm, overflows
from ..files.reader import Snapshot, count_progress

Types = tuple[str, str]  # of the embedding, and of states with one number for each element
Where = Callable[[NDArray[np.uint32], NDArray[np.int64] | NDArray[np.uint64]], NDArray[np.bool_]]


def converted_description(description: dict[str, Any], types: Types) -> dict[str, Any]:
    """The description of the same rows with numbers of other types."""
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
    """The types of the rows of a valid description, None if they have no states."""
    widths = description["state_widths"]
    states = description.get(STATE_TYPES, ["float32"] * len(widths))
    return description["dtype"], states[0] if states else None


def converted(rows: RowArray, old: RowForm, new: RowForm, signed: bool) -> RowArray:
    """Rows [n] of form `old` as new rows of form `new`, whose fields are the first of those of `old`.

    signed: whether keys are signed. Raises InputError for a finite number beyond the largest of its type.
    """
    out = np.zeros(len(rows), new.dtype)
    for name in ("table", "key", "updates", "step"):
        out[name] = rows[name]
    for number in new.fields:
        values = old.numbers(rows, number.name)
        flags = overflows(values, number.type)
        if flags.any():
            row, column = np.argwhere(flags)[0].tolist()
            key = rows["key"].astype(np.int64)[row] if signed else rows["key"][row]
            raise InputError(
                f"convert=True: {number.name} of key {key} in table {rows['table'][row]} holds "
                f"{values[row, column]!s}, which overflows {number.type}; load it into rows of torch.float32"
            )
        new.set_numbers(out, number.name, values)
    return out


@dataclass
class LoadReport:
    """What a load did: `rows` loaded and `left_out`. `remarks` say what did not fit and how it was handled."""

    rows: int = 0
    left_out: int = 0
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Selection:
    """What to load of a snapshot.

    `tables`: indexes, or names until `fitting` resolves them. `where`: a function of (tables [n], keys [n]) that
    returns bool [n], the rows to load. `state`: whether to load optimizer state. `convert`: whether numbers of another
    type are converted to `types`, which `fitting` sets. `padding`: the 64 bits of padding_idx, which is not a key of
    the table.
    """

    tables: Collection[int | str] | None = None
    where: Where | None = None
    state: bool = True
    padding: int | None = None
    convert: bool = False
    types: Types | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the selection is the whole snapshot, bit for bit."""
        return self.has_every_row and self.state and self.types is None

    @property
    def can_recover(self) -> bool:
        """Whether the loaded rows equal those of the snapshot bit for bit, so that recovery may load it."""
        return self.is_whole and not self.convert

    @property
    def has_every_row(self) -> bool:
        """Whether no row is skipped."""
        return self.tables is None and self.where is None and self.padding is None

    def description(self, description: dict[str, Any]) -> dict[str, Any]:
        """The description of the selected rows; without state, of a table that no optimizer has trained."""
        if self.types is not None:
            description = converted_description(description, self.types)
        if self.state:
            return description
        bare: dict[str, Any] = {"optimizer": None, "step": 0}
        bare |= {name: [] for name in ("states", "state_widths", "initial", "hyper")}
        if description["dtype"] != "float32":
            bare[STATE_TYPES] = []
        kept = {name: value for name, value in description.items() if name != STATE_TYPES}
        return {**kept, **bare, "width": RowForm(sum(kept["columns"]), kept["dtype"]).width}

    def rows_of(self, snapshot: Snapshot, report: LoadReport, progress: Callable[[int], None] | None = None) -> Chunks:
        """The selected rows of a snapshot, counted in `report`; without state, as a lookup returns them.

        progress: called with the number of rows of each chunk read.
        """
        chunks = snapshot.chunks()
        if not self.state:
            from ...engine.table.row_scan import caught_up  # loads torch

            chunks = caught_up(snapshot.description, chunks)
        return self.chunks(count_progress(chunks, progress), snapshot.description, report)

    def chunks(self, chunks: Chunks, description: dict[str, Any], report: LoadReport) -> Chunks:
        """The selected rows of a snapshot, counted in `report`."""
        signed = description["key_type"] != "uint64"
        stored, loaded = (RowForm.described(of) for of in (description, self.description(description)))
        for bucket, rows in chunks:
            selected = self._selected(rows, signed)
            report.left_out += len(rows) - len(selected)
            report.rows += len(selected)
            if not self.state or loaded.dtype != stored.dtype:
                selected = converted(selected, stored, loaded, signed)
            if not self.state:
                selected["step"] = 0
            if len(selected):
                yield bucket, selected

    def _selected(self, rows: NDArray[np.void], signed: bool) -> NDArray[np.void]:
        if self.tables is not None:
            rows = rows[np.isin(rows["table"], list(self.tables))]
        if self.padding is not None:
            rows = rows[rows["key"] != np.uint64(self.padding)]
        if self.where is not None:
            keys = rows["key"].copy()
            wanted = np.asarray(self.where(rows["table"].copy(), keys.view(np.int64) if signed else keys))
            if wanted.dtype != bool or wanted.shape != keys.shape:
                raise InputError(
                    f"where returned {wanted.dtype} of shape {wanted.shape}: return bool of shape {keys.shape}, one "
                    "for each row"
                )
            rows = rows[wanted]
        return rows


ALL = Selection()
