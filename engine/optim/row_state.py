"""What a row carries beside its embedding, and the last settings it was trained with: known without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..row_format import Chunks, row_dtype


@dataclass(frozen=True)
class RowState:
    """The state of rows under `rule`, None where rows were put without an optimizer.

    `names`, `widths` (floats in a row) and `initial` values of the states, in the order of the line.
    """

    rule: str | None = None
    names: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    initial: tuple[float, ...] = ()

    @property
    def width(self) -> int:
        """Floats of all states in a row."""
        return sum(self.widths)

    def describe(self) -> dict[str, Any]:
        """The state as plain values, as marks and snapshots keep it."""
        return {
            "optimizer": self.rule,
            "states": list(self.names),
            "state_widths": list(self.widths),
            "initial": list(self.initial),
        }

    @staticmethod
    def described(stored: Mapping[str, Any]) -> RowState:
        """The row state in a description."""
        names, widths, initial = stored["states"], stored["state_widths"], stored["initial"]
        return RowState(stored["optimizer"], tuple(names), tuple(widths), tuple(initial))

    def added_to(self, chunks: Chunks) -> Chunks:
        """Scanned rows without state, with the state of a new row added."""
        for bucket, rows in chunks:
            dim = rows["values"].shape[1]
            wide = np.empty(len(rows), row_dtype(dim + self.width))
            for field in ("table", "key", "updates", "step"):
                wide[field] = rows[field]
            wide["values"][:, :dim] = rows["values"]
            wide["values"][:, dim:] = np.repeat(np.asarray(self.initial, np.float32), self.widths)
            yield bucket, wide
