"""What the ops and the graph need of an embedding."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import GraphError
from ..optim.row_optimizer import RowOptimizer, row_optimizer
from ..options.lookup import Lookup
from ..options.store_options import StoreOptions
from ..options.table_spec import TableSpec

TRACED = "tierbed_traced"  # attribute of a trace's tensor: the thread of the trace, and the live parameter
REMEDY = "tierbed_remedy"  # attribute of the storage of a trace's `weight`: the message for a write into it


class NoTorchScript:
    """A module that TorchScript cannot compile. torch.jit.script raises GraphError for it, and for a model with it."""

    def __prepare_scriptable__(self) -> NoReturn:
        raise GraphError(
            f"torch.jit.script of {type(self).__name__}: TorchScript compiles no module of tierbed; script the dense "
            "part alone and call it with the looked-up rows, or run the whole step in a Graph"
        )


class EmbeddingBase(NoTorchScript, nn.Module):
    """A module whose rows a step reads and trains."""

    spec: TableSpec
    store_options: StoreOptions
    output_dtype: torch.dtype  # of the results of lookups, and of their gradients
    device: torch.device  # of lookups, to which the module was moved
    handle: int  # the number by which the ops find the module
    shadow: nn.Parameter  # [1, 1] float32, through which optimizers and autograd reach the rows
    parameter_name = "shadow"  # of it in named_parameters() and state_dict()
    misses_rows: bool  # whether the last run that judged its cache over SSD looked ahead
    row_optimizer: RowOptimizer | None  # the optimizer of the next update
    world: Any = None  # the ranks that own the rows
    group: Any = None  # of the embeddings that are trained together with this one
    # "path": the module has no name until its place in a model is known; "default": a name that may change; "given"
    naming: str = "given"

    @property
    def name(self) -> str:
        raise NotImplementedError

    def take_name(self, name: str) -> None:
        """Be called by this name from here on."""
        raise NotImplementedError

    @property
    def dim(self) -> int:
        """Columns of a lookup's result."""
        raise NotImplementedError

    def read(self, lookup: Lookup, weights: Tensor | None = None, trains: bool = False) -> Tensor:
        """The result of a lookup, for checked arguments: lookup.shape + (dim,). Inserts no rows."""
        raise NotImplementedError

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of a lookup's weights from the gradient of its result, with the present rows."""
        raise NotImplementedError

    def pin(self, lookups: list[Lookup], dedup_from: Any = None, dtype: torch.dtype | None = None) -> Any:
        """The rows of all lookups of a training step: a `PinnedBatch`, over ranks a `ShardedBatch`.

        dedup_from: another embedding's batch of the same lookups, whose deduplication is reused. dtype: of results and
        gradients, by default `output_dtype`. OptimizerError, StoreError, CapacityError, InputError.
        """
        raise NotImplementedError

    def release(self) -> None:
        """End the pin that a failed step left."""
        raise NotImplementedError

    def hit_counts(self) -> tuple[int, int]:
        """How many rows the top tier was asked for that it had, and that it did not have."""
        raise NotImplementedError

    def announce(self, lookups: list[Lookup]) -> None:
        """Announce the checked lookups of a future step, so that its rows may be prefetched. In the order of steps."""
        raise NotImplementedError

    def forget_announced(self) -> None:
        """Forget announced steps, and end the prefetch thread."""
        raise NotImplementedError

    def check_trained_lookup(self) -> None:
        """Called before a lookup whose rows are to be trained. OptimizerError if they cannot be."""
        raise NotImplementedError

    def accumulate(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, order: int) -> None:
        """Keep the gradient of a lookup outside a graph for the next step. GraphError if there is no next step.

        Threads may call it at once.
        """
        raise NotImplementedError

    def attach(self, optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RowOptimizer:
        """Let one of the optimizer's param groups train the rows. OptimizerError."""
        rows_optimizer = row_optimizer(optimizer, group)
        self.use_optimizer(rows_optimizer)
        return rows_optimizer

    def use_optimizer(self, rows_optimizer: RowOptimizer) -> None:
        """Let `rows_optimizer` make the next updates. OptimizerError."""
        raise NotImplementedError

    def forget_optimizer(self) -> None:
        """Let the next update ask for its optimizer again."""
        self.row_optimizer = None
