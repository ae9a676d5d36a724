"""`RowState` describes the optimizer states that a row stores. It holds no reference to the optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..row_format import EMBEDDING, STATE_DTYPES, Chunks, RowFormat


@dataclass(frozen=True)
class RowState:
    """The optimizer states of a row, in the order in which the row stores them."""

    rule: str | None = None  # None if `put` wrote the rows without an optimizer
    names: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()  # for each state, how many numbers a row stores
    initial_values: tuple[float, ...] = ()  # the initial value of each state
    types: tuple[str, ...] = ()  # the dtype of each state; empty if all are float32

    @property
    def width(self) -> int:
        """How many numbers a row stores for all states together."""
        return sum(self.widths)

    @property
    def states_16bit(self) -> tuple[str, int]:
        """The dtype and number of the 16-bit states. A row stores 16-bit states before float32 states."""
        types = [type for type in self.types if type != "float32"]
        return (types[0] if types else "float32"), len(types)

    def make_row_format(self, dim: int, dtype: str) -> RowFormat:
        """Return the format of a row whose embedding has `dim` numbers in `dtype`."""
        return RowFormat(dim, dtype, self.names, self.widths, self.types or None)

    def describe(self) -> dict[str, Any]:
        """Return the state as plain values, to be stored in MARK and in snapshots."""
        return {
            "optimizer": self.rule,
            "states": list(self.names),
            "state_widths": list(self.widths),
            "initial": list(self.initial_values),
        }

    @staticmethod
    def from_description(stored: Mapping[str, Any]) -> RowState:
        """Read the row state from a stored description."""
        names, widths, initial = (tuple(stored[field]) for field in ("states", "state_widths", "initial"))
        types = tuple(stored.get(STATE_DTYPES, ()))
        return RowState(stored["optimizer"], names, widths, initial, types if {*types} - {"float32"} else ())

    def add_initial_state(self, chunks: Chunks, dim: int, dtype: str) -> Chunks:
        """Add the initial optimizer state to scanned rows. A scanned row holds only `dim` numbers in `dtype`."""
        stateless_format, row_format = RowFormat(dim, dtype), self.make_row_format(dim, dtype)
        for bucket, rows in chunks:
            full_rows = np.zeros(len(rows), row_format.dtype)
            for field in ("table", "key", "updates", "step"):
                full_rows[field] = rows[field]
            row_format.set_values(full_rows, EMBEDDING, stateless_format.values(rows, EMBEDDING))
            for name, width, value in zip(self.names, self.widths, self.initial_values, strict=True):
                row_format.set_values(full_rows, name, np.full((len(rows), width), value, np.float32))
            yield bucket, full_rows
