"""The rows of an embedding over all ranks: what `OpenTable` does in one process, in calls that all ranks make."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine import _core
from ..engine.errors import StoreError
from ..engine.ops.segments import batch_of, empty
from ..engine.optim.optimizers import RowOptimizer
from ..engine.options.inputs import Lookup
from ..engine.table.pinned import PinnedBatch
from ..engine.table.report import new_rows
from ..engine.table.table import OpenTable
from .agreement import agree, attempt, telling
from .ahead import Ahead
from .asked import IdsOnTheirWay, Local, all_of
from .blocks import Blocks, Message, Traffic
from .pinned import ShardedBatch, no_room

if TYPE_CHECKING:
    from ..embedding.table_handle import HeldTable
    from .group import Group
    from .requests import Requests


Method = TypeVar("Method", bound=Callable[..., Any])


def _whole(what: str) -> Callable[[Method], Method]:
    """For a method of several exchanges, which all ranks make: `Group.whole`. what: it does, for errors.

    What it raises before the first exchange is raised on all ranks.
    """

    def with_name(method: Method) -> Method:
        @wraps(method)
        def whole(self: ShardedTable, *arguments: Any, **named: Any) -> Any:
            op = f"{what} of embedding {self.name!r}"
            with self.world.whole(op), telling(self.world, op):
                return method(self, *arguments, **named)

        return cast(Method, whole)

    return with_name


class ShardedTable:
    """All rows of an embedding. Each rank has those whose `owner` it is, in a table of its own."""

    def __init__(self, world: Group, held: HeldTable, capacity: int | None) -> None:
        """held: of this rank's rows. capacity: the most rows of all ranks; None where each sees to its own."""
        self.world, self._held, self.capacity = world, held, capacity
        self.name = held.table.spec.name
        self.traffic = Traffic()
        self.pinned: ShardedBatch | None = None
        self._behind = ""  # the update that this rank's rows lack, and why
        self.between_steps: Callable[[], None] = lambda: None  # what all ranks do before a step
        self.requests: Requests | None = None  # of other processes
        self.ahead = Ahead(world, self.name, self.traffic, lambda asked: self.own.announce(asked))

    @property
    def own(self) -> OpenTable:
        """The rows that this rank has."""
        return self._held.table

    @property
    def optimizer(self) -> RowOptimizer | None:
        return self.own.optimizer if self._held.is_open else None

    @_whole("step")
    def pin(self, lookups: list[Lookup], dtype: torch.dtype = torch.float32, like: Any = None) -> ShardedBatch:
        """Begin a training step, as `OpenTable.pin`, of all ranks. What keeps a rank from it is raised on every rank.

        Rows are on their way when this returns. Raises the errors of `Agreement.settle`.
        """
        op = f"embedding {self.name!r}, step {self.own.step + 1}"
        self.release()
        self.between_steps()
        local, asked, pools = self._ask(op, lookups, like, dtype)
        like_own = None if like is None else like.own
        own, error = attempt(lambda: self._pin_own(asked, like_own))
        self.pinned = ShardedBatch(self, op, local, asked, pools, own, error, dtype)
        if self.world.batches is not None:
            self.world.batches.append(self.pinned)
        return self.pinned

    def _begin_write(self) -> None:
        self._check_behind()
        self._held.begin_write()

    def _pin_own(self, asked: list[Lookup], like: PinnedBatch | None) -> PinnedBatch:
        self._held.begin_write()
        pinned = self.own.pin(asked, torch.float32, like)
        self.own.check()  # what a device finds late, so that all ranks hear of it in this step
        return pinned

    def _ask(
        self, op: str, lookups: list[Lookup], like: Any = None, dtype: torch.dtype | None = None
    ) -> tuple[Local, list[Lookup], bool]:
        """This rank's unique rows, a lookup of each rank of rows that this one has, and whether a rank pools rows.

        dtype: of what a step gathers; None where this is no step.
        """
        world, own, is_step = self.world, self.own, dtype is not None
        number = self.ahead.number_of(lookups, own.processor) if is_step else 0
        pools = any(lookup.pooling is not None for lookup in lookups)

        same: dict[str, Any] = {"graph": world.script, "shared lookups": like is not None}

        def prepare() -> Local:
            self._check_behind()
            if is_step:
                optimizer = own.check_optimizer()
                numbers = optimizer.numbers(own.step + 1)
                same.update({"output_dtype": str(dtype), "optimizer": optimizer.rule, "its numbers": numbers})
            if number and like is None:
                return self.ahead.local_of(number)
            return Local(own.processor, own.spec, lookups, world, None if like is None else like.local)

        local, error = attempt(prepare)
        counts = [0] * world.size if local is None else local.counts
        try:
            wanted = self.requests is not None and self.requests.wanted
            answer = agree(world, op, error, same, counts, note=2 * number + pools, asks=wanted)
        finally:
            world.passed += 1
        assert local is not None
        if is_step:
            self.ahead.advance()  # only here: a rank that failed answers the headers of a step alone
        if answer.asked and self.requests is not None:
            self.requests.serve()
        pools = any(note & 1 for note in answer.notes)
        if like is not None:
            self.ahead.skip(number)
            return local, like.asked, pools
        if number and all(note >> 1 == number for note in answer.notes):
            return local, self.ahead.take(number), pools
        self.ahead.skip(number)
        return local, IdsOnTheirWay(world, f"ids of {op}", local, answer.counts, self.traffic).wait(), pools

    def read(self, lookup: Lookup, weights: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows of ids, or pooled bags of them, as `OpenTable.read`: all ranks call it, each with ids of its own."""
        local = self._look_up(lookup)
        return local.processor.gather(local.batch, 0, lookup, weights, dtype)

    def get(self, lookup: Lookup) -> Tensor:
        """As `read`."""
        return self.read(lookup)

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of the weights of a lookup that only reads, as `OpenTable.read_weights_grad`."""
        local = self._look_up(lookup)
        return local.processor.weights_grad(local.batch, 0, lookup, grad)

    @_whole("lookup")
    def _look_up(self, lookup: Lookup) -> Local:
        """This rank's unique rows of a lookup, with their lines set."""
        op = f"embedding {self.name!r}, lookup at step {self.own.step}"
        local, asked, _ = self._ask(op, [lookup])
        counts = [len(part.ids) for part in asked]
        rows, error = attempt(lambda: self.own.get(all_of(asked)))
        given, taken = (Blocks(self.world, c, local.spec.dim, self.world.rows) for c in (counts, local.counts))
        if rows is not None:
            for rank, part in enumerate(rows.split(counts)):
                (taken if rank == self.world.rank else given).of(rank).copy_(part)
        self.traffic.rows_sent += sum(counts) - counts[self.world.rank]
        self.traffic.rows_received += sum(local.counts) - local.counts[self.world.rank]
        Message(self.world, f"rows of {op}", given, taken, self.traffic, error).wait()
        here = taken.rows.to(local.processor.device, torch.float32)
        local.processor.set_lines(local.batch, here, local.by_owner.places)
        local.rows = here
        return local

    @_whole("put")
    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write rows, as `OpenTable.put`. Of a key that several ranks give, the row of the last rank stands."""
        op = f"put of embedding {self.name!r} at step {self.own.step}"
        asked, rows = self._scatter(op, lookup, values)
        if self.capacity is not None:
            self._check_room(op, asked, self.capacity)
        self.count_write()
        _, error = attempt(lambda: self.own.put(asked, rows))
        agree(self.world, f"{op}: done", error)

    def _check_room(self, op: str, asked: Lookup, capacity: int) -> None:
        """Raise CapacityError on every rank where new rows of all ranks exceed `capacity`."""
        new, error = attempt(lambda: new_rows(self.own, asked))
        answer = agree(self.world, f"{op}: room", error, counts=[new or 0] * self.world.size, note=self.own.counts.rows)
        if any(answer.counts) and sum(answer.notes) + sum(answer.counts) > capacity:
            self.world.told = no_room(self.name, capacity, sum(answer.notes), sum(answer.counts))
            raise self.world.told

    @_whole("delete")
    def delete(self, lookup: Lookup) -> int:
        """Forget rows, as `OpenTable.delete`. Returns how many had been written, of the ids of all ranks together."""
        op = f"delete of embedding {self.name!r} at step {self.own.step}"
        asked, _ = self._scatter(op, lookup, None)
        self.count_write()
        gone, error = attempt(lambda: self.own.delete(asked))
        return sum(agree(self.world, f"{op}: done", error, note=gone or 0).notes)

    def _scatter(
        self, op: str, lookup: Lookup, values: NDArray[np.float32] | None
    ) -> tuple[Lookup, NDArray[np.float32]]:
        """The ids and values [n, dim] that all ranks give of rows that this rank has, in the order of ranks."""
        world, spec = self.world, self.own.spec
        on_host = Lookup(lookup.ids.cpu(), None if lookup.table_ids is None else lookup.table_ids.cpu())
        batch, error = attempt(lambda: batch_of(spec, [on_host]))
        if error is None:
            _, error = attempt(self._begin_write)
        if batch is None or error is not None:
            agree(world, op, error)
        owners = _core.owners(batch.tables, batch.keys, world.size)
        order = np.argsort(owners, kind="stable")
        sends = np.bincount(owners, minlength=world.size).tolist()
        takes = agree(world, op, None, counts=sends).counts
        ids = np.stack((batch.keys[order].view(np.int64), batch.tables[order].astype(np.int64)), 1)
        here = empty((sum(takes) * 2,), torch.int64)
        sizes = [2 * count for count in takes], [2 * count for count in sends]
        world.start(f"ids of {op}", here, torch.from_numpy(ids).view(-1), *sizes).wait()
        keys, tables = (column.contiguous().to(lookup.ids.device) for column in here.view(-1, 2).unbind(1))
        asked = Lookup(keys, tables)
        if values is None:
            return asked, np.empty((0, spec.dim), np.float32)
        last = np.empty(batch.unique, np.int64)
        last[batch.inverse] = np.arange(len(batch.inverse))  # of a repeated id the last
        given = torch.from_numpy(values[last[order]]).view(-1)
        rows = empty((sum(takes), spec.dim), torch.float32)
        sizes = [spec.dim * count for count in takes], [spec.dim * count for count in sends]
        world.start(f"rows of {op}", rows.view(-1), given, *sizes).wait()
        return asked, rows.numpy()

    @_whole("size")
    def size(self) -> int:
        """How many rows all ranks have."""
        rows, error = attempt(self._held.size)
        return sum(agree(self.world, f"size of embedding {self.name!r}", error, note=rows or 0).notes)

    @_whole("announcement")
    def announce(self, lookups: list[Lookup] | None, together: bool = False) -> None:
        """Announce a coming step, as `OpenTable.announce`. All ranks call it; None is for lookups that are unknown.

        together: whether every rank is known to be in this call. What keeps one from it is then left for the step.
        """
        if not together:
            _, error = attempt(self._check_behind)
            agree(self.world, f"announcement of embedding {self.name!r} at step {self.own.step}", error)
        self.ahead.announce(lookups, lambda: Local(self.own.processor, self.own.spec, lookups or [], self.world))

    def rows_and_new(self, own: PinnedBatch) -> tuple[int, int]:
        """How many rows this rank has, and how many of a pinned batch come to them. Counted for a `capacity` alone."""
        if self.capacity is None:
            return 0, 0
        written = int(own.table.processor.count_written(own.core).sum())
        return self.own.counts.rows, own.core.unique - written

    def count_write(self) -> None:
        """Every rank is about to write its rows."""
        self._held.count_write()

    def fall_behind(self, op: str, error: BaseException) -> None:
        """This rank failed in an update that other ranks make: no rank uses the rows until a snapshot is loaded."""
        attempt(self.release)  # the pin cannot end after a failure
        self._behind = f"{op} raised {error!r} on this rank amid its updates, which other ranks made"
        if self._held.is_open:
            self.own.failure = self.own.failure or error  # so that these rows are never marked as whole

    def _check_behind(self) -> None:
        if self._behind and self.own.failure is not None:  # a load has put another table in its place else
            raise StoreError(f"{self._behind}; load a snapshot of every embedding of that step on all ranks")

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        self.pinned = None
        self._held.release()
