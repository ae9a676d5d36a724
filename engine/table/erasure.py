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
    """The erasing of rows from a table. Where a tier has no room to erase, the next call of the table tries again.

    `before_write(step)` is called before a tier is written at that step.
    """

    def __init__(
        self, counts: RowCounts, lifecycle: Lifecycle, watch: Watch, before_write: Callable[[int], None]
    ) -> None:
        self._counts, self._lifecycle, self._watch, self._before_write = counts, lifecycle, watch, before_write
        self.asked: tuple[Tables, Keys, Counts, str] | None = None  # the rows to erase: some may be in a tier yet

    def ask(self, tables: Tables, keys: Keys, there: Counts, cause: str, step: int) -> None:
        """Ask for rows to leave by the next `finish`. there: by table, how many were written. Raises StoreError."""
        self._before_write(step)  # first: where there is no room to write, the rows can still be read
        self.asked = tables, keys, there, cause
        self._counts.leaving = there  # they count as gone

    def prepare(self, step: int) -> None:
        """Tell the watchers of the rows to erase, before any tier changes; `finish` comes next. StoreError."""
        assert self.asked is not None
        self._watch.before_erase(*self.asked[:2])
        self._before_write(step)

    def finish(self, store: Store[Any]) -> None:
        """Take the rows out of every tier. After a StoreError some are out, and no tier may be used before all are."""
        assert self.asked is not None
        tables, keys, there, cause = self.asked
        store.erase(tables, keys)
        self._lifecycle.left(tables, keys, there, cause)
        self.asked = self._counts.leaving = None
