"""Which rows a cache over memory keeps, written after its words: plain, slow, and exact to the slot."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from functools import cache
from itertools import chain

from support import naive
from support.caches import TABLE, Row, batch_of, cache_over, identities, places
from tierbed.engine import _core
from tierbed.engine._core import GROUP_WAYS, WAYS

BUCKETS, NEVER = 64, 2**32
NUMBERS = _core.slot_hash().tolist()
COUNTS = ("hits", "misses", "insertions", "evictions_clean", "evictions_dirty", "overflows", "prefetch_waits")


@cache
def hash_of(row: Row) -> int:
    return naive.slot_hash(*row, NUMBERS)


def bucket_of(row: Row) -> int:
    return hash_of(row) >> 58


def set_of(row: Row, sets: int) -> int:
    low = hash_of(row) % 2**32
    if sets < BUCKETS:
        return low * sets >> 32
    first, end = (number * sets // BUCKETS for number in (bucket_of(row), bucket_of(row) + 1))
    return first + (low * (end - first) >> 32)


@dataclass
class Way:
    row: Row
    last: int
    next: int  # the batch known to need it next, 0 for none
    uses: int
    updates: int
    stored: int

    @property
    def dirty(self) -> bool:
        return self.updates != self.stored


def until(next_batch: int, number: int) -> int:
    return next_batch - number if next_batch > number else NEVER


class Plain:
    """`below`: the updates of rows in the tier below. `coming`: rows of announced batches that have not begun."""

    def __init__(self, sets: int, policy: str, overflow_rows: int) -> None:
        self.sets: list[list[Way | None]] = [[None] * WAYS for _ in range(sets)]
        self.in_sets: dict[Row, Way] = {}
        self.overflow: dict[Row, Way] = {}  # in the order in which they came
        self.below: dict[Row, int] = {}
        self.coming: dict[int, set[Row]] = {}
        self.policy, self.overflow_rows = policy, overflow_rows
        self.counts = Counter[str]()
        self.reached = Counter[str]()  # what look-ahead decided

    def ways(self, row: Row) -> list[Way | None]:
        return self.sets[set_of(row, len(self.sets))]

    def find(self, row: Row) -> Way | None:
        return self.in_sets.get(row) or self.overflow.get(row)

    def place(self, way: Way, at: int) -> Way | None:
        """Put it into its set, in the place of what is returned."""
        ways = self.ways(way.row)
        gone, ways[at] = ways[at], way
        if gone:
            del self.in_sets[gone.row]
        self.in_sets[way.row] = way
        return gone

    def next_of(self, row: Row) -> int:
        return min((number for number, rows in self.coming.items() if row in rows), default=0)

    def announce(self, rows: list[Row], number: int) -> None:
        for row in rows:
            way = self.find(row)
            if way and not self.next_of(row):
                way.next = number
        self.coming[number] = set(rows)

    def place_batch(self, rows: list[Row], number: int, done: int, ahead: bool) -> bool:
        up = {row: way for row in rows if (way := self.find(row))}
        if ahead and len(self.overflow) + len(rows) - len(up) > self.overflow_rows:
            self.counts["prefetch_waits"] += 1
            self.sweep(done)
            return False
        self.counts["hits"] += len(up)
        self.counts["misses"] += len(rows) - len(up)
        self.coming.pop(number, None)
        before = {row: way.last for row, way in up.items()}
        for row, way in up.items():
            way.last, way.next, way.uses = number, self.next_of(row), way.uses + 1
        self.sweep(done)
        absent = [row for row in rows if row not in up or row in self.overflow]
        for row in sorted(absent, key=lambda row: (bucket_of(row), until(self.next_of(row), number))):
            stored = self.below.get(row, 0)
            way = up.get(row) or Way(row, number, self.next_of(row), 1, stored, stored)
            at = None if before.get(row, 0) > done else self.victim(row, number, done)
            gone = None if at is None else self.ways(row)[at]
            if at is None or (gone and until(gone.next, number) != NEVER):
                self.reached["victims that are needed"] += at is not None
                self.overflow[row] = way
                self.counts["overflows"] += 1
                continue
            if gone:
                self.counts["evictions_dirty" if gone.dirty else "evictions_clean"] += 1
                self.leave(gone)
            self.place(way, at)
            self.overflow.pop(row, None)
            self.counts["insertions"] += 1
        return True

    def victim(self, row: Row, number: int, done: int) -> int | None:
        ways, home = self.ways(row), (hash_of(row) >> 32) * GROUP_WAYS % WAYS
        turns = [(home + turn) % WAYS for turn in range(WAYS)]
        order: dict[int, tuple[int, int, int]] = {}
        for at in turns:
            if ways[at] is None:
                return at
        for begin in range(0, WAYS, GROUP_WAYS):  # one more group where those before have no row that is not needed
            for at in turns[begin : begin + GROUP_WAYS]:
                if (way := ways[at]) and way.last <= done:
                    order[at] = (-until(way.next, number), way.uses if self.policy == "lfu" else 0, way.last)
            if any(needed == -NEVER for needed, _, _ in order.values()):
                break
            self.reached["further groups"] += begin + GROUP_WAYS < WAYS
        return min(order, key=order.__getitem__, default=None)

    def sweep(self, done: int) -> None:
        """Rows leave the overflow, but for the pinned, and while half of it is free those that are needed."""
        rows, leaving = len(self.overflow), []
        for way in list(self.overflow.values()):
            if way.last > done:
                continue
            if 2 * rows <= self.overflow_rows and until(way.next, done) != NEVER:
                self.reached["kept beside the sets"] += 1
            elif way.dirty:
                leaving.append(way)
            else:
                del self.overflow[way.row]
                rows -= 1
        for way in leaving:
            self.leave(self.overflow.pop(way.row))

    def leave(self, way: Way) -> None:
        if way.dirty:
            self.below[way.row] = way.updates


@dataclass
class Announced:
    batch: _core.Batch
    number: int
    is_up: bool = False


class Both:
    """A cache and the plain one, which do the same."""

    def __init__(self, sets: int, policy: str, overflow_rows: int = 10_000) -> None:
        self.cache = cache_over(_core.FullTable(TABLE.layout), sets, policy, overflow_rows)
        self.plain = Plain(sets, policy, overflow_rows)
        self.number = 0  # of the latest batch
        self.announced = deque[Announced]()
        self.pinned: Announced | None = None
        self.seen: set[Row] = set()

    @property
    def done(self) -> int:
        """The last batch that is over: they end in the order of their numbers."""
        if self.pinned:
            return self.pinned.number - 1
        return self.announced[0].number - 1 if self.announced else self.number

    def announce(self, rows: list[Row]) -> None:
        batch = batch_of(rows)
        self.number += 1
        self.announced.append(Announced(batch, self.number))
        self.seen.update(identities(batch))
        self.cache.announce(batch)
        self.plain.announce(identities(batch), self.number)

    def prefetch(self) -> None:
        for ahead in self.announced:
            if not ahead.is_up:
                ahead.is_up = self.plain.place_batch(identities(ahead.batch), ahead.number, self.done, True)
                assert self.cache.prefetch(ahead.batch) == ahead.is_up
            if not ahead.is_up:
                break

    def pin(self, rows: list[Row]) -> None:
        """The batch that was announced first, or one of these rows."""
        now = self.announced[0] if self.announced else Announced(batch_of(rows), self.number + 1)
        self.cache.pin(now.batch)
        self.seen.update(identities(now.batch))
        if not now.is_up:
            self.plain.place_batch(identities(now.batch), now.number, now.number - 1, False)
        if self.announced:
            self.announced.popleft()
        else:
            self.number += 1
        self.pinned = now

    def unpin(self, written: bool) -> None:
        assert self.pinned is not None
        for row, line in zip(identities(self.pinned.batch), self.pinned.batch.lines, strict=True):
            way = self.plain.find(row)
            assert way is not None
            assert TABLE.view(line)[1][0] == way.updates
            TABLE.view(line)[1][0] += written
            way.updates += written
        self.cache.unpin(self.pinned.batch)
        self.pinned = None

    def cancel(self) -> None:
        self.cache.cancel_announced()
        self.announced.clear()
        self.plain.coming.clear()

    def step(self, rows: list[Row], written: bool) -> None:
        self.pin(rows)
        self.check()
        self.unpin(written)

    def check(self) -> None:
        kept = {way.row: (at, way.dirty) for at, way in enumerate(chain.from_iterable(self.plain.sets)) if way}
        kept |= {row: (-1, way.dirty) for row, way in self.plain.overflow.items()}
        assert places(self.cache, self.seen) == kept
        metrics = self.cache.metrics()
        assert {name: metrics[name] for name in COUNTS} == {name: self.plain.counts[name] for name in COUNTS}
