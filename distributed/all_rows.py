"""Whether the parts of a snapshot that ranks read are all its rows, whose number its manifest has."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..snapshots.files.reader import Snapshot
from .agreement import all_gather_object, call_on_all_ranks

if TYPE_CHECKING:
    from .rank_group import RankGroup


def reading(op: str) -> str:
    """What ranks are about that tell each other how many rows they have read."""
    return f"{op}: its rows"


def check_all_rows(world: RankGroup, op: str, snapshot: Snapshot, read: Callable[[], dict[str, int]]) -> None:
    """Raise SnapshotError on all ranks where their parts are not all rows of each snapshot in the chain. Collective.

    read: gives how many rows this rank has read of each of these, by name. What it raises is raised on all ranks.
    """
    found = all_gather_object(world, reading(op), read)

    def check() -> None:
        for link in snapshot.chain:
            link.check_count(sum(counts.get(link.name, 0) for counts in found))

    call_on_all_ranks(world, f"{op}: counts", check)
