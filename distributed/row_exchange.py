"""Buffers and exchanges for the rows and ids that ranks send to each other.

A rank sends the unique ids that it looks up to the ids' owners, and receives the rows. A buffer contains one block per
rank. The other ranks' blocks come first, in rank order. This rank's own block is last, because it is not sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.ops.batch import empty
from ..engine.options.lookup import Lookup
from ..engine.options.table_spec import TableSpec
from ..engine.processors.processor import Processor, sort_by_owner
from .rank_group import PendingAllToAll
from .world import World


@dataclass
class Traffic:
    """What this rank sent and received. Bytes count ids, rows and gradients, but not handshakes."""

    ids_sent: int = 0
    ids_received: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class RankBuffers:
    """All ranks' rows in one piece of memory. blocks: each rank's rows, [the rank's count, dim]."""

    def __init__(self, world: World, counts: list[int], dim: int, dtype: torch.dtype) -> None:
        self.rows, self.remote_counts = empty((sum(counts), dim), dtype), zero_out_rank(counts, world.rank)
        *self.blocks, own = self.rows.split([*self.remote_counts, counts[world.rank]])
        self.blocks[world.rank] = own

    @property
    def remote_row_bytes(self) -> Tensor:
        """All blocks except this rank's own, as bytes [rows, row bytes], since Gloo does not support every dtype."""
        return self.rows[: sum(self.remote_counts)].view(torch.uint8)


def start_exchange(
    world: World, op: str, source: RankBuffers, target: RankBuffers, traffic: Traffic
) -> PendingAllToAll:
    """Start to send `source`'s blocks to the other ranks and to receive `target`'s blocks."""
    sent_bytes, received_bytes = source.remote_row_bytes, target.remote_row_bytes
    traffic.bytes_sent += sent_bytes.numel()
    traffic.bytes_received += received_bytes.numel()
    return world.start_all_to_all(op, sent_bytes, source.remote_counts, target.remote_counts, received_bytes)


class LocalBatch:
    """The unique rows that this rank looks up, ordered by owner."""

    def __init__(
        self,
        processor: Processor[Any],
        spec: TableSpec,
        lookups: list[Lookup],
        world: World,
        sibling: LocalBatch | None = None,
    ) -> None:
        """sibling: another embedding's batch with the same lookups; its deduplication is reused. Raises InputError."""
        self.processor, self.spec, self.lookups = processor, spec, lookups
        self.batch: Any = processor.make_batch(lookups, None if sibling is None else sibling.batch)
        if sibling is None:
            self.owner_order = sort_by_owner(processor.list_unique_rows(self.batch), world.size, world.rank)
        else:
            self.owner_order = sibling.owner_order
        self.keepalive_rows: Tensor | None = None  # kept alive, because the batch points into this memory
        if processor.defers_errors and (deferred := processor.take_deferred_error(True)) is not None:
            raise deferred.error

    @property
    def counts(self) -> list[int]:
        return self.owner_order.counts


class IdExchange:
    """Exchanges ids. The handshake (handshake.py) has already exchanged the counts."""

    def __init__(self, world: World, op: str, local: LocalBatch, counts: list[int], traffic: Traffic) -> None:
        """counts: how many ids come from each rank, this rank included."""
        ids = local.owner_order.keys[:, None]
        if local.spec.num_tables > 1:
            ids = torch.stack((local.owner_order.keys, local.owner_order.tables), 1)
        self._rank, self._device = world.rank, local.processor.device
        send_counts, self._receive_counts = (zero_out_rank(part, world.rank) for part in (local.counts, counts))
        remote_ids, self._own_ids = ids.tensor_split([sum(send_counts)])  # this rank's own ids are last
        traffic.ids_sent += sum(send_counts)
        traffic.ids_received += sum(self._receive_counts)
        traffic.bytes_sent += 8 * ids.shape[1] * sum(send_counts)
        traffic.bytes_received += 8 * ids.shape[1] * sum(self._receive_counts)
        self._exchange = world.start_all_to_all(op, remote_ids, send_counts, self._receive_counts)

    def wait(self) -> list[Lookup]:
        """Return one lookup per rank. Lookup i contains the rows that rank i requests from this rank."""
        parts = [*self._exchange.wait().split(self._receive_counts)]
        parts[self._rank] = self._own_ids
        return [Lookup(*(column.contiguous().to(self._device) for column in part.unbind(1))) for part in parts]


def zero_out_rank(counts: list[int], rank: int) -> list[int]:
    return [*counts[:rank], 0, *counts[rank + 1 :]]


def concat_lookups(lookups: list[Lookup]) -> Lookup:
    tables = [lookup.table_ids for lookup in lookups if lookup.table_ids is not None]
    return Lookup(torch.cat([lookup.ids for lookup in lookups]), torch.cat(tables) if tables else None)
