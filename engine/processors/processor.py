"""The methods of the processor that runs a table's operations. A batch takes the same path on every processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from ..errors import TierbedError
from ..host_memory import FreeMemory
from ..ops.batch import Gradients
from ..optim.row_state import RowState
from ..options.lookup import Lookup
from ..options.store_options import CachedHostMemOptions
from ..options.table_spec import TableSpec
from ..store.contract import FullStore, InMemoryTier, Tier, TopTier
from ..store.table_counts import Counts

B = TypeVar("B")


class DeferredError(NamedTuple):
    """The error of a call that had returned before it was found. Nothing has changed since that call."""

    error: TierbedError
    updates: int  # how many of the launched updates were applied


class ByOwner(NamedTuple):
    """The unique rows of a batch ordered by the ranks that own them, in host memory; within a rank in batch order."""

    keys: Tensor  # [unique] int64
    tables: Tensor  # [unique] int64
    positions: NDArray[np.int64]  # [unique] of each row of the batch in this order
    counts: list[int]  # [ranks]


def by_owner(unique: Lookup, ranks: int, last: int) -> ByOwner:
    """The unique rows of a batch by the ranks that own them, those of rank `last` after all others."""
    keys = unique.ids.cpu()
    tables = torch.zeros_like(keys) if unique.table_ids is None else unique.table_ids.cpu()
    owners = _core.owners(tables.numpy().astype(np.uint32), keys.numpy().view(np.uint64), ranks)
    turns = np.where(owners == last, ranks - 1, owners - (owners > last))
    order = np.argsort(turns.astype(np.uint16), kind="stable")  # of 16 bits by radix
    positions = np.empty_like(order)
    positions[order] = np.arange(len(order))
    counts = np.bincount(owners, minlength=ranks).tolist()
    in_order = torch.from_numpy(order)
    return ByOwner(keys[in_order], tables[in_order], positions, counts)


class Processor(Protocol[B]):
    """Runs the operations of one table on one kind of device. Rows and outputs are bit-identical on all of them.

    `B` is its batch: the unique rows of lookups, with addresses that a store sets. Tensors are on `device`. By default
    all work of a call is done when it returns, so that no error is deferred and nothing waits for an event.
    """

    device: torch.device
    layout: _core.Layout  # of lines in host memory
    defers_errors: bool = False  # whether errors of ids are raised by later calls
    capturer: Any = None  # the Device that captures launches, to replay them

    @property
    def written(self) -> Counts:
        """How many rows of each table were written for the first time; may wait for the device."""

    @property
    def dropped(self) -> Counts:
        """How many ids of lookups each table dropped by its option `bad_ids`; may wait for the device."""

    def deferred_error(self, wait: bool) -> DeferredError | None:
        """The deferred error since the last call, returned once. wait: whether to wait for all launched work."""
        return None

    def free_memory(self) -> FreeMemory | None:
        """The free memory of the device. None if rows are used in host memory."""
        return None

    def full_table(self, tier: str) -> FullStore[B]:
        """A full table in the memory `tier`, "device" or "host". Raises OptionError if that memory is too small."""

    def cache(self, below: Tier, options: CachedHostMemOptions) -> TopTier[B]:
        """A cache above a tier. Raises OptionError for a budget that cannot work."""

    def cached_table(self, options: CachedHostMemOptions) -> tuple[TopTier[B], InMemoryTier]:
        """A cache above a full table in host memory, and that table. OptionError, as `full_table` and `cache`."""

    def batch(self, lookups: Sequence[Lookup], dedup_from: B | None = None, ahead: bool = False) -> B:
        """The unique rows of lookups. InputError, maybe deferred, for offsets, table ids and ids out of range.

        dedup_from: a batch of the same lookups for an embedding with the same number of tables and the same padding,
        whose deduplication is reused. ahead: whether the batch is made before its step, which then raises its errors.
        """

    def side_stream(self) -> AbstractContextManager[object]:
        """A context in which work of this thread runs concurrently with the steps of another thread."""
        return nullcontext()

    def record_event(self) -> Any:
        """An event that is complete when all work that this thread has launched so far is."""
        return

    def wait_event(self, event: Any) -> None:
        """Let work that this thread launches later begin when `event` is complete."""
        return

    def wait(self) -> None:
        """Wait until all work that any thread has launched is complete."""
        return

    def adopt(self, batch: B, announced: Sequence[Lookup], lookups: Sequence[Lookup]) -> None:
        """Let this thread use, for `lookups`, a batch that another thread made from the announced lookups."""
        return

    def count_written(self, batch: B) -> Counts:
        """How many rows of each table in a batch were ever written; its lines are set. May wait for the device."""

    def gather_few(self, top: TopTier[B], lookup: Lookup, dtype: torch.dtype, trains: bool) -> Tensor | None:
        """The result of a lookup of few ids, read without making a batch; None if it takes a batch.

        trains: as of `TopTier.peek`.
        """

    def gather(
        self,
        batch: B,
        index: int,
        lookup: Lookup,
        weights: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """The rows of lookup number `index`, or its pooled bags: lookup.shape + (dim,), of `dtype`.

        out: a contiguous tensor of this shape and dtype, to be written and returned.
        """

    def weights_grad(self, batch: B, index: int, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of a lookup's weights, float32 of its ids' shape, 0 for padding; grad is like its `gather`."""

    def set_numbers(self, rule: str, hyper: Sequence[float], step: int, scale: float = 1.0) -> None:
        """Set the numbers for later calls of `update`, `preview_catch_up` and `catch_up`.

        hyper: the numbers of the rule, from `RowOptimizer.hyper`. step: the embedding's step. scale: multiplies
        gradients.
        """

    def update(self, batch: B, gradients: Gradients, rule: str) -> None:
        """Reduce each row's gradients and apply the rule.

        Raises TypeError or ValueError for wrong gradients, and nothing is written.
        """

    def square_gradients(self, batch: B, gradients: Gradients) -> Tensor:
        """[unique or longer] float32, the sum of the squares of each row's gradient, 0 after the rows."""

    def sum_gradients(
        self, batch: B, gradients: Gradients, positions: NDArray[np.int64] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """[unique, dim] float32, the gradient of each row of the batch, reduced as by `update`.

        out, positions: a contiguous [*, dim] to write instead, with row u at positions[u]. May wait for the
        device.
        """

    def unique_rows(self, batch: B) -> Lookup:
        """A lookup of the unique rows of the batch, each once, in its order. May wait for the device."""

    def set_lines(
        self, batch: B, rows: Tensor, positions: NDArray[np.int64], rest: tuple[B, int] | None = None
    ) -> None:
        """Let `gather` and `weights_grad` read row u of the batch from rows[positions[u]], of rows [*, dim] float32.

        rest: (other, at). Position len(rows) + i is the row at position at + i of the batch `other` of this processor,
        which has to stay pinned while this batch is read.
        """

    def assign(self, batch: B, values: NDArray[np.float32], step: int) -> None:
        """Write values [positions, dim] to the rows of a lookup without bags. The last write wins."""

    def preview_catch_up(self, batch: B, rule: str) -> None:
        """Let lookups read rows as of the beginning of the step, for a rule that catches up. No line changes."""

    def catch_up(self, batch: B, rule: str) -> None:
        """Apply missed steps to the lines of the batch, for a rule that catches up."""


# (spec, state, the maximum of rows or None) -> the processor of a table
Factory = Callable[[TableSpec, RowState, int | None], Processor[Any]]
