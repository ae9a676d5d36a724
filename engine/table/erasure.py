"""Taking rows out of every tier of a table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..interrupts import uninterrupted
from ..lifecycle.lifecycle import Lifecycle
from ..row_format import Keys, Tables
from ..store.contract import Store
from ..store.table_counts import Counts
from .counts import RowCounts
from .watch import Watch


class Erasure:
    """Rows that leave a table. Where no tier has room to take them out, the next call finishes it.

    `before_write` is called before a tier is written.
    """

    def __init__(self, counts: RowCounts, lifecycle: Lifecycle, watch: Watch, before_write: Callable[[], None]) -> None:
        self._counts, self._lifecycle, self._watch, self._before_write = counts, lifecycle, watch, before_write
        self.asked: tuple[Tables, Keys, Counts, str] | None = None  # what may still be in a tier

    def ask(self, tables: Tables, keys: Keys, there: Counts, cause: str) -> None:
        """Let rows leave by the next `finish`. `there` of each table had been written. Raises StoreError."""
        self._before_write()  # first: where there is no room to write, the rows can still be read
        self.asked = tables, keys, there, cause
        self._counts.leaving = there  # they count as gone

    def finish(self, store: Store[Any]) -> None:
        """Take them out. Where StoreError is raised, some may be out: no tier is to be used before the rest is."""
        assert self.asked is not None
        tables, keys, there, cause = self.asked
        with uninterrupted():
            self._watch.before_erase(tables, keys)
            self._before_write()
            store.erase(tables, keys)
            self._lifecycle.left(tables, keys, there, cause)
            self.asked = self._counts.leaving = None
