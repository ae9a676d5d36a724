"""How far down an LRU stack a row is when a batch uses it again, and whether a cache still has it.

A cache serves batches of distinct rows. The rows of a batch are found or missed as the batch begins, and they do not
push each other out while it runs. So a row's depth has two parts: the number of rows that later batches used, and the
number of rows that the same batch used, which tie with the row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine import _core
from ..engine._core import GROUP
from ..engine.row_format import BUCKETS

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

ROUNDS = 6  # iterations to the model's fixed point, which moves little after three
PER_ROW = 100  # loads of the tables below between one row of a group and the next
_LOADS = np.arange(80 * PER_ROW + 1) / PER_ROW  # rows of a group; at the end GROUP ways are never enough


class Uses(NamedTuple):
    """Uses of rows, in the order of batches: a batch uses each of its rows once. Arrays are [n]."""

    batch: I64  # ascending
    table: I64
    row: I64  # numbers of rows, from 0
    arrival: F64  # in [0, 1): the place in the order of ids, among the batch's rows that compete for a set


class Sample:
    """Uses of the rows whose hash is below a bound: a share `rate` of all rows, each with all of its uses.

    The bound sinks so that no more than `most` uses are held. Spatial sampling of stack distances: Waldspurger et al.,
    "Efficient MRC Construction with SHARDS", FAST 2015.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._halvings = 0
        self._parts: list[tuple[I64, NDArray[np.uint32], NDArray[np.uint64], F64]] = []
        self._size = 0
        self.batch_rows: list[int] = []  # rows of every batch, sampled or not

    @property
    def rate(self) -> float:
        return 0.5**self._halvings

    def add(self, batch: _core.Batch) -> None:
        hashes = hash_rows(batch.tables, batch.keys)
        buckets = (hashes >> np.uint64(58)).astype(np.int64)  # the rows of a batch are in the order of buckets
        places = np.arange(len(buckets)) - np.searchsorted(buckets, np.arange(BUCKETS))[buckets]
        arrivals = places / np.bincount(buckets, minlength=BUCKETS)[buckets]
        self._append((np.full(batch.unique, len(self.batch_rows)), batch.tables.copy(), hashes, arrivals))
        self.batch_rows.append(batch.unique)
        while self._size > self._most:
            parts, self._parts, self._size = self._parts, [], 0
            self._halvings += 1
            for part in parts:
                self._append(part)

    def uses(self) -> Uses:
        if not self._parts:
            return Uses(*(np.empty(0, np.int64),) * 3, np.empty(0))
        batches, tables, hashes, arrivals = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
        of = tables.astype(np.int64)
        _, by_hash = np.unique(hashes, return_inverse=True)
        _, rows = np.unique(by_hash * (of.max() + 1) + of, return_inverse=True)  # two tables may share a hash
        return Uses(batches, of, rows, arrivals)

    def _append(self, part: tuple[I64, NDArray[np.uint32], NDArray[np.uint64], F64]) -> None:
        if self._halvings:
            kept = part[2] >> np.uint64(64 - self._halvings) == 0
            part = (part[0][kept], part[1][kept], part[2][kept], part[3][kept])
        if len(part[0]):
            self._parts.append(part)
            self._size += len(part[0])


class Depths(NamedTuple):
    """The depth at which each use finds its row on the stack, in rows of the sample. Arrays are [n]."""

    before: I64  # the previous use of the same row, -1 for its first
    newer: I64  # distinct rows that batches between that use and this one used
    tied: I64  # other rows whose last use before this one was in the batch of that use


