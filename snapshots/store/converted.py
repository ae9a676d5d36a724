"""Rows whose numbers become those of another type: widening is exact, narrowing rounds to nearest even."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import InputError
from ...engine.optim.kernel import kernels
from ...engine.row_format import STATE_TYPES, RowForm, Rows, overflows

Types = tuple[str, str]  # of the embedding, and of the states that every element has


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


def converted(rows: Rows, old: RowForm, new: RowForm, signed: bool) -> Rows:
    """Rows [n] of one form as new rows of another, whose fields are the first of the other's.

    signed: whether keys are. Raises InputError for a finite number beyond the largest of its type.
    """
    out = np.zeros(len(rows), new.dtype)
    for name in ("table", "key", "updates", "step"):
        out[name] = rows[name]
    for field in new.fields:
        values = old.numbers(rows, field.name)
        _check_range(values, field.name, field.type, rows, signed)
        new.set_numbers(out, field.name, values)
    return out


def _check_range(values: NDArray[np.float32], name: str, type: str, rows: Rows, signed: bool) -> None:
    flags = overflows(values, type)
    if flags.any():
        row, column = np.argwhere(flags)[0].tolist()
        keys = rows["key"].astype(np.int64) if signed else rows["key"]
        raise InputError(
            f"convert=True: {name} of key {keys[row]} in table {rows['table'][row]} holds {values[row, column]!s}, "
            f"which overflows {type}; load it into rows of torch.float32"
        )
