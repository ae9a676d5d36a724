"""Divides the free memory among caches with "auto" budgets, and prints the shares."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakSet

from ..cache import memory_split
from ..cache.memory_split import LINE_OVERHEAD_BYTES, MB, MIN_CACHE_ROWS, MemorySharer, MemorySplit, split_memory
from ..errors import OptionError
from ..host_memory import ROOT, FreeMemory, read_free_host_memory
from ..options.store_options import CachedHostMemOptions, CachedSsdOptions, StoreOptions, as_mb
from ..processors.processor import Processor
from ..store.rocksdb import READ_THREADS

TOP, LOWER = "cache_budget_mb", "host_cache_budget_mb"


class AutoBudgets:
    """Replaces an embedding's "auto" budgets by numbers. The host's memory is divided equally among `num_ranks`."""

    def __init__(self, name: str, options: StoreOptions, root: Path = ROOT, num_ranks: int = 1) -> None:
        self._name, self._options, self._root, self._num_ranks = name, options, root, num_ranks
        self._free_memory: dict[str, FreeMemory] = {}  # read once, so a reopened table gets the same budgets
        self._reserved_bytes: dict[str, int] = {}  # bytes reserved for this embedding; the key is a device or the host
        self._printed_lines: set[str] = set()

    def resolve(self, processor: Processor[Any]) -> StoreOptions:
        """Returns the options with MiB instead of "auto". Prints once how the memory is divided. Raises OptionError."""
        options = self._options
        if not isinstance(options, CachedHostMemOptions) or "auto" not in (options.cache_budget_mb, options.get(LOWER)):
            return options
        self.release()
        with _lock:
            _instances.add(self)
        row_bytes = processor.layout.line_bytes + LINE_OVERHEAD_BYTES
        device_memory = processor.read_free_memory()
        if device_memory is not None and options.cache_budget_mb == "auto":
            split = self._split_memory(TOP, str(processor.device), device_memory, row_bytes, "device")
            options = replace(options, cache_budget_mb=split.cache_mb)
        if "auto" not in (options.cache_budget_mb, options.get(LOWER)):
            return options
        return self._resolve_host(options, row_bytes, has_top_cache=device_memory is None)

    def release(self) -> None:
        """Release the memory reserved for this embedding, whose caches are now closed."""
        if self._reserved_bytes:
            with _lock:
                self._reserved_bytes.clear()

    def _resolve_host(self, options: CachedHostMemOptions, row_bytes: int, has_top_cache: bool) -> StoreOptions:
        """Returns the options with MiB for "auto" caches on the host. has_top_cache: the top cache is on the host."""
        name = TOP if options.cache_budget_mb == "auto" else LOWER
        budgets = [options.get(LOWER, 0), options.cache_budget_mb if has_top_cache else 0]
        fixed_mb = sum(as_mb(mb) + options.compute_overflow_mb(as_mb(mb)) for mb in budgets if mb and mb != "auto")
        fixed_mb += (options.get("rocksdb_cache_mb") or 0) + (options.get("index_mb") or 0)
        sharer: MemorySharer = "rocksdb" if isinstance(options, CachedSsdOptions) else "table"
        free = read_free_host_memory(self._root)
        if free is not None and self._num_ranks > 1:
            free = FreeMemory(free.bytes // self._num_ranks, f"{free.location} for each of {self._num_ranks} ranks")
        split = self._split_memory(name, str(self._root), free, row_bytes, sharer, options.overflow_mb, fixed_mb)
        numbers: dict[str, Any] = {name: split.cache_mb, "overflow_mb": split.overflow_mb}
        if name == TOP and options.get(LOWER) == "auto":
            numbers[LOWER] = 0  # a second cache would be in the same memory as the top cache
        return replace(options, **numbers)

    def _split_memory(
        self,
        name: str,
        memory_key: str,
        free: FreeMemory | None,
        row_bytes: int,
        sharer: MemorySharer,
        overflow_mb: float | None = 0,
        fixed_mb: float = 0,
    ) -> MemorySplit:
        option = f"embedding {self._name!r}: {name}='auto'"
        if free is None:
            raise OptionError(
                f"{option}: this system does not report free memory as MemAvailable in "
                f"{str(self._root / 'proc/meminfo')!r}; give a number of MiB"
            )
        with _lock:
            if memory_key not in self._free_memory:
                reserved = sum(budgets._reserved_bytes.get(memory_key, 0) for budgets in _instances)
                if not reserved:
                    _initial_free_bytes[memory_key] = free.bytes
                available_bytes = max(min(free.bytes, _initial_free_bytes[memory_key] - reserved), 0)
                self._free_memory[memory_key] = FreeMemory(available_bytes, free.location)
            free = self._free_memory[memory_key]
            capacity = self._options.capacity
            split = split_memory(
                free.bytes / MB, row_bytes, sharer, capacity=capacity, overflow_mb=overflow_mb, fixed_mb=fixed_mb,
                has_index_limit=self._options.get("index_mb") is not None,
            )  # fmt: skip
            if split.cache_mb * MB < MIN_CACHE_ROWS * row_bytes:
                other_options = f", and other options take {fixed_mb:.1f} MiB (lower these options)" if fixed_mb else ""
                raise OptionError(
                    f"{option}: only {split.free_mb:.1f} MiB are free {free.location}{other_options}. The cache would "
                    f"get {split.cache_mb:.1f} MiB, but needs {MIN_CACHE_ROWS * row_bytes / MB:.1f} MiB for the "
                    f"minimum of {MIN_CACHE_ROWS} rows. Free memory, or give a number of MiB"
                )
            self._reserved_bytes[memory_key] = int((split.free_mb - split.rest_mb) * MB)
        line = f"tierbed: {option} divides {split.free_mb:.1f} MiB free {free.location}: {split}"
        if sharer == "rocksdb":
            threads_mb = memory_split.compute_thread_bytes(threads=self._options.get("io_threads") or READ_THREADS) / MB
            line += f", of which changed keys at most {self._options.changed_keys_mb:.1f}, threads {threads_mb:.1f}"
        if line not in self._printed_lines and sys.stderr is not None:
            self._printed_lines.add(line)
            with suppress(OSError, ValueError):  # stderr may be closed
                print(line, file=sys.stderr, flush=True)
        return split


_instances: WeakSet[AutoBudgets] = WeakSet()
_initial_free_bytes: dict[str, int] = {}  # free bytes before caches reserve any; the key is a device or the host
_lock = Lock()


def _reset_after_fork() -> None:
    """Reset the state in a forked child: the child uses no cache of its parent, whose threads may hold the lock."""
    global _lock
    _lock = Lock()
    _instances.clear()


os.register_at_fork(after_in_child=_reset_after_fork)
