"""What an open table asks of the processor that its rows are used on. A batch takes the same way on every processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .. import _core
from ..errors import TierbedError
from ..host_memory import FreeMemory
from ..options.lookup import Gradients, Lookup
from ..options.store_options import CachedHostMemOptions
from ..store.contract import FullStore, InMemoryTier, Tier, TopTier
from ..store.table_counts import Counts

if TYPE_CHECKING:
    from ..optim.row_state import RowState
    from ..options.table_spec import TableSpec

B = TypeVar("B")
R = TypeVar("R")


class Recorder(Protocol):
    """Records launches, as `Device` of engine/ops/cuda/device.py does."""

    def record(self, launches: Callable[[], R]) -> tuple[Callable[[], None], R]: ...


class DeferredError(NamedTuple):
    """A mistake that was found after its call had returned. Nothing has changed since that call."""

    error: TierbedError
    updates: int  # how many of the launched updates were applied


class ByOwner(NamedTuple):
    """The unique rows of a batch by the ranks that own them, in host memory; those of a rank in the batch's order."""

    keys: Tensor  # [unique] int64
    tables: Tensor  # [unique] int64
    positions: NDArray[np.int64]  # [unique] of each row of the batch, in that order
    counts: list[int]  # [ranks]


class Processor(Protocol[B]):
    """Runs the operations of one table on one kind of device. Rows and outputs have the same bits on all of them.

    `B` is its batch: the unique rows of lookups, whose addresses a store sets. Tensors are on `device`.
    """

    device: torch.device
    layout: _core.Layout  # of lines in host memory
    defers_errors: bool  # whether bad ids are found only after the call that was given them has returned
    recorder: Recorder | None  # records launches, to run them again

    @property
    def written(self) -> Counts:
        """How many rows of each table were written for the first time; may wait for the device."""

    @property
    def dropped(self) -> Counts:
        """How many ids of lookups each table dropped, as its `bad_ids` says; may wait for the device."""

    def deferred_error(self, wait: bool) -> DeferredError | None:
        """The mistake found since the last call, reported once; with `wait`, all requested work is looked at."""

    def free_memory(self) -> FreeMemory | None:
        """What the device has free of a memory of its own. None where rows are used in the memory of the host."""

    def full_table(self, tier: str) -> FullStore[B]:
        """A full table in the memory `tier`, "device" or "host". Raises OptionError where that memory is too small."""

    def cache(self, below: Tier, options: CachedHostMemOptions) -> TopTier[B]:
        """A cache in front of a tier. Raises OptionError for a budget that cannot work."""

    def cached_table(self, options: CachedHostMemOptions) -> tuple[TopTier[B], InMemoryTier]:
        """A cache over a full table in host memory, and that table. OptionError, as `full_table` and `cache`."""

    def batch(self, lookups: Sequence[Lookup], dedup_from: B | None = None, ahead: bool = False) -> B:
        """The unique rows of lookups. Raises InputError for offsets, table ids and ids out of range, or finds it late.

        like: a batch of these lookups, made for an embedding with as many tables and the same padding; its unique rows
        are taken. ahead: whether the batch is made ahead of its step; mistakes found late are then found in its step.
        """

    def side_stream(self) -> AbstractContextManager[object]:
        """A context in which the work of a thread runs beside the steps of another thread."""

    def record_event(self) -> Any:
        """An event that is over when all work is done that this thread has asked for until now."""

    def wait_event(self, event: Any) -> None:
        """Let the work that this thread asks for from here on begin when `event` is over."""

    def wait(self) -> None:
        """Wait until all work that any thread has asked for is done."""

    def adopt(self, batch: B, announced: Sequence[Lookup], lookups: Sequence[Lookup]) -> None:
        """Let this thread use, for `lookups`, a batch that another thread made of the announced lookups."""

    def count_written(self, batch: B) -> Counts:
        """How many rows of each table in a batch were ever written; its lines are set. May wait for the device."""

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

        out: a contiguous tensor of these elements, to be written and returned.
        """

    def weights_grad(self, batch: B, index: int, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of a lookup's weights, float32 of its ids' shape, 0 for padding; grad is like its `gather`."""

    def set_numbers(self, rule: str, hyper: Sequence[float], step: int, scale: float = 1.0) -> None:
        """Set the numbers that `update`, `preview_catch_up` and `catch_up` go by from here on.

        hyper: the numbers of the rule, from `RowOptimizer.hyper`. step: the embedding's step. scale: multiplies
        gradients.
        """

    def update(self, batch: B, gradients: Gradients, rule: str) -> None:
        """Reduce each row's gradients and apply the rule.

        Raises TypeError or ValueError for wrong gradients, and nothing is written.
        """

    def square_gradients(self, batch: B, gradients: Gradients) -> Tensor:
        """[at least the unique rows] float32, the sum of the squares of each row's gradient, 0 beyond the rows."""

    def sum_gradients(
        self, batch: B, gradients: Gradients, positions: NDArray[np.int64] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """[unique, dim] float32, the gradient of each row of the batch, reduced as by `update`.

        out, positions: a contiguous [*, dim] to write instead, with row u at positions[u]. May wait for the
        device.
        """

    def unique_rows(self, batch: B) -> Lookup:
        """A lookup of the unique rows of the batch, each once, in its order. May wait for the device."""

    def by_owner(self, batch: B, ranks: int, last: int) -> ByOwner:
        """The unique rows of the batch by the ranks that own them, those of rank `last` behind all others.

        May wait for the device.
        """

    def set_lines(
        self, batch: B, rows: Tensor, positions: NDArray[np.int64], rest: tuple[B, int] | None = None
    ) -> None:
        """Let `gather` and `weights_grad` take row u of the batch from rows[positions[u]], of rows [*, dim] float32.

        rest: a batch of this processor and a position in it. Place len(rows) + i is then what that batch has at i
        behind the position, and stays there: the batch has to be pinned as long as this one is read.
        """

    def assign(self, batch: B, values: NDArray[np.float32], step: int) -> None:
        """Write values [positions, dim] to the rows of a lookup without bags. The last occurrence of a row stands."""

    def preview_catch_up(self, batch: B, rule: str) -> None:
        """Let lookups see rows at the beginning of the step, for a rule that catches up. No line changes."""

    def catch_up(self, batch: B, rule: str) -> None:
        """Bring the lines of the batch to the beginning of the step, for a rule that catches up."""


# (spec, state, the most rows or None) -> the processor of a table
Factory = Callable[["TableSpec", "RowState", int | None], Processor[Any]]
