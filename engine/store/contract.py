"""The contract that every tier and every stack of tiers keeps. Lines are addressed, never copied through Python."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .._core import Batch

Tables = NDArray[np.uint32]  # [n]
Keys = NDArray[np.uint64]  # [n]
Lines = NDArray[np.uint64]  # [n], the address of a line each
Found = NDArray[np.bool_]  # [n]

Chunks = Iterator[tuple[int, NDArray[np.void]]]  # (bucket, rows of `row_dtype`), as `Tier.scan` yields them

BUCKETS = 64


def row_dtype(width: int) -> np.dtype[np.void]:
    """One stored row as NumPy sees it, packed: what `scan` yields and what snapshots hold.

    `width` is in floats, optimizer state included.
    """
    return np.dtype(
        [("table", "<u4"), ("key", "<u8"), ("values", "<f4", (width,)), ("updates", "<u4"), ("step", "<u4")]
    )


class Tier(Protocol):
    """Something that holds rows: the full table, RocksDB, or a cache over one of them.

    `tables` and `keys` hold no (table, key) twice. Only rows with `updates > 0` count as held.
    """

    def read(self, tables: Tables, keys: Keys, lines: Lines) -> Found:
        """Copy each held row to its line; a line whose row is not held is left as it was."""

    def write(self, tables: Tables, keys: Keys, lines: Lines) -> None:
        """Copy each line to its row, inserting it where it is new."""

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


class Store(Tier, Protocol):
    """The top of a stack: serves a step."""

    def pin(self, batch: Batch, room: int | None) -> None:
        """Bring each unique row of the batch up, initialising new ones, and write its address to the batch.

        It stays there until `unpin`. More than `room` new rows, where it is not None, raise CapacityError and pin
        nothing.
        """

    def unpin(self, batch: Batch, dirty: bool) -> None:
        """End a pin. With `dirty`, the lines were written and must reach the tiers below in time."""

    def peek(self, batch: Batch) -> None:
        """Write the address of each unique row to the batch for reading alone.

        Unknown rows get initial values in memory of the batch; no tier changes.
        """
