"""What the ops and the graph need of an embedding, whatever stands behind its rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..optim.row_optimizer import RowOptimizer
    from ..options.lookup import Lookup
    from ..options.store_options import StoreOptions
    from ..options.table_spec import TableSpec


TRACED = "tierbed_traced"  # attribute of a trace's tensor: the thread of the trace, and the live parameter


class Pinned(Protocol):
    """The unique rows of all lookups of a step, pinned in the top tier until `update` or `release`."""

    core: Any  # the processor's batch
    lookups: list[Lookup]
    dtype: torch.dtype

    def gather(self, index: int, weights: Tensor | None = None) -> Tensor:
        """The rows of lookup number `index`, or its pooled bags: lookup.shape + (dim,), of `dtype`.

        weights: float32 of the shape of its ids, or None.
        """

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of the weights of lookup number `index`, of the shape of its ids; grad is like its result."""

    def square_gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """The sum of the squares of the gradients of the rows, each summed over its occurrences, as `update` does."""

    def update(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None] | None = None,
        scale: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        """Apply the optimizer and end the pin.

        grads and weights: for each lookup, the gradient of its result and the weights that pooled it. A row's summed
        gradient is multiplied by `scale`, then each element is clipped to [-clip_value, clip_value].
        """

    def release(self) -> None:
        """End the pin; the rows stay as they are."""


class EmbeddingBase(nn.Module):
    """A module whose rows a step reads and trains."""

    spec: TableSpec
    store_options: StoreOptions
    output_dtype: torch.dtype  # of what a lookup returns, and of its gradient
    handle: int  # the number by which the ops find the module
    shadow: nn.Parameter  # [1] float32, by which optimizers and autograd know the module
    row_optimizer: RowOptimizer | None  # the optimizer of the next update
    world: Any = None  # the ranks that share the rows
    group: Any = None  # of the embeddings that are trained together with this one

    def join(self) -> None:
        """Note that `group` has changed."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where lookups take place: the device that the module was moved to."""
        raise NotImplementedError

    @property
    def dim(self) -> int:
        """Floats of a row that a lookup returns."""
        raise NotImplementedError

    def read(self, lookup: Lookup, weights: Tensor | None = None) -> Tensor:
        """What a lookup returns, for checked arguments: lookup.shape + (dim,), inserting nothing."""
        raise NotImplementedError

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of a lookup's weights for the gradient of its result, with the rows as they are."""
        raise NotImplementedError

    def pin(self, lookups: list[Lookup], like: Any = None, dtype: torch.dtype | None = None) -> Pinned:
        """The rows of all lookups of a training step, pinned until they are updated.

        like: another embedding's batch of the same lookups, already deduplicated. dtype: of results and gradients;
        left out, `output_dtype`. OptimizerError, StoreError, CapacityError, InputError.
        """
        raise NotImplementedError

    def unique_rows(self, lookups: list[Lookup]) -> Lookup:
        """A lookup of each row that these look up, once: the part of a coming step that one call makes. InputError."""
        raise NotImplementedError

    def sum_gradients(
        self, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None]
    ) -> tuple[Lookup, Tensor]:
        """The part of a step that one call makes: its unique rows [n], and the gradient [n, dim] float32 of each.

        grads and weights are as in `Pinned.update`, which sums as well. InputError.
        """
        raise NotImplementedError

    def square_gradients(self, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None]) -> float:
        """`Pinned.square_gradients` of lookups that are not pinned. InputError."""
        raise NotImplementedError

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        raise NotImplementedError

    def announce(self, lookups: list[Lookup]) -> None:
        """Announce the checked lookups of a coming step, so that its rows may be made ready. In the order of steps."""
        raise NotImplementedError

    def forget_announced(self) -> None:
        """Forget what was announced, and end the thread that makes it ready."""
        raise NotImplementedError

    def is_reached(self) -> bool:
        """Whether the backward pass under way reaches `shadow`. GraphError for what has no derivative."""
        raise NotImplementedError

    def check_trained_lookup(self) -> None:
        """Called before a lookup whose rows are to be trained. OptimizerError where they cannot be."""
        raise NotImplementedError

    def accumulate(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, order: int) -> None:
        """Keep the gradient of a lookup outside a graph for the coming step. GraphError where no step comes.

        Threads may call it at once.
        """
        raise NotImplementedError

    def attach(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RowOptimizer:
        """Let the rows follow one of the optimizer's param groups. OptimizerError."""
        raise NotImplementedError

    def use_optimizer(self, rows_optimizer: RowOptimizer) -> None:
        """Let the next updates be those of `rows_optimizer`. OptimizerError."""
        raise NotImplementedError
