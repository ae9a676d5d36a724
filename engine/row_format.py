"""The format of a stored row, in a scan and in a snapshot: its fields, its bucket and its key."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BUCKETS = 64
LAST_STEP = 2**32 - 2  # of a table: rows keep a step as u32, and the number of the step after it is needed

Tables = NDArray[np.uint32]  # [n]
Keys = NDArray[np.uint64]  # [n]
Rows = NDArray[np.void]  # [n] of `row_dtype`, or of KEY
Chunks = Iterator[tuple[int, Rows]]  # (bucket, rows of `row_dtype`), as `Tier.scan` yields them
Change = tuple[int, Rows, Rows]  # (bucket, new or changed rows, keys [n] of KEY of erased rows)

KEY = np.dtype([("table", "<u4"), ("key", "<u8")])  # identifies a row


def row_dtype(width: int) -> np.dtype[np.void]:
    """The NumPy dtype of one stored row, packed, as `scan` yields it and snapshots hold it.

    `width` is in floats, optimizer state included.
    """
    return np.dtype(
        [("table", "<u4"), ("key", "<u8"), ("values", "<f4", (width,)), ("updates", "<u4"), ("step", "<u4")]
    )


def keys_of(rows: Rows) -> Rows:
    """The keys [n] of KEY of rows [n]."""
    keys = np.empty(len(rows), KEY)
    keys["table"], keys["key"] = rows["table"], rows["key"]
    return keys
