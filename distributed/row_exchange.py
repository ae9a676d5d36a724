"""Rows and ids that ranks send to each other: the unique rows of each rank's lookups, by their owner.

The blocks of all ranks lie in one piece of memory. This rank's own block is the last, and is not sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..engine.ops.batch import empty
from ..engine.options.lookup import Lookup
from ..engine.options.table_spec import TableSpec
from ..engine.processors.processor import ByOwner, Processor, by_owner
from .rank_group import PendingAllToAll
from .world import World


@dataclass
class Traffic:
    """What was sent to other ranks and received from them. Bytes are of ids, rows and gradients, not of headers."""

    ids_sent: int = 0
    ids_received: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class RankBuffers:
    """Rows of all ranks in one piece of memory: `blocks` has those of each rank, [count, dim]."""

    def __init__(self, group: World, counts: list[int], dim: int, dtype: torch.dtype) -> None:
        """counts: by rank."""
        self.rows, self.remote_counts = empty((sum(counts), dim), dtype), zeroed(counts, group.rank)
        *self.blocks, own = self.rows.split([*self.remote_counts, counts[group.rank]])
        self.blocks[group.rank] = own

    @property
    def remote_bytes(self) -> Tensor:
        """All blocks but this rank's own, [rows, bytes of a row]. Gloo does not take every dtype."""
        return self.rows[: sum(self.remote_counts)].view(torch.uint8)


def start(group: World, op: str, given: RankBuffers, taken: RankBuffers, traffic: Traffic) -> PendingAllToAll:
    """Start to send the blocks of `given` to the other ranks, and to receive those of `taken`."""
    sent, received = given.remote_bytes, taken.remote_bytes
    traffic.bytes_sent += sent.numel()
    traffic.bytes_received += received.numel()
    return group.start(op, sent, given.remote_counts, taken.remote_counts, received)


class LocalBatch:
    """The unique rows of this rank's lookups, ordered by their owners."""

    def __init__(
        self,
        processor: Processor[Any],
        spec: TableSpec,
        lookups: list[Lookup],
        group: World,
        dedup_from: LocalBatch | None = None,
    ) -> None:
        """dedup_from: of an embedding with the same lookups, whose deduplication is reused. Raises InputError."""
        self.processor, self.spec, self.lookups = processor, spec, lookups
        self.batch: Any = processor.batch(lookups, None if dedup_from is None else dedup_from.batch)
        self.by_owner: ByOwner = (
            by_owner(processor.unique_rows(self.batch), group.size, group.rank)
            if dedup_from is None
            else dedup_from.by_owner
        )
        self.rows: Tensor | None = None  # kept while lines of the batch point into it
        if processor.defers_errors and (late := processor.deferred_error(True)) is not None:
            raise late.error

    @property
    def counts(self) -> list[int]:
        return self.by_owner.counts


class IdExchange:
    """The exchange of ids that follows the headers: `wait` returns the rows that each rank requests of this one."""

    def __init__(self, world: World, op: str, local: LocalBatch, counts: list[int], traffic: Traffic) -> None:
        """counts: how many ids come from each rank, this one included."""
        ids = local.by_owner.keys[:, None]
        if local.spec.num_tables > 1:
            ids = torch.stack((local.by_owner.keys, local.by_owner.tables), 1)
        self._rank, self._device = world.rank, local.processor.device
        sends, self._takes = (zeroed(part, world.rank) for part in (local.counts, counts))
        self._own = ids[sum(sends) :]  # those of this rank are the last
        traffic.ids_sent += sum(sends)
        traffic.ids_received += sum(self._takes)
        traffic.bytes_sent += 8 * ids.shape[1] * sum(sends)
        traffic.bytes_received += 8 * ids.shape[1] * sum(self._takes)
        self._exchange: PendingAllToAll = world.start(op, ids[: sum(sends)], sends, self._takes)

    def wait(self) -> list[Lookup]:
        """One lookup for each rank, of rows that this rank owns."""
        parts = [*self._exchange.wait().split(self._takes)]
        parts[self._rank] = self._own
        return [Lookup(*(column.contiguous().to(self._device) for column in part.unbind(1))) for part in parts]


def zeroed(counts: list[int], rank: int) -> list[int]:
    """The counts, with 0 for one rank."""
    return [*counts[:rank], 0, *counts[rank + 1 :]]


def concat_lookups(lookups: list[Lookup]) -> Lookup:
    """The lookups of all ranks as one."""
    tables = [lookup.table_ids for lookup in lookups if lookup.table_ids is not None]
    return Lookup(torch.cat([lookup.ids for lookup in lookups]), torch.cat(tables) if tables else None)
