"""A call of a table-batched embedding: one lookup of each embedding, one output, the update in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import _disable_current_modes

from ...embedding.autograd.gradients import is_reached
from ...embedding.optim.ddp_guard import refuse_lookup
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.lookup import Lookup
from ...engine.options.table_spec import TableSpec
from ...engine.table.row_step import row_step
from ..tensors.keyed_jagged_tensor import VariableBatchKeyedJaggedTensor
from ..tensors.keyed_tensor import ColumnOrder
from .call_arguments import TBECall

_NO_GRADIENT = (
    "torch.autograd.grad of the anchor of a TableBatchedEmbeddingBags, but rows are updated in backward, and no tensor "
    "holds their gradients; call backward(), or leave the anchor out"
)


@dataclass(eq=False)
class _FeatureGroup:
    """The features that look up one embedding.

    tables: of each feature, by its number in the embedding. columns: of all features in the result, -1 for others.
    """

    spec: TableSpec
    features: list[int]  # ascending
    tables: list[int]
    columns: tuple[int, ...]
    _table_ids: dict[torch.device, Tensor] = field(default_factory=dict)

    def table_ids(self, device: torch.device) -> Tensor | None:
        """The tables of the columns; None if these are all tables in order."""
        if self.tables == [*range(self.spec.num_tables)]:
            return None
        if device not in self._table_ids:
            with _disable_current_modes(), torch.inference_mode(False):  # traces and later calls keep it
                self._table_ids[device] = torch.tensor(self.tables, device=device)
        return self._table_ids[device]


class CallSplitter:
    """Splits a call into a lookup of each embedding, and joins what these return.

    specs: of the embeddings. locations: for each feature the number of its embedding, and of its table there.
    pooling: "sum" or "mean"; None returns a row for each index.
    """

    def __init__(self, specs: Sequence[TableSpec], locations: Sequence[tuple[int, int]], pooling: str | None) -> None:
        self._pooling = pooling
        sources = [embedding for embedding, _ in locations]
        self._groups = []
        for number, spec in enumerate(specs):
            features = [feature for feature, source in enumerate(sources) if source == number]
            tables = [locations[feature][1] for feature in features]
            columns = tuple(features.index(at) if source == number else -1 for at, source in enumerate(sources))
            self._groups.append(_FeatureGroup(spec, features, tables, columns))
        self._columns = ColumnOrder(sources, [spec.dim for spec in specs])

    def split(self, call: TBECall) -> list[tuple[Lookup, Tensor | None]]:
        """The lookup of each embedding, and its weights."""
        if call.sizes is not None or self._pooling is None:
            return [self._selected(group, call.jagged) for group in self._groups]
        ids, offsets = call.indices, call.offsets
        return [
            (Lookup(ids, group.table_ids(ids.device), offsets, self._pooling, group.columns), call.weights)
            for group in self._groups
        ]

    def join(self, call: TBECall, results: Sequence[Tensor]) -> Tensor:
        """One output of the results of all embeddings."""
        if len(results) == 1 and self._pooling is None:
            return results[0]
        if self._pooling is None:
            return self._by_rank([[count] for count in call.jagged.length_per_key()], results)
        if call.sizes is not None:
            return self._by_rank(call.sizes, [rows.flatten() for rows in results])
        return self._columns.join([rows.flatten(1) for rows in results])

    def _selected(self, group: _FeatureGroup, every: VariableBatchKeyedJaggedTensor) -> tuple[Lookup, Tensor | None]:
        """The bags, or the indices, of the group's features alone, with a table id for each."""
        chosen = every if len(self._groups) == 1 else every.permute(group.features)
        ids, counts = chosen.values(), every.stride_per_key() if self._pooling else every.length_per_key()
        rows = [counts[feature] for feature in group.features]
        tables = torch.tensor(group.tables, device=ids.device).repeat_interleave(
            torch.tensor(rows, device=ids.device), output_size=sum(rows)
        )
        lookup = Lookup(ids, tables, chosen.offsets() if self._pooling else None, self._pooling)
        return lookup, chosen.weights_or_none()

    def _by_rank(self, sizes: Sequence[Sequence[int]], results: Sequence[Tensor]) -> Tensor:
        """The rows of all embeddings: rank by rank, and feature by feature within.

        sizes: how many rows each feature has for each rank. A result of one dimension has the numbers of such rows.
        """
        ranks = len(sizes[0])
        if len(results) == ranks == 1:
            return results[0]
        parts: list[list[Tensor]] = [[] for _ in sizes]
        for group, rows in zip(self._groups, results, strict=True):
            width = group.spec.dim if rows.dim() == 1 else 1
            of_group = iter(rows.split([size * width for feature in group.features for size in sizes[feature]]))
            for feature in group.features:
                parts[feature] = [next(of_group) for _ in range(ranks)]
        return torch.cat([of_feature[rank] for rank in range(ranks) for of_feature in parts])


