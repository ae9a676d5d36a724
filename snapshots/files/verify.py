"""Finds the damaged snapshots in a folder. Reads each chain of snapshots once, to check all snapshots in the chain."""

from __future__ import annotations

from collections.abc import Iterable

from ...engine.errors import SnapshotError
from .read_errors import ReadIOError
from .reader import ProgressCallback, Snapshot, exhaust, read_changes

Chain = list[Snapshot]
Damaged = dict[str, SnapshotError]


def find_chains(snapshots: Iterable[Snapshot]) -> tuple[dict[str, Chain], Damaged]:
    """Returns {snapshot name: its chain}, and {name: error} for snapshots with a broken chain. Raises ReadIOError."""
    chains, damaged = {}, {}
    for snapshot in snapshots:
        try:
            chains[snapshot.name] = snapshot.chain
        except ReadIOError:
            raise
        except SnapshotError as error:
            damaged[snapshot.name] = error
    return chains, damaged


def verify_all(chains: dict[str, Chain], damaged: Damaged, progress: ProgressCallback) -> Damaged:
    """Find the damaged snapshots in `chains`. Returns {snapshot name: error}, including the errors in `damaged`.

    If a snapshot's parent is damaged, only the snapshot's own files are checked. Raises ReadIOError.
    """
    errors, intact = dict(damaged), set[str]()  # intact: snapshots whose own files are intact

    def is_intact(chain: Chain) -> bool:
        try:
            exhaust(read_changes(chain, progress=progress))
        except ReadIOError:
            raise
        except SnapshotError as error:
            errors[next(snapshot.name for snapshot in chain if snapshot.error is error)] = error
            return False
        intact.update(snapshot.name for snapshot in chain)
        return True

    def verify(chain: Chain) -> None:
        """Verify those snapshots in a chain that are not verified yet."""
        names = [snapshot.name for snapshot in chain]
        if intact.union(errors).issuperset(names) or (errors.keys().isdisjoint(names) and is_intact(chain)):
            return
        first = next(index for index, name in enumerate(names) if name in errors)
        verify(chain[:first])
        for snapshot in chain[first + 1 :]:
            if snapshot.name not in intact and snapshot.name not in errors:
                is_intact([snapshot])

    for chain in sorted(chains.values(), key=len, reverse=True):
        verify(chain)
    inherited = {}
    for name, chain in chains.items():
        parent = next((snapshot.name for snapshot in chain if snapshot.name in errors), None)
        if parent is not None and name not in errors:
            inherited[name] = SnapshotError(f"its parent {parent!r} is damaged")
    return errors | inherited
