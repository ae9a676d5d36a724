"""The open table of an embedding.

A stack of tiers, the rows' layout, the step count, and the way of one batch through them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _core
from .errors import ClosedError, InputError, OptimizerError, StoreError
from .store.contract import Store, row_dtype
from .store.stack import Stack

if TYPE_CHECKING:
    from .optimizers import RowOptimizer
    from .spec import TableSpec

Lookup = tuple[Tensor, Tensor | None]  # ids, and table ids of the same shape or None


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
        capacity: int | None,
        before_write: Callable[[], None],
    ) -> None:
        self.spec = spec
        self.layout = layout
        self.stack: Stack | None = stack
        self.rule = rule
        self.states = tuple(states)
        self.optimizer: RowOptimizer | None = None
        self.rows = 0
        self.step = 0
        self.failure: StoreError | None = None
        self._capacity = capacity
        self._before_write = before_write
        self._pinned: PinnedBatch | None = None

    def describe(self) -> dict[str, Any]:
        return self.spec.describe(self.rule, self.states, self.step)

    def read(self, lookup: Lookup) -> Tensor:
        """Rows of ids, ids.shape + (dim,), float32; unknown ones are initial values and stay unknown."""
        batch = self._batch([lookup])
        self._store().peek(batch)
        return self._gather(batch, 0, lookup[0].shape)

    def prefetch(self, lookups: list[Lookup]) -> PinnedBatch:
        """Deduplicate the ids, bring their rows up and pin them.

        Raises CapacityError and pins nothing where they do not fit.
        """
        if self.optimizer is None:
            raise OptimizerError(f"embedding {self.spec.name!r} has no optimizer; pass its parameters to add_optimizer")
        return self._pin(lookups)

    def put(self, lookup: Lookup, values: Tensor) -> None:
        """Write values [n, dim] to the rows of n ids; of a repeated id the last stands. Optimizer state stays."""
        batch = self._pin([lookup]).core
        self.rows += _core.assign(batch, self.layout, values.reshape(-1, self.layout.dim).numpy(), self.step)
        self._unpin(dirty=True)

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        if self._pinned is not None:
            self._unpin(dirty=False)

    def scan(self) -> Iterator[tuple[int, NDArray[np.void]]]:
        """Every written row, as `Tier.scan`."""
        self.release()
        return self._store().scan()

    def flush(self) -> None:
        self._store().flush()

    def close(self) -> None:
        """Release memory and files without flushing. May be called again."""
        stack, self.stack, self._pinned = self.stack, None, None
        if stack is not None:
            stack.top.close()

    def metrics(self) -> dict[str, dict[str, int]]:
        return {"table": {"rows": self.rows, "step": self.step}, **self._store().metrics()}

    def finish(self, pinned: PinnedBatch, grads: NDArray[np.float32]) -> None:
        """Apply the optimizer to a pinned batch, grads [size, dim], and end the pin."""
        self._check_pinned(pinned)
        assert self.optimizer is not None
        step = self.step + 1
        hyper = self.optimizer.hyper(step)
        self.rows += _core.update(pinned.core, self.layout, grads, self.optimizer.rule, hyper, step)
        self.step = step
        self._unpin(dirty=True)

    def gather(self, pinned: PinnedBatch, begin: int, shape: torch.Size) -> Tensor:
        """The rows of the pinned batch from position `begin` on, shape + (dim,)."""
        self._check_pinned(pinned)
        return self._gather(pinned.core, begin, shape)

    def _check_pinned(self, pinned: PinnedBatch) -> None:
        if pinned is not self._pinned:
            raise StoreError(f"embedding {self.spec.name!r}: the batch is no longer pinned; prefetch it again")

    def _pin(self, lookups: list[Lookup]) -> PinnedBatch:
        self.release()
        batch = self._batch(lookups)
        self._before_write()
        self._store().pin(batch, self._room())
        self._pinned = PinnedBatch(self, batch, [ids.shape for ids, _ in lookups])
        return self._pinned

    def _unpin(self, dirty: bool) -> None:
        pinned, self._pinned = self._pinned, None
        assert pinned is not None
        try:
            self._store().unpin(pinned.core, dirty)
        except StoreError as error:
            # rows of the batch may be lost between memory and disk: nothing here may be served or marked clean
            self.failure = error
            raise

    def _room(self) -> int | None:
        return None if self._capacity is None else self._capacity - self.rows

    def _store(self) -> Store:
        if self.stack is None:
            raise ClosedError(f"embedding {self.spec.name!r} was closed; create it again")
        if self.failure is not None:
            raise StoreError(
                f"embedding {self.spec.name!r} failed before ({self.failure}); create it again: it resumes from the "
                f"last snapshot"
            ) from self.failure
        return self.stack.top

    def _batch(self, lookups: list[Lookup]) -> _core.Batch:
        _core.set_threads(torch.get_num_threads())
        segments = [(_unsigned(ids), None if tables is None else _u32(tables)) for ids, tables in lookups]
        padding = None if self.spec.padding_idx is None else self.spec.padding_idx % 2**64
        try:
            return _core.Batch(segments, self.spec.num_tables, padding)
        except IndexError as error:
            raise InputError(
                f"table_ids of embedding {self.spec.name!r}: {error}; they run from 0 to {self.spec.num_tables - 1}"
            ) from None

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
        self._table.finish(self, total.numpy())


def load_rows(stack: Stack, chunks: Iterator[tuple[int, NDArray[np.void]]], width: int) -> int:
    """Write scanned rows to the last tier of an empty stack. Returns how many."""
    # a packed row holds values and record as a line does, behind table and key: its line is an address within
    dtype = row_dtype(width)
    assert dtype.fields is not None
    offset = dtype.fields["values"][1]
    count = 0
    for _, rows in chunks:
        rows = np.ascontiguousarray(rows)
        lines = np.arange(len(rows), dtype=np.uint64) * np.uint64(dtype.itemsize) + np.uint64(rows.ctypes.data + offset)
        stack.bottom.write(np.ascontiguousarray(rows["table"]), np.ascontiguousarray(rows["key"]), lines)
        count += len(rows)
    return count


def _unsigned(ids: Tensor) -> NDArray[np.uint64]:
    """Ids as the 64 bits that identify a row; int32 is sign-extended, so -1 is the same row in either type."""
    flat = ids.detach().reshape(-1)
    if flat.dtype == torch.int32:
        flat = flat.to(torch.int64)
    return flat.contiguous().numpy().view(np.uint64)


def _u32(tables: Tensor) -> NDArray[np.uint32]:
    return tables.detach().reshape(-1).to(torch.int32).contiguous().numpy().view(np.uint32)
