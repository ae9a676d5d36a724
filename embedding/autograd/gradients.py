"""The gradients of an embedding's lookups, kept until its rows take them in one step."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Hashable
from threading import get_ident
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.autograd.graph import get_gradient_edge, increment_version
from torch.utils import _pytree as pytree

from ...engine.errors import ClosedError, GraphError, InputError, OptimizerError
from ...engine.ops.fingerprint import copied, fingerprint, same_values, write_count
from ...engine.ops.rows_contract import TRACED, EmbeddingBase
from ...engine.optim.base import positive
from ...engine.options.lookup import Lookup

# the EagerOptimizer that steps an embedding, by its handle
holders: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU) - torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# the functions by which torch, and torch.compile, look at what a tensor is, but at none of its numbers
_LOOKS = {"__get__", "_is_view", "dim", "is_complex", "is_conj", "is_floating_point", "is_inference", "is_neg", "size"}
_LOOKS |= {"storage_offset", "stride", "untyped_storage"}
# what a program has called that calls a function of a gradient
_CALLERS = dict.fromkeys(("requires_grad_", "detach_", "zero_"), "zero_grad(set_to_none=False)") | {
    "foreach": "a clip with foreach=True",
    "linalg_vector_norm": "a norm by torch over ranks, or with a norm_type other than 2,",
}
os.register_at_fork(after_in_child=holders.clear)  # or a child would train a copy of its parent's rows unnoticed


class _LookupGradient:
    """The gradient of what a lookup returned.

    lookup, weights: copies. given: the caller's tensors, by whose identity the key is made.
    """

    def __init__(
        self, lookup: Lookup, weights: Tensor | None, given: tuple[Tensor | None, ...], grad: Tensor, order: int
    ) -> None:
        self.lookup, self.weights, self._originals, self.order = lookup, weights, given, order
        self._set(grad)

    def _set(self, grad: Tensor) -> None:
        self.grad, self._count = grad, write_count(grad)

    def is_of(self, given: tuple[Tensor | None, ...]) -> bool:
        return all(map(same_values, given, (*self.lookup.tensors, self.weights)))

    def add(self, grad: Tensor, order: int, name: str) -> None:
        self._set(self.unchanged(name) + grad)
        self.order = min(self.order, order)

    def multiply(self, scale: float) -> None:
        self._set(self.grad.float() * scale)

    def unchanged(self, name: str) -> Tensor:
        """The gradient. name: the embedding's. InputError if it was written to."""
        if write_count(self.grad) != self._count:
            raise InputError(
                f"gradient of embedding {name!r}: it was changed in place between backward() and the step; give "
                "backward() a copy, grad.clone()"
            )
        return self.grad


