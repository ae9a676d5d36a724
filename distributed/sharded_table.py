"""The rows of an embedding over all ranks: what `OpenTable` does in one process, in calls that all ranks make."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine import _core
from ..engine.errors import CapacityError, StoreError
from ..engine.ops.batch import batch_of, empty
from ..engine.ops.exact_sum import partial, total
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.options.lookup import Gradients, Lookup, checked_gradients
from ..engine.table.table import OpenTable, PinnedBatch
from ..engine.table.table_report import new_rows
from .id_prefetch import IdPrefetcher
from .row_exchange import IdExchange, LocalBatch, RankBuffers, RowExchange, Traffic, concat_lookups, start, zeroed
from .world import Handshake, catch

if TYPE_CHECKING:
    from .rank_group import PendingAllToAll
from .world import World

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


class RankedStep(Protocol):
    """What a step needs of the table that pinned its rows."""

    world: World
    traffic: Traffic
    capacity: int | None
    pinned: ShardedBatch | None

    def rows_and_new(self, own: PinnedBatch) -> tuple[int, int]:
        """How many rows this rank has, and how many of a pinned batch come to them."""

    def count_write(self) -> None:
        """Every rank is about to write its rows of this step."""

    def fall_behind(self, op: str, error: BaseException) -> None:
        """This rank failed in an update that other ranks make: no rank uses the rows until a snapshot is loaded."""

    def release(self) -> None: ...


class ShardedBatch:
    """A `Pinned` for rows of all ranks: what this rank looked up, and what it has for the others.

    Rows are on their way when it is made; the first use waits for them. `send` starts the gradients on theirs.
    """

    def __init__(
        self,
        table: RankedStep,
        op: str,
        local: LocalBatch,
        asked: list[Lookup],
        pools: bool,
        own: PinnedBatch | None,
        error: BaseException | None,
        dtype: torch.dtype,
    ) -> None:
        """pools: whether a lookup of some rank pools rows.

        own: the rows that this rank has of those asked for, pinned; None with the error that kept it from that.
        """
        self.core: Any = local.batch
        self.lookups = local.lookups
        self.dtype = dtype
        self.local, self.asked, self.own = local, asked, own
        self._table, self._world, self._op = table, table.world, op
        self._asked_counts = [len(lookup.ids) for lookup in asked]
        self._dim = local.spec.dim
        # what an unpooled lookup returns is rounded once, here or there
        wire = dtype if not pools and self._world.rows == torch.float32 else self._world.rows
        self._stay = wire == torch.float32  # else those of this rank are rounded as well
        taken = zeroed(local.counts, self._world.rank) if self._stay else local.counts
        self._taken = RankBuffers(self._world, taken, self._dim, wire)
        self._rows: Tensor | None = None  # [m, dim] float32, those that travelled, once they are here
        self._sent: PendingAllToAll | None = None
        self._sums: RankBuffers | None = None  # the gradients of rows that this rank has, by rank
        self._own_sums = torch.empty(0)  # those of the rows that this rank asked itself for
        rows, new = (0, 0) if own is None else table.rows_and_new(own)
        self._coming = RowExchange(
            self._world,
            f"rows of {op}",
            self._given(wire),
            self._taken,
            table.traffic,
            error,
            [new] * self._world.size,
            rows,
        )
        table.traffic.rows_received += sum(zeroed(local.counts, self._world.rank))

    def _given(self, wire: torch.dtype) -> RankBuffers:
        """The rows that this rank has, for each other rank."""
        me = self._world.rank
        blocks = RankBuffers(self._world, zeroed(self._asked_counts, me), self._dim, wire)
        if self.own is not None:
            for rank in range(self._world.size):
                if rank == me and self._stay:
                    continue
                block = (self._taken if rank == me else blocks).of(rank)
                if wire == torch.float32 and self.own.lookups[rank].ids.device.type == "cpu":
                    self.own.gather(rank, out=block)
                else:
                    block.copy_(self.own.gather(rank))
        self._table.traffic.rows_sent += len(blocks.rows)
        return blocks

    def arrive(self) -> None:
        """Wait for the rows. Where a rank could not give its own, or they exceed `capacity`, raises on every rank."""
        if self._rows is not None:
            return
        answer = self._ending(self._coming.wait)
        capacity = self._table.capacity
        if capacity is not None and any(answer.counts) and sum(answer.notes) + sum(answer.counts) > capacity:
            self.release()
            self._world.shared_error = no_room(self.local.spec.name, capacity, sum(answer.notes), sum(answer.counts))
            raise self._world.shared_error
        self._rows = self._taken.rows.to(self.local.processor.device, torch.float32)
        assert self.own is not None
        stay = (self.own.core, sum(self._asked_counts[: self._world.rank])) if self._stay else None
        self.local.processor.set_lines(self.core, self._rows, self.local.by_owner.places, stay)

    def gather(self, index: int, weights: Tensor | None = None) -> Tensor:
        """The rows of lookup number `index`, as `Pinned.gather`."""
        with self._standing():
            return self.local.processor.gather(self.core, index, self.lookups[index], weights, self.dtype)

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of the weights of lookup number `index`, as `Pinned.weights_grad`."""
        with self._standing():
            return self.local.processor.weights_grad(self.core, index, self.lookups[index], grad)

    def send(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
        """Start to send the gradients, one number for each element of this rank's unique rows, to who has the rows.

        Raises what is wrong with them, on this rank alone. Then ranks agree, before an update: a rank that had nothing
        to send says so there, after `send_nothing`.
        """
        given = weights or [None] * len(self.lookups)
        with self._standing():
            sums = self._summed(checked_gradients(self.local.spec, self.lookups, grads, given, self.dtype))
        self._start(sums)

    def send_nothing(self) -> None:
        """Take part in the exchange of gradients where `send` failed or was not called; nothing where it was.

        What keeps this rank from it ends the group, which would wait for it.
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
        local.processor.sum_gradients(self.core, gradients, local.by_owner.places, sums)
        if not plain:
            blocks.rows.copy_(sums)
        return blocks

    def _start(self, given: RankBuffers) -> None:
        world = self._world
        self._sums, self._own_sums = (
            RankBuffers(world, self._asked_counts, self._dim, world.grads),
            given.of(world.rank),
        )
        self._sent = start(world, f"gradients of {self._op}", given, self._sums, self._table.traffic)
        world.step_collectives += 1

    def receive(self) -> None:
        """Wait for the gradients that were sent."""
        assert self._sent is not None
        self._sent.wait()

    def _receive(self) -> list[Tensor]:
        """The gradients, once they are here: for each rank, [rows that it asked for, dim] float32."""
        self.receive()
        assert self._sums is not None
        sums = [self._sums.of(rank) for rank in range(self._world.size)]
        sums[self._world.rank] = self._own_sums
        return [part.to(self.local.processor.device, torch.float32) for part in sums]

    def square_gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """The sum of the squares of the gradients of all rows, summed over ranks, the same on every rank."""
        own, sums, world, op = self._ready(grads, weights), self._receive(), self._world, f"norm of {self._op}"
        squares, error = catch(lambda: own.partial_squares(sums))
        with world.collective_block(op):
            headers = Handshake(world, op, error)
            given = torch.from_numpy(partial(np.empty(0, np.float32)) if squares is None else squares)
            sizes = [len(given)] * world.size
            given = given.repeat(world.size)
            parts = world.start(op, torch.empty_like(given), given, sizes, sizes).wait()
            headers.wait()
        return total([part.numpy() for part in parts.split(sizes)])

    def update(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None] | None = None,
        scale: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Apply the optimizer to the rows that this rank has, for all ranks, and end the pin.

        scale: multiplies a row's summed gradient; left out, it is one over the number of ranks: the mean of their
        losses is trained. The gradients are sent here, unless `send` was called; what is wrong with them is then raised
        on every rank. What fails then is raised on this rank alone, and keeps all from using the rows.
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
        """Keep all ranks from rows that this one did not update by `error`, and others did; nothing where it did."""
        if self._table.pinned is self:
            self._table.fall_behind(self._op, error)

    def release(self) -> None:
        """End the pin; the rows stay as they are."""
        self._table.release()

    def _ready(self, grads: list[Tensor], weights: list[Tensor | None] | None) -> PinnedBatch:
        if self._sent is None:
            self._check()
            self.arrive()
            _, error = catch(lambda: self.send(grads, weights))
            self.send_nothing()
            self._ending(lambda: self._world.handshake(f"gradients of {self._op}", error))
        assert self.own is not None
        return self.own

    def _ending(self, call: Callable[[], T]) -> T:
        """The result of a call; where it raises, the pin ends."""
        try:
            return call()
        except BaseException:
            self.release()
            raise

    @contextmanager
    def _standing(self) -> Iterator[None]:
        """A block for which the rows stand, those of this rank where its own pin holds them."""
        self._check()
        self.arrive()
        assert self.own is not None
        with self.own.table.lock:
            self.own.table.check_pinned(self.own)
            yield

    def _check(self) -> None:
        if self._table.pinned is not self:
            raise StoreError(
                f"embedding {self.local.spec.name!r}: the batch is no longer pinned: put, delete or a load let its "
                "rows go in the middle of the step; let one thread at a time write to it"
            )


def no_room(name: str, capacity: int, rows: int, new: int) -> CapacityError:
    return CapacityError(
        f"embedding {name!r}: capacity={capacity} rows over all ranks, {rows} are there and {new} new ones "
        "come; give a larger capacity, or an eviction policy"
    )


def _whole(what: str) -> Callable[[Method], Method]:
    """For a method of several exchanges, which all ranks make: `World.whole`. what: it does, for errors.

    What it raises before the first exchange is raised on all ranks.
    """

    def with_name(method: Method) -> Method:
        @wraps(method)
        def whole(self: ShardedTable, *arguments: Any, **named: Any) -> Any:
            op = f"{what} of embedding {self.name!r}"
            with self.world.collective_block(op), self.world.raise_on_all_ranks(op):
                return method(self, *arguments, **named)

        return cast(Method, whole)

    return with_name


class ShardedTable:
    """All rows of an embedding. Each rank has those whose `owner` it is, in a table of its own."""

    def __init__(
        self,
        world: World,
        local_table: Callable[[], OpenTable],
        open_table: Callable[[], OpenTable | None],
        count_write: Callable[[], None],
        capacity: int | None,
    ) -> None:
        """local_table: returns the table with the rows of this rank, or raises ClosedError.

        open_table: returns it, or None if it is closed. count_write: called when every rank is about to write.
        capacity: the most rows of all ranks; None if each rank limits its own.
        """
        self.world, self.capacity = world, capacity
        self._local_table, self._open_table, self.count_write = local_table, open_table, count_write
        self.name = local_table().spec.name
        self.traffic = Traffic()
        self.pinned: ShardedBatch | None = None
        self._behind = ""  # the update that this rank's rows lack, and why
        self.before_step: Callable[[], None] = lambda: None  # what all ranks do before a step
        self.is_save_requested: Callable[[], bool] = lambda: False  # by another process
        self.serve_requests: Callable[[], None] = lambda: None
        self.ahead = IdPrefetcher(world, self.name, self.traffic, lambda asked: self.own.announce(asked))

    @property
    def own(self) -> OpenTable:
        """The rows that this rank has."""
        return self._local_table()

    @property
    def optimizer(self) -> RowOptimizer | None:
        table = self._open_table()
        return None if table is None else table.optimizer

    @_whole("step")
    def pin(self, lookups: list[Lookup], dtype: torch.dtype = torch.float32, like: Any = None) -> ShardedBatch:
        """Begin a training step, as `OpenTable.pin`, of all ranks. What keeps a rank from it is raised on every rank.

        Rows are on their way when this returns. Raises the errors of `Handshake.wait`.
        """
        op = f"embedding {self.name!r}, step {self.own.step + 1}"
        self.release()
        self.before_step()
        local, asked, pools = self._ask(op, lookups, like, dtype)
        like_own = None if like is None else like.own
        own, error = catch(lambda: self._pin_own(asked, like_own))
        self.pinned = ShardedBatch(self, op, local, asked, pools, own, error, dtype)
        if self.world.pinned_batches is not None:
            self.world.pinned_batches.append(self.pinned)
        return self.pinned

    def _begin_write(self) -> None:
        self._check_behind()
        self._clear_clean_marker()

    def _clear_clean_marker(self) -> None:
        """Clear the clean marker of this rank's rows for a write of all ranks, before it is certain. StoreError."""
        with self.own.lock:
            self.own.before_write(self.own.step)

    def _pin_own(self, asked: list[Lookup], like: PinnedBatch | None) -> PinnedBatch:
        self._clear_clean_marker()
        pinned = self.own.pin(asked, torch.float32, like)
        self.own.check()  # what a device finds late, so that all ranks hear of it in this step
        return pinned

    def _ask(
        self, op: str, lookups: list[Lookup], like: Any = None, dtype: torch.dtype | None = None
    ) -> tuple[LocalBatch, list[Lookup], bool]:
        """This rank's unique rows, a lookup of each rank of rows that this one has, and whether a rank pools rows.

        dtype: of what a step gathers; None where this is no step.
        """
        world, own, is_step = self.world, self.own, dtype is not None
        number = self.ahead.number_of(lookups, own.processor) if is_step else 0
        pools = any(lookup.pooling is not None for lookup in lookups)

        same: dict[str, Any] = {"graph": world.collectives, "shared lookups": like is not None}

        def prepare() -> LocalBatch:
            self._check_behind()
            if is_step:
                optimizer = own.check_optimizer()
                numbers = optimizer.numbers(own.step + 1)
                same.update({"output_dtype": str(dtype), "optimizer": optimizer.rule, "its numbers": numbers})
            if number and like is None:
                return self.ahead.local_of(number)
            return LocalBatch(own.processor, own.spec, lookups, world, None if like is None else like.local)

        local, error = catch(prepare)
        counts = [0] * world.size if local is None else local.counts
        try:
            wants_more = self.is_save_requested()
            answer = world.handshake(op, error, same, counts, note=2 * number + pools, wants_more=wants_more)
        finally:
            world.step_collectives += 1
        assert local is not None
        if is_step:
            self.ahead.advance()  # only here: a rank that failed answers the headers of a step alone
        if answer.wants_more:
            self.serve_requests()
        pools = any(note & 1 for note in answer.notes)
        if like is not None:
            self.ahead.skip(number)
            return local, like.asked, pools
        if number and all(note >> 1 == number for note in answer.notes):
            return local, self.ahead.take(number), pools
        self.ahead.skip(number)
        return local, IdExchange(world, f"ids of {op}", local, answer.counts, self.traffic).wait(), pools

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
    def _look_up(self, lookup: Lookup) -> LocalBatch:
        """This rank's unique rows of a lookup, with their lines set."""
        op = f"embedding {self.name!r}, lookup at step {self.own.step}"
        local, asked, _ = self._ask(op, [lookup])
        counts = [len(part.ids) for part in asked]
        rows, error = catch(lambda: self.own.get(concat_lookups(asked)))
        given, taken = (RankBuffers(self.world, c, local.spec.dim, self.world.rows) for c in (counts, local.counts))
        if rows is not None:
            for rank, part in enumerate(rows.split(counts)):
                (taken if rank == self.world.rank else given).of(rank).copy_(part)
        self.traffic.rows_sent += sum(counts) - counts[self.world.rank]
        self.traffic.rows_received += sum(local.counts) - local.counts[self.world.rank]
        RowExchange(self.world, f"rows of {op}", given, taken, self.traffic, error).wait()
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
        _, error = catch(lambda: self.own.put(asked, rows))
        self.world.handshake(f"{op}: done", error)

    def _check_room(self, op: str, asked: Lookup, capacity: int) -> None:
        """Raise CapacityError on every rank where new rows of all ranks exceed `capacity`."""
        new, error = catch(lambda: new_rows(self.own, asked))
        answer = self.world.handshake(
            f"{op}: room", error, counts=[new or 0] * self.world.size, note=self.own.counts.rows
        )
        if any(answer.counts) and sum(answer.notes) + sum(answer.counts) > capacity:
            self.world.shared_error = no_room(self.name, capacity, sum(answer.notes), sum(answer.counts))
            raise self.world.shared_error

    @_whole("delete")
    def delete(self, lookup: Lookup) -> int:
        """Forget rows, as `OpenTable.delete`. Returns how many had been written, of the ids of all ranks together."""
        op = f"delete of embedding {self.name!r} at step {self.own.step}"
        asked, _ = self._scatter(op, lookup, None)
        self.count_write()
        gone, error = catch(lambda: self.own.delete(asked))
        return sum(self.world.handshake(f"{op}: done", error, note=gone or 0).notes)

    def _scatter(
        self, op: str, lookup: Lookup, values: NDArray[np.float32] | None
    ) -> tuple[Lookup, NDArray[np.float32]]:
        """The ids and values [n, dim] that all ranks give of rows that this rank has, in the order of ranks."""
        world, spec = self.world, self.own.spec
        on_host = Lookup(lookup.ids.cpu(), None if lookup.table_ids is None else lookup.table_ids.cpu())
        batch, error = catch(lambda: batch_of(spec, [on_host]))
        if error is None:
            _, error = catch(self._begin_write)
        if batch is None or error is not None:
            world.handshake(op, error)
        owners = _core.owners(batch.tables, batch.keys, world.size)
        order = np.argsort(owners, kind="stable")
        sends = np.bincount(owners, minlength=world.size).tolist()
        takes = world.handshake(op, None, counts=sends).counts
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
        rows, error = catch(self._size)
        return sum(self.world.handshake(f"size of embedding {self.name!r}", error, note=rows or 0).notes)

    def _size(self) -> int:
        with self.own.lock:
            self.own.check()
            return self.own.counts.rows

    @_whole("announcement")
    def announce(self, lookups: list[Lookup] | None, together: bool = False) -> None:
        """Announce a coming step, as `OpenTable.announce`. All ranks call it; None is for lookups that are unknown.

        together: whether every rank is known to be in this call. What keeps one from it is then left for the step.
        """
        if not together:
            _, error = catch(self._check_behind)
            self.world.handshake(f"announcement of embedding {self.name!r} at step {self.own.step}", error)
        self.ahead.announce(lookups, lambda: LocalBatch(self.own.processor, self.own.spec, lookups or [], self.world))

    def rows_and_new(self, own: PinnedBatch) -> tuple[int, int]:
        """How many rows this rank has, and how many of a pinned batch come to them. Counted for a `capacity` alone."""
        if self.capacity is None:
            return 0, 0
        written = int(own.table.processor.count_written(own.core).sum())
        return self.own.counts.rows, own.core.unique - written

    def fall_behind(self, op: str, error: BaseException) -> None:
        """This rank failed in an update that other ranks make: no rank uses the rows until a snapshot is loaded."""
        catch(self.release)  # the pin cannot end after a failure
        self._behind = f"{op} raised {error!r} on this rank amid its updates, which other ranks made"
        table = self._open_table()
        if table is not None:
            table.failure = table.failure or error  # so that these rows are never marked as whole

    def _check_behind(self) -> None:
        if self._behind and self.own.failure is not None:  # a load has put another table in its place else
            raise StoreError(f"{self._behind}; load a snapshot of every embedding of that step on all ranks")

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        self.pinned = None
        table = self._open_table()
        if table is not None:
            table.release()
