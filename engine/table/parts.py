"""Parts of a step: what one call looks up, each row once, and one gradient for each row."""

from __future__ import annotations

import torch
from torch import Tensor

from ..exact_sum import partial, total
from ..options.inputs import Lookup, checked_gradients
from .table import OpenTable


def unique_rows(table: OpenTable, lookups: list[Lookup]) -> Lookup:
    """A lookup of the rows of a coming call, each once. InputError for ids that the host finds wrong."""
    with table.lock:
        table.opened()
        return table.processor.unique_rows(table.processor.batch(lookups, ahead=True))


def sum_gradients(
    table: OpenTable, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None], dtype: torch.dtype
) -> tuple[Lookup, Tensor]:
    """The rows of a call [n], each once, and the gradient [n, dim] float32 of each; dtype: of `grads`. InputError."""
    gradients = checked_gradients(table.spec, lookups, grads, weights, dtype)
    with table.lock:
        table.opened()
        batch = table.processor.batch(lookups)
        return table.processor.unique_rows(batch), table.processor.sum_gradients(batch, gradients)


def square_gradients(
    table: OpenTable, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None], dtype: torch.dtype
) -> float:
    """The sum of the squares of the gradients of all rows, as that of a pinned batch; dtype: of `grads`. InputError."""
    gradients = checked_gradients(table.spec, lookups, grads, weights, dtype)
    with table.lock:
        table.opened()
        batch = table.processor.batch(lookups)
        return total([partial(table.processor.square_gradients(batch, gradients).cpu().numpy())])
