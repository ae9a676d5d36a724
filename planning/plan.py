"""`plan` predicts, from a trace of ids, the hit rate of any cache size and how much data ranks would exchange."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine import _core
from ..engine._core import WAYS
from ..engine.cache.memory_split import (
    LINE_OVERHEAD_BYTES,
    MB,
    MIN_CACHE_ROWS,
    OVERFLOW_OVERHEAD_BYTES,
    MemorySplit,
    compute_index_bytes,
    compute_thread_bytes,
    split_memory,
)
from ..engine.checks import as_int, as_number, check_budget, check_int, validate_arguments
from ..engine.errors import InputError, OptionError
from ..engine.host_memory import read_free_host_memory
from ..engine.options.initializers import MASK64
from ..engine.options.store_options import compute_default_overflow_mb
from ..engine.options.table_spec import check_dtype, check_state_dtype
from ..engine.row_format import ROW_KEY_DTYPE, compute_line_bytes, count_words
from ..engine.store.rocksdb import WRITE_BUFFER_BYTES
from .stack_distance import HitModel, Sample

MAX_RANKS = 1024
FRACTIONS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # cache sizes that a `Plan` prints, as fractions of all rows
I64 = NDArray[np.int64]
WIRE_BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}  # per element, for dtypes that ranks can send


class Curve(NamedTuple):
    """A miss-ratio curve, as three arrays [n] sorted by cache size.

    Attributes:
        rows: The cache size in rows.
        budget_mb: The cache size in MiB, as for the option `cache_budget_mb`.
        miss_ratio: Misses divided by accesses. A batch accesses each of its distinct rows once.
    """

    rows: NDArray[np.int64]
    budget_mb: NDArray[np.float64]
    miss_ratio: NDArray[np.float64]


class Plan:
    """Predicted hit rates of an LRU cache that all tables of an embedding share. `print(plan)` shows hit rates.

    Hits are counted as in an embedding's metrics: each distinct row counts once per batch.

    Attributes:
        dim: Embedding elements per row.
        state: Optimizer state elements per row.
        line_bytes: Bytes of a cached row with its state and counters. A cache adds `LINE_OVERHEAD_BYTES` per row.
        batches: How many batches the trace has after the warmup.
        seen: int64 [tables], each table's number of distinct rows in the whole trace, including the warmup.
        uses: int64 [tables], each table's number of row uses after the warmup. A row counts once per batch.
        rate: The fraction of rows that was sampled. If `rate` is 1, `seen` and `uses` are exact, otherwise estimates.
        memory_mb: The memory in MiB that `division` divides, or None if the system does not report its free memory.
        ranks: A `RankPlan` with the data that ranks would exchange, or None if `world_size` was not given.
    """

    def __init__(
        self,
        sample: Sample,
        dim: int,
        state: int,
        tables: int,
        warmup: int,
        memory_mb: float | None,
        ranks: RankPlan | None,
        num_words: int,
    ) -> None:
        """`num_words` is how many 4-byte words a row with its state needs."""
        self.dim, self.state, self.memory_mb, self.ranks = dim, state, memory_mb, ranks
        self.line_bytes, self._stored_bytes = compute_line_bytes(num_words), 4 * num_words + 8
        self.rate = sample.rate
        self.batches = max(len(sample.batch_rows) - warmup, 0)
        uses = sample.collect_uses()
        self._is_counted = uses.batch >= warmup
        if not self._is_counted.any():
            raise InputError(f"trace: {self.batches} batches after warmup={warmup} use no rows; give more batches")
        self._tables = uses.table
        self._overflow_row_bytes = self.line_bytes + OVERFLOW_OVERHEAD_BYTES
        self._max_batch_rows = max(sample.batch_rows)
        self._model = HitModel(uses, sample)
        _, first_uses = np.unique(uses.row, return_index=True)
        self.seen = _estimate_counts(uses.table[first_uses], tables, self.rate)
        self.uses = _estimate_counts(uses.table[self._is_counted], tables, self.rate)

    def rows(self, budget_mb: float) -> int:
        """Return how many rows a cache of `budget_mb` MiB holds. Raises OptionError below MIN_CACHE_ROWS rows."""
        budget = as_number(budget_mb)
        if budget is None or not self.bytes(MIN_CACHE_ROWS) / MB <= budget < 1 << 40:
            raise OptionError(f"budget_mb={budget_mb!r}: give a number of MiB >= {self.bytes(MIN_CACHE_ROWS) / MB:.3f}")
        return int(budget * MB) // self.bytes(WAYS) * WAYS

    def bytes(self, rows: int) -> int:
        """Return how many bytes a cache for `rows` rows needs, including its metadata."""
        return rows * (self.line_bytes + LINE_OVERHEAD_BYTES)

    def overflow_mb(self, budget_mb: float) -> float:
        """Return the default `overflow_mb` for a `cached_ssd` store whose cache has `budget_mb` MiB.

        The default is the smaller of `budget_mb` and 192 MiB, but at least twice the size of the largest batch.
        """
        batches_mb = 2 * self._max_batch_rows * self._overflow_row_bytes / MB
        return max(compute_default_overflow_mb("cached_ssd", budget_mb), batches_mb)

    def hit_rate(
        self,
        *,
        budget_mb: float | None = None,
        rows: int | None = None,
        table: int | None = None,
        overflow_mb: float = 0,
    ) -> float:
        """Return a cache's predicted hit rate, from 0 to 1.

        Args:
            budget_mb: The cache size in MiB.
            rows: The cache size in rows. Give either `rows` or `budget_mb`.
            table: Count only the hits on this table's rows. The cache is still shared by all tables.
            overflow_mb: The overflow area's size in MiB. Give it only for a `cached_ssd` store on the CPU. Half of the
                area holds rows that wait for write-back. Lookups of waiting rows count as hits.

        Raises:
            OptionError: If an argument is invalid.
        """
        overflow = as_number(overflow_mb)
        if overflow is None or not 0 <= overflow < 1 << 40:
            raise OptionError(f"overflow_mb={overflow_mb!r}: give a number of MiB, or 0")
        if (budget_mb is None) == (rows is None):
            raise OptionError(f"budget_mb={budget_mb!r}, rows={rows!r}: give exactly one of the two")
        if budget_mb is not None:
            rows = self.rows(budget_mb)
        lines = as_int(rows, minimum=MIN_CACHE_ROWS)
        if lines is None:
            raise OptionError(f"rows={rows!r}: give a whole number, {MIN_CACHE_ROWS} or more")
        return self._predict_mean(lines + int(overflow * MB) // self._overflow_row_bytes // 2, self._make_mask(table))

    def division(self, capacity: int | None = None) -> MemorySplit:
        """Return how a `cached_ssd` store on the CPU with `cache_budget_mb="auto"` would divide `memory_mb`.

        `capacity` is the store option. Other options have their defaults. Raises OptionError if `memory_mb` is None.
        """
        if self.memory_mb is None:
            raise OptionError(
                "memory_mb=None, and this system does not report its free memory; call plan with memory_mb"
            )
        if capacity is not None:
            capacity = _check_count("capacity", capacity, 1)
        return split_memory(self.memory_mb, self.bytes(1), "rocksdb", capacity=capacity, overflow_mb=None)

    def memory(self, rows: int | None = None) -> dict[str, float]:
        """Return how many MiB the parts of a `cached_ssd` store take at most, besides caches and overflow areas.

        `index_and_filters` is the memory without the option `index_mb`; `index_mb_for_all` is the `index_mb` that is
        enough for all rows. Both count one version of each row; replaced versions add to it until they are compacted.

        `rows` is how many rows are stored. Default: the trace's distinct rows. Raises OptionError.
        """
        num_rows = int(self.seen.sum()) if rows is None else _check_count("rows", rows, 1)
        return {
            "write_buffers": WRITE_BUFFER_BYTES / MB,
            "index_and_filters": num_rows * compute_index_bytes(self._stored_bytes) / MB,
            "index_mb_for_all": num_rows * compute_index_bytes(self._stored_bytes, is_bounded=True) / MB,
            "changed_keys": num_rows * ROW_KEY_DTYPE.itemsize / MB,
            "threads": compute_thread_bytes(self._max_batch_rows) / MB,
        }

    def curve(self, table: int | None = None, points: int = 32) -> Curve:
        """Return miss ratios for cache sizes from MIN_CACHE_ROWS to twice the trace's distinct rows.

        Args:
            table: Count only this table's rows. The cache is still shared by all tables.
            points: How many cache sizes to compute. Each size is the previous size times a constant factor.

        Raises:
            OptionError: If an argument is invalid.
        """
        if as_int(points, minimum=2) is None:
            raise OptionError(f"points={points!r}: give a whole number, 2 or more")
        mask = self._make_mask(table)
        largest = max(2 * int(self.seen.sum()), 2 * MIN_CACHE_ROWS)
        rows = np.unique(np.geomspace(MIN_CACHE_ROWS, largest, points).astype(np.int64))
        miss_ratio = np.array([1 - self._predict_mean(int(size), mask) for size in rows])
        return Curve(rows, np.array([self.bytes(int(size)) / MB for size in rows]), miss_ratio)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw a miss-ratio curve for all tables together and, if there are several tables, for each table.

        The path's suffix chooses matplotlib's file format. Raises OptionError if `tierbed[plot]` is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise OptionError("plot needs matplotlib: pip install 'tierbed[plot]'") from error
        figure = Figure(figsize=(7, 4.5), layout="constrained")
        axes = figure.subplots()
        if len(self.seen) > 1:
            for table in np.flatnonzero(self.uses):
                curve = self.curve(int(table))
                axes.plot(curve.budget_mb, curve.miss_ratio, linewidth=1, alpha=0.6, label=f"table {table}")
        curve = self.curve()
        axes.plot(curve.budget_mb, curve.miss_ratio, color="black", label="all tables")
        axes.set(xscale="log", xlabel="cache_budget_mb", ylabel="miss ratio", ylim=(0, 1.02))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=1 + len(self.seen) // 12)
        figure.savefig(path)

    def __repr__(self) -> str:
        seen = int(self.seen.sum())
        sampled = "" if self.rate == 1 else f", sampled 1/{round(1 / self.rate)}"
        lines = [
            f"{self.batches} batches need {int(self.uses.sum())} rows, {seen} different ones in all{sampled}",
            f"{self.bytes(1)} bytes a cached row: {self.dim} numbers and {self.state} of optimizer state",
        ]
        if self.ranks is not None:
            lines.append(repr(self.ranks))
        if seen < MIN_CACHE_ROWS:
            note = f"caches of fewer than {MIN_CACHE_ROWS} rows are not predicted: one of {MIN_CACHE_ROWS} holds all"
            return "\n".join([*lines, note])
        lines.append(
            f"{'cache_budget_mb':>16}{'rows':>12}{'of all':>8}{'hit rate':>10}{'+ overflow_mb':>15}{'MiB in all':>12}"
            f"{'on RocksDB':>12}"
        )
        for fraction in FRACTIONS:
            rows = round(fraction * seen)
            if rows < MIN_CACHE_ROWS:
                continue
            budget, overflow = self.bytes(rows) / MB, self.overflow_mb(self.bytes(rows) / MB)
            hit_rate, on_rocksdb = (self.hit_rate(rows=rows, overflow_mb=mb) for mb in (0, overflow))
            sizes = f"{overflow:15.2f}{budget + overflow:12.2f}"
            lines.append(f"{budget:16.2f}{rows:12d}{fraction:8.0%}{hit_rate:10.1%}{sizes}{on_rocksdb:12.1%}")
        parts = ", ".join(f"{name.replace('_', ' ')} {mb:.1f}" for name, mb in self.memory().items())
        lines.append(f"MiB of RocksDB's other parts, for {seen} rows: {parts}")
        if self.memory_mb is not None:
            lines.append(f"'auto' divides {self.memory_mb:.1f} MiB: {self.division()}")
        return "\n".join(lines)

    def _make_mask(self, table: int | None) -> NDArray[np.bool_]:
        if table is None:
            return self._is_counted
        if as_int(table, 0, len(self.seen) - 1) is None:
            raise OptionError(f"table={table!r}: give a number from 0 to {len(self.seen) - 1}")
        if not self.uses[table]:
            raise OptionError(f"table={table}: the trace has no ids for it; give a longer trace, or more samples")
        return self._is_counted & (self._tables == table)

    def _predict_mean(self, rows: int, mask: NDArray[np.bool_]) -> float:
        return float(self._model.compute_hit_probabilities(rows)[mask].mean())


@validate_arguments("trace")
def plan(
    trace: Iterable[Any],
    dim: int,
    state: int,
    *,
    tables: int = 1,
    padding_idx: int | None = None,
    warmup: int = 0,
    samples: int = 1 << 18,
    memory_mb: float | None = None,
    world_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    state_dtype: torch.dtype = torch.float32,
) -> Plan:
    """Predict cache hit rates, and how much data ranks would exchange, for batches like the ones in a trace.

    Args:
        trace: One item per training step: ids, or a tuple (ids, table_ids). Ids and table ids are integer tensors
            or arrays. `table_ids` is broadcast to the shape of the ids. Without `table_ids`, ids for several tables
            need shape [..., tables]; column t holds the ids of table t.
        dim: Embedding elements per row.
        state: Optimizer state elements per row: 0 for SGD; `dim` for SGD with momentum and Adagrad; `2 * dim` for Adam,
            AdamW and CatchUpAdam; 1 for RowWiseAdagrad (docs/optimizers.md lists all).
        tables: How many tables the embedding has.
        padding_idx: The padding id, as for an embedding. Padding ids are not counted.
        warmup: The number of batches at the start that are not counted. These batches only fill the cache.
        samples: The maximum number of recorded uses of rows. If the trace has more uses, rows are sampled.
        memory_mb: The memory in MiB that `Plan.division` divides, as `cache_budget_mb="auto"` would. Default: the
            memory that is free on the machine and in this process's cgroups.
        world_size: Predict for this many ranks. Rows are divided among the ranks, and each batch is split into equal
            consecutive parts, one per rank. `Plan.ranks` then tells how much data ranks would exchange, and cache
            sizes are sums over all ranks.
        dtype: The dtype of stored rows, as for an embedding.
        state_dtype: The optimizer state's dtype, as for an embedding.

    Returns:
        A `Plan`. Print the plan, or call its methods.

    Raises:
        OptionError: If an argument is invalid.
        InputError: If a batch in the trace is invalid.
    """
    dim, tables = _check_count("dim", dim, 1), _check_count("tables", tables, 1)
    state, warmup = _check_count("state", state, 0), _check_count("warmup", warmup, 0)
    samples = _check_count("samples", samples, 1024)
    if memory_mb is not None:
        memory_mb = check_budget("memory_mb", memory_mb, allows_zero=False)
    elif (free := read_free_host_memory()) is not None:
        memory_mb = free.bytes / MB
    state_type = check_state_dtype(state_dtype)
    num_words = count_words(check_dtype(dtype), dim) + state // dim * count_words(state_type, dim) + state % dim
    padding = None
    if padding_idx is not None:
        padding = check_int("padding_idx", padding_idx, "a whole number, or None") & MASK64
    ranks = None
    if world_size is not None:
        size = check_int("world_size", world_size, f"a number of ranks from 1 to {MAX_RANKS}", 1, MAX_RANKS)
        ranks = RankPlan(size, dim, tables, padding)
    sample = Sample(samples)
    for index, item in enumerate(trace):
        keys, table_ids, batch_size = _read_ids(item, tables, f"batch {index} of trace")
        batch = _core.Batch([(keys, table_ids, None)], tables, padding)
        sample.add(batch)
        if ranks is not None and index >= warmup:
            ranks.add(batch, keys, table_ids, batch_size)
    return Plan(sample, dim, state, tables, warmup, memory_mb, ranks, num_words)


def _check_count(name: str, value: Any, minimum: int) -> int:
    return check_int(name, value, f"a whole number >= {minimum}", minimum)


def _estimate_counts(tables: NDArray[np.int64], count: int, rate: float) -> NDArray[np.int64]:
    return np.asarray(np.round(np.bincount(tables, minlength=count) / rate), np.int64)


def _read_ids(item: Any, tables: int, where: str) -> tuple[NDArray[np.uint64], NDArray[np.uint32] | None, int]:
    """Return a batch's keys [n], its table ids [n] or None, and the length of the ids' first dimension."""
    ids, table_ids = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    keys = _read_integers(ids, f"{where}: ids")
    batch_size = len(keys) if keys.ndim else 1
    if table_ids is None:
        if tables > 1 and (keys.ndim < 2 or keys.shape[-1] != tables):
            raise InputError(
                f"{where}: ids have shape {keys.shape}, but {tables} tables need shape (..., {tables}); give this "
                "shape, or a tuple (ids, table_ids)"
            )
        return _make_keys(keys), None, batch_size
    table_ids = _read_integers(table_ids, f"{where}: table_ids")
    try:
        table_ids = np.broadcast_to(table_ids, keys.shape)
    except ValueError:
        raise InputError(
            f"{where}: table_ids of shape {table_ids.shape} do not broadcast to the shape of ids, {keys.shape}; give "
            "one table id for each id"
        ) from None
    if table_ids.size and (table_ids.min() < 0 or table_ids.max() >= tables):
        raise InputError(f"{where} has table ids from {table_ids.min()} to {table_ids.max()}; give 0 to {tables - 1}")
    return _make_keys(keys), np.ascontiguousarray(table_ids.reshape(-1), np.uint32), batch_size


def _read_integers(values: Any, where: str) -> NDArray[Any]:
    if isinstance(values, Tensor) and values.is_meta:
        raise InputError(f"{where} are on the meta device, without values; give a tensor on the CPU")
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "iu":
        raise InputError(f"{where} are {array.dtype}; give a tensor or an array of integers")
    return array


def _make_keys(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """Convert ids to 64-bit keys. Signed ids are sign-extended, as in lookups."""
    wide_ids = ids.astype(np.uint64 if ids.dtype.kind == "u" else np.int64, copy=False)
    return np.ascontiguousarray(wide_ids.reshape(-1)).view(np.uint64)


class RankPlan:
    """How much data ranks would exchange for a trace, if `torch.chunk` split each batch among the ranks.

    All numbers are exact sums over the batches after the warmup.

    Attributes:
        size: How many ranks there are.
        batches: How many batches there are after the warmup.
        lookups: int64 [size], how many ids each rank looks up, without padding ids.
        ids: int64 [size, size]. Rank i requests `ids[i, j]` rows from rank j, each distinct row once per step.
        rows: int64 [size], how many of its rows each rank pins for requests from all ranks. A row counts once per step.
    """

    def __init__(self, size: int, dim: int, tables: int, padding: int | None) -> None:
        self.size, self.dim, self.batches = size, dim, 0
        self.lookups, self.ids, self.rows = (np.zeros(shape, np.int64) for shape in (size, (size, size), size))
        self._tables, self._padding = tables, padding

    def add(
        self, batch: _core.Batch, keys: NDArray[np.uint64], tables: NDArray[np.uint32] | None, samples: int
    ) -> None:
        """Count one batch. keys: [n]. tables: [n] or None. samples: the batch size. Samples have equally many keys."""
        self.batches += 1
        self.rows += self._count_owned(batch)
        step = -(-samples // self.size) * (len(keys) // samples) if samples else 0
        for rank in range(self.size):
            chunk = slice(rank * step, (rank + 1) * step)
            chunk_tables = None if tables is None else tables[chunk]
            part = _core.Batch([(keys[chunk], chunk_tables, None)], self._tables, self._padding)
            self.lookups[rank] += len(part.occurrences)
            self.ids[rank] += self._count_owned(part)

    def bytes(self, rows: torch.dtype = torch.float32, grads: torch.dtype = torch.float32) -> I64:
        """Return the bytes that rank i sends to rank j for ids, rows and gradients: int64 [size, size].

        rows, grads: the dtypes of sent rows and of sent gradients, as for `World`. Message headers are not included;
        they need at most 1 KiB per pair of ranks and step. Raises OptionError if a dtype is not supported.
        """
        for name, dtype in (("rows", rows), ("grads", grads)):
            if dtype not in WIRE_BYTES:
                raise OptionError(f"{name}={dtype!r}: give torch.float32, bfloat16 or float16")
        requests = self.ids * (1 - np.eye(self.size, dtype=np.int64))  # a rank sends nothing to itself
        ids = 8 if self._tables == 1 else 16
        return requests * (ids + WIRE_BYTES[grads] * self.dim) + requests.T * (WIRE_BYTES[rows] * self.dim)

    @property
    def dedup(self) -> float:
        """How many ids are looked up, divided by how many rows are requested."""
        return float(self.lookups.sum() / max(self.ids.sum(), 1))

    @property
    def skew(self) -> float:
        """The highest load divided by the mean load. A rank's load is how many of its rows are requested."""
        requests = self.ids.sum(0)
        return float(requests.max() / max(requests.mean(), 1e-9))

    def __repr__(self) -> str:
        steps = max(self.batches, 1)
        requests, sent = self.ids.sum() / steps, self.bytes() / steps
        return (
            f"{self.size} ranks request {requests:.0f} rows per step, {self.dedup:.2f} ids each; owners pin "
            f"{self.rows.sum() / steps:.0f}, the most loaded {self.skew:.2f} times the mean\n"
            f"{sent.sum() / 1e6:.3f} MB are sent per step in float32, the most by a rank "
            f"{sent.sum(1).max() / 1e6:.3f} MB, of a pair {sent.max() / 1e6:.3f} MB"
        )

    def _count_owned(self, batch: _core.Batch) -> I64:
        """Return how many of a batch's unique rows each rank owns: int64 [size]."""
        return np.bincount(_core.find_owners(batch.tables, batch.keys, self.size), minlength=self.size)
