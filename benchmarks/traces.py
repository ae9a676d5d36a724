"""Draw ids: batches with a given shape, and endless traces in which the step number determines the batch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALPHA = 1.05  # Zipf exponent
BATCHES = 8  # different batches, used in turn


def hash_rows(rows: Tensor) -> Tensor:
    """Map row numbers to 64-bit keys by splitmix64 (Steele et al. 2014), a bijection, so keys are distinct."""
    x = rows.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((x ^ (x >> np.uint64(31))).view(np.int64))


@dataclass(frozen=True)
class Shape:
    """The sizes for a step that only trains rows. Each of `batch` samples is a summed bag of ids per table.

    rows: rows per table. length: ids per bag, for all tables or for each. alpha: Zipf exponent; None for uniform ids.
    optimizer: a name in `contenders.OPTIMIZERS`. ragged: bag sizes are random, 1 to 2 * length - 1.
    """

    tables: int
    rows: int
    dim: int
    batch: int
    length: int | tuple[int, ...] = 1
    alpha: float | None = None
    optimizer: str = "adagrad"
    ragged: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self.length,) * self.tables if isinstance(self.length, int) else self.length


@dataclass(frozen=True)
class Batch:
    """One step's ids and output gradient.

    flat: row numbers within their table, ordered by table: int64 [ids]. offsets: bag boundaries in `flat`, int64
    [tables * batch + 1]. grad: float32 [batch, tables, dim].
    """

    flat: Tensor
    offsets: Tensor
    grad: Tensor

    @property
    def rows(self) -> Tensor:
        """Row numbers as int64 [batch, tables, length], if all bags are equally long."""
        samples, tables = self.grad.shape[:2]
        return self.flat.view(tables, samples, -1).transpose(0, 1).contiguous()

    def take_part(self, index: int, count: int) -> Batch:
        """Return part `index` when the samples are split into `count` equal parts. Needs one id per bag."""
        samples, tables = self.grad.shape[0] // count, self.grad.shape[1]
        part = slice(index * samples, (index + 1) * samples)
        flat = self.flat.view(tables, -1)[:, part].flatten()
        return Batch(flat, torch.arange(len(flat) + 1), self.grad[part].contiguous())


def make_batches(shape: Shape, count: int = BATCHES) -> list[Batch]:
    """Draw ids as FBGEMM's benchmarks do: (zipf(alpha) - 1) % rows, then a random renumbering of the rows.

    Gradients are positive, because sums that nearly cancel would round differently in optimizers that divide by them.
    """
    random = np.random.default_rng(0)
    renumber = [random.permutation(shape.rows) for _ in shape.lengths]
    lengths = np.repeat(shape.lengths, shape.batch)
    batches = []
    for _ in range(count):
        bags = random.integers(1, 2 * lengths) if shape.ragged else lengths
        offsets = torch.from_numpy(np.concatenate([[0], bags.cumsum()]))
        ids = bags.reshape(shape.tables, shape.batch).sum(1)
        parts = [order[_draw(random, shape, n)] for order, n in zip(renumber, ids, strict=True)]
        grad = random.uniform(0.5, 1.5, (shape.batch, shape.tables, shape.dim)).astype(np.float32)
        batches.append(Batch(torch.from_numpy(np.concatenate(parts)), offsets, torch.from_numpy(grad)))
    return batches


def _draw(random: np.random.Generator, shape: Shape, ids: int) -> NDArray[np.int64]:
    if shape.alpha is None:
        return random.integers(0, shape.rows, ids)
    return (random.zipf(shape.alpha, ids) - 1) % shape.rows


class Trace(Protocol):
    """An endless sequence of batches for `tables` tables with `rows` rows each."""

    tables: int
    rows: int
    batch: int

    def draw_rows(self, step: int) -> NDArray[np.int64]:
        """Return a step's row numbers: int64 [batch, tables]."""


def draw_ids(trace: Trace, step: int) -> Tensor:
    """Return a step's ids, int64 [batch, tables]: hashed, so that neighbouring rows are not close in a store."""
    return hash_rows(torch.from_numpy(trace.draw_rows(step)))


class Zipf:
    """Draws rank k (1 to rows) with probability proportional to k ** -1.05. Ranks map to rows in random order."""

    def __init__(self, tables: int, rows: int, batch: int, seed: int = 0) -> None:
        self.tables, self.rows, self.batch, self.seed = tables, rows, batch, seed
        random = np.random.default_rng(seed)
        self._renumber = np.stack([random.permutation(rows).astype(np.int32) for _ in range(tables)])
        weights = np.cumsum(np.arange(1, rows + 1) ** -ALPHA)
        self._cumulative = weights / weights[-1]

    def draw_rows(self, step: int) -> NDArray[np.int64]:
        ranks = self.draw_ranks(np.random.default_rng((self.seed, step)), step)
        return self._renumber[np.arange(self.tables), ranks].astype(np.int64)

    def draw_ranks(self, random: np.random.Generator, step: int) -> NDArray[np.int64]:
        """Draw ranks from 0: int64 [batch, tables]."""
        drawn = random.random((self.batch, self.tables), np.float64)
        return np.searchsorted(self._cumulative[:-1], drawn).astype(np.int64)


class LogUniform:
    """Draws rank k with probability proportional to 1 / k. Ranks map to rows in a fixed order.

    Ranks are not stored, so that this class can be used in benchmarks with limited memory.
    """

    STRIDE = 2_654_435_761  # a prime larger than any number of rows here

    def __init__(self, tables: int, rows: int, batch: int, seed: int = 0) -> None:
        self.tables, self.rows, self.batch, self.seed = tables, rows, batch, seed

    def draw_rows(self, step: int) -> NDArray[np.int64]:
        drawn = np.random.default_rng((self.seed, step)).random((self.batch, self.tables))
        ranks = np.minimum(np.exp(drawn * math.log(self.rows)).astype(np.int64), self.rows) - 1
        numbers: NDArray[np.int64] = (ranks + np.arange(self.tables)) * self.STRIDE % self.rows
        return numbers


class Cycles:
    """One table whose rows are in two cycles. Each cycle uses its rows in a fixed order, then starts again.

    The small cycle is a fifth of the rows, and supplies four fifths of each batch. The large cycle supplies the rest.
    Before a row in the small cycle is used again, a quarter of all rows are used. A cache for 40 % of the rows has a
    hit rate up to four fifths, for any number of rows. No row occurs twice in a batch.
    """

    tables = 1

    def __init__(self, rows: int, batch: int, seed: int = 0) -> None:
        self.rows, self.batch = rows, batch
        self._order = np.random.default_rng(seed).permutation(rows).astype(np.int32)

    def draw_rows(self, step: int) -> NDArray[np.int64]:
        small, num_small = self.rows // 5, self.batch * 4 // 5
        large, num_large = self.rows - small, self.batch - num_small
        if num_small > small or num_large > large:
            raise ValueError(f"a batch of {self.batch} ids has rows twice: {self.rows} rows are too few")
        small_ids = (step * num_small + np.arange(num_small)) % small
        large_ids = small + (step * num_large + np.arange(num_large)) % large
        return self._order[np.concatenate([small_ids, large_ids])].astype(np.int64)[:, None]
