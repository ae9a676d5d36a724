"""The rows of an embedding over all ranks: what `OpenTable` does in one process, by calls that all ranks make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine import _core
from ..engine.errors import CapacityError, StoreError
from ..engine.ops.batch import Gradients, batch_of, checked_gradients
from ..engine.ops.exact_sum import partial, total
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.options.lookup import Lookup
from ..engine.table.table import OpenTable, PinnedBatch
from ..engine.table.table_report import new_rows
from .handshake import Handshake
from .id_prefetch import IdPrefetcher
from .rank_group import PendingAllToAll
from .row_exchange import IdExchange, LocalBatch, RankBuffers, Traffic, concat_lookups, start, zeroed
from .world import World, catch

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class ShardedBatch:
    """A pinned batch of rows of all ranks: what this rank looked up, and what the others request of it.

    Its rows are in flight when it is made; the first use waits for them. `send` starts to send the gradients.
    """

    def __init__(
        self,
        table: ShardedTable,
        op: str,
        local: LocalBatch,
        requested: list[Lookup],
        pools: bool,
        own: PinnedBatch | None,
        error: BaseException | None,
        dtype: torch.dtype,
    ) -> None:
        """pools: whether a lookup of some rank pools rows.

        own: the rows that the ranks request of this one, pinned; None with the error that prevented it.
        """
        self.core: Any = local.batch
        self.lookups = local.lookups
        self.dtype = dtype
        self.local, self.requested, self.own = local, requested, own
        self._table, self._world, self._op = table, table.world, op
        self._requested_counts = [len(lookup.ids) for lookup in requested]
        self._dim = local.spec.dim
        # what an unpooled lookup returns is rounded once, by either rank
        wire = dtype if not pools and self._world.rows == torch.float32 else self._world.rows
        self._keeps_own = wire == torch.float32  # else the rows of this rank are rounded as well
        received = zeroed(local.counts, self._world.rank) if self._keeps_own else local.counts
        self._received = RankBuffers(self._world, received, self._dim, wire)
        self._rows: Tensor | None = None  # [m, dim] float32, those received, once they arrived
        self._sent: PendingAllToAll | None = None
        self._sums: RankBuffers | None = None  # the gradients of rows that this rank owns, by rank
        self._own_sums = torch.empty(0)  # those of its own rows that this rank looked up
        rows, new = (0, 0) if own is None else table.rows_and_new(own)
        given, op = self._blocks(wire), f"rows of {op}"
        self._headers = Handshake(self._world, op, error, counts=[new] * self._world.size, note=rows)
        self._in_flight = start(self._world, op, given, self._received, table.traffic)
        table.traffic.rows_received += sum(zeroed(local.counts, self._world.rank))

    def _blocks(self, wire: torch.dtype) -> RankBuffers:
        """The rows of this rank, for each other rank."""
        me = self._world.rank
        blocks = RankBuffers(self._world, zeroed(self._requested_counts, me), self._dim, wire)
        if self.own is not None:
            for rank in range(self._world.size):
                if rank == me and self._keeps_own:
                    continue
                block = (self._received if rank == me else blocks).blocks[rank]
                if wire == torch.float32 and self.own.lookups[rank].ids.device.type == "cpu":
                    self.own.gather(rank, out=block)
                else:
                    block.copy_(self.own.gather(rank))
        self._table.traffic.rows_sent += len(blocks.rows)
        return blocks

    def arrive(self) -> None:
        """Wait for the rows. Raises on every rank if one could not give its own, or they exceed `capacity`."""
        if self._rows is not None:
            return
        self._unpin_on_error(self._in_flight.wait)
        answer = self._unpin_on_error(self._headers.wait)
        self._unpin_on_error(lambda: self._table.check_capacity(answer.notes, answer.counts))
        self._rows = self._received.rows.to(self.local.processor.device, torch.float32)
        assert self.own is not None
        own = (self.own.core, sum(self._requested_counts[: self._world.rank])) if self._keeps_own else None
        self.local.processor.set_lines(self.core, self._rows, self.local.by_owner.positions, own)

    def gather(self, index: int, weights: Tensor | None = None) -> Tensor:
        """The rows of lookup number `index`, as `PinnedBatch.gather`."""
        with self._while_pinned():
            return self.local.processor.gather(self.core, index, self.lookups[index], weights, self.dtype)

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of the weights of lookup number `index`, as `PinnedBatch.weights_grad`."""
        with self._while_pinned():
            return self.local.processor.weights_grad(self.core, index, self.lookups[index], grad)

    def send(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
        """Start to send the gradients, one number for each element of this rank's unique rows, to the owners.

        Raises what is wrong with them on this rank alone. A handshake follows before the update: a rank that failed
        here calls `send_nothing` and gives its error there.
        """
        given = weights or [None] * len(self.lookups)
        with self._while_pinned():
            sums = self._summed(checked_gradients(self.local.spec, self.lookups, grads, given, self.dtype))
        self._start(sums)

    def send_nothing(self) -> None:
        """Join the exchange of gradients without any, if `send` failed or was not called; else does nothing.

        An error here aborts the group, which would wait for this rank.
        """
        if self._sent is not None:
            return
        world = self._world
        try:
            self._start(RankBuffers(world, self.local.counts, self._dim, world.grads))
        except BaseException as error:
            if not world.must_report(error):
                raise
            raise world.abort(f"gradients of {self._op}", f"failed with {error!r}") from error

    def _summed(self, gradients: Gradients) -> RankBuffers:
        """The gradients of this rank's unique rows."""
        local, wire = self.local, self._world.grads
        blocks = RankBuffers(self._world, local.counts, self._dim, wire)
        device = local.processor.device
        plain = wire == torch.float32 and device.type == "cpu"
        sums = blocks.rows if plain else torch.empty(blocks.rows.shape, dtype=torch.float32, device=device)
        local.processor.sum_gradients(self.core, gradients, local.by_owner.positions, sums)
        if not plain:
            blocks.rows.copy_(sums)
        return blocks

    def _start(self, given: RankBuffers) -> None:
        world = self._world
        self._sums = RankBuffers(world, self._requested_counts, self._dim, world.grads)
        self._own_sums = given.blocks[world.rank]
        self._sent = start(world, f"gradients of {self._op}", given, self._sums, self._table.traffic)
        world.step_collectives += 1

    def receive(self) -> None:
        """Wait for the gradients that were sent."""
        assert self._sent is not None
        self._sent.wait()

    def _receive(self) -> list[Tensor]:
        """The gradients, once they arrived: for each rank, [rows that it requested, dim] float32."""
        self.receive()
        assert self._sums is not None
        sums = [*self._sums.blocks]
        sums[self._world.rank] = self._own_sums
        return [part.to(self.local.processor.device, torch.float32) for part in sums]

    def square_gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """The sum of the squares of the gradients of all rows, summed over ranks, the same on every rank."""
        own, sums, world, op = self._ready(grads, weights), self._receive(), self._world, f"norm of {self._op}"
        squares, error = catch(lambda: own.partial_squares(sums))
        with world.collective_block(op):
            headers = Handshake(world, op, error)
            given = torch.from_numpy(partial(np.empty(0, np.float32)) if squares is None else squares)
            parts = world.start(op, given.repeat(world.size)).wait()
            headers.wait()
        return total([part.numpy() for part in parts.split(len(given))])

    def update(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None] | None = None,
        scale: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Apply the optimizer to the rows of this rank, for all ranks, and unpin.

        scale: multiplies a row's summed gradient; left out, it is one over the number of ranks: the mean of their
        losses is trained. The gradients are sent here, unless `send` was called; what is wrong with them is then raised
        on every rank. A later error is raised on this rank alone, and no rank can use the rows after it.
        """
        own = self._ready(grads, weights)
        sums = self._receive()
        try:
            self._table.count_write()
            own.update(sums, None, 1.0 / self._world.size if scale is None else scale, clip_value)
        except BaseException as error:
            self.fall_behind(error)
            raise
        self._table.pinned = None

    def fall_behind(self, error: BaseException) -> None:
        """Mark rows diverged that this rank failed to update, with `error`, and others updated; no-op if it updated."""
        if self._table.pinned is self:
            self._table.fall_behind(self._op, error)

    def release(self) -> None:
        """Unpin; the rows are unchanged."""
        self._table.release()

    def _ready(self, grads: list[Tensor], weights: list[Tensor | None] | None) -> PinnedBatch:
        if self._sent is None:
            self._check()
            self.arrive()
            _, error = catch(lambda: self.send(grads, weights))
            self.send_nothing()
            self._unpin_on_error(lambda: self._world.handshake(f"gradients of {self._op}", error))
        assert self.own is not None
        return self.own

    def _unpin_on_error(self, call: Callable[[], T]) -> T:
        """The result of a call; unpins if it raises."""
        try:
            return call()
        except BaseException:
            self.release()
            raise

    @contextmanager
    def _while_pinned(self) -> Iterator[None]:
        """A block in which the rows stay pinned, those of this rank in its own tiers."""
        self._check()
        self.arrive()
        assert self.own is not None
        with self.own.table.lock:
            self.own.table.check_pinned(self.own)
            yield

    def _check(self) -> None:
        if self._table.pinned is not self:
            raise StoreError(
                f"embedding {self.local.spec.name!r}: the batch is no longer pinned: put, delete or a load unpinned "
                "its rows in the middle of the step; let one thread at a time write to it"
            )


def _collective(what: str) -> Callable[[Method], Method]:
    """Decorates a method that makes several collectives, which run in a `World.collective_block`.

    An error before the first of them is raised on all ranks. what: the name of the operation in errors.
    """

    def with_name(method: Method) -> Method:
        @wraps(method)
        def collective(self: ShardedTable, *arguments: Any, **named: Any) -> Any:
            op = f"{what} of embedding {self.name!r}"
            with self.world.collective_block(op), self.world.raise_on_all_ranks(op):
                return method(self, *arguments, **named)

        return cast(Method, collective)

    return with_name


class Requests(Protocol):
    """What other processes want of all ranks."""

    def is_wanted(self) -> bool:
        """Whether this rank has a request that can be served now."""

    def serve(self) -> None:
        """Serve it, on all ranks."""


class ShardedTable:
    """All rows of an embedding. Each rank has those that it owns, in its local table."""

    def __init__(
        self,
        world: World,
        local_table: Callable[[], OpenTable],
        open_table: Callable[[], OpenTable | None],
        count_write: Callable[[], None],
        capacity: int | None,
        before_step: Callable[[], None],
        requests: Requests,
    ) -> None:
        """local_table: returns the table with the rows of this rank, or raises ClosedError.

        open_table: returns it, or None if it is closed. count_write: called when every rank is about to write.
        capacity: the most rows of all ranks; None if each rank limits its own. before_step: what all ranks do before a
        step. requests: of other processes.
        """
        self.world, self.capacity, self._before_step, self._requests = world, capacity, before_step, requests
        self._local_table, self._open_table, self.count_write = local_table, open_table, count_write
        self.name = local_table().spec.name
        self.traffic = Traffic()
        self.pinned: ShardedBatch | None = None
        self._diverged = ""  # the update that this rank's rows lack, and why
        self.id_prefetcher = IdPrefetcher(
            world, self.name, self.traffic, lambda requested: self.own.announce(requested)
        )

    def rename(self, name: str) -> None:
        self.name = name

    @property
    def own(self) -> OpenTable:
        """The rows that this rank has."""
        return self._local_table()

    @property
    def optimizer(self) -> RowOptimizer | None:
        table = self._open_table()
        return None if table is None else table.optimizer

    @_collective("step")
    def pin(self, lookups: list[Lookup], dtype: torch.dtype = torch.float32, dedup_from: Any = None) -> ShardedBatch:
        """Begin a training step of all ranks, as `OpenTable.pin`. An error of one rank is raised on every rank.

        Rows are in flight when this returns. Raises the errors of `Handshake.wait`.
        """
        op = f"embedding {self.name!r}, step {self.own.step + 1}"
        self.release()
        self._before_step()
        local, requested, pools = self._request(op, lookups, dedup_from, dtype)
        own_dedup_from = None if dedup_from is None else dedup_from.own
        own, error = catch(lambda: self._pin_own(requested, own_dedup_from))
        self.pinned = ShardedBatch(self, op, local, requested, pools, own, error, dtype)
        if self.world.pinned_batches is not None:
            self.world.pinned_batches.append(self.pinned)
        return self.pinned

    def _clear_clean_marker(self) -> None:
        """Clear the clean marker of this rank's rows for a write of all ranks, before it is certain. StoreError."""
        with self.own.lock:
            self.own.before_write(self.own.step)

    def _pin_own(self, requested: list[Lookup], dedup_from: PinnedBatch | None) -> PinnedBatch:
        self._clear_clean_marker()
        pinned = self.own.pin(requested, torch.float32, dedup_from)
        self.own.check()  # deferred errors of a device, which all ranks raise in this step
        return pinned

    def _request(
        self, op: str, lookups: list[Lookup], dedup_from: Any = None, dtype: torch.dtype | None = None
    ) -> tuple[LocalBatch, list[Lookup], bool]:
        """This rank's unique rows, the lookup that each rank requests of this one, and whether a rank pools rows.

        dtype: of what a step gathers; None if this is no step.
        """
        world, own, is_step = self.world, self.own, dtype is not None
        announced = self.id_prefetcher.find(lookups, own.processor) if is_step else None
        number = 0 if announced is None else announced.number
        pools = any(lookup.pooling is not None for lookup in lookups)

        same: dict[str, Any] = {"graph": world.collectives, "shared lookups": dedup_from is not None}

        def prepare() -> LocalBatch:
            self._check_diverged()
            if is_step:
                optimizer = own.check_optimizer()
                numbers = optimizer.numbers(own.step + 1)
                same.update({"output_dtype": str(dtype), "optimizer": optimizer.rule, "its numbers": numbers})
            if announced is not None and announced.local is not None and dedup_from is None:
                return announced.local
            return LocalBatch(own.processor, own.spec, lookups, world, None if dedup_from is None else dedup_from.local)

        local, error = catch(prepare)
        counts = [0] * world.size if local is None else local.counts
        try:
            wants_more = self._requests.is_wanted()
            answer = world.handshake(op, error, same, counts=counts, note=2 * number + pools, wants_more=wants_more)
        finally:
            world.step_collectives += 1
        assert local is not None
        if is_step:
            self.id_prefetcher.advance()  # only here: a rank that failed makes the handshake of a step alone
        if answer.wants_more:
            self._requests.serve()
        pools = any(note & 1 for note in answer.notes)
        if dedup_from is not None:
            self.id_prefetcher.skip(number)
            return local, dedup_from.requested, pools
        if announced is not None and all(note >> 1 == number for note in answer.notes):
            return local, self.id_prefetcher.take(announced), pools
        self.id_prefetcher.skip(number)
        return local, IdExchange(world, f"ids of {op}", local, answer.counts, self.traffic).wait(), pools

    def read(
        self,
        lookup: Lookup,
        weights: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        trains: bool = False,
    ) -> Tensor:
        """Rows of ids, or pooled bags of them, as `OpenTable.read`: all ranks call it, each with ids of its own."""
        local = self._look_up(lookup, trains)
        return local.processor.gather(local.batch, 0, lookup, weights, dtype)

    def get(self, lookup: Lookup) -> Tensor:
        """As `read`."""
        return self.read(lookup)

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of the weights of a lookup that only reads, as `OpenTable.read_weights_grad`."""
        local = self._look_up(lookup, trains=True)
        return local.processor.weights_grad(local.batch, 0, lookup, grad)

    @_collective("lookup")
    def _look_up(self, lookup: Lookup, trains: bool) -> LocalBatch:
        """This rank's unique rows of a lookup, with their lines set."""
        op = f"embedding {self.name!r}, lookup at step {self.own.step}"
        local, requested, _ = self._request(op, [lookup])
        counts = [len(part.ids) for part in requested]
        rows, error = catch(lambda: self.own.get(concat_lookups(requested), trains))
        given, taken = (RankBuffers(self.world, c, local.spec.dim, self.world.rows) for c in (counts, local.counts))
        if rows is not None:
            for rank, part in enumerate(rows.split(counts)):
                (taken if rank == self.world.rank else given).blocks[rank].copy_(part)
        self.traffic.rows_sent += sum(counts) - counts[self.world.rank]
        self.traffic.rows_received += sum(local.counts) - local.counts[self.world.rank]
        headers = Handshake(self.world, f"rows of {op}", error)
        start(self.world, f"rows of {op}", given, taken, self.traffic).wait()
        headers.wait()
        here = taken.rows.to(local.processor.device, torch.float32)
        local.processor.set_lines(local.batch, here, local.by_owner.positions)
        local.rows = here
        return local

    @_collective("put")
    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write rows, as `OpenTable.put`. Of a key that several ranks give, the last rank wins."""
        op = f"put of embedding {self.name!r} at step {self.own.step}"
        requested, rows = self._scatter(op, lookup, values)
        if self.capacity is not None:
            new, error = catch(lambda: new_rows(self.own, requested))
            news = [new or 0] * self.world.size
            answer = self.world.handshake(f"{op}: room", error, counts=news, note=self.own.counts.rows)
            self.check_capacity(answer.notes, answer.counts)
        self.count_write()
        _, error = catch(lambda: self.own.put(requested, rows))
        self.world.handshake(f"{op}: done", error)

    def check_capacity(self, rows: list[int], new: list[int]) -> None:
        """CapacityError on every rank if new rows of all ranks exceed `capacity`. rows, new: how many, by rank."""
        if self.capacity is not None and any(new) and sum(rows) + sum(new) > self.capacity:
            self.world.raise_shared(
                CapacityError(
                    f"embedding {self.name!r}: capacity={self.capacity} rows over all ranks, {sum(rows)} exist and "
                    f"{sum(new)} new ones would be added; give a larger capacity, or an eviction policy"
                )
            )

    @_collective("delete")
    def delete(self, lookup: Lookup) -> int:
        """Forget rows, as `OpenTable.delete`. Returns how many had been written, of the ids of all ranks together."""
        op = f"delete of embedding {self.name!r} at step {self.own.step}"
        requested, _ = self._scatter(op, lookup, None)
        self.count_write()
        gone, error = catch(lambda: self.own.delete(requested))
        return sum(self.world.handshake(f"{op}: done", error, note=gone or 0).notes)

    def _scatter(
        self, op: str, lookup: Lookup, values: NDArray[np.float32] | None
    ) -> tuple[Lookup, NDArray[np.float32]]:
        """The ids and values [n, dim] that all ranks give of rows that this rank has, in the order of ranks."""
        world, spec = self.world, self.own.spec
        on_host = Lookup(lookup.ids.cpu(), None if lookup.table_ids is None else lookup.table_ids.cpu())
        batch = batch_of(spec, [on_host])  # its error, and those of the next two, are raised on all ranks
        self._check_diverged()
        self._clear_clean_marker()
        owners = _core.owners(batch.tables, batch.keys, world.size)
        order = np.argsort(owners, kind="stable")
        sends = np.bincount(owners, minlength=world.size).tolist()
        takes = world.handshake(op, None, counts=sends).counts
        ids = np.stack((batch.keys[order].view(np.int64), batch.tables[order].astype(np.int64)), 1)
        here = world.start(f"ids of {op}", torch.from_numpy(ids), sends, takes).wait()
        keys, tables = (column.contiguous().to(lookup.ids.device) for column in here.unbind(1))
        requested = Lookup(keys, tables)
        if values is None:
            return requested, np.empty((0, spec.dim), np.float32)
        last = np.empty(batch.unique, np.int64)
        last[batch.inverse] = np.arange(len(batch.inverse))  # the last value of a repeated id
        rows = world.start(f"rows of {op}", torch.from_numpy(values[last[order]]), sends, takes).wait()
        return requested, rows.numpy()

    @_collective("size")
    def size(self) -> int:
        """How many rows all ranks have."""
        rows, error = catch(lambda: self.own.size())
        return sum(self.world.handshake(f"size of embedding {self.name!r}", error, note=rows or 0).notes)

    @_collective("announcement")
    def announce(self, lookups: list[Lookup] | None, together: bool = False) -> None:
        """Announce a later step, as `OpenTable.announce`. All ranks call it; None is for lookups that are unknown.

        together: whether every rank is known to be in this call. An error of one is then left for the step.
        """
        if not together:
            _, error = catch(self._check_diverged)
            self.world.handshake(f"announcement of embedding {self.name!r} at step {self.own.step}", error)
        self.id_prefetcher.announce(
            lookups, lambda: LocalBatch(self.own.processor, self.own.spec, lookups or [], self.world)
        )

    def rows_and_new(self, own: PinnedBatch) -> tuple[int, int]:
        """How many rows this rank has, and how many new ones a pinned batch adds. Counted for a `capacity` alone."""
        if self.capacity is None:
            return 0, 0
        written = int(own.table.processor.count_written(own.core).sum())
        return self.own.counts.rows, own.core.unique - written

    def fall_behind(self, op: str, error: BaseException) -> None:
        """Mark this rank's rows diverged: it failed in an update that other ranks make.

        No rank uses the rows until a snapshot is loaded.
        """
        catch(self.release)  # the pin cannot end after a failure
        self._diverged = f"{op} raised {error!r} on this rank during its updates, which other ranks made"
        table = self._open_table()
        if table is not None:
            table.note_failure(error)

    def _check_diverged(self) -> None:
        if self._diverged and self.own.failure is not None:  # else a load has replaced the table
            raise StoreError(f"{self._diverged}; load a snapshot of every embedding of that step on all ranks")

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        self.pinned = None
        table = self._open_table()
        if table is not None:
            table.release()
