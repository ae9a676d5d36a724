"""The ops that a trace records: a lookup, and its gradients for rows and for weights.

A compiled graph replaces them by methods of the embedding and of its pinned batch. Called eagerly, a lookup reads, and
its gradient is kept for the step of an `EagerOptimizer`.

`shadow` is the embedding's one-element parameter: autograd records gradients by it, and an optimizer holds it.
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
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from .gradients import are_rows_reached
from .shadow import Shadow, plain

_orders = itertools.count()
_embeddings: dict[int, weakref.ref[EmbeddingBase]] = {}  # a WeakValueDictionary takes twice the time


def register(embedding: EmbeddingBase) -> int:
    """A number by which the ops find the embedding: op arguments are tensors and numbers only.

    The number is drawn at random, so that a program finds no wrong embedding by it, where the program was recorded
    elsewhere or its embedding is gone.
    """
    handle = secrets.randbits(62)
    _embeddings[handle] = weakref.ref(embedding, lambda _: _embeddings.pop(handle))
    return handle


def _living() -> list[EmbeddingBase]:
    return [one for reference in list(_embeddings.values()) if (one := reference()) is not None]


def _forget_optimizers() -> None:
    """Make the next step of a forked child ask for its optimizer again, and be refused."""
    for embedding in _living():
        if getattr(embedding, "is_open", False):  # an embedding that the child opens is its own
            embedding.forget_optimizer()


os.register_at_fork(after_in_child=_forget_optimizers)


def lookup_of(ids: Any, table_ids: Any, offsets: Any, pooling: Any, places: Sequence[int] | None) -> Lookup:
    """The `Lookup` of an op's arguments."""
    return Lookup(ids, table_ids, offsets, pooling, None if places is None else tuple(places))


def embedding_of(handle: int) -> EmbeddingBase:
    reference = _embeddings.get(handle)
    if reference is None or (embedding := reference()) is None:
        raise ClosedError(
            f"a lookup of handle {handle}, which no embedding of this process has: it no longer exists, so keep a "
            "reference to it; or another process recorded the program: make it of the module that takes the rows, and "
            "call the embedding before the program"
        )
    return embedding


def embeddings_of(parameters: Iterable[int]) -> list[EmbeddingBase]:
    """The living embeddings whose parameter is one of those, given by `id`, in their order."""
    by_shadow = {id(embedding.shadow): embedding for embedding in _living()}
    return [by_shadow[one] for one in parameters if one in by_shadow]


def refuse_export(name: str) -> None:
    """GraphError where a lookup of embedding `name` would be recorded to run elsewhere. `torch.compile` is fine."""
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if traced or (torch.compiler.is_dynamo_compiling() and torch.compiler.is_exporting()):
        _refuse_export(name)


def _refuse_export(name: str) -> None:
    raise GraphError(
        f"embedding {name!r} cannot be part of a program of torch.export, torch.jit or torch.onnx, which would run "
        "without its rows; export the module that takes the rows, and call the embedding before the program"
    )


# as by torch.compiler.assume_constant_result, which imports Dynamo: strict export then raises the very error
_refuse_export._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _op(name: str, arguments: str) -> Any:
    """Decorates what an op does. arguments: of its schema; `rows` stands for those of a `Lookup`."""
    rows = "Tensor ids, Tensor? table_ids, Tensor? offsets, str? pooling, SymInt[]? places"
    schema = f"({arguments.replace('rows', rows)}) -> Tensor"
    return torch.library.custom_op(f"tierbed::{name}", mutates_args=(), schema=schema)


@_op("lookup", "Tensor shadow, rows, Tensor? weights, SymInt handle")
def lookup(shadow: Tensor, *rest: Any) -> Tensor:
    """The rows of a `Lookup`, or its pooled bags, lookup.shape + (dim,), read without inserting."""
    *rows, weights, handle = rest
    return embedding_of(handle).read(lookup_of(*rows), weights, trains=shadow.requires_grad)


