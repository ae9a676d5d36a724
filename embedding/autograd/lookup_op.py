"""The custom ops that traces record: a lookup, and its gradients for rows and for weights.

A compiled graph replaces the ops by calls to the embedding and its pinned batch. An eager lookup reads rows, and
backward() keeps the lookup's gradient for an `EagerOptimizer`'s step. Op arguments can only be tensors and numbers, so
an op gets an embedding's `embedding_id`, a random number. The op also gets the `shadow`, the embedding's one-element
parameter. Through the shadow, autograd sees that the result depends on rows.
"""

from __future__ import annotations

import itertools
import os
import secrets
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ...engine.errors import ClosedError, GraphError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.options.lookup import Lookup
from .gradients import are_rows_reached
from .shadow import Shadow, to_plain_tensor

_order_counter = itertools.count()
_embeddings: dict[int, weakref.ref[EmbeddingBase]] = {}  # a WeakValueDictionary would take twice the time


def register(embedding: EmbeddingBase) -> int:
    """Return a random id for the ops. Since it is random, it matches no embedding of another process."""
    embedding_id = secrets.randbits(62)
    _embeddings[embedding_id] = weakref.ref(embedding, lambda _: _embeddings.pop(embedding_id))
    return embedding_id


def _list_embeddings() -> list[EmbeddingBase]:
    return [embedding for reference in list(_embeddings.values()) if (embedding := reference()) is not None]


def _forget_optimizers() -> None:
    """After a fork, drop the optimizers of open embeddings in the child process, so that training there raises."""
    for embedding in _list_embeddings():
        if getattr(embedding, "is_open", False):
            embedding.forget_optimizer()


os.register_at_fork(after_in_child=_forget_optimizers)


def make_lookup(ids: Any, table_ids: Any, offsets: Any, pooling: Any, feature_columns: Sequence[int] | None) -> Lookup:
    """Return an op's arguments as a `Lookup`."""
    return Lookup(ids, table_ids, offsets, pooling, None if feature_columns is None else tuple(feature_columns))


def find_embedding(embedding_id: int) -> EmbeddingBase:
    reference = _embeddings.get(embedding_id)
    if reference is None or (embedding := reference()) is None:
        raise ClosedError(
            f"a lookup of embedding_id {embedding_id}, but this process has no embedding with this id. Python may "
            "have deleted the embedding: keep a reference to it. Or another process recorded the lookup: record only "
            "the modules after the embedding, and pass them the embedding's result"
        )
    return embedding


def find_embeddings(parameters: Iterable[int]) -> list[EmbeddingBase]:
    """Return the embeddings whose parameters have the given ids (`id(parameter)`), in the same order."""
    by_shadow = {id(embedding.shadow): embedding for embedding in _list_embeddings()}
    return [by_shadow[parameter] for parameter in parameters if parameter in by_shadow]


def check_not_exported(name: str) -> None:
    """Raise GraphError if a lookup of embedding `name` is being exported. torch.compile is allowed."""
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or (torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()):
        _raise_export_error(name)


def _raise_export_error(name: str) -> None:
    raise GraphError(
        f"embedding {name!r} cannot be exported by torch.export, torch.jit or torch.onnx, because the program would "
        "not contain its rows; export only the modules after the embedding, and pass them the embedding's result"
    )


# same as torch.compiler.assume_constant_result, but imports no Dynamo. Strict export then raises the error above.
_raise_export_error._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _define_op(name: str, arguments: str) -> Any:
    """Decorate an op's implementation. arguments: the op's schema, where `lookup` stands for a `Lookup`'s fields."""
    fields = "Tensor ids, Tensor? table_ids, Tensor? offsets, str? pooling, SymInt[]? feature_columns"
    schema = f"({arguments.replace('lookup', fields)}) -> Tensor"
    return torch.library.custom_op(f"tierbed::{name}", mutates_args=(), schema=schema)


@_define_op("lookup", "Tensor shadow, lookup, Tensor? weights, SymInt embedding_id")
def lookup(shadow: Tensor, *rest: Any) -> Tensor:
    """Read a `Lookup`'s rows or pooled bags, and insert no rows. The result has the shape lookup.shape + (dim,)."""
    *fields, weights, embedding_id = rest
    return find_embedding(embedding_id).read(make_lookup(*fields), weights, is_training=shadow.requires_grad)


