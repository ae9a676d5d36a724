"""What a compiled step calls, in the order of a step: pin, gather, (the dense part), weights_grad, update.

Where ranks share the rows, `send` follows the gradients. Evaluation calls read and read_weights_grad. Results are of
the embedding's output dtype.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..options.lookup import Lookup
    from .rows_contract import EmbeddingBase, Pinned, SharedPinned


def pin(embedding: EmbeddingBase, lookups: list[Lookup], like: Pinned | None = None) -> Pinned:
    """Deduplicate the ids of all lookups, bring their rows to the top tier and pin them.

    like: another embedding's batch of the same lookups, whose unique rows are taken.
    """
    return embedding.pin(lookups, like)


def gather(batch: Pinned, index: int, weights: Tensor | None = None) -> Tensor:
    """The rows of lookup number `index`, or its pooled bags: lookup.shape + (dim,).

    weights: float32 of the shape of its ids.
    """
    return batch.gather(index, weights)


def weights_grad(batch: Pinned, index: int, grad: Tensor) -> Tensor:
    """The gradient of the weights of lookup number `index`, of their shape; grad is the gradient of its `gather`."""
    return batch.weights_grad(index, grad)


def send(batch: SharedPinned, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
    """Start to send the gradients that `update` will take to the ranks that have the rows."""
    batch.send(grads, weights)


def update(batch: Pinned, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
    """Apply the embedding's optimizer to the rows of the batch.

    grads: for each lookup, the gradient of what `gather` returned. weights: for each lookup, its weights, if any lookup
    has weights. Ends the pin.
    """
    batch.update(grads, weights)


def read(embedding: EmbeddingBase, lookup: Lookup, weights: Tensor | None = None) -> Tensor:
    """The rows of a lookup, or its pooled bags, lookup.shape + (dim,), inserting nothing."""
    return embedding.read(lookup, weights)


def read_weights_grad(embedding: EmbeddingBase, lookup: Lookup, grad: Tensor) -> Tensor:
    """The gradient of the weights of a lookup that was read, of their shape."""
    return embedding.read_weights_grad(lookup, grad)