class RowGradients:
    """The gradients of one embedding. They add up over lookups, and over passes of a model, until `clear`."""

    def __init__(self, embedding: EmbeddingBase) -> None:
        self._embedding = weakref.ref(embedding)  # which may hold this object
        self._kept: dict[Hashable, _LookupGradient] = {}
        with torch._C.DisableTorchFunctionSubclass():
            self._began = embedding.shadow._version
        self._scale = 1.0  # of clips: multiplies the sum of each row
        self._clip_value: float | None = None  # then clips each of its elements
        self._dtype = embedding.output_dtype  # of gradients in a step

    @property
    def embedding(self) -> EmbeddingBase:
        """The embedding. ClosedError if only its parameter is left, as in an optimizer that outlives the model."""
        embedding = self._embedding()
        if embedding is None:
            raise ClosedError("a gradient's embedding was dropped, and only its parameter is left: keep the module")
        return embedding

    def add(self, lookup: Lookup, grad: Tensor, weights: Tensor | None = None, order: int = 0) -> None:
        """Keep the gradient of what a lookup returned, lookup.shape + (dim,), of the output dtype.

        weights: the weights that pooled it, float32 of the shape of its ids. order: the step takes lookups in ascending
        order, equal numbers as they came; sums over the occurrences of an id follow this order.

        The lookup and the weights are copied. The gradient is not: InputError in the step if it was changed in place.
        Gradients of the very same tensors are summed here, as a graph sums them.
        """
        self._check_unclipped("backward()")
        self._apply_scale()
        given = (*lookup.tensors, weights)
        key = (lookup.pooling, lookup.feature_columns, *map(fingerprint, given))
        kept = self._kept.get(key)
        if kept is not None and not kept.is_of(given):  # NumPy has written to the tensors, which changes no version
            key, kept = (key, len(self._kept)), None
        if kept is not None:
            kept.add(grad, order, self.embedding.name)
        else:
            weights = None if weights is None else weights.detach().clone()
            self._kept[key] = _LookupGradient(copied(lookup), weights, given, grad, order)

    def pin(self) -> Any:
        """The rows of all lookups, after `check`, each row once, as of `embedding.pin`."""
        return self.embedding.pin([one.lookup for one in self._in_order()], dtype=self._dtype)

    def check(self) -> list[_LookupGradient]:
        """The gradients, in their order. InputError for one that can no longer be taken."""
        embedding, kept = self.embedding, self._in_order()
        for one in kept:
            one.unchanged(embedding.name)
            if one.lookup.ids.device != embedding.device:
                raise InputError(
                    f"gradients of embedding {embedding.name!r} are on {one.lookup.ids.device} and the embedding on "
                    f"{embedding.device}; call zero_grad() after moving a module"
                )
        return kept

    @property
    def is_waiting(self) -> bool:
        """Whether there are gradients, and no step has taken the first of them."""
        return bool(self._kept) and self.embedding.shadow._version == self._began

    def grads(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The gradients and the weights of the lookups of `pin`, in their order."""
        kept = self._in_order()
        return [one.grad.to(self._dtype) for one in kept], [one.weights for one in kept]

    def update(self, batch: Any) -> None:
        """Apply the embedding's optimizer once, with the sum of all gradients. `batch`: from `pin`; its pin ends."""
        clip = () if self._scale == 1.0 and self._clip_value is None else (self._scale, self._clip_value)
        batch.update(*self.grads(), *clip)  # without numbers, over ranks the mean
        increment_version(self.embedding.shadow)  # a backward() that needs the rows as they were raises from here on

    def square_gradients(self) -> float:
        """The sum of the squares of the gradients of all rows, each summed over its occurrences. InputError."""
        self._check_unclipped("a norm")
        self._apply_scale()  # or squares of what a GradScaler scaled might overflow
        lookups = [one.lookup for one in self.check()]
        embedding: Any = self.embedding
        return embedding.table_handle().local_table.square_gradients(lookups, *self.grads()) if lookups else 0.0

    def multiply(self, scale: float) -> None:
        """Multiply the gradients that there are by a number. GraphError after `clip`."""
        self._check_unclipped("a factor")
        self._scale *= scale

    def clip(self, value: float) -> None:
        """Clip each element of the sum of each row to [-value, value] in the step. OptimizerError."""
        value = positive("clip_value", value) or math.inf
        self._clip_value = min(value, self._clip_value or value)

    def _apply_scale(self) -> None:
        """Multiply the gradients that there are by the scale, so that it is of no later one. InputError."""
        if self._scale != 1.0:
            for one in self._kept.values():
                one.unchanged(self.embedding.name)
            for one in self._kept.values():
                one.multiply(self._scale)
            self._scale, self._dtype = 1.0, torch.float32  # rounded no further

    def _check_unclipped(self, what: str) -> None:
        if self._clip_value is not None:
            raise GraphError(
                f"{what} after clip_grad_value_ of embedding {self.embedding.name!r}: clip by value just before step()"
            )

    def _in_order(self) -> list[_LookupGradient]:
        return sorted(self._kept.values(), key=lambda kept: kept.order)


class ShadowGrad(Tensor):
    """Stands for the gradients of rows, which no tensor holds. Setting `grad` to None drops them, as any gradient.

    What clip_grad_norm_ and clip_grad_value_ of torch and a GradScaler do with a gradient is done to the rows. Other
    operations raise GraphError: they would leave the rows out.
    """

    def __new__(cls, rows: RowGradients) -> ShadowGrad:
        with torch._C.DisableTorchFunctionSubclass():
            plain = torch.zeros_like(rows.embedding.shadow)
        return torch.Tensor._make_subclass(cls, plain)  # no view, unlike as_subclass

    def __init__(self, rows: RowGradients) -> None:
        """`rows` as the gradient of the parameter that their embedding has."""
        self.rows = rows

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShadowGrad(rows of embedding {self.rows.embedding.name!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **(kwargs or {}))
            if not isinstance(found, Tensor):  # such as .data and .T are
                return found
        embeddings = [leaf.rows.embedding for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, cls)]
        on_rows = _ON_ROWS.get(func.__name__) if all(one.world is None for one in embeddings) else None
        if on_rows is not None and (result := on_rows(*args, **(kwargs or {}))) is not None:
            return result
        name = f".{func.__self__.__name__}" if func.__name__ == "__get__" else func.__name__
        caller = _CALLERS.get(name.partition("foreach")[1] or name, name)
        raise GraphError(
            f"{caller} of the gradient of embedding {embeddings[0].name!r}: no tensor holds the "
            "gradients of its rows; step and call zero_grad() by the EagerOptimizer, measure or clip the L2 norm by "
            "its clip_grad_norm_(parameters, max_norm), leave foreach=True out of torch's clips, clip rows alone by "
            "clip_grad_row_norm in their param group, and leave the embedding's parameters out of what else reads "
            "gradients"
        )


def _norm(grad: ShadowGrad, ord: float = 2.0) -> Any:
    if ord != 2:
        return None
    norm = math.sqrt(grad.rows.square_gradients())
    return torch.tensor(norm, dtype=torch.float32, device=grad.rows.embedding.device)


def _multiply(grad: ShadowGrad, factor: Any) -> Any:
    if isinstance(factor, Tensor) and factor.dim():
        return None
    grad.rows.multiply(float(factor))
    return grad


def _clamp(grad: ShadowGrad, min: float | None = None, max: float | None = None) -> Any:
    if max is None or min != -max:
        return None
    grad.rows.clip(max)
    return grad


def _unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Any:
    for rows in (grad.rows for grad in grads if isinstance(grad, ShadowGrad)):
        if not all(grad.isfinite().all() for grad in rows.grads()[0]):
            found_inf.fill_(1.0)
        rows.multiply(float(inv_scale))
    if dense := [grad for grad in grads if not isinstance(grad, ShadowGrad)]:
        torch._amp_foreach_non_finite_check_and_unscale_(dense, found_inf, inv_scale)
    return grads


# what clips and scalers of torch call, by name, for rows that no other rank shares; a result of None refuses
_ON_ROWS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": _norm,
    "mul_": _multiply,
    "clamp_": _clamp,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}


