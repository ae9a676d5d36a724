"""The numbers for "auto" budgets of caches: the free memory, divided and printed."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

from ..cache.memory_split import LINE_OVERHEAD_BYTES, MB, MIN_CACHE_ROWS, MemorySplit, SharedWith, split_memory
from ..errors import OptionError
from ..host_memory import ROOT, FreeMemory, free_host_memory
from ..options.store_options import CachedHostMemOptions, CachedSsdOptions, StoreOptions, mib
from ..processors.processor import Processor

TOP, BELOW = "cache_budget_mb", "host_cache_budget_mb"


class AutoBudgets:
    """The options of one embedding with numbers instead of "auto" budgets.

    Free memory is read once, so a table that opens again has the same budgets. root: the folder of proc and sys. ranks:
    how many processes divide the host's memory equally.
    """

    def __init__(self, name: str, options: StoreOptions, root: Path = ROOT, ranks: int = 1) -> None:
        self._name, self._options, self._root, self._ranks = name, options, root, ranks
        self._free: dict[str, FreeMemory] = {}
        self._promised: dict[str, int] = {}  # bytes of each memory for caches that may not have touched them yet
        self._printed: set[str] = set()

    def numbers(self, processor: Processor[Any]) -> StoreOptions:
        """The options for a table on the processor. Prints each division to stderr, once.

        Raises OptionError if the system does not report free memory, or if it is too little for a cache.
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
            split = self._split(TOP, str(processor.device), own, row_bytes, "device")
            options = replace(options, cache_budget_mb=split.cache_mb)
        if "auto" not in (options.cache_budget_mb, options.get(BELOW)):
            return options
        return self._of_host(options, row_bytes, top_is_here=own is None)

    def release(self) -> None:
        """Give back the memory that the embedding was promised: its caches are closed."""
        if self._promised:
            with _one_at_a_time:
                self._promised.clear()

    def _of_host(self, options: CachedHostMemOptions, row_bytes: int, top_is_here: bool) -> StoreOptions:
        """The options with numbers for the caches in host memory. top_is_here: whether the top one is."""
        name = TOP if options.cache_budget_mb == "auto" else BELOW
        others = [options.get(BELOW, 0), options.cache_budget_mb if top_is_here else 0]
        given = sum(mib(other) + options.overflow_for(mib(other)) for other in others if other and other != "auto")
        given += options.get("rocksdb_cache_mb") or 0
        shared_with: SharedWith = "rocksdb" if isinstance(options, CachedSsdOptions) else "table"
        free = free_host_memory(self._root)
        if free is not None and self._ranks > 1:
            free = FreeMemory(free.bytes // self._ranks, f"{free.where} for each of {self._ranks} ranks")
        split = self._split(name, str(self._root), free, row_bytes, shared_with, options.overflow_mb, given)
        numbers: dict[str, Any] = {name: split.cache_mb, "overflow_mb": split.overflow_mb}
        if name == TOP and options.get(BELOW) == "auto":
            numbers[BELOW] = 0  # it would be in the memory of the cache above it
        return replace(options, **numbers)

    def _split(
        self,
        name: str,
        memory: str,
        free: FreeMemory | None,
        row_bytes: int,
        shared_with: SharedWith,
        overflow_mb: float | None = 0,
        given_mb: float = 0,
    ) -> MemorySplit:
        option = f"embedding {self._name!r}: {name}='auto'"
        if free is None:
            raise OptionError(
                f"{option}: this system does not report free memory as MemAvailable in "
                f"{str(self._root / 'proc/meminfo')!r}; give a number of MiB"
            )
        with _one_at_a_time:
            if memory not in self._free:
                promised = sum(budgets._promised.get(memory, 0) for budgets in _of_this_process)
                if not promised:
                    _free_at_first[memory] = free.bytes
                rest = max(min(free.bytes, _free_at_first[memory] - promised), 0)
                self._free[memory] = FreeMemory(rest, free.where)
            free = self._free[memory]
            capacity = self._options.capacity
            split = split_memory(
                free.bytes / MB, row_bytes, shared_with, capacity=capacity, overflow_mb=overflow_mb, given_mb=given_mb
            )
            if split.cache_mb * MB < MIN_CACHE_ROWS * row_bytes:
                taken = f", and other options take {given_mb:.1f}: lower them" if given_mb else ""
                raise OptionError(
                    f"{option}: {split.free_mb:.1f} MiB are free {free.where}{taken}; the cache would get "
                    f"{split.cache_mb:.1f} MiB, and one of {MIN_CACHE_ROWS} rows takes "
                    f"{MIN_CACHE_ROWS * row_bytes / MB:.1f}; free memory, or give a number of MiB"
                )
            self._promised[memory] = int((split.free_mb - split.rest_mb) * MB)
        line = f"tierbed: {option} divides {split.free_mb:.1f} MiB free {free.where}: {split}"
        if line not in self._printed and sys.stderr is not None:
            self._printed.add(line)
            with suppress(OSError, ValueError):  # it was closed
                print(line, file=sys.stderr, flush=True)
        return split


_of_this_process: WeakSet[AutoBudgets] = WeakSet()
_free_at_first: dict[str, int] = {}  # bytes of each memory before the first of the present promises
_one_at_a_time = Lock()


def _forget_parent() -> None:
    """A forked child uses none of its parent's caches, and another thread of the parent may hold the copied lock."""
    global _one_at_a_time
    _one_at_a_time = Lock()
    _of_this_process.clear()


os.register_at_fork(after_in_child=_forget_parent)
