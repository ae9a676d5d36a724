"""Looks up each embedding of a table-batched embedding once, joins the results, and updates rows in backward."""

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
from ...embedding.optim.ddp_guard import check_lookup_outside_ddp
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.options.lookup import Lookup
from ...engine.options.table_spec import TableSpec
from ...engine.table.row_step import run_row_step
from ..tensors.keyed_jagged_tensor import VariableBatchKeyedJaggedTensor
from ..tensors.keyed_tensor import ColumnJoiner
from .call_arguments import TBECall

_NO_GRADIENT_ERROR = (
    "torch.autograd.grad got the anchor of a TableBatchedEmbeddingBags, but rows are updated in backward, and no "
    "tensor holds their gradients; call backward(), or leave the anchor out"
)


@dataclass(eq=False)
class _FeatureGroup:
    """The features that look up one embedding."""

    spec: TableSpec
    features: list[int]  # ascending
    table_ids: list[int]  # each feature's table id in the embedding
    columns: tuple[int, ...]  # each feature's column in this embedding's result; -1 if another embedding has it
    _table_id_tensors: dict[torch.device, Tensor] = field(default_factory=dict)

    def make_table_ids(self, device: torch.device) -> Tensor | None:
        """Return the table id of each feature, or None if the features look up all tables in order."""
        if self.table_ids == [*range(self.spec.num_tables)]:
            return None
        if device not in self._table_id_tensors:
            with _disable_current_modes(), torch.inference_mode(False):  # the cached tensor outlives this trace or mode
                self._table_id_tensors[device] = torch.tensor(self.table_ids, device=device)
        return self._table_id_tensors[device]


class CallSplitter:
    """Splits a call into one lookup per embedding, and joins the results.

    specs: the embeddings' specs. locations: (embedding index, table id in the embedding) for each feature.
    pooling: "sum", "mean", or None to return one row per index.
    """

    def __init__(self, specs: Sequence[TableSpec], locations: Sequence[tuple[int, int]], pooling: str | None) -> None:
        self._pooling = pooling
        embedding_by_feature = [embedding for embedding, _ in locations]
        self._feature_groups = []
        for index, spec in enumerate(specs):
            features = [feature for feature, embedding in enumerate(embedding_by_feature) if embedding == index]
            tables = [locations[feature][1] for feature in features]
            columns = tuple(features.index(i) if i in features else -1 for i in range(len(locations)))
            self._feature_groups.append(_FeatureGroup(spec, features, tables, columns))
        self._column_joiner = ColumnJoiner(embedding_by_feature, [spec.dim for spec in specs])

    def make_table_ids(self, device: torch.device) -> None:
        """Make the tensors of table ids now, because torch.compile cannot trace how they are made."""
        for group in self._feature_groups:
            group.make_table_ids(device)

    def split(self, call: TBECall) -> list[tuple[Lookup, Tensor | None]]:
        """Return (lookup, weights) for each embedding."""
        if call.bag_counts is not None or self._pooling is None:
            return [self._select(group, call.jagged) for group in self._feature_groups]
        ids, offsets = call.indices, call.offsets
        return [
            (Lookup(ids, group.make_table_ids(ids.device), offsets, self._pooling, group.columns), call.weights)
            for group in self._feature_groups
        ]

    def join(self, call: TBECall, results: Sequence[Tensor]) -> Tensor:
        """Join the embeddings' results to one output."""
        if len(results) == 1 and self._pooling is None:
            return results[0]
        if self._pooling is None:
            return self._join_by_rank([[count] for count in call.jagged.length_per_key()], results)
        if call.bag_counts is not None:
            return self._join_by_rank(call.bag_counts, [rows.flatten() for rows in results])
        return self._column_joiner.join([rows.flatten(1) for rows in results])

    def _select(self, group: _FeatureGroup, jagged: VariableBatchKeyedJaggedTensor) -> tuple[Lookup, Tensor | None]:
        """Return a lookup of only the group's features. Table ids are per bag, or per index if rows are not pooled."""
        selected = jagged if len(self._feature_groups) == 1 else jagged.permute(group.features)
        ids, feature_counts = selected.values(), jagged.stride_per_key() if self._pooling else jagged.length_per_key()
        counts = [feature_counts[feature] for feature in group.features]
        tables, repeats = torch.tensor([group.table_ids, counts], device=ids.device)
        table_ids = tables.repeat_interleave(repeats, output_size=sum(counts))
        lookup = Lookup(ids, table_ids, selected.offsets() if self._pooling else None, self._pooling)
        return lookup, selected.weights_or_none()

    def _join_by_rank(self, row_counts: Sequence[Sequence[int]], results: Sequence[Tensor]) -> Tensor:
        """Join results. The output is ordered by rank, and within a rank by feature.

        row_counts: number of rows per feature and rank. A 1-D result holds flattened rows.
        """
        num_ranks = len(row_counts[0])
        if len(results) == num_ranks == 1:
            return results[0]
        blocks_by_feature: list[list[Tensor]] = [[] for _ in row_counts]
        for group, rows in zip(self._feature_groups, results, strict=True):
            width = group.spec.dim if rows.dim() == 1 else 1
            blocks = iter(rows.split([n * width for feature in group.features for n in row_counts[feature]]))
            for feature in group.features:
                blocks_by_feature[feature] = [next(blocks) for _ in range(num_ranks)]
        return torch.cat([feature_blocks[rank] for rank in range(num_ranks) for feature_blocks in blocks_by_feature])


