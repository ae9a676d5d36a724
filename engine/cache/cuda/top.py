"""A cache on a device as the top of a stack, apart from how rows move between it and the tier below."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...ops.cuda.batch import Batch, lines_among, rows_of
from ...ops.cuda.faults import Faults
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...ops.cuda.step import initialise_lines
from ...row_format import Keys, Tables
from ...store.contract import Asked
from .cache import Cache
from .window import CudaWindow


class CacheTop:
    """The sets of a cache and the window of the batches that use them.

    `erase`, `where` and `metrics` are called in a turn of the window.
    """

    def __init__(self, layout: Layout, cache: Cache, faults: Faults) -> None:
        self._layout, self._faults = layout, faults
        self.cache = cache
        self.window = CudaWindow(layout.device, cache)

    def erase(self, tables: Tables, keys: Keys) -> tuple[Batch, Tensor]:
        """Take rows out of the sets. A row of a batch that is up stays, with its initial value.

        Returns the rows as a batch, and flags [size] bool of those that stay.
        """
        batch = rows_of(self._layout.device, tables, keys, self._faults.word)
        batch.lines = lines_among(self.window.up, batch, self._faults.word)
        kept = batch.lines != 0
        initialise_lines(batch, self._layout, kept)
        self.cache.erase(batch, kept)
        return batch, kept

    def where(self, table: int, key: int, staging: Staging) -> list[dict[str, Any]]:
        """`Level.where` of the cache alone. staging: memory that the row's record passes."""
        return self.cache.where(table, key, staging, self._faults.word, self.window.over)

    def metrics(self, asked: Asked) -> dict[str, float]:
        """Counters and sizes of the cache, with the hits and misses `asked` of the whole store."""
        hits, misses = asked.sum(0).tolist()
        return {**self.cache.metrics(), "hits": hits, "misses": misses}

    def close(self) -> None:
        """Release the device memory of the sets, once both streams are done with it."""
        with self.window.turn():
            self.window.close()
            self._faults.seen(wait=True)
            self.cache.close()
