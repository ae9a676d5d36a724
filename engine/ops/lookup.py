"""The two ops that a trace records.

A compiled graph replaces them by the functions of `step.py`; called eagerly, a lookup only reads.

`shadow` is the embedding's one-element parameter: it makes autograd record the gradient, and it is what an optimizer
holds.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ClosedError, GraphError

if TYPE_CHECKING:
    from ..embedding import MultiTableMultiColumnEmbedding

_handles = itertools.count()
_embeddings: weakref.WeakValueDictionary[int, MultiTableMultiColumnEmbedding] = weakref.WeakValueDictionary()


def register(embedding: MultiTableMultiColumnEmbedding) -> int:
    """A number by which the ops find the embedding: op arguments are tensors and numbers only."""
    handle = next(_handles)
    _embeddings[handle] = embedding
    return handle


def embedding_of(handle: int) -> MultiTableMultiColumnEmbedding:
    embedding = _embeddings.get(handle)
    if embedding is None:
        raise ClosedError(f"handle {handle}: its embedding no longer exists; keep a reference to it")
    return embedding


@torch.library.custom_op("tierbed::lookup", mutates_args=())
def lookup(shadow: Tensor, ids: Tensor, table_ids: Tensor | None, handle: int) -> Tensor:
    """Rows of ids, shape ids.shape + (dim,), read without inserting."""
    return embedding_of(handle).read(ids, table_ids)


@lookup.register_fake
def _(shadow: Tensor, ids: Tensor, table_ids: Tensor | None, handle: int) -> Tensor:
    return torch.empty((*ids.shape, embedding_of(handle).dim), dtype=torch.float32, device=ids.device)


@torch.library.custom_op("tierbed::lookup_grad", mutates_args=())
def lookup_grad(grad: Tensor, ids: Tensor, table_ids: Tensor | None, handle: int) -> Tensor:
    """Stands for the update of the rows; grad is [..., dim].

    Its value is the shadow's gradient, which nothing reads.
    """
    name = embedding_of(handle).name
    raise GraphError(
        f"embedding {name!r}: backward() outside a graph; call it in the build() of a tierbed.graph.Graph, or read "
        f"under torch.no_grad()"
    )


@lookup_grad.register_fake
def _(grad: Tensor, ids: Tensor, table_ids: Tensor | None, handle: int) -> Tensor:
    return grad.new_empty((1,))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ids, table_ids, ctx.handle = inputs
    ctx.save_for_backward(ids, table_ids)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    ids, table_ids = ctx.saved_tensors
    return lookup_grad(grad, ids, table_ids, ctx.handle), None, None, None


lookup.register_autograd(_backward, setup_context=_setup)
