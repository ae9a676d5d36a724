"""The contract that every tier and every stack of tiers keeps. Lines are addressed, never copied through Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..row_format import Chunks, Keys, Tables

Lines = NDArray[np.uint64]  # [n], the address of a line each
Found = NDArray[np.bool_]  # [n]
Asked = NDArray[np.int64]  # [tables, 2], hits and misses

B = TypeVar("B", contravariant=True)  # the batches of a processor


class Room(NamedTuple):
    """How many rows of an embedding may still be written for the first time."""

    embedding: str
    capacity: int
    left: Callable[[], int]


class Level(Protocol):
    """What the tiers of a stack have in common. Only rows with `updates > 0` count as held."""

    def scan(self) -> Chunks:
        """Every held row as (bucket, rows of `row_dtype`).

        Buckets ascending, within one (table, key) ascending, in bounded chunks.
        """

    def erase(self, tables: Tables, keys: Keys) -> None:
        """Forget rows, given once each, in this and the tiers below; those that are not there are fine.

        A row that a batch has up at this time goes back to its initial value where it is.
        """

    def flush(self) -> None:
        """Bring every dirty line down to the last tier, which makes it durable where it is a disk."""

    def close(self) -> None:
        """Release memory and files. Does not flush."""

    def where(self, table: int, key: int) -> list[dict[str, Any]]:
        """The tiers that have the row, from the top, each with its place, `updates` and `last_step`. Changes nothing.

        `tier` is a name of `metrics`. `key`: its 64 bits, unsigned.
        """

    def metrics(self) -> dict[str, dict[str, float]]:
        """Counters by the tier's name, from the top down."""


class Loadable(Level, Protocol):
    """The last tier of a stack. `tables` and `keys` hold no (table, key) twice; lines are in host memory."""

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        """Copy each line to its row, inserting it where it is new."""


class TableImage(Protocol):
    """The rows of a full table as they are when this is made, read bucket by bucket while they change.

    Nothing runs beside anything else, but for `sort` beside what `keep` and `keep_rows` do.
    """

    def keep(self, batch: Any) -> None:
        """To be called before the lines of a pinned batch are written: what they hold is kept aside."""

    def keep_rows(self, tables: Tables, keys: Keys) -> None:
        """The same before rows, distinct, are erased."""

    def list(self, bucket: int) -> None:
        """Begin to read a bucket; they are read in ascending order."""

    def sort(self) -> None:
        """Between `list` and the first `next`."""

    def next(self, rows: NDArray[np.uint8]) -> int:
        """Pack as many rows as there is room for, by (table, key), as `row_dtype`. How many: 0 at the bucket's end."""

    @property
    def kept_bytes(self) -> int:
        """What is kept aside."""


class Table(Loadable, Protocol):
    """The last tier of a stack without a disk: every row, in memory."""

    def image(self, top: Any) -> TableImage:
        """`top`: of the stack, which has been flushed."""


class Tier(Loadable, Protocol):
    """Something in host memory or on a disk that a cache goes over: the full table, RocksDB, or another cache."""

    @property
    def native(self) -> _core.Tier:
        """What a cache of the CPU goes over."""

    def read(self, tables: Tables, keys: Keys, lines: Lines, touch: bool = True) -> Found:
        """Copy each held row to its line; a line whose row is not held is left as it was.

        touch: whether it counts as a use of the rows, which a cache tells the rows to keep by.
        """


class Tracker(Protocol[B]):
    """The names of rows that changed."""

    def note(self, batch: B) -> None:
        """The lines of a pinned batch will be written."""

    def names(self) -> tuple[Tables, Keys]:
        """Of the rows that changed since the last `forget`, but for some that were erased after it; may wait."""

    def forget(self) -> None:
        """What `names` has just told is known elsewhere."""


class Store(Level, Protocol[B]):
    """The top of a stack: serves a step."""

    def pin(self, batch: B, room: Room | None) -> None:
        """Bring each unique row of the batch up, initialising new ones, and write its address to the batch.

        It stays there until `unpin`. More new rows than there is room for raise CapacityError and pin nothing; a store
        that cannot tell without waiting for its device sets a fault, and the batch changes nothing.
        """

    def unpin(self, batch: B, dirty: bool) -> None:
        """End a pin. With `dirty`, the lines were written and must reach the tiers below in time."""

    def announce(self, batch: B) -> None:
        """A coming step pins this batch; steps do so in the order in which their batches are announced."""

    def prefetch(self, batch: B) -> bool:
        """Bring the rows of an announced batch up ahead and keep them there; False where the caps say to wait.

        May run in another thread than the rest, as `announce` may.
        """

    def cancel(self) -> None:
        """Forget every announced batch but the pinned one. They may be announced again."""

    def tracker(self) -> Tracker[B] | None:
        """What tells from now on which rows change; None where `_core.ChangedRows` does."""

    def read(self, tables: Tables, keys: Keys, lines: Lines, touch: bool = True) -> Found:
        """As `Tier.read`."""

    def asked(self) -> Asked:
        """By table, the `hits` and `misses` that `metrics` has of this store; may wait for the device."""

    def peek(self, batch: B) -> None:
        """Write the address of each unique row to the batch for reading alone.

        Unknown rows get initial values in memory of the batch; no tier changes.
        """


class FullStore(Store[B], Table, Protocol[B]):
    """Every row, at the top: a stack of one."""


class WithoutAnnouncements(Generic[B]):
    """For stores that gain nothing from knowing the batches of coming steps."""

    def announce(self, batch: B) -> None:
        """Nothing to remember."""

    def prefetch(self, batch: B) -> bool:
        return True

    def cancel(self) -> None:
        """Nothing to forget."""
