"""The gradients of an embedding's lookups, kept from backward() until a step applies the gradients to the rows.

No tensor holds the rows' gradient. `RowGradients` collects the gradients of lookup results, and the step passes these
gradients to the store, which sums them by row. The shadow parameter's `.grad` is a `ShadowGrad` that refers to the
`RowGradients`. zero_grad(), torch's clips and a GradScaler work on this `.grad`, and thus change the rows' gradients.
"""

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
from ...engine.ops.embedding_base import TRACED_ATTRIBUTE, EmbeddingBase
from ...engine.ops.fingerprint import are_values_equal, copy_lookup, fingerprint, get_version
from ...engine.optim.base import check_positive
from ...engine.options.lookup import Lookup

# maps each embedding_id to the EagerOptimizer that trains the embedding
trainers: WeakValueDictionary[int, Any] = WeakValueDictionary()
_NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU) - torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# functions that torch and torch.compile call to read a tensor's metadata, but not its values
_METADATA_OPS = {"__get__", "_is_view", "dim", "is_complex", "is_conj", "is_floating_point", "is_inference", "is_neg"}
_METADATA_OPS |= {"size", "storage_offset", "stride", "untyped_storage"}
# names for error messages: maps a torch function to the call that a user made
_CALLER_NAMES = dict.fromkeys(("requires_grad_", "detach_", "zero_"), "zero_grad(set_to_none=False)") | {
    "foreach": "a clip with foreach=True",
    "linalg_vector_norm": "a torch norm (if norm_type is not 2, or ranks share the rows)",
}
os.register_at_fork(after_in_child=trainers.clear)  # otherwise a child process would train a copy of the rows


