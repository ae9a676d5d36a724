"""The cache on a device decides as a plain one that is written after its words, whatever the order of threads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from support.cache_model import Way, bucket_of, hash_of, set_of
from support.caches import TABLE, Row
from support.cuda_emulation import EmulatedDevice
from support.cuda_tables import DeviceTable, array, on_devices
from tierbed.engine._core import GROUP_WAYS, WAY_BYTES, WAYS
from tierbed.engine.cache.cuda.cache import COUNT_NAMES, POLICIES, CacheSets, Placement
from tierbed.engine.ops.cuda import step
from tierbed.engine.ops.cuda.batch import Batch
from tierbed.engine.ops.cuda.device import Device

NOTHING, CLEAN, DIRTY = 0, 1, 2
Ways = dict[Row, Way | None]


class Plain:
    """Sets of ways that are free or hold a row; batches are numbered, and those after `done` pin their rows."""

    def __init__(self, sets: int, policy: str) -> None:
        self.sets: list[list[Way | None]] = [[None] * WAYS for _ in range(sets)]
        self.policy, self.now, self.done = policy, 0, 0
        self.counts: Counter[str] = Counter()

    def ways(self, row: Row) -> list[Way | None]:
        return self.sets[set_of(row, len(self.sets))]

    def find(self, row: Row) -> Way | None:
        return next((way for way in self.ways(row) if way and way.row == row), None)

    def place_batch(self, rows: list[Row]) -> tuple[Ways, Ways]:
        """The rows that were resident or fetched, None for those without a slot; and the victim of each fetched row."""
        self.now += 1
        up: Ways = {row: way for row in rows if (way := self.find(row))}
        gone: Ways = {}
        for way in up.values():
            way.last, way.uses = self.now, way.uses + 1
        self.counts["hits"] += len(up)
        self.counts["misses"] += len(rows) - len(up)
        for row in sorted((row for row in rows if row not in up), key=bucket_of):
            at = self.victim(row)
            up[row] = None
            if at is None:
                self.counts["overflows"] += 1
                continue
            gone[row], up[row] = self.ways(row)[at], Way(row, self.now, 0, 1, 0, 0)
            self.ways(row)[at] = up[row]
            if before := gone[row]:
                self.counts["evictions_dirty" if before.dirty else "evictions_clean"] += 1
        return up, gone

    def victim(self, row: Row) -> int | None:
        ways, home = self.ways(row), (hash_of(row) >> 32) * GROUP_WAYS % WAYS
        turns = [(home + turn) % WAYS for turn in range(WAYS)]
        if free := [at for at in turns if ways[at] is None]:
            return free[0]
        for those in (turns[:GROUP_WAYS], turns):  # of all, only where no row of its home may go
            order = {
                at: (way.uses if self.policy == "lfu" else 0, way.last)
                for at in those
                if (way := ways[at]) and way.last <= self.done
            }
            if order:
                return min(order, key=order.__getitem__)
        return None


class Both:
    """Rows are fetched with initial values; there is no tier below."""

    def __init__(self, device: Device, sets: int, policy: str = "lru") -> None:
        self.side = DeviceTable(device, TABLE)
        self.cache = CacheSets(self.side.layout, sets * WAYS * (self.side.layout.line_bytes + WAY_BYTES + 1), policy)
        self.plain = Plain(sets, policy)
        assert self.cache.capacity == sets * WAYS

    def batch(self, keys: list[int]) -> tuple[Batch, list[Row]]:
        batch = self.side.batch([(keys, [key % 2 for key in keys], None)])
        return batch, self.side.identities(batch)

    def step(self, keys: list[int], written: bool, end: str = "release") -> None:
        """A batch that is placed, fetched, written to, and ends; or that is cancelled before it was fetched."""
        batch, rows = self.batch(keys)
        before = [[way and replace(way) for way in ways] for ways in self.plain.sets]
        placement = self.cache.place_batch(batch, self.plain.done)
        up, gone = self.plain.place_batch(rows)
        self.check_placement(placement, rows, up, gone)
        if end == "release":
            self.fetch(placement, batch)
            if written:
                values = torch.ones(batch.num_positions, self.side.layout.dim, device=batch.lines.device)
                step.assign(batch, self.side.layout, values, 1, self.side.written, self.side.faults)
            for way in up.values():
                if way and written:
                    way.updates += 1
        else:
            self.cache.undo_placement(placement, end == "restore")
            for row in gone:
                where = set_of(row, len(before))
                at = self.plain.sets[where].index(up[row])
                self.plain.sets[where][at] = before[where][at] if end == "restore" else None
        self.plain.done = self.plain.now
        self.check()

    def fetch(self, placement: Placement, batch: Batch) -> None:
        lines = placement.lines
        ranks = (lines == 0).cumsum(0, dtype=torch.int32)
        memory = torch.empty(batch.num_positions * self.side.layout.line_bytes, dtype=torch.uint8, device=lines.device)
        own = batch.keep_alive(memory) + (ranks.long() - 1) * self.side.layout.line_bytes
        batch.lines = torch.where(lines == 0, own, lines)
        step.initialise_lines(batch, self.side.layout, placement.is_hit == 0)
        self.cache.mark_fetched(placement)

    def check_placement(self, placement: Placement, rows: list[Row], up: Ways, gone: Ways) -> None:
        hit, kinds, lines = (values.tolist() for values in (placement.is_hit, placement.evictions, placement.lines))
        befores = placement.victim_ways.view(torch.int64)[:, 0].cpu().numpy().view(np.uint64).tolist()
        for row, is_hit, kind, line, before in zip(rows, hit, kinds, lines, befores, strict=False):
            way = gone.get(row)
            assert is_hit == (up[row] is not None and row not in gone)
            assert bool(line) == (up[row] is not None)
            assert kind == (NOTHING if way is None else DIRTY if way.dirty else CLEAN)
            assert way is None or before == hash_of(way.row)
        metrics = self.cache.metrics()
        for name in ("hits", "misses", *COUNT_NAMES):
            assert metrics[name] == self.plain.counts[name], name

    def check(self) -> None:
        resident = [(at, way) for at, way in enumerate(way for ways in self.plain.sets for way in ways) if way]
        assert self.cache.metrics()["resident_rows"] == len(resident)
        slots = self.cache.find_dirty_slots()
        assert slots.tolist() == [at for at, way in resident if way.dirty]
        hashes, tables, lines = self.cache.rows(slots)
        dirty = [way.row for _, way in resident if way.dirty]
        assert array(hashes, np.uint64).tolist() == [hash_of(row) for row in dirty]
        assert tables.tolist() == [table for table, _ in dirty]
        assert len(set(lines.tolist())) == len(dirty)


@on_devices
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sets", [1, 3, 64])
def test_random_batches(device: Device, sets: int, policy: str) -> None:
    both, rng = Both(device, sets, policy), np.random.default_rng(sets)
    weights = np.arange(1, 120 * sets + 1) ** -0.8
    for round in range(14):
        size = int(rng.integers(0, 32 * sets if round % 3 else 96 * sets))
        keys = rng.choice(120 * sets, min(size, 1000), p=weights / weights.sum()).tolist()
        both.step(keys, written=round % 2 == 0, end={3: "restore", 8: "drop"}.get(round, "release"))
    batch, rows = both.batch(list(range(120 * min(sets, 8))))
    missing = both.cache.find(batch)
    resident = [both.plain.find(row) is not None for row in rows]
    assert [line != 0 for line in batch.lines.tolist()] == resident
    assert missing.tolist() == [not up for up in resident]
    slots = both.cache.find_dirty_slots()
    both.cache.mark_clean(slots[: len(slots) // 2])
    for at in slots[: len(slots) // 2].tolist():
        way = both.plain.sets[at // WAYS][at % WAYS]
        assert way is not None
        way.stored = way.updates
    both.check()
    kept = torch.arange(batch.num_positions, device=batch.lines.device) % 3 == 0
    both.cache.erase(batch, kept)
    for row, stays in zip(rows, kept.tolist(), strict=True):
        if way := both.plain.find(row):
            ways, way.stored = both.plain.ways(row), 0
            ways[ways.index(way)] = way if stays else None
    both.check()


@on_devices
def test_after_a_fault_no_row_comes_up(device: Device) -> None:
    both = Both(device, 3)
    both.step(list(range(120)), written=True)
    both.side.faults.fill_(1)
    batch, rows = both.batch(list(range(80, 200)))
    placement = both.cache.place_batch(batch, both.plain.done)
    assert [line != 0 for line in placement.lines.tolist()] == [both.plain.find(row) is not None for row in rows]
    assert both.cache.metrics()["misses"] == both.plain.counts["misses"]
    both.check()


def test_a_budget_below_one_set_is_refused() -> None:
    with pytest.raises(ValueError, match="one set takes"):
        CacheSets(DeviceTable(EmulatedDevice(), TABLE).layout, 100)
