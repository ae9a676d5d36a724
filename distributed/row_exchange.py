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
from .handshake import Handshake, HandshakeResult
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
    """A block of rows [count, dim] for each rank. `rows` is all memory, [sum of counts, dim]."""

    def __init__(self, group: World, counts: list[int], dim: int, dtype: torch.dtype) -> None:
        """counts: by rank."""
        self.counts, self.me, self._row_bytes = counts, group.rank, dim * dtype.itemsize
        self.rows = empty((sum(counts), dim), dtype)

    @property
    def remote_bytes(self) -> Tensor:
        """The bytes of all blocks but this rank's own."""
        return self.rows[: len(self.rows) - self.counts[self.me]].view(-1).view(torch.uint8)

    @property
    def sizes(self) -> list[int]:
        """How many bytes are sent, by rank."""
        return [0 if rank == self.me else count * self._row_bytes for rank, count in enumerate(self.counts)]

    def of(self, rank: int) -> Tensor:
        """The rows of a rank, [count, dim]."""
        end = len(self.rows) if rank == self.me else sum(self.counts[: rank + 1])
        if rank > self.me:
            end -= self.counts[self.me]
        return self.rows[end - self.counts[rank] : end]


class RowExchange:
    """Blocks in flight to the other ranks, with headers that say whether each rank could give its own."""

    def __init__(
        self,
        group: World,
        op: str,
        given: RankBuffers,
        taken: RankBuffers,
        traffic: Traffic,
        error: BaseException | None = None,
        counts: list[int] | None = None,
        note: int = 0,
    ) -> None:
        """error, counts, note: as of `Handshake`. With an error the content of the blocks is undefined."""
        self._headers = Handshake(group, op, error, None, counts, note)
        self._rows = start(group, op, given, taken, traffic)

    def wait(self) -> HandshakeResult:
        """Wait for the blocks of all ranks. Raises on every rank if one could not give its own."""
        self._rows.wait()
        return self._headers.wait()


def start(group: World, op: str, given: RankBuffers, taken: RankBuffers, traffic: Traffic) -> PendingAllToAll:
    """Start to send the blocks of `given` to the other ranks, and to receive those of `taken`."""
    sent, received = given.sizes, taken.sizes
    traffic.bytes_sent += sum(sent)
    traffic.bytes_received += sum(received)
    return group.start(op, taken.remote_bytes, given.remote_bytes, received, sent)


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
        columns = [local.by_owner.keys]
        if local.spec.num_tables > 1:
            columns.append(local.by_owner.tables)
        me = world.rank
        self._rank, self._device, self._width = me, local.processor.device, len(columns)
        self._takes, gives = (zeroed(part, me) for part in (counts, local.counts))
        self._own = [column[sum(gives) :] for column in columns]  # those of this rank are the last
        sizes, given_sizes = ([self._width * count for count in part] for part in (self._takes, gives))
        given = columns[0][: sum(gives)]
        if self._width > 1:  # for each rank its keys, then its tables
            of_ranks = zip(*(column[: sum(gives)].split(gives) for column in columns), strict=True)
            given = torch.cat([part for parts in of_ranks for part in parts])
        traffic.ids_sent += sum(gives)
        traffic.ids_received += sum(self._takes)
        traffic.bytes_sent += 8 * sum(given_sizes)
        traffic.bytes_received += 8 * sum(sizes)
        self._exchange: PendingAllToAll = world.start(op, empty((sum(sizes),), torch.int64), given, sizes, given_sizes)

    def wait(self) -> list[Lookup]:
        """One lookup for each rank, of rows that this rank owns."""
        received = self._exchange.wait().split([count for count in self._takes for _ in range(self._width)])
        parts = [list(received[at : at + self._width]) for at in range(0, len(received), self._width)]
        parts[self._rank] = self._own
        return [Lookup(*(column.to(self._device) for column in part)) for part in parts]


def zeroed(counts: list[int], rank: int) -> list[int]:
    """The counts, with 0 for one rank."""
    return [*counts[:rank], 0, *counts[rank + 1 :]]


def concat_lookups(lookups: list[Lookup]) -> Lookup:
    """The lookups of all ranks as one."""
    tables = [lookup.table_ids for lookup in lookups if lookup.table_ids is not None]
    return Lookup(torch.cat([lookup.ids for lookup in lookups]), torch.cat(tables) if tables else None)
