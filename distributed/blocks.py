"""Rows on their way between ranks: a block for each rank in one piece of memory.

This rank's own block is the last, and stays where it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.ops.segments import empty
from .agreement import Agreement, Answer

if TYPE_CHECKING:
    from .group import Exchange, Group


@dataclass
class Traffic:
    """What went to other ranks and came from them. Of the bytes, those of ids, rows and gradients: no headers."""

    ids_sent: int = 0
    ids_received: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0


class Blocks:
    """A block of rows [count, dim] for each rank. `rows` is all memory, [sum of counts, dim]."""

    def __init__(self, group: Group, counts: list[int], dim: int, dtype: torch.dtype) -> None:
        """counts: by rank."""
        self.counts, self.me, self._row_bytes = counts, group.rank, dim * dtype.itemsize
        self.rows = empty((sum(counts), dim), dtype)

    @property
    def travelling(self) -> Tensor:
        """The bytes of all blocks but this rank's own."""
        return self.rows[: len(self.rows) - self.counts[self.me]].view(-1).view(torch.uint8)

    @property
    def sizes(self) -> list[int]:
        """How many bytes travel, by rank."""
        return [0 if rank == self.me else count * self._row_bytes for rank, count in enumerate(self.counts)]

    def of(self, rank: int) -> Tensor:
        """The rows of a rank, [count, dim]."""
        end = len(self.rows) if rank == self.me else sum(self.counts[: rank + 1])
        if rank > self.me:
            end -= self.counts[self.me]
        return self.rows[end - self.counts[rank] : end]


class Message:
    """Blocks on their way to the other ranks, with headers that say whether each rank could give its own."""

    def __init__(
        self,
        group: Group,
        op: str,
        given: Blocks,
        taken: Blocks,
        traffic: Traffic,
        error: BaseException | None = None,
        counts: list[int] | None = None,
        note: int = 0,
    ) -> None:
        """error, counts, note: as of `Agreement`. With an error the blocks hold anything."""
        self._headers = Agreement(group, op, error, None, counts, note)
        self._rows = start(group, op, given, taken, traffic)

    def wait(self) -> Answer:
        """Wait for the blocks of all ranks. Raises on every rank where one could not give its own."""
        self._rows.wait()
        return self._headers.settle()


def start(group: Group, op: str, given: Blocks, taken: Blocks, traffic: Traffic) -> Exchange:
    """Begin to send the blocks of `given` to the other ranks, and to receive those of `taken`."""
    sent, received = given.sizes, taken.sizes
    traffic.bytes_sent += sum(sent)
    traffic.bytes_received += sum(received)
    return group.start(op, taken.travelling, given.travelling, received, sent)
