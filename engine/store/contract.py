"""The contract that every tier and every stack of tiers keeps. Lines are addressed, never copied through Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Tables = NDArray[np.uint32]  # [n]
Keys = NDArray[np.uint64]  # [n]
Lines = NDArray[np.uint64]  # [n], the address of a line each
Found = NDArray[np.bool_]  # [n]

Chunks = Iterator[tuple[int, NDArray[np.void]]]  # (bucket, rows of `row_dtype`), as `Tier.scan` yields them

Room = Callable[[], int]  # how many rows may still be written for the first time

BUCKETS = 64

B = TypeVar("B", contravariant=True)  # the batches of a processor


def row_dtype(width: int) -> np.dtype[np.void]:
    """One stored row as NumPy sees it, packed: what `scan` yields and what snapshots hold.

    `width` is in floats, optimizer state included.
    """
    return np.dtype(
        [("table", "<u4"), ("key", "<u8"), ("values", "<f4", (width,)), ("updates", "<u4"), ("step", "<u4")]
    )


class Level(Protocol):
    """What the tiers of a stack have in common. Only rows with `updates > 0` count as held."""

    def scan(self) -> Chunks:
        """Every held row as (bucket, rows of `row_dtype`).

        Buckets ascending, within one (table, key) ascending, in bounded chunks.
        """

    def flush(self) -> None:
        """Bring every dirty line down to the last tier, which makes it durable where it is a disk."""

    def close(self) -> None:
        """Release memory and files. Does not flush."""

    def metrics(self) -> dict[str, dict[str, int]]:
        """Counters by the tier's name, from the top down."""


class Loadable(Level, Protocol):
    """The last tier of a stack. `tables` and `keys` hold no (table, key) twice; lines are in host memory."""

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        """Copy each line to its row, inserting it where it is new."""


class Tier(Loadable, Protocol):
    """Something in host memory or on a disk that a cache goes over: the full table, RocksDB, or another cache."""

    def read(self, tables: Tables, keys: Keys, lines: Lines) -> Found:
        """Copy each held row to its line; a line whose row is not held is left as it was."""


class Store(Level, Protocol[B]):
    """The top of a stack: serves a step."""

    def pin(self, batch: B, room: Room | None) -> None:
        """Bring each unique row of the batch up, initialising new ones, and write its address to the batch.

        It stays there until `unpin`. More new rows than there is room for raise CapacityError and pin nothing; a store
        that cannot tell without waiting for its device sets a fault, and the batch changes nothing.
        """

    def unpin(self, batch: B, dirty: bool) -> None:
        """End a pin. With `dirty`, the lines were written and must reach the tiers below in time."""

    def peek(self, batch: B) -> None:
        """Write the address of each unique row to the batch for reading alone.

        Unknown rows get initial values in memory of the batch; no tier changes.
        """


class FullStore(Store[B], Loadable, Protocol[B]):
    """Every row, at the top: a stack of one."""