class FusedUpdater:
    """Looks up an embedding, and updates its rows in backward.

    clip: to which magnitude each element of a result's gradient is clamped, before anything is summed; None is no
    bound.
    """

    def __init__(self, embedding: EmbeddingBase, optimizer: RowOptimizer, clip: float | None) -> None:
        self.embedding, self.optimizer, self.clip = embedding, optimizer, clip

    def look_up(self, anchor: Tensor, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """The result of a checked lookup, whose backward updates rows if `anchor` requires grad."""
        if anchor.requires_grad and torch.is_grad_enabled():
            refuse_lookup(self.embedding.name)
            if self.embedding.group is not None:
                self.embedding.group.check_passed()
        output: Tensor = _Lookup.apply(anchor, weights, self, lookup)
        return output

    def update(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, of_weights: bool) -> Tensor | None:
        """Update each row of a lookup once. Returns the gradient of the weights, by the rows before the update."""
        embedding = self.embedding

        def update() -> Tensor | None:
            pinned = embedding.pin([lookup])
            if embedding.group is not None:
                embedding.group.begin_pass()
            weights_grad = self._weights_grad(pinned, grad) if of_weights else None
            pinned.update([grad], [weights])
            increment_version(embedding.shadow)  # a later backward that needs the rows as they were raises
            return weights_grad

        return row_step([(embedding, self.optimizer)], "a TableBatchedEmbeddingBags", update)

    def _weights_grad(self, pinned: Any, grad: Tensor) -> Tensor:
        """The gradient of the weights. If this rank alone fails, the ranks that wait for gradients raise its error."""
        world = self.embedding.world
        try:
            weights_grad: Tensor = pinned.weights_grad(0, grad)
        except Exception as error:
            if world is not None and world.must_report(error):
                pinned.send_nothing()
                world.handshake(f"a step of embedding {self.embedding.name!r}", error)
            raise
        return weights_grad


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, updater: FusedUpdater, lookup: Lookup) -> Tensor:
        ctx.updater, ctx.pooling, ctx.places = updater, lookup.pooling, lookup.feature_columns
        needs_rows = ctx.needs_input_grad[1]
        ctx.save_for_backward(updater.embedding.shadow if needs_rows else None, anchor, weights, *lookup.tensors)
        return updater.embedding.read(lookup, weights, trains=ctx.needs_input_grad[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, anchor, weights, ids, table_ids, offsets = ctx.saved_tensors
        updater: FusedUpdater = ctx.updater
        lookup = Lookup(ids, table_ids, offsets, ctx.pooling, ctx.places)
        if updater.clip is not None:
            grad = grad.clamp(-updater.clip, updater.clip)
        of_weights = ctx.needs_input_grad[1]
        if ctx.needs_input_grad[0] and is_reached(anchor, _NO_GRADIENT):
            return None, updater.update(lookup, grad, weights, of_weights), None, None
        return None, updater.embedding.read_weights_grad(lookup, grad) if of_weights else None, None, None
