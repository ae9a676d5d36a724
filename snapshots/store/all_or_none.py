"""Saves snapshots of several stores, all or none: the rename of the first one commits all of them.

Each snapshot is durable in a temporary folder before the first one is renamed. A process that is killed before that
leaves none of them, and after it all: the next process that locks a store renames what is left, or removes it
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
    """The commit of one snapshot. first, id: folder and id of the first one. before: called before its rename."""

    def __init__(self, first: Path, id: str, before: Callable[[], object]) -> None:
        self.id, self._first, self._before = id, first, before

    def wait(self) -> None:
        self._before()

    @property
    def is_made(self) -> bool:
        return snapshot_id(self._first) == self.id


class OfAll(NamedTuple):
    """A save of several stores as snapshots `name`. Once that of the store `first` has its name, all are committed."""

    name: str
    first: Path
    commit: Decided
    stores: int = 1  # their number, if they are saved in the background

    def of(self, store: Path) -> tuple[str, tuple[Peer, str, str] | None]:
        """The id for the snapshot of a store, and its field `first`."""
        if os.path.realpath(store) == os.path.realpath(self.first):
            return self.commit.id, None
        return secrets.token_hex(16), (Peer.of(self.first.name, store, self.first), self.name, self.commit.id)


def all_or_none(first: Path, saves: Sequence[Callable[[Decided], object]]) -> None:
    """Make snapshots, each by a function that takes its `Commit`. The first function saves the snapshot `first`."""
    id = secrets.token_hex(16)

    def save(number: int) -> None:
        """Make one of them. Those before it get their names first."""
        saves[number](Decided(first, id, lambda: save(number - 1) if number else None))

    save(len(saves) - 1)
