"""The interfaces of tiers and of stacks of tiers. Python passes lines by address and never copies them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from .. import _core
from ..row_format import Chunks, Keys, TableIds

Lines = NDArray[np.uint64]  # [n], line addresses
HitMask = NDArray[np.bool_]  # [n], True for rows that the tier has
HitCounts = NDArray[np.int64]  # [tables, 2], hits and misses

B = TypeVar("B", contravariant=True)  # the batch type of the CPU or the GPU


class CapacityLimit(NamedTuple):
    """How many more rows an embedding may insert."""

    embedding: str
    capacity: int
    count_free_rows: Callable[[], int]


class TierBase(Protocol):
    """The methods that all tiers share. A row that was never written (`updates` = 0) does not count."""

    def scan(self) -> Chunks:
        """Yield all rows in small chunks, as (bucket, rows of `row_dtype`), sorted by bucket, then by (table, key)."""

    def erase(self, tables: TableIds, keys: Keys) -> None:
        """Erase distinct rows in this tier and below; skip missing rows. Pinned rows stay, but get initial values."""

    def flush(self) -> None:
        """Write all dirty lines back to the last tier. A last tier on disk also makes its rows durable."""
        return

    def close(self) -> None:
        """Release memory and files. Does not flush."""

    def locate(self, table: int, key: int) -> list[dict[str, Any]]:
        """Return one entry for each tier with the row, top tier first. Changes nothing.

        An entry has the tier's name in `metrics`, the row's position, `updates` and `last_step`. `key` is unsigned.
        """

    def metrics(self) -> dict[str, dict[str, float]]:
        """Return the counters of each tier by its name, top tier first."""


class WritableTier(TierBase, Protocol):
    """A tier that rows can be written to. The rows of one call are distinct, and their lines are in host memory."""

    def write(self, tables: TableIds, keys: Keys, lines: Lines) -> None:
        """Copy each line to its row, and insert new rows."""


class TableImage(Protocol):
    """A full table's rows as they were when the image was made. Buckets are read one by one while the table changes.

    Calls must not overlap, except that `sort_bucket` may run while before-images are saved.
    """

    def save_before_images(self, batch: Any) -> None:
        """Save before-images of a pinned batch's rows, before these rows are written."""

    def save_before_images_by_key(self, tables: TableIds, keys: Keys) -> None:
        """Save before-images of distinct rows, before these rows are erased."""

    def open_bucket(self, bucket: int) -> None:
        """Start to read a bucket. Read buckets in ascending order."""

    def sort_bucket(self) -> None:
        """Sort the bucket's rows. Call `sort_bucket` between `open_bucket` and the first `read_next`."""

    def read_next(self, rows: NDArray[np.uint8]) -> int:
        """Fill `rows` with the next packed rows (`row_dtype`), sorted by (table, key). Returns the row count, or 0."""

    @property
    def before_image_bytes(self) -> int:
        """Memory that the before-images use, in bytes."""


class InMemoryTier(WritableTier, Protocol):
    """A last tier that keeps all rows in memory, so that an image of them can be made."""

    def make_image(self, top_tier: Any) -> TableImage:
        """Return an image of the current rows. First call `flush` of the stack's top tier, `top_tier`."""


class Tier(WritableTier, Protocol):
    """A tier that can be below a cache: the full table, RocksDB, or another cache."""

    @property
    def native(self) -> _core.Tier:
        """The tier's C++ object, for a CPU cache above this tier."""

    def read(self, tables: TableIds, keys: Keys, lines: Lines, should_touch: bool = True) -> HitMask:
        """Copy rows to their lines, except rows that the tier lacks. should_touch: caches record the use."""


class NativeTier:
    """Base of CPU tiers: forwards calls to the C++ tier `native`."""

    native: Any

    def read(self, tables: TableIds, keys: Keys, lines: Lines, should_touch: bool = True) -> HitMask:
        return self.native.read(tables, keys, lines, should_touch)

    def write(self, tables: TableIds, keys: Keys, lines: Lines) -> None:
        self.native.write(tables, keys, lines)

    def erase(self, tables: TableIds, keys: Keys) -> None:
        self.native.erase(tables, keys)

    def hit_counts(self) -> HitCounts:
        return self.native.hit_counts().astype(np.int64).reshape(-1, 2)


class ChangeSource(Protocol[B]):
    """Collects the keys of rows that change."""

    def add_batch(self, batch: B) -> None:
        """Record a pinned batch's rows, after these rows are written."""

    def list_keys(self) -> tuple[TableIds, Keys]:
        """Return the keys of rows changed since the last `forget`. Erased rows may be missing. May wait."""

    def forget(self) -> None:
        """Forget the keys that the last call of `list_keys` returned."""

    @property
    def bytes(self) -> int:
        """The host memory that the keys take."""


class TopTier(TierBase, Protocol[B]):
    """The top tier serves steps. The default methods suit a store without a tier below; announcements do nothing."""

    def pin(self, batch: B, capacity_limit: CapacityLimit | None) -> None:
        """Make the batch's unique rows resident, initialise new ones, and write all line addresses to the batch.

        A row stays at its address until `unpin`. Raises CapacityError and pins nothing if the batch has more new rows
        than `capacity_limit` allows. If a GPU store cannot count new rows without waiting, it sets a fault instead.
        """

    def unpin(self, batch: B, is_dirty: bool) -> None:
        """Release the pinned batch. is_dirty: True if the batch's lines were written and must be written back."""

    def announce(self, batch: B) -> None:
        """Announce a future step's batch. Steps must pin announced batches in order of announcement."""
        return

    def prefetch(self, batch: B) -> bool:
        """Fetch and pin an announced batch. False if memory is short. May run in any thread, like `announce`."""
        return True

    def cancel_announced(self) -> None:
        """Forget all announced batches except the pinned one. Forgotten batches may be announced again."""
        return

    def start_change_source(self) -> ChangeSource[B] | None:
        """Start to collect changed rows. Returns None if `_core.ChangedRows` can collect batches' rows."""
        return None

    def read(self, tables: TableIds, keys: Keys, lines: Lines, should_touch: bool = True) -> HitMask:
        """Copy rows to lines, as in `Tier.read`."""

    def hit_counts(self) -> HitCounts:
        """Return the hits and misses of each table, as in `metrics`. May wait for the device."""

    def peek_counts(self) -> tuple[int, int, int]:
        """Return how many rows `peek(is_training=False)` found here, in lower tiers and in no tier. May wait."""

    def peek(self, batch: B, is_training: bool = False) -> None:
        """Write row addresses to the batch, for reading only. Unknown rows get initial values in the batch's memory.

        is_training: True in a training step; `peek_counts` does not count these rows.
        """


class FullTier(TopTier[B], InMemoryTier, Protocol[B]):
    """A full table that is the whole stack: top tier and last tier in one."""
