"""What the steps of a trace would send between ranks, and how evenly the rows fall on them."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .. import _core
from ..errors import OptionError

I64 = NDArray[np.int64]
WIRE = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}  # bytes of a float that travels


class RankPlan:
    """The exchange of a trace's steps, each batch given to ranks in equal consecutive parts, as torch.chunk divides it.

    `size`: the ranks. `batches`: those that are counted. `lookups`: int64 [size], the ids of each rank but padding.
    `ids`: int64 [size, size]; rank i asks owner j for ids[i, j] rows, each distinct row of a step once. `rows`: int64
    [size], the rows that each owner pins, those of several ranks' parts once a step. All are sums over the batches,
    and exact.
    """

    def __init__(self, size: int, dim: int, tables: int, padding: int | None) -> None:
        self.size, self.dim, self.batches = size, dim, 0
        self.lookups, self.ids, self.rows = (np.zeros(shape, np.int64) for shape in (size, (size, size), size))
        self._tables, self._padding = tables, padding

    def add(
        self, batch: _core.Batch, keys: NDArray[np.uint64], tables: NDArray[np.uint32] | None, samples: int
    ) -> None:
        """Count a batch of `samples` equal runs of keys [n]. tables [n]: the table of each key, if they are given."""
        self.batches += 1
        self.rows += self._owned(batch)
        step = -(-samples // self.size) * (len(keys) // samples) if samples else 0
        for rank in range(self.size):
            mine = slice(rank * step, (rank + 1) * step)
            part = _core.Batch(
                [(keys[mine], None if tables is None else tables[mine], None)], self._tables, self._padding
            )
            self.lookups[rank] += len(part.occurrences)
            self.ids[rank] += self._owned(part)

    def bytes(self, rows: torch.dtype = torch.float32, grads: torch.dtype = torch.float32) -> I64:
        """int64 [size, size]: the bytes that rank i sends to rank j for ids, rows and their gradients.

        rows, grads: as of `World`. Headers, at most 1 KiB for a pair and step, are left out. Raises OptionError.
        """
        for name, dtype in (("rows", rows), ("grads", grads)):
            if dtype not in WIRE:
                raise OptionError(f"{name}={dtype!r}: give torch.float32, bfloat16 or float16")
        asked = self.ids * (1 - np.eye(self.size, dtype=np.int64))  # a rank sends itself nothing
        ids = 8 if self._tables == 1 else 16
        result: I64 = asked * (ids + WIRE[grads] * self.dim) + asked.T * (WIRE[rows] * self.dim)
        return result

    @property
    def dedup(self) -> float:
        """Ids looked up for each id that a rank asks for."""
        return float(self.lookups.sum() / max(self.ids.sum(), 1))

    @property
    def skew(self) -> float:
        """The load of the most loaded owner over the mean load, which is the rows that ranks ask an owner for."""
        asked = self.ids.sum(0)
        return float(asked.max() / max(asked.mean(), 1e-9))

    def __repr__(self) -> str:
        steps = max(self.batches, 1)
        asked, sent = self.ids.sum() / steps, self.bytes() / steps
        return "\n".join(
            [
                f"{self.size} ranks ask for {asked:.0f} rows a step, {self.dedup:.2f} ids each; owners pin "
                f"{self.rows.sum() / steps:.0f}, the most loaded {self.skew:.2f} times the mean",
                f"{sent.sum() / 1e6:.3f} MB travel a step in float32, the most of a rank {sent.sum(1).max() / 1e6:.3f} "
                f"MB, of a pair {sent.max() / 1e6:.3f} MB",
            ]
        )

    def _owned(self, batch: _core.Batch) -> I64:
        """int64 [size]: the unique rows of a batch by their owner."""
        return np.bincount(_core.owners(batch.tables, batch.keys, self.size), minlength=self.size)
