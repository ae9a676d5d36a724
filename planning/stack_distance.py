"""Computes how deep a row is in an LRU stack when a batch uses it again, and the chance that a cache still has it.

A row's depth in the LRU stack is the number of distinct rows that were used since the row's last use. An LRU cache for
n rows holds a row if the row's depth is less than n. One pass over a trace finds the depth at every use. The depths
give the hit rate for every cache size (Mattson's stack algorithm).

The engine looks up a whole batch before it replaces rows, so rows of one batch do not evict each other. A row's depth
counts the rows that later batches used, and the tied rows. Two rows are tied if both were last used in the same batch.
The cache is set-associative, so the depth alone does not decide a hit. `HitModel` computes hit probabilities.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..engine import _core
from ..engine._core import GROUP_WAYS
from ..engine.row_format import BUCKETS

I64 = NDArray[np.int64]
F64 = NDArray[np.float64]

NUM_ITERATIONS = 6  # how often `HitModel` iterates towards a fixed point; after three iterations, little changes
LOADS_PER_ROW = 100  # `_LOADS` increases in steps of 1 / LOADS_PER_ROW
_LOADS = np.arange(80 * LOADS_PER_ROW + 1) / LOADS_PER_ROW  # mean rows per group; at 80, almost all groups are full


class Uses(NamedTuple):
    """The uses of rows, sorted by batch. A batch uses each of its rows once. Arrays are [n]."""

    batch: I64  # ascending
    table: I64
    row: I64  # row numbers, from 0
    arrival: F64  # in [0, 1): the row's relative position among the batch's rows in the same bucket


class Sample:
    """A spatial sample: it keeps every use of the sampled rows. `rate` is the fraction of rows that are sampled.

    A row is sampled if its hash is below a bound. Whenever the sample exceeds `max_uses` uses, the bound is halved. The
    method is from Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 2015.
    """

    def __init__(self, max_uses: int) -> None:
        self._max_uses = max_uses
        self._halvings = 0
        self._parts: list[tuple[I64, NDArray[np.uint32], NDArray[np.uint64], F64]] = []
        self._size = 0
        self.batch_rows: list[int] = []  # how many rows each batch has, sampled or not

    @property
    def rate(self) -> float:
        return 0.5**self._halvings

    def add(self, batch: _core.Batch) -> None:
        hashes = hash_rows(batch.tables, batch.keys)
        buckets = (hashes >> np.uint64(58)).astype(np.int64)  # a batch's rows are sorted by bucket
        positions = np.arange(len(buckets)) - np.searchsorted(buckets, np.arange(BUCKETS))[buckets]
        arrivals = positions / np.bincount(buckets, minlength=BUCKETS)[buckets]
        self._append((np.full(batch.num_unique, len(self.batch_rows)), batch.tables.copy(), hashes, arrivals))
        self.batch_rows.append(batch.num_unique)
        while self._size > self._max_uses:
            parts, self._parts, self._size = self._parts, [], 0
            self._halvings += 1
            for part in parts:
                self._append(part)

    def collect_uses(self) -> Uses:
        if not self._parts:
            return Uses(*(np.empty(0, np.int64),) * 3, np.empty(0))
        batches, tables, hashes, arrivals = (np.concatenate(arrays) for arrays in zip(*self._parts, strict=True))
        tables = tables.astype(np.int64)
        _, by_hash = np.unique(hashes, return_inverse=True)
        _, rows = np.unique(by_hash * (tables.max() + 1) + tables, return_inverse=True)  # rows may share a hash
        return Uses(batches, tables, rows, arrivals)

    def _append(self, part: tuple[I64, NDArray[np.uint32], NDArray[np.uint64], F64]) -> None:
        if self._halvings:
            mask = part[2] >> np.uint64(64 - self._halvings) == 0
            part = (part[0][mask], part[1][mask], part[2][mask], part[3][mask])
        if len(part[0]):
            self._parts.append(part)
            self._size += len(part[0])


class Depths(NamedTuple):
    """For each use of a row, the row's depth in the LRU stack, counted in sampled rows. Arrays are [n]."""

    previous: I64  # the index of the same row's previous use, or -1
    num_newer: I64  # distinct rows used between the row's previous use and this use
    num_tied: I64  # other rows that were last used in the same batch as this row


