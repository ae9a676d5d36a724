"""What the snapshots of a chain make together: one table, of which every row is checked, and whether all is sound."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from ..engine.errors import SnapshotError
from ..engine.store.contract import Chunks
from .aligned import changed
from .difference import keys_of
from .unread import UnreadError

if TYPE_CHECKING:
    from .reader import Snapshot

Chain = list["Snapshot"]
Damaged = dict[str, SnapshotError]
Progress = Callable[[int], None]
Watch = Callable[["Snapshot", Chunks], Chunks]


def table_of(
    chain: Chain, max_rows: int = 65536, progress: Progress | None = None, watch: Watch | None = None
) -> Chunks:
    """The rows of the table that a chain makes, each snapshot counted when its last row is known.

    With `progress`, which is told how many rows of files were read, the names of rows alone where there are several
    snapshots. `watch` gets each snapshot and the table as it is with it. Raises SnapshotError naming what is damaged.
    """
    table: Chunks = iter(())
    for snapshot in chain:
        rows, deleted = (_told(part, progress, len(chain) > 1) for part in snapshot.parts(max_rows))
        table = rows if snapshot.manifest.parent is None else changed(table, rows, deleted, snapshot.named_twice)
        table = _counted(snapshot, table)
        if watch is not None:
            table = watch(snapshot, table)
    return table


def verify_chain(chain: Chain, progress: Progress | None = None, watch: Watch | None = None) -> None:
    """Read all that the rows of a chain are read from. Raises SnapshotError where a load would."""
    _read(table_of(chain, progress=progress or _nothing, watch=watch))


def chains_of(snapshots: Iterable[Snapshot]) -> tuple[dict[str, Chain], Damaged]:
    """The chain of each, by name, and why there is none. Raises UnreadError."""
    chains, damaged = {}, {}
    for snapshot in snapshots:
        try:
            chains[snapshot.name] = snapshot.chain
        except UnreadError:
            raise
        except SnapshotError as error:
            damaged[snapshot.name] = error
    return chains, damaged


def verify_all(chains: dict[str, Chain], damaged: Damaged, progress: Progress) -> Damaged:
    """Why snapshots, and those that they go over, are not sound: `damaged` and what is found, by name.

    A chain is read once for all snapshots in it; where one goes over what is damaged, the rest of its files is checked.
    Raises UnreadError.
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
        self._sound: set[str] = set()  # their own files, where they go over what is damaged
        self._progress = progress

    def take(self, chain: Chain) -> None:
        """Verify those of a chain that were not yet."""
        if all(link.name in self._sound or link.name in self.damaged for link in chain):
            return
        if not any(link.name in self.damaged for link in chain):
            try:
                verify_chain(chain, self._progress, self._blaming)
            except UnreadError:
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
            rows, deleted = (_told(part, self._progress, True) for part in link.parts())
            _read(changed(iter(()), rows, deleted, link.named_twice))
        except UnreadError:
            raise
        except SnapshotError as error:
            self.damaged[link.name] = error
        else:
            self._sound.add(link.name)

    def _blaming(self, link: Snapshot, table: Chunks) -> Chunks:
        try:
            yield from table
        except SnapshotError as error:
            if error not in self.damaged.values():  # of one before
                self.damaged[link.name] = error
            raise


def _counted(snapshot: Snapshot, chunks: Chunks) -> Chunks:
    count = 0
    for bucket, rows in chunks:
        count += len(rows)
        yield bucket, rows
    if count != snapshot.manifest.rows:
        raise snapshot.damaged(None, f"it has {count} rows instead of {snapshot.manifest.rows}")


def _told(chunks: Chunks, progress: Progress | None, names: bool) -> Chunks:
    for bucket, rows in chunks:
        if progress is None:
            yield bucket, rows
        else:
            progress(len(rows))
            yield bucket, keys_of(rows) if names else rows


def _read(chunks: Chunks) -> None:
    deque(chunks, maxlen=0)


def _nothing(count: int) -> None:
    pass
