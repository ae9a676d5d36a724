"""Measures times: the sides' times in turns, a store's steps with hits and misses, and calls within a step."""

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
    """Each turn's seconds, by side. `str` shows the median and, in brackets, the best, in milliseconds."""

    def ratio(self, one: str, other: str) -> float:
        """Return one side's time divided by the other's, as the median over turns."""
        return median(a / b for a, b in zip(self[one], self[other], strict=True))

    def ms(self, name: str) -> float:
        return 1e3 * median(self[name])

    def __str__(self) -> str:
        return "ms: " + ", ".join(f"{name} {self.ms(name):.2f} ({1e3 * min(self[name]):.2f})" for name in self)


def time_in_turns(
    sides: Mapping[str, Callable[[int], Any]],
    turns: int,
    warm_up: int,
    check: Callable[[dict[str, Any]], None] | None = None,
    before: Callable[[], object] | None = None,
    calls: int = 1,
) -> Times:
    """Call the sides in turns, in rotating order, and return their times.

    Args:
        sides: Functions that take the call's number.
        turns: Timed turns.
        warm_up: Untimed turns before them.
        check: Called after each turn with each side's last result.
        before: Called before each side's clock starts.
        calls: Consecutive calls to one side per turn, as in a training loop. Their time is the median without the
            first third, because other sides' threads may still be spinning then.
    """
    times = Times({name: [] for name in sides})
    names = list(sides)
    with disable_gc():
        for turn in range(warm_up + turns):
            first = turn % len(names)
            results = {}
            for name in names[first:] + names[:first]:
                seconds = []
                for call in range(turn * calls, (turn + 1) * calls):
                    if before is not None:
                        before()
                    begin = time.perf_counter()
                    out = sides[name](call)
                    seconds.append(time.perf_counter() - begin)
                    results[name] = out if check else None
                    del out  # frees the output outside the clock
                times[name].append(median(seconds[calls // 3 :]))
            if check is not None:
                check(results)
    return Times({name: seconds[warm_up:] for name, seconds in times.items()})


def time_call(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def disable_gc() -> Iterator[None]:
    gc.collect()  # frees gigabytes of earlier workloads
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def use_one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class Turn:
    """Consecutive steps: their times, hits and results.

    backlog: seconds after the last step until background work ended. cpu: processor seconds in all threads, including
    the backlog. parts: seconds within pin, gather and update. hits, misses: distinct rows that the top tier had or
    lacked, counted in each step and summed.
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
        """Seconds outside pin, gather and update."""
        return self.seconds - sum(self.parts.values())


def format_times(turns: Sequence[Turn], steps: int) -> str:
    """Format the milliseconds per step: whole, by part, and processor time."""

    def ms(seconds: Iterable[float]) -> str:
        return f"{1e3 * median(seconds) / steps:.1f}"

    parts = [f"{part} {ms(turn.parts[part] for turn in turns)}" for part in turns[0].parts]
    parts.append(f"dense {ms(turn.dense for turn in turns)}")
    whole, cpu = ms(turn.seconds for turn in turns), ms(turn.cpu for turn in turns)
    return f"{whole} ms = {' + '.join(parts)} (CPU {cpu})"


def measure_turn(embedding: MultiTableEmbedding, steps: Iterable[Tensor], first: int = 0) -> Turn:
    """Run the steps and measure them. The clock starts after the `first` ones."""
    turn, watches = Turn(), {"pin": Stopwatch(), "gather": Stopwatch(), "update": Stopwatch()}
    before, remaining = read_top_tier(embedding), iter(steps)
    with (
        time_calls(watches["pin"], OpenTable, "pin"),
        time_calls(watches["gather"], PinnedBatch, "gather"),
        time_calls(watches["update"], OpenTable, "update"),
    ):
        turn.results += [next(remaining) for _ in range(first)]
        for watch in watches.values():
            watch.lap()
        cpu, begin = time.process_time(), time.perf_counter()
        turn.results += remaining
        turn.seconds = time.perf_counter() - begin
    turn.parts = {name: watch.lap() for name, watch in watches.items()}
    turn.backlog = wait_until_idle()
    turn.cpu = time.process_time() - cpu
    after = read_top_tier(embedding)
    turn.hits, turn.misses = after["hits"] - before["hits"], after["misses"] - before["misses"]
    return turn


def read_top_tier(embedding: MultiTableEmbedding) -> dict[str, Any]:
    """Return the metrics of the top tier."""
    return next(counts for tier, counts in embedding.metrics().items() if tier != "table")


def wait_until_idle(seconds: float = 0.02, longest: float = 60.0) -> float:
    """Wait until this process has been idle for `seconds`. Returns how long it was busy before that."""
    begin = time.perf_counter()
    while (waited := time.perf_counter() - begin) < longest:
        used = time.process_time()
        time.sleep(seconds)
        if time.process_time() - used < 0.001:
            break
    return waited


def read_io_bytes() -> dict[str, int]:
    """Return this process's byte counters from /proc/self/io. `rchar` and `wchar` include the page cache."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {name: int(counts[name]) for name in ("rchar", "wchar", "read_bytes", "write_bytes")}


class Stopwatch:
    """Sums the seconds that one thread spends in timed calls. Nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def lap(self) -> float:
        """Return the seconds summed since the last lap."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def wrap(self, call: Callable[..., Any]) -> Callable[..., Any]:
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
def time_calls(watch: Stopwatch, owner: Any, *names: str) -> Iterator[None]:
    """Time all calls to the named attributes in a module, class or object."""
    before = {name: vars(owner).get(name) for name in names}
    for name in names:
        setattr(owner, name, watch.wrap(getattr(owner, name)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:  # inherited
                delattr(owner, name)
            else:
                setattr(owner, name, value)