def depths(uses: Uses) -> Depths:
    """The depths of uses, exact for these uses."""
    count, batches = len(uses.batch), int(uses.batch[-1]) + 1 if len(uses.batch) else 0
    before = np.full(count, -1)
    order = np.argsort(uses.row, kind="stable")
    again = np.flatnonzero(np.diff(uses.row[order]) == 0)
    before[order[again + 1]] = order[again]
    newer, tied = np.zeros(count, np.int64), np.zeros(count, np.int64)
    last = np.zeros(batches + 1, np.int64)  # by batch: how many rows it was the last to use
    ends = np.searchsorted(uses.batch, np.arange(batches), side="right")
    begin = 0
    for batch, end in enumerate(ends):
        since = np.cumsum(last[batch::-1])[::-1]  # rows of that batch or a later one
        known = begin + np.flatnonzero(before[begin:end] >= 0)
        latest = uses.batch[before[known]]
        newer[known], tied[known] = since[latest + 1], last[latest] - 1
        last[:batch] -= np.bincount(latest, minlength=batch)[:batch]
        last[batch] = end - begin
        begin = end
    return Depths(before, newer, tied)


class Model:
    """The chances that uses hit a cache where a row replaces one of its group.

    Rows fall on groups at random, so those ahead of a row in its group are Poisson distributed about their number
    divided by the groups (Smith, "A comparative study of set associative memory mapping algorithms", 1978). Rows tie in
    random order. A batch with more rows than its group has ways keeps its hits and the first of its misses.
    """

    def __init__(self, uses: Uses, sample: Sample) -> None:
        found = depths(uses)
        self._again = np.flatnonzero(found.before >= 0)
        self._before = before = found.before[self._again]
        self._rows = np.array(sample.batch_rows, np.float64)[uses.batch[before]]
        self._newer = found.newer[self._again] / sample.rate
        # the share of the batch that is ahead: uniform over uses, the same at every size of the cache
        shares = np.arange(len(before)) * 0.6180339887498949 % 1
        self._ties = shares * found.tied[self._again] / sample.rate / self._rows
        self._arrival = uses.arrival[before]
        self._uses = len(uses.batch)

    def chances(self, lines: float) -> F64:
        """[n], for each use the chance that a cache of `lines` lines has the row.

        It has every row of the last batch: those that did not fit their group are in the overflow area.
        """
        groups = lines / GROUP
        load = self._rows / groups
        stays = _between(self._newer / groups + self._ties * _between(load, _AT_MOST), _FITS)
        stays[self._newer == 0] = 1.0
        chances = np.zeros(self._uses)
        chances[self._again] = stays
        if load.max(initial=0.0) < GROUP / 4:  # no batch fills a group
            return chances
        for _ in range(ROUNDS):  # what a batch keeps depends on what it hits, and its hits on what the last batch kept
            hit, rate = chances[self._before], float(chances.mean())
            kept = _between(load * (rate + (1 - rate) * self._arrival), _FITS)
            chances[self._again] = stays * (hit + (1 - hit) * kept)
            chances[self._again[self._newer == 0]] = 1.0
        return chances


def hash_rows(tables: NDArray[np.uint32], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The engine's hash of rows [n] (kernels/hash.h)."""
    x = keys ^ ((tables.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_RATIOS = np.hstack([np.ones((len(_LOADS), 1)), _LOADS[:, None] / np.arange(1, GROUP)])
# P(X = k) for k < GROUP, where X is Poisson distributed with each mean of `_LOADS`
_SHARES: F64 = np.exp(-_LOADS)[:, None] * np.cumprod(_RATIOS, axis=1)
# where a number of rows are ahead of a row in its group on average: the chance that fewer than GROUP are
_FITS = _SHARES.sum(1)
# where a batch has a number of rows for each group on average: the expected number that a group keeps
_AT_MOST = GROUP - _SHARES @ (GROUP - np.arange(GROUP))


def _between(load: F64, values: F64) -> F64:
    """The value [n] at each load >= 0, by a straight line between two of `_LOADS`; beyond them their last value.

    Loads are evenly spaced, so nothing is searched.
    """
    place = np.minimum(load * PER_ROW, len(values) - 1)
    below = place.astype(np.int32)
    step = np.diff(values, append=values[-1])
    return np.asarray(values[below] + (place - below) * step[below])