@lookup.register_fake
def _(shadow: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    embedding = find_embedding(rest[-1])
    if torch.compiler.is_exporting():
        _raise_export_error(embedding.name)
    shape = (*make_lookup(ids, *rest[:4]).shape, embedding.dim)
    return torch.empty(shape, dtype=embedding.output_dtype, device=ids.device)


@_define_op("lookup_grad", "Tensor grad, lookup, Tensor? weights, SymInt order, SymInt embedding_id")
def lookup_grad(grad: Tensor, *rest: Any) -> Tensor:
    """Keep the gradient of lookup number `order` for a step. Returns an unused zero as the shadow's gradient."""
    *fields, weights, order, embedding_id = rest
    find_embedding(embedding_id).accumulate(make_lookup(*fields), grad, weights, order)
    return grad.new_zeros((1, 1), dtype=torch.float32)


@lookup_grad.register_fake
def _(grad: Tensor, *rest: Any) -> Tensor:
    return grad.new_empty((1, 1), dtype=torch.float32)


@_define_op("lookup_weights_grad", "Tensor grad, lookup, Tensor shadow, SymInt embedding_id")
def lookup_weights_grad(grad: Tensor, *rest: Any) -> Tensor:
    """Compute the gradient of a lookup's weights. The argument `shadow` tells autograd that the result needs rows."""
    *fields, _, embedding_id = rest
    return find_embedding(embedding_id).read_weights_grad(make_lookup(*fields), grad)


@lookup_weights_grad.register_fake
def _(grad: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return torch.empty(ids.shape, dtype=torch.float32, device=ids.device)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shadow, ids, table_ids, offsets, pooling, feature_columns, weights, embedding_id = inputs
    if ctx.needs_input_grad[0]:
        find_embedding(embedding_id).check_trained_lookup()
    ctx.constants = pooling, feature_columns, embedding_id, next(_order_counter)
    # The weights' gradient needs the rows as they are now. The shadow's version changes with the rows, so autograd
    # raises if the rows change before backward().
    saved_shadow = shadow if ctx.needs_input_grad[6] else None
    ctx.save_for_backward(saved_shadow, ids, table_ids, offsets, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shadow, ids, table_ids, offsets, weights = ctx.saved_tensors
    pooling, feature_columns, embedding_id, order = ctx.constants
    fields = ids, table_ids, offsets, pooling, feature_columns
    shadow_grad = weights_grad = None
    if ctx.needs_input_grad[0] and are_rows_reached(embedding := find_embedding(embedding_id)):
        if is_eager(grad):
            embedding.accumulate(make_lookup(*fields), grad, weights, order)
            shadow_grad = grad.new_zeros((1, 1), dtype=torch.float32)
        else:
            shadow_grad = lookup_grad(grad, *fields, weights, order, embedding_id)
    if ctx.needs_input_grad[6]:
        weights_grad = lookup_weights_grad(grad, *fields, shadow, embedding_id)
    return shadow_grad, None, None, None, None, None, weights_grad, None


def _raise_second_derivative(ctx: Any, grad: Tensor) -> None:
    raise GraphError(
        "a lookup has no second derivative; leave out create_graph=True, or detach the gradient before it is used"
    )


class EagerLookup(_SingleLevelFunction):
    """The op `lookup` without torch's dispatcher, because dispatching takes longer than a small lookup.

    Derives from autograd.Function's base class, to skip torch.func support. Under torch.func, lookups use the op.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _, *fields, weights, embedding_id = inputs
        output = find_embedding(embedding_id).read(Lookup(*fields), weights, is_training=ctx.needs_input_grad[0])
        _setup_context(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def look_up(embedding: EmbeddingBase, shadow: Tensor, inputs: Lookup, weights: Tensor | None) -> Tensor:
    """Run a checked lookup. It runs directly, or as an op if a trace or transform must record the lookup."""
    is_trained, is_direct = torch.is_grad_enabled(), is_eager(inputs.ids)
    if is_direct and not is_trained:
        return embedding.read(inputs, weights)
    if is_direct:
        return EagerLookup.apply(shadow, *inputs, weights, embedding.embedding_id)  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.compiler.is_dynamo_compiling() and torch._C._len_torch_dispatch_stack():
            shadow = to_plain_tensor(shadow) if isinstance(shadow, Shadow) else shadow
        output: Tensor = lookup(shadow if is_trained else shadow.detach(), *inputs, weights, embedding.embedding_id)
        return output


def is_eager(tensor: Tensor) -> bool:
    """True if only autograd watches operations on the tensor: no compiler, trace, transform or mode is active."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or tensor.is_meta
    )


lookup.register_autograd(_backward, setup_context=_setup_context)
lookup_grad.register_autograd(_raise_second_derivative)
lookup_weights_grad.register_autograd(_raise_second_derivative)
