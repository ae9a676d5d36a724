"""What ids are: batches of given shapes, and endless traces whose batches follow from the number of the step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALPHA = 1.05  # of zipf laws
BATCHES = 8  # different ones, used in turn


def hashed(rows: Tensor) -> Tensor:
    """64-bit keys of row numbers, by splitmix64 (Steele et al. 2014): a bijection, so no two rows share one."""
    x = rows.numpy().astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((x ^ (x >> np.uint64(31))).view(np.int64))


@dataclass(frozen=True)
class Shape:
    """A step of rows alone: for each of `batch` samples a bag of each table's ids, all summed.

    rows: of one table. length: ids of a bag, of all tables or of each. alpha: the exponent of a zipf law, None for
    uniform ids. optimizer: a name of `contenders.OPTIMIZERS`. ragged: bags have 1 to 2 * length - 1 ids, at random.
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
    """Row numbers within their tables, feature by feature, and the gradient of the output.

    flat: int64 [ids]. offsets: int64 [tables * batch + 1], where bags begin. grad: float32 [batch, tables, dim].
    """

    flat: Tensor
    offsets: Tensor
    grad: Tensor

    @property
    def rows(self) -> Tensor:
        """int64 [batch, tables, length], of bags that all have one length."""
        samples, tables = self.grad.shape[:2]
        return self.flat.view(tables, samples, -1).transpose(0, 1).contiguous()

    def part(self, index: int, count: int) -> Batch:
        """One of `count` parts of the samples, with one id in a bag."""
        samples, tables = self.grad.shape[0] // count, self.grad.shape[1]
        mine = slice(index * samples, (index + 1) * samples)
        flat = self.flat.view(tables, -1)[:, mine].flatten()
        return Batch(flat, torch.arange(len(flat) + 1), self.grad[mine].contiguous())


def make_batches(shape: Shape, count: int = BATCHES) -> list[Batch]:
    """Ids as FBGEMM's benchmarks draw them: zipf(alpha) - 1 modulo the rows, then a random renumbering of the rows.

    Gradients are positive, so that no sum cancels and optimizers that divide by its size agree on every element.
    """
    random = np.random.default_rng(0)
    renumber = [random.permutation(shape.rows) for _ in shape.lengths]
    lengths = np.repeat(shape.lengths, shape.batch)
    batches = []
    for _ in range(count):
        bags = random.integers(1, 2 * lengths) if shape.ragged else lengths
        offsets = torch.from_numpy(np.concatenate([[0], bags.cumsum()]))
        ids = bags.reshape(shape.tables, shape.batch).sum(1)
        parts = [order[_drawn(random, shape, n)] for order, n in zip(renumber, ids, strict=True)]
        grad = random.uniform(0.5, 1.5, (shape.batch, shape.tables, shape.dim)).astype(np.float32)
        batches.append(Batch(torch.from_numpy(np.concatenate(parts)), offsets, torch.from_numpy(grad)))
    return batches


def _drawn(random: np.random.Generator, shape: Shape, ids: int) -> NDArray[np.int64]:
    if shape.alpha is None:
        return random.integers(0, shape.rows, ids)
    return (random.zipf(shape.alpha, ids) - 1) % shape.rows


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
