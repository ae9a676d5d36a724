"""Misses of a fully-associative cache on a trace of batches: LRU, the optimum, and the optimum of a look-ahead window.

All three serve batches of distinct rows under the same terms:

- A row that is in the cache when its batch starts is a hit; every other row of the batch is one miss, fetched once.
- While a batch runs all of its rows are resident, beyond the capacity if they are more: no row that it needs leaves.
- When it ends, the cache keeps at most `capacity` of the rows that were in it or were fetched. A row of the batch may
  leave at once, without having been in the cache between batches.

They differ in what is kept, by the next batch that needs a row and the last one that did:

- LRU keeps the latest used; of one batch, its hits before its misses, and these in their order.
- The optimum (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966) keeps the rows whose
  next use is nearest. A row costs the same whichever it is, so no choice of rows misses less.
- The windowed optimum sees the next `window` batches alone: rows that they need are kept, the nearest next use first,
  of equal ones the latest used, and the rest of the cache is LRU's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]

NEVER = 1 << 40  # the next use of a row that no batch needs again
LATER = 1 << 22  # more than the number of any batch


def misses(batches: Sequence[NDArray[np.integer]], capacity: int, window: int | None) -> I64:
    """[batches], the misses of each: LRU for `window=0`, the full optimum for None, else that of the window.

    batches: the rows of each, as integers, each row once. capacity: rows.
    """
    numbers, rows = np.unique(np.concatenate([np.asarray(batch, np.int64) for batch in batches]), return_inverse=True)
    numbered = np.split(rows, np.cumsum([len(batch) for batch in batches])[:-1])
    following = _next_uses(numbered, len(numbers))
    next_use = np.full(len(numbers), NEVER)
    recency = np.zeros(len(numbers), np.int64)  # larger is later
    cached = np.zeros(len(numbers), np.bool_)
    residents = np.empty(0, np.int64)
    counts = np.zeros(len(batches), np.int64)
    now = 0
    for number, batch in enumerate(numbered):
        hit = cached[batch]
        counts[number] = len(batch) - np.count_nonzero(hit)
        next_use[batch] = following[number]
        now += len(batch)
        recency[np.concatenate([batch[hit], batch[~hit]])] = now - np.arange(len(batch))
        residents = np.concatenate([residents, batch[~hit]])
        cached[batch] = True
        if len(residents) > capacity:
            seen = next_use[residents]
            known = seen <= (NEVER if window is None else number + window)
            # the nearest known use first, of equal ones and of unknown ones the latest used
            rank = (np.where(known, np.minimum(seen, LATER), LATER) << 40) - recency[residents]
            order = np.argpartition(rank, capacity) if capacity else np.arange(len(residents))
            cached[residents[order[capacity:]]] = False
            residents = residents[order[:capacity]]
    return counts


def _next_uses(batches: Sequence[I64], rows: int) -> list[I64]:
    """For each batch the number of the next one that needs each of its rows, or NEVER."""
    uses = np.full(rows, NEVER)
    result: list[I64] = []
    for number in range(len(batches) - 1, -1, -1):
        result.append(uses[batches[number]])
        uses[batches[number]] = number
    return result[::-1]
