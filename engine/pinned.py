"""A step's hold on the rows that it needs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Thread, current_thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .errors import GraphError
from .inputs import Lookup

if TYPE_CHECKING:
    from .embedding import MultiTableMultiColumnEmbedding
    from .table import OpenTable

_training: dict[int, tuple[Thread, str]] = {}  # by the handle of an embedding: the thread of its step, and whose it is
os.register_at_fork(after_in_child=_training.clear)


@contextmanager
def training_step(embeddings: Iterable[MultiTableMultiColumnEmbedding], owner: str) -> Iterator[None]:
    """Around a step that pins rows of `embeddings`: a step in another thread would take its pins away.

    owner: whose step it is, for people. GraphError where another thread is in a step of one of them.
    """
    mine = current_thread(), owner
    held = []
    try:
        for embedding in embeddings:
            thread, other = first = _training.setdefault(embedding.handle, mine)
            if thread is not mine[0]:
                raise GraphError(
                    f"a step of {owner} in thread {mine[0].name!r} trains embedding {embedding.name!r} while a step of "
                    f"{other} in thread {thread.name!r} does; let one thread make all training steps of an embedding, "
                    "or hold a lock of your own around each"
                )
            if first is mine:
                held.append(embedding.handle)
        yield
    finally:
        for handle in held:
            del _training[handle]


class PinnedBatch:
    """The unique rows of all lookups of a step, pinned in the top tier until `update` or the table's `release`."""

    def __init__(self, table: OpenTable, core: Any, lookups: list[Lookup], dtype: torch.dtype) -> None:
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
