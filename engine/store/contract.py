"""The contract of tiers and of stacks of tiers. Lines are passed by address and never copied through Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..row_format import Chunks, Keys, TableIds

Lines = NDArray[np.uint64]  # [n], the address of each line
Found = NDArray[np.bool_]  # [n]
HitCounts = NDArray[np.int64]  # [tables, 2], hits and misses

B = TypeVar("B", contravariant=True)  # the batches of a processor


class CapacityLimit(NamedTuple):
    """How many rows of an embedding may still be inserted."""

    embedding: str
    capacity: int
    left: Callable[[], int]


class TierBase(Protocol):
    """What the tiers of a stack have in common. A tier counts only rows with `updates > 0` as its rows."""

    def scan(self) -> Chunks:
        """Every row as (bucket, rows of `row_dtype`).

        Buckets ascend, and (table, key) ascends within a bucket. Chunks have a bounded size.
        """

    def erase(self, tables: TableIds, keys: Keys) -> None:
        """Erase rows, given once each, from this tier and the tiers below; missing rows are skipped.

        A row that a batch has pinned at this time is reset to its initial value and stays resident.
        """

    def flush(self) -> None:
        """Write every dirty line back to the last tier. A last tier on a disk makes its rows durable."""
        return

    def close(self) -> None:
        """Release memory and files. Does not flush."""

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        """The tiers that have the row, from the top, with its position there, `updates`, `last_step`. Changes nothing.

        `tier` is a name of `metrics`. `key`: its 64 bits, unsigned.
        """

    def metrics(self) -> dict[str, dict[str, float]]:
        """Counters by the tier's name, from the top down."""


class WritableTier(TierBase, Protocol):
    """The last tier of a stack. `tables` and `keys` hold no (table, key) twice; lines are in host memory."""

    def write(self, tables: TableIds, keys: Keys, lines: Lines) -> None:
        """Copy each line to its row, and insert rows that are new."""


class TableImage(Protocol):
    """The rows of a full table as of the creation of the image, read bucket by bucket while they change.

    No two calls run at the same time, except `sort` with `save_before_images` or `save_before_images_of`.
    """

    def save_before_images(self, batch: Any) -> None:
        """Save before-images of the lines of a pinned batch. Called before they are written."""

    def save_before_images_of(self, tables: TableIds, keys: Keys) -> None:
        """Save before-images of rows, given once each. Called before they are erased."""

    def list(self, bucket: int) -> None:
        """Begin to read a bucket; buckets are read in ascending order."""

    def sort(self) -> None:
        """Sort the rows of the bucket. Called between `list` and the first `next`."""

    def next(self, rows: NDArray[np.uint8]) -> int:
        """Pack as many rows as `rows` has room for, by (table, key), as `row_dtype`. Returns how many, 0 at the end."""

    @property
    def before_image_bytes(self) -> int:
        """The memory of the before-images, in bytes."""


class InMemoryTier(WritableTier, Protocol):
    """The last tier of a stack without a disk. It has every row in memory."""

    def image(self, top: Any) -> TableImage:
        """An image of the rows as they are now. `top`: the top of the stack, flushed."""


class Tier(WritableTier, Protocol):
    """The tier below a cache, in host memory or on a disk: the full table, RocksDB, or another cache."""

    @property
    def native(self) -> _core.Tier:
        """The native tier, for a CPU cache above it."""

    def read(self, tables: TableIds, keys: Keys, lines: Lines, touch: bool = True) -> Found:
        """Copy each row that the tier has to its line; lines of missing rows are unchanged.

        touch: whether the read counts as a use of the rows. Caches choose victims by uses.
        """


class NativeTier:
    """What a tier of the CPU leaves to its native one."""

    native: Any  # for a CPU cache above it

    def read(self, tables: TableIds, keys: Keys, lines: Lines, touch: bool = True) -> Found:
        found: Found = self.native.read(tables, keys, lines, touch)
        return found

    def write(self, tables: TableIds, keys: Keys, lines: Lines) -> None:
        self.native.write(tables, keys, lines)

    def erase(self, tables: TableIds, keys: Keys) -> None:
        self.native.erase(tables, keys)

    def hit_counts(self) -> HitCounts:
        counts: HitCounts = self.native.hit_counts().astype(np.int64).reshape(-1, 2)
        return counts


class ChangeSource(Protocol[B]):
    """The keys of rows that changed."""

    def note(self, batch: B) -> None:
        """Note the rows of a pinned batch. Called before their lines are written."""

    def names(self) -> tuple[TableIds, Keys]:
        """The keys of the rows that changed since the last `forget`, without some that were erased since; may wait."""

    def forget(self) -> None:
        """Forget the keys that `names` has just returned."""


class TopTier(TierBase, Protocol[B]):
    """The top of a stack, which serves steps. By default it has no tier below, and gains nothing from announcements."""

    def pin(self, batch: B, capacity_limit: CapacityLimit | None) -> None:
        """Fetch each unique row of the batch, initialise new rows, and write the addresses of all to the batch.

        A row stays at its address until `unpin`. If the batch has more new rows than `capacity_limit` allows this
        raises CapacityError and pins nothing. A store that would have to wait for its device to find this sets a fault,
        and the batch changes nothing.
        """

    def unpin(self, batch: B, dirty: bool) -> None:
        """End a pin. dirty: whether the lines were written, so that they have to be written back."""

    def announce(self, batch: B) -> None:
        """Announce the batch of a future step. Steps pin announced batches in the order of the announcements."""
        return

    def prefetch(self, batch: B) -> bool:
        """Fetch the rows of an announced batch and pin them. Returns False if the cache has no memory for them yet.

        `prefetch` and `announce` may run in another thread than the other methods.
        """
        return True

    def cancel(self) -> None:
        """Forget every announced batch but the pinned one. Forgotten batches may be announced again."""
        return

    def change_source(self) -> ChangeSource[B] | None:
        """The rows that change from now on; None for a store that `_core.ChangedRows` can observe."""
        return None

    def read(self, tables: TableIds, keys: Keys, lines: Lines, touch: bool = True) -> Found:
        """As `Tier.read`."""

    def hit_counts(self) -> HitCounts:
        """The hits and misses of each table, as in `metrics`; may wait for the device."""

    def peeked(self) -> tuple[int, int, int]:
        """Rows of `peek` without `trains`: that this tier had, one below had, and none had; may wait for the device."""

    def peek(self, batch: B, trains: bool = False) -> None:
        """Write the address of each unique row to the batch, for reading only.

        Unknown rows get initial values in memory of the batch; no tier changes.
        """


class FullStore(TopTier[B], InMemoryTier, Protocol[B]):
    """A full table as the top of a stack: the stack is this one tier."""
