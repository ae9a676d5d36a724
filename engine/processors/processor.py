"""What an open table asks of the processor that its rows are used on: one obvious way of a batch for all of them."""

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
from ..spec.inputs import Gradients, Lookup
from ..spec.options import CachedHostMemOptions
from ..store.contract import FullStore, Store, Table, Tier
from ..store.table_counts import Counts

if TYPE_CHECKING:
    from ..optim.row_state import RowState
    from ..spec.table_spec import TableSpec

B = TypeVar("B")
R = TypeVar("R")


class Recorder(Protocol):
    """As `Device` of `cuda/device.py`."""

    def record(self, launches: Callable[[], R]) -> tuple[Callable[[], None], R]: ...


class Late(NamedTuple):
    """A mistake that the processor found when the call that made it had returned; nothing changed since."""

    error: TierbedError
    taken: int  # how many updates took place, of all that were asked for


class Processor(Protocol[B]):
    """Runs the operations of one table on one kind of device. Rows and outputs have the same bits on all of them.

    `B` is its batch: the unique rows of lookups, whose addresses a store sets. Tensors are on `device`.
    """

    device: torch.device
    layout: _core.Layout  # of lines in host memory
    checks_late: bool  # what is wrong with ids is found when the call that was given them has returned
    recorder: Recorder | None  # what records launches, to run them again

    @property
    def written(self) -> Counts:
        """How many rows of each table were written for the first time; may wait for the device."""

    def late(self, wait: bool) -> Late | None:
        """What was found since it was asked last, once; with `wait`, in all that was asked for."""

    def full_table(self, tier: str) -> FullStore[B]:
        """`tier`: "device" or "host". Raises OptionError where its memory is too small."""

    def cache(self, below: Tier, options: CachedHostMemOptions) -> Store[B]:
        """Raises OptionError for a budget that cannot work."""

    def cached_table(self, options: CachedHostMemOptions) -> tuple[Store[B], Table]:
        """A cache over a full table in host memory, and that table. Raises OptionError as the two above."""

    def batch(self, lookups: Sequence[Lookup], like: B | None = None, ahead: bool = False) -> B:
        """Raises InputError for offsets and table ids that are out of range, or finds it late.

        like: a batch of these lookups that was made for another table, with as many tables and the same padding; its
        unique rows are taken. `ahead` of its step: what is found late is found in its step.
        """

    def beside(self) -> AbstractContextManager[object]:
        """Around what another thread than that of the steps does, which is done beside them."""

    def mark(self) -> Any:
        """What this thread has asked for until now."""

    def follow(self, mark: Any) -> None:
        """What this thread asks for from here on comes after that."""

    def wait(self) -> None:
        """Until all that any thread has asked for is done."""

    def hand_over(self, batch: B, announced: Sequence[Lookup], lookups: Sequence[Lookup]) -> None:
        """Another thread made the batch of the former; this one uses it from here on, for the latter."""

    def count_written(self, batch: B) -> Counts:
        """How many unique rows of each table were ever written, of a batch whose lines are set; may wait."""

    def gather(self, batch: B, index: int, lookup: Lookup, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The rows of lookup number `index`, or its pooled bags: lookup.shape + (dim,), of `dtype`."""

    def weights_grad(self, batch: B, index: int, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of its weights, float32 of the shape of its ids, 0 for padding; grad as gathered."""

    def set_numbers(self, rule: str, hyper: Sequence[float], step: int, scale: float = 1.0) -> None:
        """What `update`, `settle` and `catch_up` go by from here on.

        hyper: the rule's, as `RowOptimizer.hyper`. step: the embedding's. scale: of gradients.
        """

    def update(self, batch: B, gradients: Gradients, rule: str) -> None:
        """Reduce each row's gradients and apply the rule.

        TypeError or ValueError for wrong gradients, and nothing is written.
        """

    def square_gradients(self, batch: B, gradients: Gradients, rule: str) -> Tensor:
        """[at least the unique rows] float32, the sum of the squares of each row's gradient, 0 beyond the rows.

        rule: that of the update that follows, with whose kernels a device may have this one.
        """

    def assign(self, batch: B, values: NDArray[np.float32], step: int) -> None:
        """Write values [positions, dim] to the rows of a lookup without bags, the last occurrence standing."""

    def settle(self, batch: B, rule: str) -> None:
        """Let lookups see rows at the beginning of the step, for a rule that catches up. No line changes."""

    def catch_up(self, batch: B, rule: str) -> None:
        """Bring the lines of the batch to the beginning of the step, for a rule that catches up."""


# makes the processor of a table: (spec, state, the most rows or None)
Factory = Callable[["TableSpec", "RowState", int | None], Processor[Any]]
