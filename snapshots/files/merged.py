"""The rows of a bucket that lies in several files, in one order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ...engine import _core
from ...engine.row_format import Rows


def merged(parts: Sequence[Iterator[Rows]]) -> Iterator[Rows]:
    """The rows of `parts` in order of (table, key). In each they strictly ascend, and none is in two.

    Two chunks of each part are held at a time. A chunk that comes out is of no more rows than those that are held.
    """
    held = [_Held(part) for part in parts]
    while len(held := [part for part in held if len(part.rows)]) > 1:
        dtype = held[0].rows.dtype
        more = [part.coming is not None for part in held]
        rows, counts = _core.merge_parts([part.rows.view(np.uint8) for part in held], more, dtype.itemsize)
        for part, count in zip(held, counts, strict=True):
            part.drop(count)
        yield rows.view(dtype)
    for part in held:
        while len(part.rows):
            yield part.drop(len(part.rows))


class _Held:
    """A stream of rows, of which it holds those of a chunk that were not taken yet, and the chunk that comes after it.

    At the end `rows` has none, and `coming` is None.
    """

    def __init__(self, chunks: Iterator[Rows]) -> None:
        self._chunks = (rows for rows in chunks if len(rows))
        self.rows: Rows = next(self._chunks, np.empty(0, np.void))
        self.coming = next(self._chunks, None)

    def drop(self, count: int) -> Rows:
        """Take the first `count` held rows."""
        taken, self.rows = self.rows[:count], self.rows[count:]
        if not len(self.rows) and self.coming is not None:
            self.rows, self.coming = self.coming, next(self._chunks, None)
        return taken
