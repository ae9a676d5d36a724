"""A step's hold on the rows that it needs."""

from __future__ import annotations

from threading import RLock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..exact_sum import partial, total
from ..options.inputs import Gradients, Lookup, checked_gradients
from ..options.table_spec import TableSpec
from ..processors.processor import Processor
from .watch import Watch


class Steps(Protocol):
    """What a step needs of the table that pinned its rows."""

    lock: RLock
    processor: Processor[Any]
    spec: TableSpec
    watch: Watch
    refused: bool

    @property
    def rule(self) -> str:
        """The rule that the next update follows. OptimizerError."""

    def check_pinned(self, pinned: PinnedBatch) -> None:
        """Raise StoreError where the rows of the batch were let go."""

    def update(self, pinned: PinnedBatch, gradients: Gradients, scale: float, clip_value: float | None) -> None: ...

    def release(self) -> None: ...


class PinnedBatch:
    """A `Pinned` for the rows of one table. The table's `release` ends the pin as well."""

    def __init__(self, table: Steps, core: Any, lookups: list[Lookup], dtype: torch.dtype) -> None:
        self.core = core  # the processor's batch
        self.lookups = lookups
        self.dtype = dtype
        self.table = table

    def gather(self, index: int, weights: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The rows of lookup number `index`, or its pooled bags: lookup.shape + (dim,), of `dtype`.

        weights: float32 of the shape of its ids, or None. out: a contiguous tensor of the result's elements, to be
        written and returned.
        """
        with self.table.lock:
            self.table.check_pinned(self)
            return self.table.processor.gather(self.core, index, self.lookups[index], weights, self.dtype, out)

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of the weights of lookup number `index`, of the shape of its ids; grad is as its result."""
        with self.table.lock:
            self.table.check_pinned(self)
            return self.table.processor.weights_grad(self.core, index, self.lookups[index], grad)

    def square_gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """The sum of the squares of the gradients of the rows, each summed over its occurrences, as `update` does."""
        return total([self.partial_squares(grads, weights)])

    def partial_squares(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> NDArray[np.int64]:
        """The same as a partial sum of engine/exact_sum.py, to be added to those of other ranks."""
        gradients = self.gradients(grads, weights)
        with self.table.lock:
            self.table.check_pinned(self)
            return partial(self.table.processor.square_gradients(self.core, gradients).cpu().numpy())

    def update(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None] | None = None,
        scale: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        """Apply the optimizer. For each lookup: the gradient of its result, and the weights that it was pooled with.

        A row's summed gradient is multiplied by `scale`, then each element clipped to [-clip_value, clip_value].
        """
        try:
            self.table.update(self, self.gradients(grads, weights), scale, clip_value)
        except BaseException:
            self.table.refused = True
            raise

    def release(self) -> None:
        """End the pin; the rows stay as they are."""
        self.table.release()

    def gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None) -> Gradients:
        """The gradients of a step, checked. `grads` and `weights` are as in `update`. Raises InputError."""
        given = weights or [None] * len(self.lookups)
        return checked_gradients(self.table.spec, self.lookups, grads, given, self.dtype)
