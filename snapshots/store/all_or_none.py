"""Snapshots of several stores that get their names together: the rename of the first decides over all of them.

Each is written and durable beside its place before the first gets its name. A process that is killed before that leaves
none, and after it all: whoever takes the lock of a store puts what is left in place, or removes it
(`StoreFolder.clear_snapshots`).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...engine.durable import Commit
from ..files.format import snapshot_id
from ..files.versions import Peer


class Decided(Commit):
    """One of the snapshots. first, id: the place and the id of the first. before: what it waits for."""

    def __init__(self, first: Path, id: str, before: Callable[[], object]) -> None:
        self.id, self._first, self._before = id, first, before

    def wait(self) -> None:
        self._before()

    @property
    def is_made(self) -> bool:
        return snapshot_id(self._first) == self.id


class OfAll(NamedTuple):
    """A save of several stores as snapshots `name`: once that of the store `first` has its name, all are there."""

    name: str
    first: Path
    commit: Decided
    stores: int = 1  # how many there are, where they are saved in the background

    def of(self, store: Path) -> tuple[str, tuple[Peer, str, str] | None]:
        """The id of the snapshot of a store, and what it says of the first."""
        if os.path.realpath(store) == os.path.realpath(self.first):
            return self.commit.id, None
        return secrets.token_hex(16), (Peer.of(self.first.name, store, self.first), self.name, self.commit.id)


def all_or_none(first: Path, saves: Sequence[Callable[[Decided], object]]) -> None:
    """Make snapshots, each by a function that is given its `Commit`, of which the first saves the snapshot `first`."""
    id = secrets.token_hex(16)

    def save(number: int) -> None:
        """Make that one, and let those before it have their names first."""
        saves[number](Decided(first, id, lambda: save(number - 1) if number else None))

    save(len(saves) - 1)
