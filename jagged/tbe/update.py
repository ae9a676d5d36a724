"""The lookup that updates its rows in backward, as FBGEMM's do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, increment_version

from ...embedding.ddp_guard import refuse_lookup
from ...embedding.gradients import training_step
from ...engine.errors import GraphError
from ...engine.ops.rows_contract import Rows
from ...engine.optim.optimizers import RowOptimizer
from ...engine.options.inputs import Lookup
from ...engine.signals import uninterrupted


class Trainer:
    """How the rows of an embedding are updated.

    clip: to which magnitude each element of a result's gradient is clamped, before anything is summed; None is no
    bound.
    """

    def __init__(self, embedding: Rows, optimizer: RowOptimizer, clip: float | None) -> None:
        self.embedding, self.optimizer, self.clip = embedding, optimizer, clip

    def look_up(self, anchor: Tensor, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """The result of a checked lookup, whose backward updates rows where `anchor` requires grad."""
        if anchor.requires_grad and torch.is_grad_enabled():
            refuse_lookup(self.embedding.name)
            if self.embedding.group is not None:
                self.embedding.group.check_passed()
        output: Tensor = _Lookup.apply(anchor, weights, self, lookup)
        return output

    def update(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, of_weights: bool) -> Tensor | None:
        """Update the rows of a lookup, each once. The gradient of the weights is that of the rows as they were."""
        embedding = self.embedding
        with training_step([embedding], "a TableBatchedEmbeddingBags"), uninterrupted():
            if embedding.row_optimizer is not self.optimizer:
                embedding.use_optimizer(self.optimizer)  # something else trained the embedding since
            try:
                pinned = embedding.pin([lookup])
                if embedding.group is not None:
                    embedding.group.begin_pass()
                weights_grad = self._weights_grad(pinned, grad) if of_weights else None
                pinned.update([grad], [weights])
            except BaseException:
                embedding.release()
                if embedding.group is not None:
                    embedding.group.fail_pass()
                raise
            increment_version(embedding.shadow)  # so that a backward that needs the rows as they were says so
        return weights_grad

    def _weights_grad(self, pinned: Any, grad: Tensor) -> Tensor:
        """The gradient of the weights. What this rank alone raises is raised on those that wait for its gradients."""
        world = self.embedding.world
        try:
            found: Tensor = pinned.weights_grad(0, grad)
        except Exception as error:
            if world is not None and world.untold(error):
                pinned.send_nothing()
                world.meet(f"a step of embedding {self.embedding.name!r}", error)
            raise
        return found


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, trainer: Trainer, lookup: Lookup) -> Tensor:
        ctx.trainer, ctx.pooling, ctx.places = trainer, lookup.pooling, lookup.places
        needs_rows = ctx.needs_input_grad[1]
        ctx.save_for_backward(trainer.embedding.shadow if needs_rows else None, anchor, weights, *lookup.tensors)
        return trainer.embedding.read(lookup, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, anchor, weights, ids, table_ids, offsets = ctx.saved_tensors
        trainer: Trainer = ctx.trainer
        lookup = Lookup(ids, table_ids, offsets, ctx.pooling, ctx.places)
        if trainer.clip is not None:
            grad = grad.clamp(-trainer.clip, trainer.clip)
        of_weights = ctx.needs_input_grad[1]
        if ctx.needs_input_grad[0] and _is_reached(anchor):
            return None, trainer.update(lookup, grad, weights, of_weights), None, None
        return None, trainer.embedding.read_weights_grad(lookup, grad) if of_weights else None, None, None


def _is_reached(anchor: Tensor) -> bool:
    """Whether the backward pass under way trains: torch.autograd.grad of other tensors does not. GraphError."""
    try:
        return bool(torch._C._will_engine_execute_node(get_gradient_edge(anchor).node))
    except RuntimeError:  # torch raises it where the gradient of the leaf itself is asked for
        raise GraphError(
            "torch.autograd.grad of the anchor of a TableBatchedEmbeddingBags, but rows are updated in backward, and "
            "no tensor holds their gradients; call backward(), or leave the anchor out"
        ) from None
