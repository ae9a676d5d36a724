"""The gradients of an embedding's lookups, kept until its rows take them in one step."""

from __future__ import annotations

import weakref
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InputError
from ..ops.rows_contract import Pinned, Rows
from ..options.inputs import Lookup


@dataclass
class _Kept:
    lookup: Lookup  # a copy, and so are the weights
    weights: Tensor | None
    given: tuple[Tensor | None, ...]  # the caller's tensors, by whose identity the key is made
    order: int
    grad: Tensor
    version: int | None  # of the gradient when it was kept

    def is_of(self, given: tuple[Tensor | None, ...]) -> bool:
        copies = (*self.lookup.tensors, self.weights)
        pairs = zip(given, copies, strict=True)
        return all(now is None or (then is not None and torch.equal(now, then)) for now, then in pairs)

    def unchanged(self, name: str) -> Tensor:
        if _version(self.grad) != self.version:
            raise InputError(
                f"gradient of embedding {name!r}: it was changed in place between backward() and the step; give "
                "backward() a copy, grad.clone()"
            )
        return self.grad


class RowGradients:
    """The gradients of one embedding. They add up over lookups, and over passes of a model, until `clear`."""

    def __init__(self, embedding: Rows) -> None:
        self._embedding = weakref.ref(embedding)  # which may hold this object
        self._kept: dict[Hashable, _Kept] = {}
        self._began = embedding.shadow._version
        self._scale = 1.0  # of clips: multiplies the sum of each row
        self._dtype = embedding.output_dtype  # of gradients in a step

    @property
    def embedding(self) -> Rows:
        """The embedding. It lives: callers of the methods here hold it."""
        embedding = self._embedding()
        assert embedding is not None
        return embedding

    def add(self, lookup: Lookup, grad: Tensor, weights: Tensor | None = None, order: int = 0) -> None:
        """Keep the gradient of what a lookup returned, lookup.shape + (dim,), of the output dtype.

        weights: the weights that pooled it, float32 of the shape of its ids. order: the step takes lookups in ascending
        order, equal numbers as they came; sums over the occurrences of an id follow this order.

        The lookup and the weights are copied. The gradient is not: InputError in the step if it was changed in place.
        Gradients of the very same tensors are summed here, as a graph sums them.
        """
        if self._scale != 1.0:  # of those that were clipped, and of no other
            scaled = [one.unchanged(self.embedding.name).float() * self._scale for one in self._kept.values()]
            for one, product in zip(self._kept.values(), scaled, strict=True):
                one.grad, one.version = product, _version(product)
            self._scale, self._dtype = 1.0, torch.float32  # rounded no further
        given = (*lookup.tensors, weights)
        key = (lookup.pooling, lookup.places, *map(_identity, given))
        kept = self._kept.get(key)
        if kept is not None and not kept.is_of(given):  # NumPy has written to the tensors, which changes no version
            key, kept = (key, len(self._kept)), None
        if kept is not None:
            grad = kept.unchanged(self.embedding.name) + grad
            kept.grad, kept.version, kept.order = grad, _version(grad), min(kept.order, order)
            return
        ids, table_ids, offsets, weights = (None if part is None else part.detach().clone() for part in given)
        assert ids is not None
        copy = lookup._replace(ids=ids, table_ids=table_ids, offsets=offsets)
        self._kept[key] = _Kept(copy, weights, given, order, grad, _version(grad))

    def pin(self) -> Pinned | None:
        """Bring up and pin the rows of all lookups, each row once. Returns None where there is no lookup.

        Raises what `embedding.pin` raises, and InputError; then nothing is pinned.
        """
        kept = self.check()
        return self.embedding.pin([one.lookup for one in kept], dtype=self._dtype) if kept else None

    def check(self) -> list[_Kept]:
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

    def update(self, batch: Pinned) -> None:
        """Apply the embedding's optimizer once, with the sum of all gradients. `batch`: from `pin`; its pin ends."""
        scale = () if self._scale == 1.0 else (self._scale,)  # over ranks the mean is meant
        batch.update(*self.grads(), *scale)

    def square_gradients(self) -> float:
        """The sum of the squares of the gradients of all rows, each summed over its occurrences. InputError."""
        lookups = [one.lookup for one in self.check()]
        return self.embedding.square_gradients(lookups, *self.grads()) * self._scale**2 if lookups else 0.0

    def multiply(self, scale: float) -> None:
        """Multiply the gradients that there are by a number."""
        self._scale *= scale

    def _in_order(self) -> list[_Kept]:
        return sorted(self._kept.values(), key=lambda kept: kept.order)


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _identity(tensor: Tensor | None) -> Hashable:
    """A key that is equal for one tensor to which nothing was written in between."""
    if tensor is None:
        return None
    return id(tensor), object() if tensor.is_inference() else tensor._version
