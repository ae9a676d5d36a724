"""How long things take: sides in turns, steps of a store with what they did there, and calls within a step."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tierbed import MultiTableEmbedding
from tierbed.engine.table.table import OpenTable, PinnedBatch


class Times(dict[str, list[float]]):
    """Seconds of each turn by the name of the side. Its text is medians, and the best in brackets, in milliseconds."""

    def ratio(self, one: str, other: str) -> float:
        """The median over turns of one's time in that of the other."""
        return median(a / b for a, b in zip(self[one], self[other], strict=True))

    def ms(self, name: str) -> float:
        return 1e3 * median(self[name])

    def __str__(self) -> str:
        return "ms: " + ", ".join(f"{name} {self.ms(name):.2f} ({1e3 * min(self[name]):.2f})" for name in self)


def in_turns(
    sides: Mapping[str, Callable[[int], Any]],
    turns: int,
    warm_up: int,
    check: Callable[[dict[str, Any]], None] | None = None,
    before: Callable[[], object] | None = None,
    calls: int = 1,
) -> Times:
    """Times of all sides, each called with the number of the call, in an order that rotates.

    warm_up: turns before the first that counts. check: gets what all sides returned in a turn. before: is called
    before each side's clock starts. calls: of a side in one turn, as a training loop makes them one after another; the
    time is the median of those after the first third, in which threads of the other sides may still spin.
    """
    times = Times({name: [] for name in sides})
    names = list(sides)
    with without_garbage_collection():
        for turn in range(warm_up + turns):
            first = turn % len(names)
            results = {}
            for name in names[first:] + names[:first]:
                taken = []
                for call in range(turn * calls, (turn + 1) * calls):
                    if before is not None:
                        before()
                    begin = time.perf_counter()
                    out = sides[name](call)
                    taken.append(time.perf_counter() - begin)
                    results[name] = out if check else None
                    del out  # freeing the output is no part of a step
                times[name].append(median(taken[calls // 3 :]))
            if check is not None:
                check(results)
    return Times({name: taken[warm_up:] for name, taken in times.items()})


def seconds_of(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    gc.collect()  # gigabytes of what ran before
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def one_thread() -> Iterator[None]:
    """Of torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Turn:
    """What a run of steps took, and what it returned.

    cpu: seconds of all threads, until nothing is left to do in the background, which took `backlog` seconds after the
    last step. parts: seconds within pin, gather and update. hits: distinct rows that the top tier had, of each step.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    backlog: float = 0.0
    hits: int = 0
    misses: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    results: list[Tensor] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(self.hits + self.misses, 1)

    @property
    def dense(self) -> float:
        """Seconds of all but pin, gather and update."""
        return self.seconds - sum(self.parts.values())


def split(turns: Sequence[Turn], steps: int) -> str:
    """Milliseconds of a step by part, and of all processors."""

    def ms(seconds: Iterable[float]) -> str:
        return f"{1e3 * median(seconds) / steps:.1f}"

    parts = [f"{part} {ms(turn.parts[part] for turn in turns)}" for part in turns[0].parts]
    parts.append(f"dense {ms(turn.dense for turn in turns)}")
    whole, cpu = ms(turn.seconds for turn in turns), ms(turn.cpu for turn in turns)
    return f"{whole} ms = {' + '.join(parts)} (CPU {cpu})"


def turn_of(embedding: MultiTableEmbedding, steps: Iterable[Tensor], first: int = 0) -> Turn:
    """Makes the steps. The clock starts after `first` of them; seconds, cpu and parts are of the others."""
    turn, watches = Turn(), {"pin": Stopwatch(), "gather": Stopwatch(), "update": Stopwatch()}
    before, left = top_tier(embedding), iter(steps)
    with (
        timed_calls(watches["pin"], OpenTable, "pin"),
        timed_calls(watches["gather"], PinnedBatch, "gather"),
        timed_calls(watches["update"], OpenTable, "update"),
    ):
        turn.results += [next(left) for _ in range(first)]
        for watch in watches.values():
            watch.lap()
        cpu, begin = time.process_time(), time.perf_counter()
        turn.results += left
        turn.seconds = time.perf_counter() - begin
    turn.parts = {name: watch.lap() for name, watch in watches.items()}
    turn.backlog = wait_until_idle()
    turn.cpu = time.process_time() - cpu
    after = top_tier(embedding)
    turn.hits, turn.misses = after["hits"] - before["hits"], after["misses"] - before["misses"]
    return turn


def top_tier(embedding: MultiTableEmbedding) -> dict[str, Any]:
    """The metrics of the tier that serves steps."""
    return next(counts for tier, counts in embedding.metrics().items() if tier != "table")


def wait_until_idle(seconds: float = 0.02, longest: float = 60.0) -> float:
    """Wait until this process has used no processor for that long. Returns the seconds until that began."""
    begin = time.perf_counter()
    while (waited := time.perf_counter() - begin) < longest:
        used = time.process_time()
        time.sleep(seconds)
        if time.process_time() - used < 0.001:
            break
    return waited


def io_bytes() -> dict[str, int]:
    """Of this process so far: asked of files (rchar, wchar), and moved from and to disks (read_bytes, write_bytes)."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes")}


class Stopwatch:
    """Adds up the seconds within timed calls, all of one thread; one within another counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def lap(self) -> float:
        """The seconds since the last lap."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
                self._inside = False

        return timed


@contextmanager
def timed_calls(watch: Stopwatch, place: Any, *names: str) -> Iterator[None]:
    """Time the calls of these attributes of a module, a class or an object."""
    before = {name: vars(place).get(name) for name in names}
    for name in names:
        setattr(place, name, watch.timed(getattr(place, name)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:  # the object's class has it
                delattr(place, name)
            else:
                setattr(place, name, value)
