"""Scanned rows as lines: what a scan of one table yields, another loads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .errors import StoreError
from .store.contract import Chunks, row_dtype
from .store.stack import Stack


def load_rows(stack: Stack, chunks: Chunks, width: int) -> int:
    """Write scanned rows to the last tier of an empty stack. Returns how many. Raises StoreError for another width."""
    count = 0
    for _, rows in chunks:
        if rows.dtype != row_dtype(width) or not rows.flags.c_contiguous:
            raise StoreError(f"rows of {rows.dtype} cannot be loaded into lines of {width} floats")
        stack.bottom.write(rows["table"].copy(), rows["key"].copy(), line_addresses(rows))
        count += len(rows)
    return count


def line_addresses(rows: NDArray[np.void]) -> NDArray[np.uint64]:
    """The lines within scanned rows [n]: values and record lie in them as in a line, behind table and key."""
    assert rows.dtype.fields is not None
    start = rows.ctypes.data + rows.dtype.fields["values"][1]
    return np.arange(len(rows), dtype=np.uint64) * np.uint64(rows.dtype.itemsize) + np.uint64(start)