class _LookupGradient:
    """The gradient of a lookup's result.

    lookup, weights: copies. originals: the caller's tensors, kept alive because the key contains `id(tensor)`.
    """

    def __init__(
        self, lookup: Lookup, weights: Tensor | None, originals: tuple[Tensor | None, ...], grad: Tensor, order: int
    ) -> None:
        self.lookup, self.weights, self._originals, self.order = lookup, weights, originals, order
        self._set_grad(grad)

    def _set_grad(self, grad: Tensor) -> None:
        self.grad, self._grad_version = grad, get_version(grad)

    def has_same_values(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """True if `tensors` have the same values as this lookup and its weights."""
        return all(map(are_values_equal, tensors, (*self.lookup.tensors, self.weights)))

    def add(self, grad: Tensor, order: int, name: str) -> None:
        self._set_grad(self.require_unchanged(name) + grad)
        self.order = min(self.order, order)

    def multiply(self, scale: float) -> None:
        self._set_grad(self.grad.float() * scale)

    def require_unchanged(self, name: str) -> Tensor:
        """Return the gradient. Raises InputError if code changed the gradient in place. name: the embedding's name."""
        if get_version(self.grad) != self._grad_version:
            raise InputError(
                f"gradient of embedding {name!r}: it was changed in place between backward() and the step; give "
                "backward() a copy, grad.clone()"
            )
        return self.grad


class RowGradients:
    """Collects one embedding's gradients. Each backward pass through a lookup adds gradients; zero_grad() drops all."""

    def __init__(self, embedding: EmbeddingBase) -> None:
        self._embedding = weakref.ref(embedding)  # weak, because the embedding holds this object
        self._gradients: dict[Hashable, _LookupGradient] = {}
        with torch._C.DisableTorchFunctionSubclass():
            self._first_version = embedding.shadow._version
        self._scale = 1.0  # factor for each row's summed gradient
        self._clip_value: float | None = None  # limit for each element of the sum, after scaling
        self._dtype = embedding.output_dtype  # dtype of the gradients that a step applies

    @property
    def embedding(self) -> EmbeddingBase:
        """The embedding. Raises ClosedError if the embedding was deleted and an optimizer still holds its parameter."""
        embedding = self._embedding()
        if embedding is None:
            raise ClosedError("a gradient's embedding was deleted, and only its parameter is left; keep the module")
        return embedding

    def add(self, lookup: Lookup, grad: Tensor, weights: Tensor | None = None, order: int = 0) -> None:
        """Keep the gradient of a lookup's result. grad: shape lookup.shape + (dim,), dtype `output_dtype`.

        The lookup and the weights are copied. `grad` is not copied: if code changes it in place, the step raises
        InputError. If two lookups share their tensor objects, their gradients become one sum, as in a graph.
        order: an id's gradients are sorted by this number, and then summed. Ties keep the order of the calls.
        """
        self._check_unclipped("run backward()")
        self._apply_scale()
        originals = (*lookup.tensors, weights)
        key = (lookup.pooling, lookup.feature_columns, *map(fingerprint, originals))
        gradient = self._gradients.get(key)
        if gradient is not None and not gradient.has_same_values(originals):  # a NumPy write changes no version
            key, gradient = (key, len(self._gradients)), None
        if gradient is not None:
            gradient.add(grad, order, self.embedding.name)
        else:
            weights = None if weights is None else weights.detach().clone()
            self._gradients[key] = _LookupGradient(copy_lookup(lookup), weights, originals, grad, order)

    def pin(self) -> Any:
        """Pin all lookups' rows with `embedding.pin`, each row once. Call `check` first."""
        return self.embedding.pin([gradient.lookup for gradient in self._sort_gradients()], dtype=self._dtype)

    def check(self) -> list[_LookupGradient]:
        """Return the gradients, sorted by `order`. Raises InputError if a gradient can no longer be applied."""
        embedding, gradients = self.embedding, self._sort_gradients()
        for gradient in gradients:
            gradient.require_unchanged(embedding.name)
            if gradient.lookup.ids.device != embedding.device:
                raise InputError(
                    f"gradients of embedding {embedding.name!r} are on {gradient.lookup.ids.device}, but the embedding "
                    f"is on {embedding.device}; call zero_grad() after moving a module"
                )
        return gradients

    @property
    def has_pending_grads(self) -> bool:
        """True if there are gradients, and no step has updated the rows since the first gradient."""
        return bool(self._gradients) and self.embedding.shadow._version == self._first_version

    def list_grads(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradients and the weights of the lookups, in the order of `pin`."""
        gradients = self._sort_gradients()
        return [gradient.grad.to(self._dtype) for gradient in gradients], [gradient.weights for gradient in gradients]

    def update(self, batch: Any) -> None:
        """Apply the embedding's optimizer once with the summed gradients. batch: the result of `pin`, unpinned here."""
        clip = () if self._scale == 1.0 and self._clip_value is None else (self._scale, self._clip_value)
        batch.update(*self.list_grads(), *clip)  # rows with a world cannot be clipped, so update() averages over ranks
        increment_version(self.embedding.shadow)  # after this, a backward() that needs the old rows raises

    def compute_squared_norm(self) -> float:
        """Return the squared norm of all rows' summed gradients. Raises InputError."""
        self._check_unclipped("compute a norm")
        self._apply_scale()  # before squaring, because squares of a GradScaler's scaled gradients might overflow
        lookups = [gradient.lookup for gradient in self.check()]
        embedding: Any = self.embedding
        return embedding.table_handle().open_table.compute_squared_norm(lookups, *self.list_grads()) if lookups else 0.0

    def multiply(self, scale: float) -> None:
        """Multiply the gradients collected so far by a number. Raises GraphError after `clip`."""
        self._check_unclipped("scale gradients")
        self._scale *= scale

    def clip(self, value: float) -> None:
        """Clip each element of each row's summed gradient to [-value, value] in the step. Raises OptimizerError."""
        value = check_positive("clip_value", value) or math.inf
        self._clip_value = min(value, self._clip_value or value)

    def _apply_scale(self) -> None:
        """Multiply the collected gradients by the scale, and reset the scale for later gradients. Raises InputError."""
        if self._scale != 1.0:
            for gradient in self._gradients.values():
                gradient.require_unchanged(self.embedding.name)
            for gradient in self._gradients.values():
                gradient.multiply(self._scale)
            self._scale, self._dtype = 1.0, torch.float32  # float32, so that scaled gradients are not rounded again

    def _check_unclipped(self, operation: str) -> None:
        if self._clip_value is not None:
            raise GraphError(
                f"embedding {self.embedding.name!r}: cannot {operation} after clip_grad_value_ was called; "
                "clip by value last, just before step()"
            )

    def _sort_gradients(self) -> list[_LookupGradient]:
        return sorted(self._gradients.values(), key=lambda gradient: gradient.order)


class ShadowGrad(Tensor):
    """A shadow parameter's `.grad`. It stands for the rows' gradients; setting `.grad` to None drops them.

    Operations by torch's clip_grad_norm_, clip_grad_value_ and GradScaler on this tensor change the rows' gradients.
    Other operations raise GraphError, because they would leave the rows out.
    """

    def __new__(cls, row_gradients: RowGradients) -> ShadowGrad:
        with torch._C.DisableTorchFunctionSubclass():
            plain = torch.zeros_like(row_gradients.embedding.shadow)
        return torch.Tensor._make_subclass(cls, plain)  # not a view, unlike as_subclass

    def __init__(self, row_gradients: RowGradients) -> None:
        self.row_gradients = row_gradients

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShadowGrad(rows of embedding {self.row_gradients.embedding.name!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ in _METADATA_OPS:
            with torch._C.DisableTorchFunctionSubclass():
                value = func(*args, **(kwargs or {}))
            if not isinstance(value, Tensor):  # .data and .T return tensors
                return value
        leaves = pytree.tree_leaves((args, kwargs))
        embeddings = [leaf.row_gradients.embedding for leaf in leaves if isinstance(leaf, cls)]
        operation = _OPERATIONS.get(func.__name__) if all(embedding.world is None for embedding in embeddings) else None
        if operation is not None and (result := operation(*args, **(kwargs or {}))) is not None:
            return result
        name = f".{func.__self__.__name__}" if func.__name__ == "__get__" else func.__name__
        caller = _CALLER_NAMES.get(name.partition("foreach")[1] or name, name)
        raise GraphError(
            f"{caller} of the gradient of embedding {embeddings[0].name!r}: no tensor holds the gradients of its rows. "
            "Call step(), zero_grad() and clip_grad_norm_(parameters, max_norm) of the EagerOptimizer. Leave "
            "foreach=True out of torch's clips. To clip rows alone, set clip_grad_row_norm in their param group. Leave "
            "the embedding's parameters out of other code that reads gradients"
        )


def _compute_norm(grad: ShadowGrad, ord: float = 2.0) -> Any:
    if ord != 2:
        return None
    norm = math.sqrt(grad.row_gradients.compute_squared_norm())
    return torch.tensor(norm, dtype=torch.float32, device=grad.row_gradients.embedding.device)


def _multiply(grad: ShadowGrad, factor: Any) -> Any:
    if isinstance(factor, Tensor) and factor.dim():
        return None
    grad.row_gradients.multiply(float(factor))
    return grad


def _clamp(grad: ShadowGrad, min: float | None = None, max: float | None = None) -> Any:
    if max is None or min != -max:
        return None
    grad.row_gradients.clip(max)
    return grad


def _unscale(grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> Any:
    for rows in (grad.row_gradients for grad in grads if isinstance(grad, ShadowGrad)):
        if not all(grad.isfinite().all() for grad in rows.list_grads()[0]):
            found_inf.fill_(1.0)
        rows.multiply(float(inv_scale))
    if dense := [grad for grad in grads if not isinstance(grad, ShadowGrad)]:
        torch._amp_foreach_non_finite_check_and_unscale_(dense, found_inf, inv_scale)
    return grads


# torch's clips and GradScaler call these operations. An operation returns None if it does not support an argument
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "linalg_vector_norm": _compute_norm,
    "mul_": _multiply,
    "clamp_": _clamp,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}


def check_not_traced(embedding: EmbeddingBase) -> None:
    """Raise GraphError while another thread traces a graph that contains the embedding: a trace hides gradients."""
    traced = getattr(embedding.shadow, TRACED_ATTRIBUTE, None)
    if traced is not None and traced[0] != get_ident():
        raise GraphError(
            f"embedding {embedding.name!r} cannot be trained while another thread traces a graph that contains the "
            "embedding. A graph's first call with a new signature traces the graph; train after this call has returned"
        )


def is_reached(leaf: Tensor, grad_error: str) -> bool:
    """True if the running backward pass computes a leaf's gradient. torch.autograd.grad may skip this leaf.

    grad_error: the message of the GraphError that is raised if code calls torch.autograd.grad for this leaf.
    """
    try:
        with torch._C.DisableTorchFunctionSubclass():
            return bool(torch._C._will_engine_execute_node(get_gradient_edge(leaf).node))
    except RuntimeError:  # torch raises this error for autograd.grad of the leaf itself
        raise GraphError(grad_error) from None


def are_rows_reached(embedding: EmbeddingBase) -> bool:
    """True if the running backward pass reaches the embedding's parameter. In a trace, always True.

    Raises GraphError for torch.autograd.grad of the parameter itself, and for create_graph=True.
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
    """Add a lookup's gradient to the gradients kept in the parameter's `.grad`. Raises GraphError."""
    node = torch._C._current_autograd_node()
    # a compiled function computes the gradients of all its inputs, even for inputs that the pass does not reach
    if node is not None and node.name().startswith("CompiledFunction"):
        with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), _NO_KEYS):
            if not are_rows_reached(embedding):
                return
    name, shadow = embedding.name, embedding.shadow
    if embedding.embedding_id not in trainers:
        raise GraphError(
            f"embedding {name!r}: backward() outside a graph, but no EagerOptimizer trains the embedding. To train in "
            "a loop, give tierbed.EagerOptimizer the optimizer and a module that contains the embedding. To train in a "
            "graph, call backward() in the build() of a tierbed.Graph. To only read rows, use torch.no_grad()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        if shadow._backward_hooks or shadow._post_accumulate_grad_hooks:
            raise GraphError(
                f"embedding {name!r}: its parameter has a gradient hook, and no tensor holds the gradients of its "
                "rows; remove the hook, and register it on what a lookup returns"
            )
    if (rows := get_gradients(embedding)) is None:
        rows = RowGradients(embedding)
        set_grad(embedding, ShadowGrad(rows))
    rows.add(lookup, grad, weights, order)


def set_grad(embedding: EmbeddingBase, grad: Tensor | None) -> Tensor | None:
    """Set the parameter's gradient, and return the old one."""
    with torch._C.DisableTorchFunctionSubclass():
        old, embedding.shadow.grad = embedding.shadow.grad, grad
    return old


def get_gradients(embedding: EmbeddingBase) -> RowGradients | None:
    """Return the row gradients in the parameter's `.grad`. Raises OptimizerError for a gradient that no lookup made."""
    with torch._C.DisableTorchFunctionSubclass():
        grad = embedding.shadow.grad
        if grad is None:
            return None
        rows = grad.row_gradients if isinstance(grad, ShadowGrad) else None
        # a gradient of zero comes from lookups, or from code that initializes optimizer state
        if (rows is not None and not grad.is_cpu) or not grad.item():
            return rows
    raise OptimizerError(
        f"embedding {embedding.name!r}: its parameter has a gradient that no lookup made, so step() would update no "
        "row. Call zero_grad(), and leave the embedding's parameters out of code that sets gradients"
    )