@lookup.register_fake
def _(shadow: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    embedding = embedding_of(rest[-1])
    if torch.compiler.is_exporting():
        _refuse_export(embedding.name)
    shape = (*lookup_of(ids, *rest[:4]).shape, embedding.dim)
    return torch.empty(shape, dtype=embedding.output_dtype, device=ids.device)


@_op("lookup_grad", "Tensor grad, rows, Tensor? weights, SymInt order, SymInt handle")
def lookup_grad(grad: Tensor, *rest: Any) -> Tensor:
    """Stands for the update of the rows; grad is like the result of the lookup. Lookups ran in the order of `order`.

    The value of the op is the shadow's gradient, which nothing reads.
    """
    *rows, weights, order, handle = rest
    embedding_of(handle).accumulate(lookup_of(*rows), grad, weights, order)
    return grad.new_zeros((1, 1), dtype=torch.float32)


@lookup_grad.register_fake
def _(grad: Tensor, *rest: Any) -> Tensor:
    return grad.new_empty((1, 1), dtype=torch.float32)


@_op("lookup_weights_grad", "Tensor grad, rows, Tensor shadow, SymInt handle")
def lookup_weights_grad(grad: Tensor, *rest: Any) -> Tensor:
    """The gradient of a lookup's weights, float32 of the shape of ids; recorded only where they require grad.

    shadow: makes autograd see that this gradient depends on rows.
    """
    *rows, _, handle = rest
    return embedding_of(handle).read_weights_grad(lookup_of(*rows), grad)


@lookup_weights_grad.register_fake
def _(grad: Tensor, ids: Tensor, *rest: Any) -> Tensor:
    return torch.empty(ids.shape, dtype=torch.float32, device=ids.device)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    shadow, ids, table_ids, offsets, pooling, places, weights, handle = inputs
    if ctx.needs_input_grad[0]:
        embedding_of(handle).check_trained_lookup()
    ctx.constants = pooling, places, handle, next(_orders)
    # autograd refuses a saved tensor that changed since: the shadow changes with the rows, which weights need
    needed = shadow if ctx.needs_input_grad[6] else None
    ctx.save_for_backward(needed, ids, table_ids, offsets, weights)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    shadow, ids, table_ids, offsets, weights = ctx.saved_tensors
    pooling, places, handle, order = ctx.constants
    rows = ids, table_ids, offsets, pooling, places
    of_rows = of_weights = None
    if ctx.needs_input_grad[0] and are_rows_reached(embedding := embedding_of(handle)):
        if runs_at_once(grad):
            embedding.accumulate(lookup_of(*rows), grad, weights, order)
            of_rows = grad.new_zeros((1, 1), dtype=torch.float32)
        else:
            of_rows = lookup_grad(grad, *rows, weights, order, handle)
    if ctx.needs_input_grad[6]:
        of_weights = lookup_weights_grad(grad, *rows, shadow, handle)
    return of_rows, None, None, None, None, None, of_weights, None


def _refuse(ctx: Any, grad: Tensor) -> None:
    raise GraphError(
        "a lookup has no second derivative; leave out create_graph=True, or detach the gradient before it is used"
    )


class EagerLookup(_SingleLevelFunction):
    """The op `lookup` without the dispatcher, which takes longer than a small lookup.

    Its base is that of autograd.Function, whose `apply` cares for torch.func as well: no lookup comes here from there.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        _, *lookup, weights, handle = inputs
        output = embedding_of(handle).read(Lookup(*lookup), weights, trains=ctx.needs_input_grad[0])
        _setup(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def look_up(embedding: EmbeddingBase, shadow: Tensor, rows: Lookup, weights: Tensor | None) -> Tensor:
    """The result of a checked lookup: read at once, or by an op where a trace or a transform must see one."""
    is_trained, at_once = torch.is_grad_enabled(), runs_at_once(rows.ids)
    if at_once and not is_trained:
        return embedding.read(rows, weights)
    if at_once:
        return EagerLookup.apply(shadow, *rows, weights, embedding.handle)  # type: ignore[attr-defined]
    with torch._C.DisableTorchFunctionSubclass():
        if not torch.compiler.is_dynamo_compiling() and torch._C._len_torch_dispatch_stack():
            shadow = plain(shadow) if isinstance(shadow, Shadow) else shadow
        output: Tensor = lookup(shadow if is_trained else shadow.detach(), *rows, weights, embedding.handle)
        return output


def runs_at_once(tensor: Tensor) -> bool:
    """True where nothing but autograd sees what is done with the tensor: no compiler, trace, transform or mode."""
    return not (
        torch.compiler.is_compiling()
        or type(tensor) is not Tensor
        or torch._C._len_torch_dispatch_stack()
        or torch._C._are_functorch_transforms_active()
        or tensor.is_meta
    )


lookup.register_autograd(_backward, setup_context=_setup)
lookup_grad.register_autograd(_refuse)
lookup_weights_grad.register_autograd(_refuse)
