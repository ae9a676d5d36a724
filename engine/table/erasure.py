"""Taking rows out of every tier of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..lifecycle.lifecycle import Lifecycle
from ..row_format import Keys, Tables
from ..store.contract import Store
from ..store.table_counts import Counts
from .counts import RowCounts
from .watch import Watch


class Erasure:
    """Rows that leave a table. Where no tier has room to take them out, the next call finishes it.

    `before_write` is told, before a tier is written, the step that the write is of.
    """

    def __init__(
        self, counts: RowCounts, lifecycle: Lifecycle, watch: Watch, before_write: Callable[[int], None]
    ) -> None:
        self._counts, self._lifecycle, self._watch, self._before_write = counts, lifecycle, watch, before_write
        self.asked: tuple[Tables, Keys, Counts, str] | None = None  # what may still be in a tier

    def ask(self, tables: Tables, keys: Keys, there: Counts, cause: str, step: int) -> None:
        """Let rows leave by the next `finish`. `there` of each table had been written. Raises StoreError."""
        self._before_write(step)  # first: where there is no room to write, the rows can still be read
        self.asked = tables, keys, there, cause
        self._counts.leaving = there  # they count as gone

    def prepare(self, step: int) -> None:
        """Before `finish`: tell the watchers, while no tier was touched. Raises StoreError."""
        assert self.asked is not None
        self._watch.before_erase(*self.asked[:2])
        self._before_write(step)

    def finish(self, store: Store[Any]) -> None:
        """Take the rows out. Where StoreError is raised, some may be out: no tier is to be used before the rest is."""
        assert self.asked is not None
        tables, keys, there, cause = self.asked
        store.erase(tables, keys)
        self._lifecycle.left(tables, keys, there, cause)
        self.asked = self._counts.leaving = None
