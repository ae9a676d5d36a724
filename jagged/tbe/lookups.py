"""A call of a table-batched embedding as a lookup of each embedding, and their results as one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...engine.options.inputs import Lookup, check_lookup, check_weights
from ...engine.options.table_spec import TableSpec
from .calls import Call, taken_out
from .specs import Part


class Asked(NamedTuple):
    """What a call asks of one embedding."""

    lookup: Lookup
    weights: Tensor | None
    ids: list[int]  # how many indices each feature has, where the output needs it


class Plan:
    """How calls are divided between embeddings.

    parts: the tables and features of each embedding. specs: the embeddings' specs, which have the dims. pooling: "sum"
    or "mean"; None returns a row for each index.
    """

    def __init__(self, name: str, parts: Sequence[Part], specs: Sequence[TableSpec], pooling: str | None) -> None:
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

    def asked(self, call: Call) -> list[Asked]:
        """What the call asks of each embedding. InputError."""
        if call.sizes is None and self._pooling is not None:
            return [self._of_features(at, call) for at in range(len(self._parts))]
        return [self._of_piece(at, call) for at in range(len(self._parts))]

    def joined(self, call: Call, asked: Sequence[Asked], found: Sequence[Tensor]) -> Tensor:
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

    def _of_features(self, at: int, call: Call) -> Asked:
        part, spec, device = self._parts[at], self._specs[at], call.indices.device
        if (at, device) not in self._table_ids:
            with torch.inference_mode(False):  # autograd saves it in later calls
                self._table_ids[at, device] = torch.tensor(part.table_of, device=device)
        table_ids = self._table_ids[at, device]
        lookup = check_lookup(spec, call.indices, table_ids, call.offsets, self._pooling, part.features, self._features)
        check_weights(spec, lookup, call.weights)
        return Asked(lookup, call.weights, [])

    def _of_piece(self, at: int, call: Call) -> Asked:
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
        return Asked(lookup, piece.weights, piece.ids)

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
