"""What becomes of indices that their table has no row for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...embedding.embedding import MultiTableEmbedding
from .enums import BoundsCheckMode

log = logging.getLogger("tierbed")

_BAD_IDS = {"FATAL": "raise", "WARNING": "drop", "IGNORE": "drop"}


class Bounds:
    """A bounds check mode: the options of a table that follow from it, and its warning."""

    def __init__(self, mode: BoundsCheckMode, name: str) -> None:
        self._name = name
        self._mode = mode.name.removeprefix("V2_")
        self._warns = self._mode == "WARNING"
        self._calls = 0

    def options(self, rows: int) -> dict[str, Any]:
        """Of a table of so many rows, what `make_table_options` takes."""
        return {} if self._mode == "NONE" else {"ids": rows, "bad_ids": _BAD_IDS[self._mode]}

    def warn(self, embeddings: Sequence[MultiTableEmbedding]) -> None:
        """Log, once, which tables dropped indices. A GPU tells at calls 1, 2, 4, 8 and so on, as each has to wait."""
        if not self._warns:
            return
        self._calls += 1
        for embedding in embeddings:
            if embedding.device.type != "cpu" and self._calls & (self._calls - 1):
                continue
            dropped = embedding.opened().own_table.processor.dropped
            tables = [name for name, count in zip(embedding.spec.labels, dropped, strict=True) if count]
            if tables:
                self._warns = False
                log.warning(
                    "TableBatchedEmbeddingBags %r: indices of table %s were negative or beyond its rows, and were "
                    "dropped; metrics() counts them from here on without a warning",
                    self._name,
                    ", ".join(map(repr, tables)),
                )
