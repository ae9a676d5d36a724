"""The optimizer state of rows, as it is described without an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..row_format import EMBEDDING, STATE_TYPES, Chunks, RowForm


@dataclass(frozen=True)
class RowState:
    """The state of rows trained by `rule`; None if rows were put without an optimizer.

    `names`, `widths` (numbers in a row) and `initial` values of the states, in the order of the line. `types`: of the
    numbers of each state; empty if all are float32.
    """

    rule: str | None = None
    names: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    initial: tuple[float, ...] = ()
    types: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """Numbers of all states in a row."""
        return sum(self.widths)

    @property
    def narrow(self) -> tuple[str, int]:
        """The type of the states that are not float32, and how many there are: the first ones."""
        narrow = [type for type in self.types if type != "float32"]
        return (narrow[0] if narrow else "float32"), len(narrow)

    def form(self, dim: int, dtype: str) -> RowForm:
        """The format of a row with an embedding of `dim` numbers of `dtype`."""
        return RowForm(dim, dtype, self.names, self.widths, self.types or None)

    def describe(self) -> dict[str, Any]:
        """The state as plain values, for the file MARK and for snapshots."""
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
        types = stored.get(STATE_TYPES, ())
        narrow = any(type != "float32" for type in types)
        return RowState(
            stored["optimizer"], tuple(names), tuple(widths), tuple(initial), tuple(types) if narrow else ()
        )

    def added_to(self, chunks: Chunks, dim: int, dtype: str) -> Chunks:
        """Scanned rows without state, embeddings of `dim` numbers of `dtype`, with the state of a new row added."""
        bare, form = RowForm(dim, dtype), self.form(dim, dtype)
        for bucket, rows in chunks:
            full = np.zeros(len(rows), form.dtype)
            for field in ("table", "key", "updates", "step"):
                full[field] = rows[field]
            form.set_numbers(full, EMBEDDING, bare.numbers(rows, EMBEDDING))
            for name, width, value in zip(self.names, self.widths, self.initial, strict=True):
                form.set_numbers(full, name, np.full((len(rows), width), value, np.float32))
            yield bucket, full