def compute_depths(uses: Uses) -> Depths:
    """Compute the depth at each use of a row. The depths are exact and count only the rows in `uses`."""
    count, batches = len(uses.batch), int(uses.batch[-1]) + 1 if len(uses.batch) else 0
    previous = np.full(count, -1)
    order = np.argsort(uses.row, kind="stable")
    repeats = np.flatnonzero(np.diff(uses.row[order]) == 0)
    previous[order[repeats + 1]] = order[repeats]
    num_newer, num_tied = np.zeros(count, np.int64), np.zeros(count, np.int64)
    last_counts = np.zeros(batches + 1, np.int64)  # for each batch, how many rows were last used by this batch
    ends = np.searchsorted(uses.batch, np.arange(batches), side="right")
    begin = 0
    for batch, end in enumerate(ends):
        num_recent = np.cumsum(last_counts[batch::-1])[::-1]  # [i]: how many rows were last used in batch i or later
        repeated = begin + np.flatnonzero(previous[begin:end] >= 0)
        latest = uses.batch[previous[repeated]]
        num_newer[repeated], num_tied[repeated] = num_recent[latest + 1], last_counts[latest] - 1
        last_counts[:batch] -= np.bincount(latest, minlength=batch)[:batch]
        last_counts[batch] = end - begin
        begin = end
    return Depths(previous, num_newer, num_tied)


class HitModel:
    """Predicts each use's hit probability, for a set-associative cache: a new row replaces a row of its own group.

    Each row belongs to one random group. A group holds GROUP_WAYS rows. For a given row, count the rows in its group
    that were used more recently. This count is Poisson distributed. Its mean is the row's depth in the LRU stack,
    divided by the number of groups (Smith, "A comparative study of set associative memory mapping algorithms", 1978).
    If a batch was the last to use several rows, their order is random. A batch may use more rows of a group than fit.
    Then the batch's cached rows stay cached. Its missing rows fill the rest of the group in the batch's order.
    """

    def __init__(self, uses: Uses, sample: Sample) -> None:
        stack = compute_depths(uses)
        self._repeated = np.flatnonzero(stack.previous >= 0)
        self._previous = previous = stack.previous[self._repeated]
        self._batch_rows = np.array(sample.batch_rows, np.float64)[uses.batch[previous]]
        self._newer = stack.num_newer[self._repeated] / sample.rate
        # It is unknown how many tied rows are above a row. Assume fractions that are spread evenly over [0, 1).
        fractions = np.arange(len(previous)) * 0.6180339887498949 % 1
        self._ties = fractions * stack.num_tied[self._repeated] / sample.rate / self._batch_rows
        self._arrivals = uses.arrival[previous]
        self._num_uses = len(uses.batch)

    def compute_hit_probabilities(self, num_lines: float) -> F64:
        """Return the hit probability of each use, [n], in a cache for `num_lines` rows.

        A row that the previous batch used is a hit: if it did not fit into its group, it is in the overflow area.
        """
        groups = num_lines / GROUP_WAYS
        load = self._batch_rows / groups
        p_fits = _interpolate(self._newer / groups + self._ties * _interpolate(load, _EXPECTED_KEPT), _P_FITS)
        p_fits[self._newer == 0] = 1.0
        probabilities = np.zeros(self._num_uses)
        probabilities[self._repeated] = p_fits
        if load.max(initial=0.0) < GROUP_WAYS / 4:  # no batch is large enough to fill a group
            return probabilities
        # A batch's hits decide which of its rows stay cached. The cached rows then decide the hits of later batches.
        for _ in range(NUM_ITERATIONS):
            hits, hit_rate = probabilities[self._previous], float(probabilities.mean())
            p_kept = _interpolate(load * (hit_rate + (1 - hit_rate) * self._arrivals), _P_FITS)
            probabilities[self._repeated] = p_fits * (hits + (1 - hits) * p_kept)
            probabilities[self._repeated[self._newer == 0]] = 1.0
        return probabilities


def hash_rows(tables: NDArray[np.uint32], keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the engine's hash (kernels/hash.h) of rows [n]."""
    hashes = keys ^ ((tables.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


_RATIOS = np.hstack([np.ones((len(_LOADS), 1)), _LOADS[:, None] / np.arange(1, GROUP_WAYS)])
# P(X = k) for k < GROUP_WAYS, where X is Poisson distributed, for each mean in `_LOADS`
_POISSON: F64 = np.exp(-_LOADS)[:, None] * np.cumprod(_RATIOS, axis=1)
# P(X < GROUP_WAYS): a row is still cached if fewer than GROUP_WAYS rows are above it in its group
_P_FITS = _POISSON.sum(1)
# E(min(X, GROUP_WAYS)): the expected number of a batch's rows that a group keeps
_EXPECTED_KEPT = GROUP_WAYS - _POISSON @ (GROUP_WAYS - np.arange(GROUP_WAYS))


def _interpolate(load: F64, values: F64) -> F64:
    """Interpolate linearly between `values` [n] at the loads `_LOADS`. For a higher load, use the last value."""
    position = np.minimum(load * LOADS_PER_ROW, len(values) - 1)  # loads are evenly spaced, so this needs no search
    below = position.astype(np.int32)
    step = np.diff(values, append=values[-1])
    return np.asarray(values[below] + (position - below) * step[below])