def check_not_traced(embedding: EmbeddingBase) -> None:
    """Raises GraphError while another thread traces a graph with the embedding: it has no gradient then."""
    traced = getattr(embedding.shadow, TRACED, None)
    if traced is not None and traced[0] != get_ident():
        raise GraphError(
            f"embedding {embedding.name!r} cannot be trained while another thread traces a graph that has it; let the "
            "first call of each signature end before other threads train its rows"
        )


def is_reached(leaf: Tensor, refusal: str) -> bool:
    """Whether the backward pass under way reaches a leaf; torch.autograd.grad of other tensors does not.

    refusal: the message of the GraphError for autograd.grad of the leaf itself.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # torch raises it where the gradient of the leaf itself is asked for
        raise GraphError(refusal) from None


def are_rows_reached(embedding: EmbeddingBase) -> bool:
    """`is_reached` of the embedding's parameter. In a trace this is not known here, and the answer is True.

    GraphError for autograd.grad of the parameter itself, and for create_graph=True.
    """
    if detect_fake_mode() is not None:
        return True
    check_not_traced(embedding)
    reached = is_reached(
        embedding.shadow,
        f"embedding {embedding.name!r}: torch.autograd.grad of its parameter, but no tensor holds the gradients of "
        "its rows; call backward(), or ask for the gradient of the rows that a lookup returned",
    )
    if reached and torch.is_grad_enabled():
        raise GraphError(
            f"embedding {embedding.name!r}: a lookup has no second derivative; leave out create_graph=True"
        )
    return reached


def accumulate(embedding: EmbeddingBase, lookup: Lookup, grad: Tensor, weights: Tensor | None, order: int) -> None:
    """Add the gradient of a lookup to `grad` of the embedding's parameter, as `RowGradients.add`. GraphError."""
    node = torch._C._current_autograd_node()
    if node is not None and node.name().startswith("CompiledFunction"):  # it computes the gradients of all its inputs
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _NO_KEYS):
            if not are_rows_reached(embedding):
                return
    name, shadow = embedding.name, embedding.shadow
    if embedding.handle not in holders:
        raise GraphError(
            f"embedding {name!r}: backward() outside a graph, and no EagerOptimizer trains the embedding; to train in "
            "a loop, give tierbed.EagerOptimizer the optimizer and a module that has the embedding; or call backward() "
            "in the build() of a tierbed.Graph, or read under torch.no_grad()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        if shadow._backward_hooks or shadow._post_accumulate_grad_hooks:
            raise GraphError(
                f"embedding {name!r}: its parameter has a gradient hook, and no tensor holds the gradients of its "
                "rows; remove the hook, and register it on what a lookup returns"
            )
    if (rows := kept_gradients(embedding)) is None:
        rows = RowGradients(embedding)
        set_grad(embedding, ShadowGrad(rows))
    rows.add(lookup, grad, weights, order)


def set_grad(embedding: EmbeddingBase, grad: Tensor | None) -> Tensor | None:
    """Replace the gradient of the embedding's parameter. Returns the one before."""
    with torch._C.DisableTorchFunctionSubclass():
        before, embedding.shadow.grad = embedding.shadow.grad, grad
    return before


def kept_gradients(embedding: EmbeddingBase) -> RowGradients | None:
    """The gradients of lookups that the embedding's parameter has. OptimizerError if it has another gradient."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = embedding.shadow.grad
        if grad is None:
            return None
        rows = grad.rows if isinstance(grad, ShadowGrad) else None
        if (rows is not None and not grad.is_cpu) or not grad.item():  # lookups give 0, and so does who fills state
            return rows
    raise OptimizerError(
        f"embedding {embedding.name!r}: its parameter has a gradient that is of no lookup, and no row would follow it; "
        "call zero_grad(), and leave the embedding's parameters out of what sets gradients"
    )
