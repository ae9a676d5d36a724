"""`Processor`, the interface through which a table runs its operations on a CPU or GPU."""

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
from ..store.interfaces import FullTier, InMemoryTier, Tier, TopTier
from ..store.table_counts import Counts

B = TypeVar("B")


class DeferredError(NamedTuple):
    """An error of an earlier call, found only after that call returned. No row has changed since that call."""

    error: TierbedError
    num_updates: int  # number of the launched updates that were applied


class RowsByOwner(NamedTuple):
    """A batch's unique rows, sorted by owner rank. A rank's rows stay in batch order. All data is in host memory."""

    keys: Tensor  # [unique] int64
    tables: Tensor  # [unique] int64
    indices: NDArray[np.int64]  # [unique]: where each row of the batch is in `keys`
    counts: list[int]  # [ranks], number of rows that each rank owns


def sort_by_owner(unique_rows: Lookup, num_ranks: int, last_rank: int) -> RowsByOwner:
    """Sort a batch's unique rows by the rank that owns them. Rank `last_rank` comes after all other ranks."""
    keys = unique_rows.ids.cpu()
    tables = torch.zeros_like(keys) if unique_rows.table_ids is None else unique_rows.table_ids.cpu()
    owners = _core.find_owners(tables.numpy().astype(np.uint32), keys.numpy().view(np.uint64), num_ranks)
    owner_order = np.where(owners == last_rank, num_ranks - 1, owners - (owners > last_rank))
    order = np.argsort(owner_order.astype(np.uint16), kind="stable")  # NumPy sorts 16-bit numbers with a radix sort
    indices = np.empty_like(order)
    indices[order] = np.arange(len(order))
    counts = np.bincount(owners, minlength=num_ranks).tolist()
    index = torch.from_numpy(order)
    return RowsByOwner(keys[index], tables[index], indices, counts)


class Processor(Protocol[B]):
    """Runs one table's operations on one kind of device. Rows and outputs are bit-identical on all devices.

    `B` is the type of a batch. A batch holds the unique rows of lookups. A store adds the rows' addresses to the batch.
    Tensors are on `device`. The default methods suit a processor that finishes a call's work before the call returns.
    """

    device: torch.device
    layout: _core.Layout  # the layout of rows in host memory
    defers_errors: bool = False  # True if an error in the input may be raised by a later call
    capturer: Any = None  # the Device that captures kernel launches and replays them

    @property
    def written_counts(self) -> Counts:
        """For each table, the number of rows that were written for the first time. May wait for the device."""

    @property
    def dropped_counts(self) -> Counts:
        """For each table, the number of illegal ids that were dropped (`bad_ids`). May wait for the device."""

    def take_deferred_error(self, wait: bool) -> DeferredError | None:
        """Returns a deferred error, each error only once. With `wait`, waits for all launched work first."""
        return None

    def read_free_memory(self) -> FreeMemory | None:
        """Returns the device's free memory, or None if the processor uses rows in host memory."""
        return None

    def make_full_table(self, tier: str) -> FullTier[B]:
        """Make a table for all rows in "device" or "host" memory. Raises OptionError if that memory is too small."""

    def make_cache(self, lower_tier: Tier, options: CachedHostMemOptions) -> TopTier[B]:
        """Make a cache above a tier. Raises OptionError for a wrong budget."""

    def make_table_cache(self, options: CachedHostMemOptions) -> tuple[TopTier[B], InMemoryTier]:
        """Make a table for all rows in host memory and a cache above it. Returns (cache, table). Raises OptionError."""

    def make_batch(self, lookups: Sequence[Lookup], sibling: B | None = None, is_future: bool = False) -> B:
        """Deduplicate lookups into a batch. Raises InputError, maybe deferred, for illegal ids, table ids and offsets.

        `sibling` is a batch of the same lookups for another embedding with the same number of tables and the same
        padding. Its deduplication is reused. `is_future`: the batch is for a later step, which raises the errors.
        """

    def enter_side_stream(self) -> AbstractContextManager[object]:
        """Returns a context that lets this thread's work run concurrently with another thread's steps."""
        return nullcontext()

    def record_event(self) -> Any:
        """Returns an event that completes when all work launched by this thread so far is complete."""
        return

    def wait_event(self, event: Any) -> None:
        """Delay this thread's later work until `event` is complete."""
        return

    def wait(self) -> None:
        """Wait until all work launched by any thread is complete."""
        return

    def adopt(self, batch: B, announced_lookups: Sequence[Lookup], lookups: Sequence[Lookup]) -> None:
        """Make another thread's batch usable in this thread. The two lists must be equal."""
        return

    def count_written(self, batch: B) -> Counts:
        """Returns, for each table, how many of the batch's rows were ever written. Needs row addresses. May wait."""

    def gather_rows(self, top: TopTier[B], lookup: Lookup, dtype: torch.dtype, is_training: bool) -> Tensor | None:
        """Returns a small lookup's result without making a batch, or None. `is_training`: see `TopTier.peek`."""

    def gather(
        self,
        batch: B,
        index: int,
        lookup: Lookup,
        weights: Tensor | None,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Returns a lookup's rows or pooled bags, [*lookup.shape, dim], in a new tensor or in `out` (contiguous)."""

    def weights_grad(self, batch: B, index: int, lookup: Lookup, grad: Tensor) -> Tensor:
        """Returns the gradient of a lookup's weights: float32 in the shape of its ids, 0 for padding."""

    def send_hyperparams(self, rule_name: str, hyperparams: Sequence[float], step: int, scale: float = 1.0) -> None:
        """Set the rule's numbers (`RowOptimizer.compute_hyperparams`), the step, and the factor for gradients."""

    def update(self, batch: B, gradients: Gradients, rule_name: str) -> None:
        """Sum the gradients of each row and apply the rule. Raises TypeError or ValueError before any write."""

    def compute_squared_norms(self, batch: B, gradients: Gradients) -> Tensor:
        """Returns each unique row's sum of squared gradient elements, as float32. Zeros may follow these sums."""

    def sum_gradients(
        self, batch: B, gradients: Gradients, indices: NDArray[np.int64] | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Returns each row's summed gradient, reduced as in `update`: float32 [unique, dim].

        If `out` is given, writes row u's gradient to out[indices[u]]; `out` is contiguous, [*, dim]. May wait.
        """

    def list_unique_rows(self, batch: B) -> Lookup:
        """Returns a lookup that contains each row of the batch once, in the batch's order. May wait for the device."""

    def set_lookup_rows(
        self, batch: B, rows: Tensor, indices: NDArray[np.int64], other_rows: tuple[B, int] | None = None
    ) -> None:
        """Make `gather` and `weights_grad` read row u of the batch from rows[indices[u]].

        `rows` is float32 [*, dim]. If `other_rows=(other, start)` is given, index len(rows) + i means row start + i
        of the batch `other`. `other` must be a batch of this processor, and must stay pinned while `batch` is read.
        """

    def assign(self, batch: B, values: NDArray[np.float32], step: int) -> None:
        """Write values [positions, dim] to the rows of a lookup without bags. A row's last value wins."""

    def preview_catch_up(self, batch: B, rule_name: str) -> None:
        """Apply missed steps to the rows that `gather` returns. The stored rows do not change."""

    def catch_up(self, batch: B, rule_name: str) -> None:
        """Apply missed steps to the stored rows of a batch."""


# (spec, state, maximum number of rows or None) -> a table's processor
ProcessorFactory = Callable[[TableSpec, RowState, int | None], Processor[Any]]
