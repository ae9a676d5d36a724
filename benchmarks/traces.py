"""Endless traces of ids: each batch is a pure function of the trace and the number of the step."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from workloads import hashed

ALPHA = 1.05


class Trace(Protocol):
    """Row numbers within `tables` tables of `rows` rows each."""

    tables: int
    rows: int
    batch: int

    def numbers(self, step: int) -> NDArray[np.int64]:
        """int64 [batch, tables]."""


def ids(trace: Trace, step: int) -> Tensor:
    """The ids of a batch, int64 [batch, tables]: 64-bit keys, so that rows of close numbers lie anywhere."""
    return hashed(torch.from_numpy(trace.numbers(step)))


class Zipf:
    """Rank k of 1 .. rows with a chance in proportion to k ** -1.05; ranks are rows in a random order."""

    def __init__(self, tables: int, rows: int, batch: int, seed: int = 0) -> None:
        self.tables, self.rows, self.batch, self.seed = tables, rows, batch, seed
        random = np.random.default_rng(seed)
        self._renumber = np.stack([random.permutation(rows).astype(np.int32) for _ in range(tables)])
        chances = np.cumsum(np.arange(1, rows + 1) ** -ALPHA)
        self._cumulative = chances / chances[-1]

    def numbers(self, step: int) -> NDArray[np.int64]:
        ranks = self.ranks(np.random.default_rng((self.seed, step)), step)
        return self._renumber[np.arange(self.tables), ranks].astype(np.int64)

    def ranks(self, random: np.random.Generator, step: int) -> NDArray[np.int64]:
        """int64 [batch, tables], from 0."""
        drawn = random.random((self.batch, self.tables), np.float64)
        return np.searchsorted(self._cumulative[:-1], drawn).astype(np.int64)


class LogUniform:
    """Rank k with a chance in proportion to 1 / k; ranks are rows in a fixed order.

    It keeps no table of ranks, so it takes no memory where memory is what is measured.
    """

    STRIDE = 2_654_435_761  # a prime larger than any number of rows here

    def __init__(self, tables: int, rows: int, batch: int, seed: int = 0) -> None:
        self.tables, self.rows, self.batch, self.seed = tables, rows, batch, seed

    def numbers(self, step: int) -> NDArray[np.int64]:
        drawn = np.random.default_rng((self.seed, step)).random((self.batch, self.tables))
        ranks = np.minimum(np.exp(drawn * math.log(self.rows)).astype(np.int64), self.rows) - 1
        numbers: NDArray[np.int64] = (ranks + np.arange(self.tables)) * self.STRIDE % self.rows
        return numbers


class WrappedZipf(Zipf):
    """As FBGEMM's benchmarks draw: ranks of an unbounded zipf modulo the rows, so about half of the ids are uniform."""

    def ranks(self, random: np.random.Generator, step: int) -> NDArray[np.int64]:
        return (random.zipf(ALPHA, (self.batch, self.tables)) - 1) % self.rows


class ScanMixed(Zipf):
    """Zipf in seven eighths of each batch; the rest reads the colder half of each table on, rank by rank, for ever.

    Every policy misses what the scan reads: with a fourth of the batch for it, Belady's optimum would have 24 % fewer
    misses than LRU in the setting of benchmarks/tier_lookahead.py.
    """

    def ranks(self, random: np.random.Generator, step: int) -> NDArray[np.int64]:
        ranks = super().ranks(random, step)
        scanned = self.batch // 8
        cold = self.rows // 2
        place = (step * scanned + np.arange(scanned)) % (self.rows - cold)
        ranks[self.batch - scanned :] = (cold + place)[:, None]
        return ranks


class Cycles:
    """One table of two endless cycles through rows in a random order, with no row twice in a batch.

    Four fifths of a batch are of the cycle through a fifth of the rows, the rest is of the cycle through the others. A
    cache of 40 % of the rows therefore hits up to four fifths, whatever the number of rows: between two uses of a row
    of the small cycle lie that cycle and a 16th of the other, a fourth of the rows.
    """

    tables = 1

    def __init__(self, rows: int, batch: int, seed: int = 0) -> None:
        self.rows, self.batch = rows, batch
        self._order = np.random.default_rng(seed).permutation(rows).astype(np.int32)

    def numbers(self, step: int) -> NDArray[np.int64]:
        small, few = self.rows // 5, self.batch * 4 // 5
        if few > small or self.batch - few > self.rows - small:
            raise ValueError(f"a batch of {self.batch} ids has rows twice, of {self.rows} rows")
        one = (step * few + np.arange(few)) % small
        other = small + (step * (self.batch - few) + np.arange(self.batch - few)) % (self.rows - small)
        return self._order[np.concatenate([one, other])].astype(np.int64)[:, None]
