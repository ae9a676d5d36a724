"""The row lifecycle as plain Python: which rows a table holds after steps, puts and deletes, by (table, key)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from support import naive
from support.embeddings import contents
from tierbed import MultiTableEmbedding

Row = tuple[int, int]  # table, key as 64 bits without sign


class NoRoomError(Exception):
    """A batch does not fit."""


class Written(NamedTuple):
    updates: int
    step: int


class Model:
    def __init__(
        self,
        eviction: str = "none",
        capacity: int | None = None,
        admission: float | None = None,
        ttl_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        self.eviction, self.capacity, self.admission, self.ttl_steps = eviction, capacity, admission, ttl_steps
        self.seed = seed % 2**64
        self.rows: dict[Row, Written] = {}
        self.seen: Counter[Row] = Counter()
        self.step = 0
        self.counts = {"refused": 0, "evicted": 0, "expired": 0, "deleted": 0}

    def train(self, batch: Iterable[Row]) -> set[Row]:
        """Returns the rows that were kept out."""
        batch, step = set(batch), self.step + 1
        refused = self.make_room(batch, step, training=True)
        self.step = step
        self.seen.update(refused)
        self.counts["refused"] += len(refused)
        self._write(batch - refused)
        if self.ttl_steps is not None and self.eviction != "ttl" and step % max(1, self.ttl_steps // 16) == 0:
            self._leave([row for row in self.rows if self._expired(row, step)], "expired")
        return refused

    def put(self, batch: Iterable[Row]) -> None:
        batch = set(batch)
        self.make_room(batch, self.step, training=False)
        self._write(batch)

    def delete(self, batch: Iterable[Row]) -> int:
        there = set(batch) & set(self.rows)
        self._leave(there, "deleted")
        return len(there)

    def _keeps(self, row: Row, step: int) -> bool:
        if self.admission is None:
            return True
        if isinstance(self.admission, int):
            return self.seen[row] + 1 >= self.admission
        hash_ = naive.hash_row(*row)
        draw = naive.hash_row(row[0], hash_ ^ naive.hash_row(step, self.seed))
        return (draw >> 11) * 2.0**-53 < self.admission

    def make_room(self, batch: set[Row], step: int, training: bool) -> set[Row]:
        """Before a write of a batch. Returns the rows that are kept out."""
        new = batch - set(self.rows)
        refused = {row for row in new if training and not self._keeps(row, step)}
        new -= refused
        if self.capacity is None or not new or (excess := len(self.rows) + len(new) - self.capacity) <= 0:
            return refused
        free = [row for row in self.rows if row not in batch and self._may_go(row, step)]
        if len(free) < excess:
            raise NoRoomError
        free.sort(key=lambda row: self._rank(row, step))
        self._leave(free[: max(excess, self.capacity // 64)], "evicted")
        return refused

    def _may_go(self, row: Row, step: int) -> bool:
        return self.eviction != "none" and (self.eviction != "ttl" or self._expired(row, step))

    def _expired(self, row: Row, step: int) -> bool:
        assert self.ttl_steps is not None
        return step - self.rows[row].step > self.ttl_steps

    def _rank(self, row: Row, step: int) -> tuple[float, int, int, int]:
        written = self.rows[row]
        first = {
            "lru": written.step,
            "lfu": written.updates,
            "ttl": written.step,
            "distance_lfu": written.updates / (step - written.step + 1.0) ** 2,
        }[self.eviction]
        return first, written.step if self.eviction == "lfu" else 0, row[0], naive.hash_row(*row)

    def _leave(self, rows: Iterable[Row], cause: str) -> None:
        for row in rows:
            del self.rows[row]
            self.counts[cause] += 1

    def _write(self, rows: Iterable[Row]) -> None:
        for row in rows:
            before = self.rows.get(row, Written(0, 0))
            self.rows[row] = Written(before.updates + 1, self.step)


def written(embedding: MultiTableEmbedding) -> dict[Row, Written]:
    return {
        (int(row["table"]), int(row["key"])): Written(int(row["updates"]), int(row["step"]))
        for row in contents(embedding)
    }


def unsigned(keys: Iterable[int]) -> list[int]:
    return [int(key) % 2**64 for key in np.asarray(keys).tolist()]


POLICIES: dict[str, dict[str, Any]] = {
    "lru": {"eviction": "lru", "capacity": 150},
    "lfu": {"eviction": "lfu", "capacity": 150, "ttl_steps": 4},
    "ttl": {"eviction": "ttl", "capacity": 150, "ttl_steps": 1},
    "distance_lfu": {"eviction": "distance_lfu", "capacity": 150},
    "sweeps": {"ttl_steps": 2},
    "sights": {"admission": 2, "eviction": "lru", "capacity": 100},
    "chance": {"admission": 0.5, "ttl_steps": 20, "capacity": 400},
}


def batches(count: int = 12, size: int = 60) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    for _ in range(count):
        ids = (torch.rand(size, generator=random) ** 2 * 200).to(torch.int64)
        yield ids, torch.randint(0, 3, (size,), generator=random)
