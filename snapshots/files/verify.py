"""Finds the damaged snapshots of a folder. A chain is read once for all snapshots in it."""

from __future__ import annotations

from collections.abc import Iterable

from ...engine.errors import SnapshotError
from ...engine.row_format import Chunks
from .merging import changed
from .read_errors import ReadIOError
from .reader import ProgressCallback, Snapshot, count_progress, read_all, verify_chain

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
    verified = _Verified(damaged, progress)
    for chain in sorted(chains.values(), key=len, reverse=True):
        verified.verify(chain)
    found = dict(verified.damaged)
    for name, chain in chains.items():
        for snapshot in chain:
            if snapshot.name in verified.damaged and name not in found:
                found[name] = SnapshotError(f"its parent {snapshot.name!r} is damaged")
    return found


class _Verified:
    def __init__(self, damaged: Damaged, progress: ProgressCallback) -> None:
        self.damaged = dict(damaged)
        self._sound: set[str] = set()  # includes children of damaged ones whose own files are sound
        self._progress = progress

    def verify(self, chain: Chain) -> None:
        """Verify the snapshots of a chain that are not verified yet."""
        if all(snapshot.name in self._sound or snapshot.name in self.damaged for snapshot in chain):
            return
        if not any(snapshot.name in self.damaged for snapshot in chain):
            try:
                verify_chain(chain, self._progress, self._recording_damage)
            except ReadIOError:
                raise
            except SnapshotError:
                pass
            else:
                self._sound.update(snapshot.name for snapshot in chain)
                return
        first = next(number for number, snapshot in enumerate(chain) if snapshot.name in self.damaged)
        self.verify(chain[:first])
        for snapshot in chain[first + 1 :]:
            if snapshot.name not in self._sound and snapshot.name not in self.damaged:
                self._verify_alone(snapshot)

    def _verify_alone(self, snapshot: Snapshot) -> None:
        try:
            rows, deleted = (count_progress(part, self._progress, True) for part in snapshot.parts())
            read_all(changed(iter(()), rows, deleted, snapshot.conflicting_key_error))
        except ReadIOError:
            raise
        except SnapshotError as error:
            self.damaged[snapshot.name] = error
        else:
            self._sound.add(snapshot.name)

    def _recording_damage(self, snapshot: Snapshot, table: Chunks) -> Chunks:
        try:
            yield from table
        except SnapshotError as error:
            if error not in self.damaged.values():  # the error of a parent
                self.damaged[snapshot.name] = error
            raise
