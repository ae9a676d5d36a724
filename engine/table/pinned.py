"""A step's hold on the rows that it needs."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..spec.inputs import Lookup


class Steps(Protocol):
    """What a table does for a step, with a batch that it pinned."""

    def gather(self, pinned: PinnedBatch, index: int, weights: Tensor | None) -> Tensor: ...

    def weights_grad(self, pinned: PinnedBatch, index: int, grad: Tensor) -> Tensor: ...

    def square_gradients(self, pinned: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None]) -> float: ...

    def update(
        self,
        pinned: PinnedBatch,
        grads: list[Tensor],
        weights: list[Tensor | None],
        scale: float,
        clip_value: float | None,
    ) -> None: ...

    def record_update(self, pinned: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None]) -> None: ...

    def release(self) -> None: ...


class PinnedBatch:
    """As `Pinned`: rows that a table pinned. The table's `release` ends the pin as well."""

    def __init__(self, table: Steps, core: Any, lookups: list[Lookup], dtype: torch.dtype) -> None:
        self.core = core  # the processor's batch
        self.lookups = lookups
        self.dtype = dtype
        self._table = table

    def gather(self, index: int, weights: Tensor | None = None) -> Tensor:
        """The rows of lookup number `index`, or its pooled bags: lookup.shape + (dim,), of `dtype`.

        weights: float32 of the shape of its ids, or None.
        """
        return self._table.gather(self, index, weights)

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of the weights of lookup number `index`, of the shape of its ids; grad is as its result."""
        return self._table.weights_grad(self, index, grad)

    def square_gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """The sum of the squares of the gradients of the rows, each summed over its occurrences, as `update` does."""
        return self._table.square_gradients(self, grads, weights or [None] * len(self.lookups))

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
        self._table.update(self, grads, weights or [None] * len(self.lookups), scale, clip_value)

    def record_update(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
        """`update`, for a device that records what it launches."""
        self._table.record_update(self, grads, weights or [None] * len(self.lookups))

    def release(self) -> None:
        """End the pin; the rows stay as they are."""
        self._table.release()
