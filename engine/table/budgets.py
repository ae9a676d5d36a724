"""The budgets of caches that "auto" stands for: the memory that is free, divided and printed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

from ..cache.memory_split import LEAST, LINE_OVERHEAD_BYTES, MB, MemorySplit, SharedWith, divide
from ..errors import OptionError
from ..host_memory import ROOT, FreeMemory, free_host_memory
from ..options.store_options import CachedHostMemOptions, CachedSsdOptions, StoreOptions, mib
from ..processors.processor import Processor

TOP, BELOW = "cache_budget_mb", "host_cache_budget_mb"


class AutoBudgets:
    """The options of one embedding with numbers for budgets that are "auto".

    A memory is looked at once, so a table that opens again has the budgets that it had. root: the folder that proc and
    sys are in. ranks: how many processes share the host's memory, each an equal part.
    """

    def __init__(self, name: str, options: StoreOptions, root: Path = ROOT, ranks: int = 1) -> None:
        self._name, self._options, self._root, self._ranks = name, options, root, ranks
        self._free: dict[str, FreeMemory] = {}
        self._promised: dict[str, int] = {}  # bytes of each memory, which the caches may not have touched yet
        self._told: set[str] = set()

    def numbers(self, processor: Processor[Any]) -> StoreOptions:
        """The options for a table on the processor. Prints each division to stderr, once.

        Raises OptionError where the system does not tell how much memory is free, or it is too little for a cache.
        """
        options = self._options
        if not isinstance(options, CachedHostMemOptions) or "auto" not in (options.cache_budget_mb, options.get(BELOW)):
            return options
        self.release()
        with _one_at_a_time:
            _of_this_process.add(self)
        row_bytes = processor.layout.line_bytes + LINE_OVERHEAD_BYTES
        own = processor.free_memory()
        if own is not None and options.cache_budget_mb == "auto":
            part = self._divide(TOP, str(processor.device), own, row_bytes, "device")
            options = replace(options, cache_budget_mb=part.cache_mb)
        if "auto" not in (options.cache_budget_mb, options.get(BELOW)):
            return options
        return self._of_host(options, row_bytes, top_is_here=own is None)

    def release(self) -> None:
        """Give back what the embedding was promised: its caches are closed."""
        if self._promised:
            with _one_at_a_time:
                self._promised.clear()

    def _of_host(self, options: CachedHostMemOptions, row_bytes: int, top_is_here: bool) -> StoreOptions:
        """The options with numbers for the caches in memory of the host. top_is_here: whether the top one is."""
        name = TOP if options.cache_budget_mb == "auto" else BELOW
        others = [options.get(BELOW, 0), options.cache_budget_mb if top_is_here else 0]
        given = sum(mib(other) + options.overflow_mb for other in others if other and other != "auto")
        given += options.get("rocksdb_cache_mb") or 0
        beside: SharedWith = "rocksdb" if isinstance(options, CachedSsdOptions) else "table"
        free = free_host_memory(self._root)
        if free is not None and self._ranks > 1:
            free = FreeMemory(free.bytes // self._ranks, f"{free.where} for each of {self._ranks} ranks")
        part = self._divide(name, str(self._root), free, row_bytes, beside, options.overflow_mb, given)
        numbers: dict[str, Any] = {name: part.cache_mb, "overflow_mb": part.overflow_mb}
        if name == TOP and options.get(BELOW) == "auto":
            numbers[BELOW] = 0  # it would be of the memory that the cache above it has
        return replace(options, **numbers)

    def _divide(
        self,
        name: str,
        memory: str,
        free: FreeMemory | None,
        row_bytes: int,
        beside: SharedWith,
        overflow_mb: float = 0,
        given_mb: float = 0,
    ) -> MemorySplit:
        option = f"embedding {self._name!r}: {name}='auto'"
        if free is None:
            raise OptionError(
                f"{option}: this system does not tell how much memory is free, by MemAvailable in "
                f"{str(self._root / 'proc/meminfo')!r}; give a number of MiB"
            )
        with _one_at_a_time:
            if memory not in self._free:
                self._free[memory] = _left(memory, free)
            free = self._free[memory]
            capacity = self._options.capacity
            part = divide(
                free.bytes / MB, row_bytes, beside, capacity=capacity, overflow_mb=overflow_mb, given_mb=given_mb
            )
            if part.cache_mb * MB < LEAST * row_bytes:
                taken = f", and other options give away {given_mb:.1f}: lower these" if given_mb else ""
                raise OptionError(
                    f"{option}: {part.free_mb:.1f} MiB are free {free.where}{taken}; the cache would get "
                    f"{part.cache_mb:.1f} MiB, and one of {LEAST} rows takes {LEAST * row_bytes / MB:.1f}; free "
                    "memory, or give a number of MiB"
                )
            self._promised[memory] = int((part.free_mb - part.rest_mb) * MB)
        line = f"tierbed: {option} divides {part.free_mb:.1f} MiB free {free.where}: {part}"
        if line not in self._told:
            self._told.add(line)
            _tell(line)
        return part


_of_this_process: WeakSet[AutoBudgets] = WeakSet()
_free_at_first: dict[str, int] = {}  # bytes of each memory before the first of the promises that stand
_one_at_a_time = Lock()


def _tell(line: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError, ValueError):  # it was closed
            print(line, file=sys.stderr, flush=True)


def _forget_parent() -> None:
    """A forked child has none of its parent's caches in use, and may have its lock as another thread held it."""
    global _one_at_a_time
    _one_at_a_time = Lock()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_forget_parent)


def _left(memory: str, free: FreeMemory) -> FreeMemory:
    """What is free beside what embeddings of this process were promised."""
    promised = sum(budgets._promised.get(memory, 0) for budgets in _of_this_process)
    if not promised:
        _free_at_first[memory] = free.bytes
    return FreeMemory(max(min(free.bytes, _free_at_first[memory] - promised), 0), free.where)
