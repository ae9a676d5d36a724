"""The open table of an embedding.

A stack of tiers, the rows' layout, the step count, and the way of one batch through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _core
from .errors import ClosedError, InputError, OptimizerError, StoreError
from .inputs import Lookup
from .interrupts import uninterrupted
from .store.contract import Chunks, Store, row_dtype
from .store.stack import Stack

if TYPE_CHECKING:
    from .optimizers import RowOptimizer
    from .spec import TableSpec


class OpenTable:
    """Rows in a stack of tiers.

    `rows` counts those written so far, `step` the updates of the whole table. `rule` and `states` name the optimizer
    that the rows carry state of; `optimizer` is None where the table is open for reading and `put` alone.
    `before_write` is called before each write.
    """

    def __init__(
        self,
        spec: TableSpec,
        layout: _core.Layout,
        stack: Stack,
        rule: str | None,
        states: Sequence[str],
        initial: Sequence[float],
        capacity: int | None,
        before_write: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.stack: Stack | None = stack
        self.rule = rule
        self.states = tuple(states)
        self.initial = tuple(initial)  # the value of each state of a new row
        self.optimizer: RowOptimizer | None = None
        self.rows = 0
        self.step = 0
        self.failure: BaseException | None = None  # what left the rows in doubt
        self._capacity = capacity
        self._before_write = before_write
        self._pinned: PinnedBatch | None = None
        self.lock = RLock()  # native loops let other threads of Python run

    def describe(self) -> dict[str, Any]:
        return self.spec.describe(self.rule, self.states, self.initial, self.step)

    def read(self, lookup: Lookup) -> Tensor:
        """Rows of ids, ids.shape + (dim,), float32; unknown ones are initial values and stay unknown."""
        with self.lock:
            batch = self._batch([lookup])
            self._store().peek(batch)
            return self._gather(batch, 0, lookup[0].shape)

    def prefetch(self, lookups: list[Lookup]) -> PinnedBatch:
        """Deduplicate the ids, bring their rows up and pin them.

        Raises CapacityError and pins nothing where they do not fit.
        """
        if self.optimizer is None:
            raise OptimizerError(f"embedding {self.spec.name!r} has no optimizer; pass its parameters to add_optimizer")
        with self.lock, uninterrupted():
            return self._pin(lookups)

    def gather(self, pinned: PinnedBatch, begin: int, shape: torch.Size) -> Tensor:
        """The rows of the pinned batch from position `begin` on, shape + (dim,)."""
        with self.lock:
            self._check_pinned(pinned)
            return self._gather(pinned.core, begin, shape)

    def update(self, pinned: PinnedBatch, grads: NDArray[np.float32]) -> None:
        """Apply the optimizer to a pinned batch, grads [size, dim], and end the pin."""
        assert self.optimizer is not None
        step = self.step + 1
        hyper = self.optimizer.hyper(step)
        with self.lock, self._writing(pinned):
            self.rows += _core.update(pinned.core, self.layout, grads, self.optimizer.rule, hyper, step)
            self.step = step

    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write values [n, dim] to the rows of n ids; of a repeated id the last stands. Optimizer state stays."""
        if self.states and self.optimizer is None:
            raise OptimizerError(
                f"embedding {self.spec.name!r} is open for reading: its rows carry the state of optimizer {self.rule}; "
                "add that optimizer before put"
            )
        with self.lock, uninterrupted():
            pinned = self._pin([lookup])
            with self._writing(pinned):
                self.rows += _core.assign(pinned.core, self.layout, values, self.step)

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        with self.lock, uninterrupted():
            pinned, self._pinned = self._pinned, None
            if pinned is not None:
                self._store().unpin(pinned.core, dirty=False)

    def scan(self) -> Chunks:
        """Every written row, as `Tier.scan`. Raises ClosedError if the table is closed or replaced on the way."""
        chunks = self._store().scan()
        while True:
            with self.lock, uninterrupted():
                self._store()
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def flush(self) -> None:
        with self.lock, uninterrupted():
            self._store().flush()

    def close(self) -> None:
        """Release memory and files without flushing. May be called again."""
        with self.lock:
            stack, self.stack, self._pinned = self.stack, None, None
            if stack is not None:
                stack.top.close()

    def metrics(self) -> dict[str, dict[str, int]]:
        with self.lock:
            return {"table": {"rows": self.rows, "step": self.step}, **self._store().metrics()}

    def _pin(self, lookups: list[Lookup]) -> PinnedBatch:
        self.release()
        batch = self._batch(lookups)
        self._store().pin(batch, None if self._capacity is None else self._capacity - self.rows)
        self._pinned = PinnedBatch(self, batch, [ids.shape for ids, _ in lookups])
        return self._pinned

    @contextmanager
    def _writing(self, pinned: PinnedBatch) -> Iterator[None]:
        """Around what writes the lines of a pinned batch; ends the pin."""
        self._check_pinned(pinned)
        with uninterrupted():
            self._before_write()
            written = False
            try:
                yield
                written, self._pinned = True, None
                self._store().unpin(pinned.core, dirty=True)
            except BaseException as error:
                if written or not isinstance(error, (TypeError, ValueError)):  # those refuse before anything is written
                    # lines, counters and the tiers below may disagree: nothing here may be served or marked clean
                    self.failure, self._pinned = error, None
                raise

    def _check_pinned(self, pinned: PinnedBatch) -> None:
        if pinned is not self._pinned:
            raise StoreError(f"embedding {self.spec.name!r}: the batch is no longer pinned; prefetch it again")

    def _store(self) -> Store:
        if self.stack is None:
            raise ClosedError(f"embedding {self.spec.name!r} was closed or its rows were replaced; use it anew")
        if self.failure is not None:
            raise StoreError(
                f"embedding {self.spec.name!r} failed in the middle of a write ({self.failure!r}); create it again: "
                "with a persistent_path it goes back to its last snapshot"
            ) from self.failure
        return self.stack.top

    def _batch(self, lookups: list[Lookup]) -> _core.Batch:
        _core.set_threads(torch.get_num_threads())
        segments = [(_unsigned(ids), None if tables is None else self._u32(tables)) for ids, tables in lookups]
        padding = None if self.spec.padding_idx is None else self.spec.padding_idx % 2**64
        return _core.Batch(segments, self.spec.num_tables, padding)

    def _u32(self, tables: Tensor) -> NDArray[np.uint32]:
        flat = tables.detach().reshape(-1).to(torch.int64)
        outside = (flat < 0) | (flat >= self.spec.num_tables)
        if outside.any():
            position = int(outside.nonzero()[0])
            raise InputError(
                f"table_ids of embedding {self.spec.name!r}: table id {int(flat[position])} at position {position}; "
                f"they run from 0 to {self.spec.num_tables - 1}"
            )
        return flat.to(torch.int32).numpy().view(np.uint32)

    def _gather(self, batch: _core.Batch, begin: int, shape: torch.Size) -> Tensor:
        out = torch.empty((*shape, self.layout.dim), dtype=torch.float32)
        _core.gather(batch, self.layout, begin, out.view(-1, self.layout.dim).numpy())
        return out


