"""What a table must hold, as NumPy arrays over a few rows: the oracle of the state machine."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from support import naive
from support.embeddings import DIM, TABLES
from support.rows import SPECIAL_KEYS
from tierbed.engine.optim.row_optimizer import RowOptimizer
from tierbed.engine.options.initializers import as_arrays, make_table_options
from tierbed.engine.row_format import row_dtype

Places = NDArray[np.int64]  # [n], rows of the universe

# every row that a test may touch, (table, key) of places 0 to N - 1
KEYS = np.array([*SPECIAL_KEYS, *range(20, 120)], np.uint64)
NUMBERS = np.repeat(np.arange(len(TABLES), dtype=np.uint32), len(KEYS))
KEYS = np.tile(KEYS, len(TABLES))
N = len(KEYS)
HASHES = np.array([naive.hash_row(int(t), int(k)) for t, k in zip(NUMBERS, KEYS, strict=True)], np.uint64)
ORDER = np.lexsort((KEYS, NUMBERS, HASHES >> np.uint64(58)))


@cache
def initial_rows() -> NDArray[np.float32]:
    """[N, DIM]"""
    tables = [make_table_options(table) for table in TABLES]
    return naive.initial_rows(NUMBERS, KEYS, 0, [DIM], *as_arrays(tables, [DIM]))


@dataclass(frozen=True)
class Policy:
    """The options of the life of rows."""

    capacity: int | None = None
    eviction: str = "none"
    admission: float | None = None
    ttl_steps: int | None = None


class Full(Exception):
    """The rows do not fit; nothing changed."""


class Model:
    """Rows of the universe under an optimizer; one that was never written has its initial values and `updates` 0."""

    def __init__(self, optimizer: RowOptimizer) -> None:
        self.optimizer = optimizer
        state = np.repeat(np.array(optimizer.initial, np.float32), optimizer.row_state(DIM).widths)
        self.initial = np.concatenate([initial_rows(), np.tile(state, (N, 1))], 1)
        self.values = self.initial.copy()
        self.updates, self.last = np.zeros(N, np.uint32), np.zeros(N, np.uint32)
        self.step = 0

    def open(self, policy: Policy) -> None:
        """A store was opened on these rows. They stay, whatever the capacity is, where none makes room."""
        self.policy = policy
        self.sights = np.zeros(N, np.int64)
        self.limit = policy.capacity
        if self.limit is not None and policy.eviction in ("none", "ttl"):
            self.limit = max(self.limit, self.rows)

    def copy(self) -> Model:
        return copy.deepcopy(self, {id(self.optimizer): self.optimizer})

    @property
    def rows(self) -> int:
        return int((self.updates > 0).sum())

    def read(self, places: Places) -> NDArray[np.float32]:
        """What a lookup of `places` returns, [n, DIM]."""
        values = self.values[places]
        if self.step:
            self._catch_up(values, places)
        return values[:, :DIM]

    def admit(self, places: Places, training: bool) -> NDArray[np.bool_]:
        """Before a write of `places`: which of the N rows it refuses; those that must make room leave. Raises Full."""
        asked, now = np.isin(np.arange(N), places), self.step + training
        new = asked & (self.updates == 0)
        refused = new & ~self._kept(now) if training else np.zeros(N, np.bool_)
        fresh = int((new & ~refused).sum())
        excess = 0 if self.limit is None or not fresh else self.rows + fresh - self.limit
        if excess > 0:
            self.forget(self._lowest(excess, asked, now))
        return refused

    def train(self, places: Places, grads: NDArray[np.float32], refused: NDArray[np.bool_]) -> None:
        """One step of admitted rows; grads [n, DIM]."""
        self.step += 1
        unique = naive.unique(KEYS[places], NUMBERS[places])
        rows = places[unique.occurrences[unique.offsets[:-1]]]
        sums = naive.reduce(grads, unique.occurrences, unique.offsets)
        values, updates, last = self.values[rows], self.updates[rows], self.last[rows]
        hyper = self.optimizer.hyper(self.step)
        naive.update(values, updates, sums, self.optimizer.rule, hyper, self.step, last)
        kept = ~refused[rows]
        rows = rows[kept]
        self.values[rows], self.updates[rows], self.last[rows] = values[kept], updates[kept], self.step
        self.sights[refused] += 1
        life = self.policy.ttl_steps
        if life is not None and self.policy.eviction != "ttl" and self.step % max(1, life // 16) == 0:
            self.forget(np.flatnonzero((self.updates > 0) & (self._ages(self.step) > life)))

    def put(self, places: Places, rows: NDArray[np.float32]) -> None:
        """Of a place given twice the last row wins, and it counts as one write."""
        values = self.values[places]
        if self.step:
            self._catch_up(values, places)
        values[:, :DIM] = rows
        self.updates[np.unique(places)] += np.uint32(1)
        for place, value in zip(places, values, strict=True):
            self.values[place] = value
        self.last[places] = self.step

    def forget(self, places: Places) -> int:
        """Rows that leave are as if they had never been; how many existed."""
        count = int((self.updates[np.unique(places)] > 0).sum())
        self.values[places], self.updates[places], self.last[places] = self.initial[places], 0, 0
        return count

    def contents(self) -> NDArray[np.void]:
        """Every written row, as a scan yields it."""
        stored = ORDER[self.updates[ORDER] > 0]
        rows = np.empty(len(stored), row_dtype(self.values.shape[1]))
        rows["table"], rows["key"], rows["values"] = NUMBERS[stored], KEYS[stored], self.values[stored]
        rows["updates"], rows["step"] = self.updates[stored], self.last[stored]
        return rows

    def _catch_up(self, values: NDArray[np.float32], places: Places) -> None:
        hyper = self.optimizer.hyper(self.step + 1)
        updates, last = self.updates[places], self.last[places]
        naive.catch_up(values, updates, last, DIM, self.optimizer.rule, hyper, self.step + 1)

    def _ages(self, now: int) -> NDArray[np.int64]:
        return now - self.last.astype(np.int64)

    def _kept(self, now: int) -> NDArray[np.bool_]:
        """[N] whether a training step would keep the row, were it new."""
        rule = self.policy.admission
        if rule is None:
            return np.ones(N, np.bool_)
        if isinstance(rule, int):
            return self.sights + 1 >= rule
        step = naive.hash_row(now, 0)
        draws = [naive.hash_row(int(t), int(h) ^ step) >> 11 for t, h in zip(NUMBERS, HASHES, strict=True)]
        return np.array(draws) / 2**53 < rule

    def _lowest(self, needed: int, asked: NDArray[np.bool_], now: int) -> Places:
        """The rows that make room: at least `needed` rows that the batch did not ask for. Raises Full."""
        updates, ages = self.updates.astype(np.float64), self._ages(now)
        ranks = {
            "lru": self.last,
            "ttl": self.last,
            "lfu": updates * 2.0**32 + self.last,
            "distance_lfu": updates / (ages + 1.0) ** 2,
        }
        free = (self.updates > 0) & ~asked & (self.policy.eviction != "none")
        if self.policy.eviction == "ttl":
            free &= ages > self.policy.ttl_steps
        places = np.flatnonzero(free)
        if len(places) < needed:
            raise Full
        assert self.limit is not None
        order = np.lexsort((HASHES[places], NUMBERS[places], ranks[self.policy.eviction][places]))
        return places[order[: max(needed, self.limit // 64)]]
