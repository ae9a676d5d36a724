"""Snapshots of several stores that get their names together: the rename of the first decides over all of them.

Each is written and durable beside its place before the first gets its name. A process that is killed before that leaves
none, and after it all: whoever takes the lock of a store puts what is left in place, or removes it
(`StoreFolder.clear_snapshots`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from ...engine.durable import Commit
from ...engine.store.folder_state import snapshot_id


class Decided(Commit):
    """One of the snapshots. first, id: the place and the id of the first. before: what it waits for."""

    def __init__(self, first: Path, id: str, before: Callable[[], object]) -> None:
        self.id, self._first, self._before = id, first, before

    def wait(self) -> None:
        self._before()

    @property
    def is_made(self) -> bool:
        return snapshot_id(self._first) == self.id


def all_or_none(first: Path, saves: Sequence[Callable[[Decided], object]]) -> None:
    """Make snapshots, each by a function that is given its `Commit`, of which the first saves the snapshot `first`."""
    id = secrets.token_hex(16)

    def save(number: int) -> None:
        """Make that one, and let those before it have their names first."""
        saves[number](Decided(first, id, lambda: save(number - 1) if number else None))

    save(len(saves) - 1)