class FusedUpdater:
    """Looks rows up in an embedding, and updates them in backward.

    max_gradient: clamps elements of the output's gradient before gradients are summed per row; None does not clamp.
    """

    def __init__(self, embedding: EmbeddingBase, optimizer: RowOptimizer, max_gradient: float | None) -> None:
        self.embedding, self.optimizer, self.max_gradient = embedding, optimizer, max_gradient

    def look_up(self, anchor: Tensor, lookup: Lookup, weights: Tensor | None) -> Tensor:
        """Return the result of a checked lookup. The result's backward updates rows if `anchor` requires grad."""
        if anchor.requires_grad and torch.is_grad_enabled():
            check_lookup_outside_ddp(self.embedding.name)
            if self.embedding.group is not None:
                self.embedding.group.detect_failed_backward()
        return _FusedLookupFunction.apply(anchor, weights, self, lookup)

    def update(self, lookup: Lookup, grad: Tensor, weights: Tensor | None, needs_weights_grad: bool) -> Tensor | None:
        """Update each row of a lookup once. Return the weights' gradient, computed from the rows before the update."""
        embedding = self.embedding

        def update() -> Tensor | None:
            batch = embedding.pin([lookup])
            if embedding.group is not None:
                embedding.group.begin_backward()
            weights_grad = self._compute_weights_grad(batch, grad) if needs_weights_grad else None
            batch.update([grad], [weights])
            increment_version(embedding.shadow)  # a later backward raises if it needs the old values of the rows
            return weights_grad

        return run_row_step([(embedding, self.optimizer)], "a TableBatchedEmbeddingBags", update)

    def _compute_weights_grad(self, batch: Any, grad: Tensor) -> Tensor:
        """Return the weights' gradient. If only this rank fails, send its error to the ranks that await gradients."""
        world = self.embedding.world
        try:
            return batch.weights_grad(0, grad)
        except Exception as error:
            if world is not None and world.must_report(error):
                batch.send_nothing()
                world.handshake(f"a step of embedding {self.embedding.name!r}", error)
            raise


class _FusedLookupFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weights: Tensor | None, updater: FusedUpdater, lookup: Lookup) -> Tensor:
        ctx.updater, ctx.pooling, ctx.feature_columns = updater, lookup.pooling, lookup.feature_columns
        shadow = updater.embedding.shadow if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(shadow, anchor, weights, *lookup.tensors)
        return updater.embedding.read(lookup, weights, is_training=ctx.needs_input_grad[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _, anchor, weights, ids, table_ids, offsets = ctx.saved_tensors
        updater: FusedUpdater = ctx.updater
        lookup = Lookup(ids, table_ids, offsets, ctx.pooling, ctx.feature_columns)
        if updater.max_gradient is not None:
            grad = grad.clamp(-updater.max_gradient, updater.max_gradient)
        needs_weights_grad = ctx.needs_input_grad[1]
        if ctx.needs_input_grad[0] and is_reached(anchor, _NO_GRADIENT_ERROR):
            return None, updater.update(lookup, grad, weights, needs_weights_grad), None, None
        return None, updater.embedding.read_weights_grad(lookup, grad) if needs_weights_grad else None, None, None
