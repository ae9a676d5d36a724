"""A call of a table-batched embedding: a lookup of each embedding, one output, the update in backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge, increment_version

from ...embedding.ddp_guard import refuse_lookup
from ...embedding.gradients import exclusive_step
from ...engine.errors import GraphError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.lookup import Lookup, check_lookup, check_weights
from ...engine.options.table_spec import TableSpec
from ...engine.signals import uninterrupted
from .call_arguments import TBECall, taken_out
from .specs import EmbeddingGroup


class EmbeddingCall(NamedTuple):
    """What a call asks of one embedding."""

    lookup: Lookup
    weights: Tensor | None
    ids: list[int]  # how many indices each feature has, where the output needs it


class CallSplitter:
    """How calls are divided between embeddings.

    parts: the tables and features of each embedding. specs: the embeddings' specs, which have the dims. pooling: "sum"
    or "mean"; None returns a row for each index.
    """

    def __init__(
        self, name: str, parts: Sequence[EmbeddingGroup], specs: Sequence[TableSpec], pooling: str | None
    ) -> None:
        self._name, self._parts, self._specs, self._pooling = name, parts, specs, pooling
        self._table_ids: dict[tuple[int, torch.device], Tensor] = {}  # of each part's features
        self._features = sum(len(part.features) for part in parts)
        of = {feature: at for at, part in enumerate(parts) for feature in part.features}
        self._part_of = [of[feature] for feature in range(self._features)]
        self._runs: list[list[int]] = [[] for _ in parts]  # of each part, columns of features that are neighbours
        self._order: list[int] = []  # the parts of these runs, from left to right
        for at in self._part_of:
            if not self._order or self._order[-1] != at:
                self._order.append(at)
                self._runs[at].append(0)
            self._runs[at][-1] += specs[at].dim

    def asked(self, call: TBECall) -> list[EmbeddingCall]:
        """What the call asks of each embedding. InputError."""
        if call.sizes is None and self._pooling is not None:
            return [self._of_features(at, call) for at in range(len(self._parts))]
        return [self._of_piece(at, call) for at in range(len(self._parts))]

    def joined(self, call: TBECall, asked: Sequence[EmbeddingCall], found: Sequence[Tensor]) -> Tensor:
        """One output of what the embeddings returned."""
        if self._pooling is None:
            return self._in_order(found, [one.ids for one in asked])
        if call.sizes is not None:
            return self._of_ranks(call.sizes, found)
        flat = [rows.flatten(1) for rows in found]
        if len(flat) == 1:
            return flat[0]
        pieces = [iter(rows.split(runs, 1)) for rows, runs in zip(flat, self._runs, strict=True)]
        return torch.cat([next(pieces[at]) for at in self._order], 1)

    def _of_features(self, at: int, call: TBECall) -> EmbeddingCall:
        part, spec, device = self._parts[at], self._specs[at], call.indices.device
        if (at, device) not in self._table_ids:
            with torch.inference_mode(False):  # autograd saves it in later calls
                self._table_ids[at, device] = torch.tensor(part.table_of, device=device)
        table_ids = self._table_ids[at, device]
        lookup = check_lookup(spec, call.indices, table_ids, call.offsets, self._pooling, part.features, self._features)
        check_weights(spec, lookup, call.weights)
        return EmbeddingCall(lookup, call.weights, [])

    def _of_piece(self, at: int, call: TBECall) -> EmbeddingCall:
        """The bags, or the indices, of the part's features alone, with a table id for each."""
        part, spec = self._parts[at], self._specs[at]
        bags = call.bags(self._features)
        piece = taken_out(self._name, call, part.features, bags)
        device = call.indices.device
        counts = piece.ids if self._pooling is None else [bags[f + 1] - bags[f] for f in part.features]
        table_ids = torch.tensor(part.table_of, device=device).repeat_interleave(
            torch.tensor(counts, device=device), output_size=sum(counts)
        )
        offsets = None if self._pooling is None else piece.offsets
        lookup = check_lookup(spec, piece.indices, table_ids, offsets, self._pooling)
        check_weights(spec, lookup, piece.weights)
        return EmbeddingCall(lookup, piece.weights, piece.ids)

    def _in_order(self, found: Sequence[Tensor], counts: Sequence[list[int]]) -> Tensor:
        """Rows of features, put in the order of the features. counts: how many each feature of a part has."""
        if len(found) == 1:
            return found[0]
        pieces = [iter(rows.split(of_part)) for rows, of_part in zip(found, counts, strict=True)]
        return torch.cat([next(pieces[at]) for at in self._part_of])

    def _of_ranks(self, sizes: list[list[int]], found: Sequence[Tensor]) -> Tensor:
        """The bags [bags, dim] of each part in one dimension, rank by rank, in each feature by feature."""
        ranks = len(sizes[0])
        if len(found) == 1 and ranks == 1:
            return found[0].flatten()
        pieces: list[list[Tensor]] = [[] for _ in sizes]
        for part, rows in zip(self._parts, found, strict=True):
            of_part = iter(rows.split([size for feature in part.features for size in sizes[feature]]))
            for feature in part.features:
                pieces[feature] = [next(of_part).flatten() for _ in range(ranks)]
        return torch.cat([of_feature[rank] for rank in range(ranks) for of_feature in pieces])


class Trainer:
    """How the rows of an embedding are updated.

    clip: to which magnitude each element of a result's gradient is clamped, before anything is summed; None is no
    bound.
    """

    def __init__(self, embedding: EmbeddingBase, optimizer: RowOptimizer, clip: float | None) -> None:
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
        with exclusive_step([embedding], "a TableBatchedEmbeddingBags"), uninterrupted():
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
            if world is not None and world.must_report(error):
                pinned.send_nothing()
                world.handshake(f"a step of embedding {self.embedding.name!r}", error)
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
