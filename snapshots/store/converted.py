"""Rows whose numbers become those of another type: widening is exact, narrowing rounds to nearest even."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...engine.errors import InputError
from ...engine.optim.kernel import kernels
from ...engine.row_format import STATE_TYPES, Chunks, RowForm, overflows

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


def converted(chunks: Chunks, old: RowForm, new: RowForm) -> Chunks:
    """Rows of one form as rows of another with the same fields. Raises InputError for a number that overflows."""
    for bucket, rows in chunks:
        out = np.zeros(len(rows), new.dtype)
        for name in ("table", "key", "updates", "step"):
            out[name] = rows[name]
        for field in new.fields:
            values = old.numbers(rows, field.name)
            if (flags := overflows(values, field.type)).any():
                row, column = np.argwhere(flags)[0].tolist()
                raise InputError(
                    f"convert=True: {field.name} of key {rows['key'][row]} in table {rows['table'][row]} holds "
                    f"{values[row, column]}, which overflows {field.type}; load it into rows of torch.float32"
                )
            new.set_numbers(out, field.name, values)
        yield bucket, out
