"""What a table must hold, as NumPy arrays over a few rows: the oracle of the state machine."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from support import lifecycle_model, naive
from support.embeddings import DIM, TABLES
from support.lifecycle_model import Row, Written
from support.rows import SPECIAL_KEYS
from tierbed.engine.optim.row_optimizer import RowOptimizer
from tierbed.engine.options.initializers import as_arrays, make_table_options
from tierbed.engine.row_format import row_dtype

Places = NDArray[np.int64]  # [n], rows of the universe
Full = lifecycle_model.NoRoomError

# every row that a test may touch, (table, key) of places 0 to N - 1
KEYS = np.array([*SPECIAL_KEYS, *range(20, 120)], np.uint64)
NUMBERS = np.repeat(np.arange(len(TABLES), dtype=np.uint32), len(KEYS))
KEYS = np.tile(KEYS, len(TABLES))
N = len(KEYS)
ROWS: list[Row] = list(zip(NUMBERS.tolist(), KEYS.tolist(), strict=True))
ORDER = sorted(range(N), key=lambda place: (naive.bucket(*ROWS[place]), *ROWS[place]))


@cache
def initial_rows() -> NDArray[np.float32]:
    tables = [make_table_options(table) for table in TABLES]
    return naive.initial_rows(NUMBERS, KEYS, 0, [DIM], *as_arrays(tables, [DIM]))


@dataclass(frozen=True)
class Policy:
    capacity: int | None = None
    eviction: str = "none"
    admission: float | None = None
    ttl_steps: int | None = None


class Model:
    """Rows of the universe under an optimizer. Which there are, a model of the life of rows knows."""

    def __init__(self, optimizer: RowOptimizer) -> None:
        self.optimizer = optimizer
        state = np.repeat(np.array(optimizer.initial_values, np.float32), optimizer.make_row_state(DIM).widths)
        self.initial = np.concatenate([initial_rows(), np.tile(state, (N, 1))], 1)
        self.values = self.initial.copy()  # of those that are there
        self.life = lifecycle_model.Model()

    def open(self, policy: Policy) -> None:
        """A store was opened on these rows. They stay, whatever the capacity is, where none makes room."""
        before, self.life = self.life, lifecycle_model.Model(**asdict(policy))
        self.life.rows, self.life.step = before.rows, before.step
        if policy.capacity is not None and policy.eviction in ("none", "ttl"):
            self.life.capacity = max(policy.capacity, self.rows)

    def copy(self) -> Model:
        return copy.deepcopy(self, {id(self.optimizer): self.optimizer, id(self.initial): self.initial})

    @property
    def rows(self) -> int:
        return len(self.life.rows)

    @property
    def step(self) -> int:
        return self.life.step

    def read(self, places: Places) -> NDArray[np.float32]:
        """What a lookup of `places` returns, [n, DIM]."""
        return self._read(places)[:, :DIM]

    def admit(self, places: Places, training: bool) -> NDArray[np.bool_]:
        """Before a write of `places`: which of the N rows it refuses; those that must make room leave. Raises Full."""
        batch = {ROWS[place] for place in places}
        refused = self.life.make_room(batch, self.step + training, training)
        return np.array([row in refused for row in ROWS])

    def train(self, places: Places, grads: NDArray[np.float32], refused: NDArray[np.bool_]) -> None:
        """One step of admitted rows; grads [n, DIM]."""
        unique = naive.unique(KEYS[places], NUMBERS[places])
        rows = places[unique.occurrences[unique.occurrence_offsets[:-1]]]
        sums = naive.reduce(grads, unique.occurrences, unique.occurrence_offsets)
        values, (updates, last) = self._values(rows), self._written(rows)
        hyperparams = self.optimizer.compute_hyperparams(self.step + 1)
        naive.update(values, updates, sums, self.optimizer.rule, hyperparams, self.step + 1, last)
        self.values[rows] = values
        self.life.train(ROWS[place] for place in places)

    def put(self, places: Places, rows: NDArray[np.float32]) -> None:
        """Of a place given twice the last row wins, and it counts as one write."""
        values = self._read(places)
        values[:, :DIM] = rows
        for place, value in zip(places, values, strict=True):
            self.values[place] = value
        self.life.put(ROWS[place] for place in places)

    def forget(self, places: Places) -> int:
        """How many rows existed."""
        return self.life.delete(ROWS[place] for place in places)

    def contents(self) -> NDArray[np.void]:
        """Every written row, as a scan yields it."""
        stored = np.array([place for place in ORDER if ROWS[place] in self.life.rows], np.int64)
        rows = np.empty(len(stored), row_dtype(self.values.shape[1]))
        rows["table"], rows["key"], rows["values"] = NUMBERS[stored], KEYS[stored], self.values[stored]
        rows["updates"], rows["step"] = self._written(stored)
        return rows

    def _values(self, places: Places) -> NDArray[np.float32]:
        there = np.array([ROWS[place] in self.life.rows for place in places], np.bool_)
        return np.where(there[:, None], self.values[places], self.initial[places])

    def _written(self, places: Places) -> NDArray[np.uint32]:
        """[2, n], how often and when."""
        written = [self.life.rows.get(ROWS[place], Written(0, 0)) for place in places]
        return np.array(written, np.uint32).reshape(-1, 2).T.copy()

    def _read(self, places: Places) -> NDArray[np.float32]:
        """What is read of rows: steps that they missed are applied."""
        values, (updates, last) = self._values(places), self._written(places)
        if self.step:
            hyperparams = self.optimizer.compute_hyperparams(self.step + 1)
            naive.catch_up(values, updates, last, DIM, self.optimizer.rule, hyperparams, self.step + 1)
        return values
