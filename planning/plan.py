"""The predicted hit rate of a cache of each size, and what ranks would exchange, from a sample of the ids to come."""

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
    split_memory,
)
from ..engine.checks import as_int, as_number, budget_option, checked_arguments, int_option
from ..engine.errors import InputError, OptionError
from ..engine.host_memory import free_host_memory
from ..engine.options.initializers import MASK64
from ..engine.options.store_options import default_overflow_mb
from ..engine.options.table_spec import check_dtype, check_state_dtype
from ..engine.row_format import line_bytes_of, words_of
from .stack_distance import Model, Sample

MAX_RANKS = 1024
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # the sizes that a plan prints, as shares of the rows seen
I64 = NDArray[np.int64]
WIRE = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}  # bytes of a float that is sent


class Curve(NamedTuple):
    """A miss-ratio curve: arrays [n], by ascending size."""

    rows: NDArray[np.int64]  # lines of the cache
    budget_mb: NDArray[np.float64]  # MiB of those lines, as `cache_budget_mb`
    miss_ratio: NDArray[np.float64]  # rows missed / rows needed, each row once a batch


class Plan:
    """Predicted hit rates of an LRU cache over all tables of an embedding. `plan` makes it; it prints as a table.

    Hits are counted as in the engine's metrics: each distinct row of a batch once. `dim`, `state`: floats of a row and
    of its optimizer state. `line_bytes`: bytes of a row's line, with the record; a cache takes `LINE_OVERHEAD_BYTES`
    more for each. `batches`: those of the trace after the warmup. `seen`: the distinct rows of the trace by table.
    `uses`: how often the batches needed these rows. Both are exact at `rate` 1, else estimated from that share of the
    rows. `memory_mb`: MiB that `division` divides; None if the system does not report what is free. `ranks`: what ranks
    send each other, or None without `world_size`.
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
        words: int,
    ) -> None:
        """words: of 4 bytes in a row, state included."""
        self.dim, self.state, self.memory_mb, self.ranks = dim, state, memory_mb, ranks
        self.line_bytes = line_bytes_of(words)
        self.rate = sample.rate
        self.batches = max(len(sample.batch_rows) - warmup, 0)
        uses = sample.uses()
        counted = uses.batch >= warmup
        if not counted.any():
            raise InputError(f"trace: no rows in {self.batches} batches after warmup={warmup}; give more batches")
        self._tables = uses.table
        self._overflow_row_bytes = self.line_bytes + OVERFLOW_OVERHEAD_BYTES
        self._most_rows = max(sample.batch_rows)
        self._model = Model(uses, sample)
        self._counted = counted
        _, first = np.unique(uses.row, return_index=True)
        self.seen = _estimates(uses.table[first], tables, self.rate)
        self.uses = _estimates(uses.table[counted], tables, self.rate)

    def rows(self, budget_mb: float) -> int:
        """How many lines a cache with `cache_budget_mb=budget_mb` has. OptionError for fewer than MIN_CACHE_ROWS."""
        budget = as_number(budget_mb)
        if budget is None or not self.bytes(MIN_CACHE_ROWS) / MB <= budget < 1 << 40:
            raise OptionError(
                f"budget_mb={budget_mb!r}: give a number of MiB from {self.bytes(MIN_CACHE_ROWS) / MB:.3f} on"
            )
        return int(budget * MB) // self.bytes(WAYS) * WAYS

    def bytes(self, rows: int) -> int:
        """The bytes of a cache with lines for `rows` rows, its metadata included."""
        return rows * (self.line_bytes + LINE_OVERHEAD_BYTES)

    def overflow_mb(self, budget_mb: float) -> float:
        """The default `overflow_mb` of a `cached_ssd` with this cache: as much, up to 192, and at least two batches."""
        return max(default_overflow_mb("cached_ssd", budget_mb), 2 * self._most_rows * self._overflow_row_bytes / MB)

    def hit_rate(
        self,
        *,
        budget_mb: float | None = None,
        rows: int | None = None,
        table: int | None = None,
        overflow_mb: float = 0,
    ) -> float:
        """The predicted hit rate of a cache of the size `budget_mb` or `rows`.

        table: counts only this table's rows, in the cache that all tables share. overflow_mb: of a cache above RocksDB
        on the CPU, half of which holds rows that wait for write-back, and are hits. Raises OptionError.
        """
        spare = as_number(overflow_mb)
        if spare is None or not 0 <= spare < 1 << 40:
            raise OptionError(f"overflow_mb={overflow_mb!r}: give a number of MiB, or 0")
        if (budget_mb is None) == (rows is None):
            raise OptionError(f"budget_mb={budget_mb!r}, rows={rows!r}: give one of them")
        if budget_mb is not None:
            rows = self.rows(budget_mb)
        lines = as_int(rows, minimum=MIN_CACHE_ROWS)
        if lines is None:
            raise OptionError(f"rows={rows!r}: give a whole number of lines, {MIN_CACHE_ROWS} or more")
        return self._mean(lines + int(spare * MB) // self._overflow_row_bytes // 2, self._of_table(table))

    def division(self, capacity: int | None = None) -> MemorySplit:
        """How `memory_mb` is divided by `cache_budget_mb="auto"` of a `cached_ssd` on the CPU, other options default.

        capacity: as the option. Raises OptionError if `memory_mb` is None.
        """
        if self.memory_mb is None:
            raise OptionError(
                "memory_mb=None, and this system does not report its free memory; call plan with memory_mb"
            )
        if capacity is not None:
            capacity = _count("capacity", capacity, 1)
        return split_memory(self.memory_mb, self.bytes(1), "rocksdb", capacity=capacity, overflow_mb=None)

    def curve(self, table: int | None = None, points: int = 32) -> Curve:
        """The miss ratio from small caches to one for every row that was seen, sizes in equal ratios.

        table: counts only this table's rows, in the cache that all tables share. Raises OptionError.
        """
        if as_int(points, minimum=2) is None:
            raise OptionError(f"points={points!r}: give a whole number, 2 or more")
        of = self._of_table(table)
        most = max(2 * int(self.seen.sum()), 2 * MIN_CACHE_ROWS)
        rows = np.unique(np.geomspace(MIN_CACHE_ROWS, most, points).astype(np.int64))
        missed = np.array([1 - self._mean(int(size), of) for size in rows])
        return Curve(rows, np.array([self.bytes(int(size)) / MB for size in rows]), missed)

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the curve of all tables together and, where there are several, the curve of each. Needs `tierbed[plot]`.

        The ending of `path` is one of matplotlib's formats. Raises OptionError if matplotlib is missing.
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
            known = f"caches of fewer than {MIN_CACHE_ROWS} rows are not predicted: one of {MIN_CACHE_ROWS} holds all"
            return "\n".join([*lines, known])
        lines.append(
            f"{'cache_budget_mb':>16}{'rows':>12}{'of all':>8}{'hit rate':>10}{'+ overflow_mb':>15}{'MiB in all':>12}"
            f"{'on RocksDB':>12}"
        )
        for share in SHARES:
            rows = round(share * seen)
            if rows < MIN_CACHE_ROWS:
                continue
            budget, overflow = self.bytes(rows) / MB, self.overflow_mb(self.bytes(rows) / MB)
            alone, above_rocksdb = (self.hit_rate(rows=rows, overflow_mb=mb) for mb in (0, overflow))
            sizes = f"{overflow:15.2f}{budget + overflow:12.2f}"
            lines.append(f"{budget:16.2f}{rows:12d}{share:8.0%}{alone:10.1%}{sizes}{above_rocksdb:12.1%}")
        if self.memory_mb is not None:
            lines.append(f"'auto' divides {self.memory_mb:.1f} MiB: {self.division()}")
        return "\n".join(lines)

    def _of_table(self, table: int | None) -> NDArray[np.bool_]:
        if table is None:
            return self._counted
        if as_int(table, 0, len(self.seen) - 1) is None:
            raise OptionError(f"table={table!r}: tables run from 0 to {len(self.seen) - 1}")
        if not self.uses[table]:
            raise OptionError(f"table={table}: the trace has no ids of it; give a longer one, or more samples")
        return self._counted & (self._tables == table)

    def _mean(self, rows: int, of: NDArray[np.bool_]) -> float:
        return float(self._model.chances(rows)[of].mean())


@checked_arguments("trace")
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
    """Predict the hit rates of caches of each size, for batches like those of `trace`, and what ranks exchange.

    trace: a batch for each training step: ids, or (ids, table_ids), tensors or arrays of integers as lookups take
    them: table_ids broadcast to ids; without them and with several tables, the last dimension of ids is the tables.
    dim, state: numbers of a row, and of its optimizer state: 0 for SGD, dim for SGD with momentum and for Adagrad,
    2 * dim for Adam, AdamW and CatchUpAdam, 1 for RowWiseAdagrad (docs/optimizers.md has all).
    warmup: batches at the start that fill the cache and are not counted.
    samples: the most uses of rows that are kept; of a trace with more, a share of the rows is followed, so memory stays
    bounded.
    memory_mb: MiB to divide as `cache_budget_mb="auto"` does; None: what is free here, by the machine and its cgroups.
    world_size: ranks to divide the rows over, and each batch, in equal consecutive parts; `Plan.ranks` has what they
    send each other. A cache size is then that of all ranks' caches together.
    dtype, state_dtype: of rows, as of an embedding.

    Raises OptionError for bad arguments and InputError for bad batches.
    """
    dim, tables = _count("dim", dim, 1), _count("tables", tables, 1)
    state, warmup = _count("state", state, 0), _count("warmup", warmup, 0)
    samples = _count("samples", samples, 1024)
    if memory_mb is not None:
        memory_mb = budget_option("memory_mb", memory_mb, zero=False)
    elif (free := free_host_memory()) is not None:
        memory_mb = free.bytes / MB
    of_states = check_state_dtype(state_dtype)
    words = words_of(check_dtype(dtype), dim) + state // dim * words_of(of_states, dim) + state % dim
    padding = None
    if padding_idx is not None:
        padding = int_option("padding_idx", padding_idx, "a whole number, or None") & MASK64
    ranks = None
    if world_size is not None:
        size = int_option("world_size", world_size, f"a number of ranks from 1 to {MAX_RANKS}", 1, MAX_RANKS)
        ranks = RankPlan(size, dim, tables, padding)
    sample = Sample(samples)
    for number, item in enumerate(trace):
        keys, table_ids, length = _ids(item, tables, f"batch {number} of trace")
        batch = _core.Batch([(keys, table_ids, None)], tables, padding)
        sample.add(batch)
        if ranks is not None and number >= warmup:
            ranks.add(batch, keys, table_ids, length)
    return Plan(sample, dim, state, tables, warmup, memory_mb, ranks, words)


def _count(name: str, value: Any, least: int) -> int:
    return int_option(name, value, f"a whole number >= {least}", least)


def _estimates(tables: NDArray[np.int64], count: int, rate: float) -> NDArray[np.int64]:
    return np.asarray(np.round(np.bincount(tables, minlength=count) / rate), np.int64)


def _ids(item: Any, tables: int, where: str) -> tuple[NDArray[np.uint64], NDArray[np.uint32] | None, int]:
    """Keys [n], table ids [n] where the batch has any, and the length of the first dimension of ids."""
    ids, table_ids = item if isinstance(item, tuple) and len(item) == 2 else (item, None)
    keys = _integers(ids, f"{where}: ids")
    length = len(keys) if keys.ndim else 1
    if table_ids is None:
        if tables > 1 and (keys.ndim < 2 or keys.shape[-1] != tables):
            raise InputError(
                f"{where}: ids of shape {keys.shape} are not (..., {tables}), a column for each table; give that, or "
                "(ids, table_ids)"
            )
        return _keys(keys), None, length
    of = _integers(table_ids, f"{where}: table_ids")
    try:
        of = np.broadcast_to(of, keys.shape)
    except ValueError:
        raise InputError(
            f"{where}: table_ids of shape {of.shape} do not broadcast to that of ids, {keys.shape}; give one an id"
        ) from None
    if of.size and (of.min() < 0 or of.max() >= tables):
        raise InputError(f"{where}: table ids from {of.min()} to {of.max()}; they run from 0 to {tables - 1}")
    return _keys(keys), np.ascontiguousarray(of.reshape(-1), np.uint32), length


def _integers(values: Any, where: str) -> NDArray[Any]:
    if isinstance(values, Tensor) and values.is_meta:
        raise InputError(f"{where} are on meta and have no values; give them on the CPU")
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.dtype.kind not in "iu":
        raise InputError(f"{where} are of {array.dtype}; give a tensor or an array of integers")
    return array


def _keys(ids: NDArray[Any]) -> NDArray[np.uint64]:
    """The 64 bits that name a row: signed ids are sign-extended, as in lookups."""
    wide = ids.astype(np.uint64 if ids.dtype.kind == "u" else np.int64, copy=False)
    return np.ascontiguousarray(wide.reshape(-1)).view(np.uint64)


class RankPlan:
    """The exchange of a trace's steps, each batch given to ranks in equal consecutive parts, as torch.chunk divides it.

    `size`: the ranks. `batches`: those that are counted. `lookups`: int64 [size], the ids of each rank but padding.
    `ids`: int64 [size, size]; rank i asks owner j for ids[i, j] rows, each distinct row of a step once. `rows`: int64
    [size], the rows that each owner pins, those of several ranks' parts once a step. All are sums over the batches,
    and exact.
    """

    def __init__(self, size: int, dim: int, tables: int, padding: int | None) -> None:
        self.size, self.dim, self.batches = size, dim, 0
        self.lookups, self.ids, self.rows = (np.zeros(shape, np.int64) for shape in (size, (size, size), size))
        self._tables, self._padding = tables, padding

    def add(
        self, batch: _core.Batch, keys: NDArray[np.uint64], tables: NDArray[np.uint32] | None, samples: int
    ) -> None:
        """Count a batch of `samples` equal runs of keys [n]. tables [n]: the table of each key, if they are given."""
        self.batches += 1
        self.rows += self._owned(batch)
        step = -(-samples // self.size) * (len(keys) // samples) if samples else 0
        for rank in range(self.size):
            mine = slice(rank * step, (rank + 1) * step)
            part = _core.Batch(
                [(keys[mine], None if tables is None else tables[mine], None)], self._tables, self._padding
            )
            self.lookups[rank] += len(part.occurrences)
            self.ids[rank] += self._owned(part)

    def bytes(self, rows: torch.dtype = torch.float32, grads: torch.dtype = torch.float32) -> I64:
        """int64 [size, size]: the bytes that rank i sends to rank j for ids, rows and their gradients.

        rows, grads: as of `World`. Headers, at most 1 KiB for a pair and step, are left out. Raises OptionError.
        """
        for name, dtype in (("rows", rows), ("grads", grads)):
            if dtype not in WIRE:
                raise OptionError(f"{name}={dtype!r}: give torch.float32, bfloat16 or float16")
        asked = self.ids * (1 - np.eye(self.size, dtype=np.int64))  # a rank sends itself nothing
        ids = 8 if self._tables == 1 else 16
        result: I64 = asked * (ids + WIRE[grads] * self.dim) + asked.T * (WIRE[rows] * self.dim)
        return result

    @property
    def dedup(self) -> float:
        """Ids looked up for each id that a rank asks for."""
        return float(self.lookups.sum() / max(self.ids.sum(), 1))

    @property
    def skew(self) -> float:
        """The load of the most loaded owner over the mean load, which is the rows that ranks ask an owner for."""
        asked = self.ids.sum(0)
        return float(asked.max() / max(asked.mean(), 1e-9))

    def __repr__(self) -> str:
        steps = max(self.batches, 1)
        asked, sent = self.ids.sum() / steps, self.bytes() / steps
        return (
            f"{self.size} ranks request {asked:.0f} rows per step, {self.dedup:.2f} ids each; owners pin "
            f"{self.rows.sum() / steps:.0f}, the most loaded {self.skew:.2f} times the mean\n"
            f"{sent.sum() / 1e6:.3f} MB are sent per step in float32, the most by a rank "
            f"{sent.sum(1).max() / 1e6:.3f} MB, of a pair {sent.max() / 1e6:.3f} MB"
        )

    def _owned(self, batch: _core.Batch) -> I64:
        """int64 [size]: the unique rows of a batch by their owner."""
        return np.bincount(_core.owners(batch.tables, batch.keys, self.size), minlength=self.size)
