"""Selects which part of a snapshot to load: some tables, some keys, or only weights. A load can convert dtypes.

Conversion to a wider dtype is exact. Conversion to a narrower dtype rounds to nearest even.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import InputError
from ...engine.optim.kernel import load_kernels
from ...engine.row_format import STATE_DTYPES, Chunks, RowArray, RowFormat, find_overflows
from ..files.reader import ProgressCallback, Snapshot, report_progress

Types = tuple[str, str]  # the dtype of embeddings, and the dtype of optimizer states with one number per element
Where = Callable[[NDArray[np.uint32], NDArray[np.int64] | NDArray[np.uint64]], NDArray[np.bool_]]


def convert_description(description: dict[str, Any], types: Types) -> dict[str, Any]:
    """Returns a table's description after its rows are converted to the dtypes `types`."""
    dtype, state_type = types
    kernel = load_kernels().get(description["optimizer"])
    widths, dim = description["state_widths"], sum(description["columns"])
    element_states = widths.count(dim) if kernel is None else len(kernel.element_states)
    state_types = [state_type] * element_states + ["float32"] * (len(widths) - element_states)
    result = {name: value for name, value in description.items() if name != STATE_DTYPES}
    result["dtype"] = dtype
    if {dtype, *state_types} != {"float32"}:
        result[STATE_DTYPES] = state_types
    return {**result, "width": RowFormat.from_description(result).width}


def read_dtypes(description: Mapping[str, Any]) -> tuple[str, str | None]:
    """Returns the dtypes of embeddings and optimizer states in a valid description. Without states: (dtype, None)."""
    states = description.get(STATE_DTYPES, ["float32"] * len(description["state_widths"]))
    return description["dtype"], states[0] if states else None


def convert_rows(rows: RowArray, old: RowFormat, new: RowFormat, signed: bool) -> RowArray:
    """Convert rows [n] to the format `new`, whose fields are the first of `old`. Raises InputError on overflow."""
    out = np.zeros(len(rows), new.dtype)
    for name in ("table", "key", "updates", "step"):
        out[name] = rows[name]
    for row_field in new.fields:
        values = old.values(rows, row_field.name)
        flags = find_overflows(values, row_field.type)
        if flags.any():
            i, j = np.argwhere(flags)[0].tolist()
            key = rows["key"].astype(np.int64)[i] if signed else rows["key"][i]
            raise InputError(
                f"convert=True: {row_field.name} of key {key} in table {rows['table'][i]} holds "
                f"{values[i, j]!s}, which overflows {row_field.type}; load the snapshot into rows of torch.float32"
            )
        new.set_values(out, row_field.name, values)
    return out


@dataclass
class LoadReport:
    """The result of a load."""

    rows: int = 0  # the number of loaded rows
    left_out: int = 0  # the number of skipped rows
    remarks: list[str] = field(default_factory=list)  # what did not fit the rows, and what the load did about it


@dataclass(frozen=True)
class Selection:
    """The part of a snapshot to load."""

    tables: Collection[int | str] | None = None  # table indexes, or names until `fit_selection` resolves them
    where: Where | None = None  # called with (tables [n], keys [n]); returns bool [n], True for rows to load
    includes_state: bool = True  # True to load optimizer state too
    padding_key: int | None = None  # padding_idx as 64 bits; a row with this key is skipped
    converts: bool = False  # True to convert numbers to `target_dtypes` if their dtype differs
    target_dtypes: Types | None = None  # the dtypes to convert to, set by `fit_selection`

    @property
    def is_whole(self) -> bool:
        """True if the whole snapshot is loaded, bit for bit."""
        return self.has_every_row and self.includes_state and self.target_dtypes is None

    @property
    def can_recover(self) -> bool:
        """True if the loaded rows equal the snapshot's rows bit for bit. Recovery may then load the snapshot."""
        return self.is_whole and not self.converts

    @property
    def has_every_row(self) -> bool:
        """True if no row is skipped."""
        return self.tables is None and self.where is None and self.padding_key is None

    def describe(self, description: dict[str, Any]) -> dict[str, Any]:
        """Returns the selected rows' description. Without `includes_state`, the table counts as never trained."""
        if self.target_dtypes is not None:
            description = convert_description(description, self.target_dtypes)
        if self.includes_state:
            return description
        result = {name: value for name, value in description.items() if name != STATE_DTYPES}
        result |= {"optimizer": None, "step": 0, "states": [], "state_widths": [], "initial": [], "hyper": []}
        if result["dtype"] != "float32":
            result[STATE_DTYPES] = []
        return {**result, "width": RowFormat(sum(result["columns"]), result["dtype"]).width}

    def read_rows(self, snapshot: Snapshot, report: LoadReport, progress: ProgressCallback | None = None) -> Chunks:
        """Yields and counts a snapshot's selected rows. Without optimizer state: values as lookups return them."""
        chunks = snapshot.chunks()
        if not self.includes_state:
            from ...engine.table.row_scan import catch_up_rows  # loads torch

            chunks = catch_up_rows(snapshot.description, chunks)
        return self.select_chunks(report_progress(chunks, progress), snapshot.description, report)

    def select_chunks(self, chunks: Chunks, description: dict[str, Any], report: LoadReport) -> Chunks:
        """Yields the selected rows among `chunks`, and counts them in `report`."""
        signed = description["key_type"] != "uint64"
        stored, loaded = (RowFormat.from_description(table) for table in (description, self.describe(description)))
        for bucket, rows in chunks:
            selected = self._select(rows, signed)
            report.left_out += len(rows) - len(selected)
            report.rows += len(selected)
            if not self.includes_state or loaded.dtype != stored.dtype:
                selected = convert_rows(selected, stored, loaded, signed)
            if not self.includes_state:
                selected["step"] = 0
            if len(selected):
                yield bucket, selected

    def _select(self, rows: NDArray[np.void], signed: bool) -> NDArray[np.void]:
        if self.tables is not None:
            rows = rows[np.isin(rows["table"], list(self.tables))]
        if self.padding_key is not None:
            rows = rows[rows["key"] != np.uint64(self.padding_key)]
        if self.where is not None:
            keys = rows["key"].copy()
            is_selected = np.asarray(self.where(rows["table"].copy(), keys.view(np.int64) if signed else keys))
            if is_selected.dtype != bool or is_selected.shape != keys.shape:
                raise InputError(
                    f"the function where= returned dtype {is_selected.dtype} and shape {is_selected.shape}. Return a "
                    f"bool array of shape {keys.shape}, with one value for each row"
                )
            rows = rows[is_selected]
        return rows


ALL = Selection()
