"""Finds the damaged snapshots in a folder. Reads each chain of snapshots once, to check all snapshots in the chain."""

from __future__ import annotations

from collections.abc import Iterable

from ...engine.errors import SnapshotError
from ...engine.row_format import Chunks
from .read_errors import ReadIOError
from .reader import ProgressCallback, Snapshot, exhaust

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

    def note_damage(snapshot: Snapshot, chunks: Chunks) -> Chunks:
        try:
            yield from chunks
        except SnapshotError as error:
            if error not in errors.values():  # an error that is already listed comes from a parent
                errors[snapshot.name] = error
            raise

    def is_intact(chunks: Chunks) -> bool:
        try:
            exhaust(chunks)
        except ReadIOError:
            raise
        except SnapshotError:
            return False
        return True

    def verify(chain: Chain) -> None:
        """Verify those snapshots in a chain that are not verified yet."""
        names = [snapshot.name for snapshot in chain]
        if intact.union(errors).issuperset(names):
            return
        if errors.keys().isdisjoint(names):
            chunks: Chunks = iter(())
            for snapshot in chain:
                chunks = note_damage(snapshot, snapshot.apply_to(chunks, progress=progress, keys_only=len(chain) > 1))
            if is_intact(chunks):
                intact.update(names)
                return
        first = next(index for index, name in enumerate(names) if name in errors)
        verify(chain[:first])
        for snapshot in chain[first + 1 :]:
            chunks = note_damage(snapshot, snapshot.apply_to(None, progress=progress, keys_only=True))
            if snapshot.name not in intact and snapshot.name not in errors and is_intact(chunks):
                intact.add(snapshot.name)

    for chain in sorted(chains.values(), key=len, reverse=True):
        verify(chain)
    inherited = {}
    for name, chain in chains.items():
        parent = next((snapshot.name for snapshot in chain if snapshot.name in errors), None)
        if parent is not None and name not in errors:
            inherited[name] = SnapshotError(f"its parent {parent!r} is damaged")
    return errors | inherited
