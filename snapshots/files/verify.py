"""Which snapshots of a folder are sound: each chain is read once for all snapshots in it."""

from __future__ import annotations

from collections.abc import Iterable

from ...engine.errors import SnapshotError
from ...engine.row_format import Chunks
from .merging import changed
from .read_errors import ReadIOError
from .reader import Progress, Snapshot, read_all, told, verify_chain

Chain = list[Snapshot]
Damaged = dict[str, SnapshotError]


def chains_of(snapshots: Iterable[Snapshot]) -> tuple[dict[str, Chain], Damaged]:
    """The chain of each snapshot, by name, and why others have none. Raises ReadIOError."""
    chains, damaged = {}, {}
    for snapshot in snapshots:
        try:
            chains[snapshot.name] = snapshot.chain
        except ReadIOError:
            raise
        except SnapshotError as error:
            damaged[snapshot.name] = error
    return chains, damaged


def verify_all(chains: dict[str, Chain], damaged: Damaged, progress: Progress) -> Damaged:
    """Why snapshots, and the snapshots that they go over, are not sound, by name: `damaged` and what is found.

    A chain is read once for all snapshots in it. Where a snapshot goes over a damaged one, its own files are checked.
    Raises ReadIOError.
    """
    verified = _Verified(damaged, progress)
    for chain in sorted(chains.values(), key=len, reverse=True):
        verified.take(chain)
    found = dict(verified.damaged)
    for name, chain in chains.items():
        for link in chain:
            if link.name in verified.damaged and name not in found:
                found[name] = SnapshotError(f"it goes over {link.name!r}, which is damaged")
    return found


class _Verified:
    def __init__(self, damaged: Damaged, progress: Progress) -> None:
        self.damaged = dict(damaged)
        self._sound: set[str] = set()  # snapshots over a damaged one, whose own files are sound
        self._progress = progress

    def take(self, chain: Chain) -> None:
        """Verify the snapshots of a chain that were not verified yet."""
        if all(link.name in self._sound or link.name in self.damaged for link in chain):
            return
        if not any(link.name in self.damaged for link in chain):
            try:
                verify_chain(chain, self._progress, self._blaming)
            except ReadIOError:
                raise
            except SnapshotError:
                pass
            else:
                self._sound.update(link.name for link in chain)
                return
        first = next(place for place, link in enumerate(chain) if link.name in self.damaged)
        self.take(chain[:first])
        for link in chain[first + 1 :]:
            if link.name not in self._sound and link.name not in self.damaged:
                self._take_alone(link)

    def _take_alone(self, link: Snapshot) -> None:
        try:
            rows, deleted = (told(part, self._progress, True) for part in link.parts())
            read_all(changed(iter(()), rows, deleted, link.named_twice))
        except ReadIOError:
            raise
        except SnapshotError as error:
            self.damaged[link.name] = error
        else:
            self._sound.add(link.name)

    def _blaming(self, link: Snapshot, table: Chunks) -> Chunks:
        try:
            yield from table
        except SnapshotError as error:
            if error not in self.damaged.values():  # found at an earlier snapshot
                self.damaged[link.name] = error
            raise
