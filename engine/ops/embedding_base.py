"""The interface through which ops and graphs use an embedding module."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import GraphError
from ..optim.row_optimizer import RowOptimizer, row_optimizer
from ..options.lookup import Lookup
from ..options.store_options import StoreOptions
from ..options.table_spec import TableSpec

TRACED_ATTRIBUTE = "tierbed_traced"  # attribute of a traced tensor: (tracing thread, live parameter)
REMEDY_ATTRIBUTE = "tierbed_remedy"  # attribute of a traced `weight`'s storage: what to do instead of writing to it


class Unscriptable:
    """A module that TorchScript cannot compile: torch.jit.script raises GraphError for models that contain it."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise GraphError(
            f"torch.jit.script of {type(self).__name__}: TorchScript cannot compile tierbed's modules; script the "
            "dense part alone and call it with the looked-up rows, or run the whole step in a Graph"
        )


class EmbeddingBase(Unscriptable, nn.Module):
    """A module with embedding rows that a step reads and trains."""

    spec: TableSpec
    store_options: StoreOptions
    output_dtype: torch.dtype  # dtype of lookup results and their gradients
    device: torch.device  # the device where lookups run; Module.to() changes it
    embedding_id: int  # a random number, by which torch ops find the module
    shadow: nn.Parameter  # [1, 1] float32; stands for the rows in optimizers and autograd
    parameter_name = "shadow"  # the shadow's name in named_parameters() and state_dict()
    look_ahead: int  # how many batches the last run over SSD looked ahead; the next run starts with this depth
    row_optimizer: RowOptimizer | None  # applies the next update to the rows
    world: Any = None  # the ranks that own the rows
    group: Any = None  # the training group
    # Where the name comes from: "given" by the user, "default" (may change later), or "path" (the path in a model).
    name_source: str = "given"

    @property
    def name(self) -> str:
        raise NotImplementedError

    def set_name(self, name: str) -> None:
        raise NotImplementedError

    @property
    def dim(self) -> int:
        """How many columns a lookup's result has."""
        raise NotImplementedError

    def read(self, lookup: Lookup, weights: Tensor | None = None, is_training: bool = False) -> Tensor:
        """Return a checked lookup's result, of shape lookup.shape + (dim,). Inserts no rows."""
        raise NotImplementedError

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """Return the gradients of a lookup's weights, computed from the result's gradient and the current rows."""
        raise NotImplementedError

    def pin(self, lookups: list[Lookup], sibling: Any = None, dtype: torch.dtype | None = None) -> Any:
        """Pin all rows that a training step looks up. Returns a `PinnedBatch`; across ranks, returns a `ShardedBatch`.

        sibling: a batch with the same lookups in another embedding, to reuse its deduplication. dtype: the dtype for
        results and gradients, by default `output_dtype`. Raises OptimizerError, StoreError, CapacityError, InputError.
        """
        raise NotImplementedError

    def unpin_rows(self) -> None:
        """Unpin the rows that a failed step left pinned."""
        raise NotImplementedError

    def hit_counts(self) -> tuple[int, int]:
        """Return the top tier's hits and misses, in rows."""
        raise NotImplementedError

    def announce(self, lookups: list[Lookup]) -> None:
        """Announce a future step's checked lookups, to prefetch the step's rows. Steps must be announced in order."""
        raise NotImplementedError

    def forget_announced(self) -> None:
        """Drop announced steps and end the prefetch thread."""
        raise NotImplementedError

    def check_trained_lookup(self) -> None:
        """Raise OptimizerError if the rows cannot be trained. Called before a lookup of a training step."""
        raise NotImplementedError

    def accumulate(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, order: int) -> None:
        """Keep an eager lookup's gradient until the next step. Thread-safe. Raises GraphError if no step follows."""
        raise NotImplementedError

    def attach(self, optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> RowOptimizer:
        """Train the rows with one of the optimizer's param groups from now on. Raises OptimizerError."""
        new_optimizer = row_optimizer(optimizer, param_group)
        self.use_optimizer(new_optimizer)
        return new_optimizer

    def use_optimizer(self, row_optimizer: RowOptimizer) -> None:
        """Update the rows with `row_optimizer` from now on. Raises OptimizerError."""
        raise NotImplementedError

    def forget_optimizer(self) -> None:
        """Make the next update look up the rows' optimizer again."""
        self.row_optimizer = None
