"""Finds the damaged snapshots of a folder. A chain is read once for all snapshots in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from ...engine.errors import SnapshotError
from ...engine.row_format import Chunks
from .read_errors import ReadIOError
from .reader import ProgressCallback, Snapshot, read_all

Chain = list[Snapshot]
Damaged = dict[str, SnapshotError]


def chains_of(snapshots: Iterable[Snapshot]) -> tuple[dict[str, Chain], Damaged]:
    """The chain of each snapshot by name, and errors for those without one. Raises ReadIOError."""
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
    """The errors of damaged snapshots and parents by name: those of `damaged`, and those that reading finds.

    A chain is read once for all snapshots in it. Of a snapshot with a damaged parent, its own files are checked.
    Raises ReadIOError.
    """
    found, sound = dict(damaged), set[str]()  # sound: also children of damaged ones, if their own files are

    def note_damage(snapshot: Snapshot, table: Chunks) -> Chunks:
        try:
            yield from table
        except SnapshotError as error:
            if error not in found.values():  # the error of a parent
                found[snapshot.name] = error
            raise

    def verify(chain: Chain) -> None:
        """Verify the snapshots of a chain that are not verified yet."""
        names = [snapshot.name for snapshot in chain]
        if sound.union(found).issuperset(names):
            return
        if found.keys().isdisjoint(names):
            with suppress_damage():
                table: Chunks = iter(())
                for snapshot in chain:
                    table = note_damage(snapshot, snapshot.apply_to(table, progress=progress, keys_only=len(chain) > 1))
                read_all(table)
                sound.update(names)
                return
        first = next(number for number, name in enumerate(names) if name in found)
        verify(chain[:first])
        for snapshot in chain[first + 1 :]:
            if snapshot.name not in sound and snapshot.name not in found:
                with suppress_damage():
                    read_all(note_damage(snapshot, snapshot.apply_to(None, progress=progress, keys_only=True)))
                    sound.add(snapshot.name)

    for chain in sorted(chains.values(), key=len, reverse=True):
        verify(chain)
    of_parents = {}
    for name, chain in chains.items():
        parent = next((snapshot.name for snapshot in chain if snapshot.name in found), None)
        if parent is not None and name not in found:
            of_parents[name] = SnapshotError(f"its parent {parent!r} is damaged")
    return found | of_parents


@contextmanager
def suppress_damage() -> Iterator[None]:
    """A block that ends at a SnapshotError that says something about the snapshot."""
    try:
        yield
    except ReadIOError:
        raise
    except SnapshotError:
        pass