class PinnedBatch:
    """The unique rows of all lookups of a step, pinned in the top tier until `update` or the table's `release`."""

    def __init__(self, table: OpenTable, core: _core.Batch, shapes: list[torch.Size]) -> None:
        self.core = core
        self._table = table
        self._shapes = shapes

    def gather(self, index: int) -> Tensor:
        """The rows of lookup number `index`: ids.shape + (dim,), float32."""
        begin = sum(math.prod(shape) for shape in self._shapes[:index])
        return self._table.gather(self, begin, self._shapes[index])

    def update(self, grads: list[Tensor]) -> None:
        """Apply the optimizer. grads: for each lookup ids.shape + (dim,), float32."""
        dim = self._table.layout.dim
        flat = [grad.detach().reshape(-1, dim) for grad in grads]
        total = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)
        self._table.update(self, total.numpy())


def with_state(chunks: Chunks, initial: Sequence[float]) -> Chunks:
    """Scanned rows that have no optimizer state, with room for states that begin as `initial`."""
    for bucket, rows in chunks:
        dim = rows["values"].shape[1]
        wide = np.empty(len(rows), row_dtype(dim * (1 + len(initial))))
        for field in ("table", "key", "updates", "step"):
            wide[field] = rows[field]
        wide["values"][:, :dim] = rows["values"]
        wide["values"][:, dim:] = np.repeat(np.asarray(initial, np.float32), dim)
        yield bucket, wide


def load_rows(stack: Stack, chunks: Chunks, width: int) -> int:
    """Write scanned rows to the last tier of an empty stack. Returns how many."""
    # a packed row holds values and record as a line does, behind table and key: its line is an address within
    dtype = row_dtype(width)
    assert dtype.fields is not None
    offset = dtype.fields["values"][1]
    count = 0
    for _, rows in chunks:
        if rows.dtype != dtype or not rows.flags.c_contiguous:
            raise StoreError(f"rows of {rows.dtype} cannot be loaded into lines of {width} floats")
        lines = np.arange(len(rows), dtype=np.uint64) * np.uint64(dtype.itemsize) + np.uint64(rows.ctypes.data + offset)
        stack.bottom.write(rows["table"].copy(), rows["key"].copy(), lines)
        count += len(rows)
    return count


def _unsigned(ids: Tensor) -> NDArray[np.uint64]:
    """Ids as the 64 bits that identify a row; int32 is sign-extended, so -1 is the same row in either type."""
    flat = ids.detach().reshape(-1)
    if flat.dtype == torch.int32:
        flat = flat.to(torch.int64)
    return flat.contiguous().numpy().view(np.uint64)
