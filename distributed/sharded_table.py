"""An embedding whose rows are distributed over all ranks. It has the methods of `OpenTable`, as collectives.

Each row belongs to one rank, its owner. In a training step, every rank deduplicates its lookups and sends the unique
ids to their owners (`_request`). Each owner pins the requested rows in its local table, and sends the rows back
(`ShardedBatch`). Ranks gather and pool these rows locally, sum the gradients per unique row, and send the sums to the
owners (`send`). Each owner adds up the received sums in rank order, and applies the optimizer (`update`).

The public operations are collectives that begin with a handshake, so one rank's error is raised on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine import _core
from ..engine.errors import CapacityError, StoreError, undo_on_error
from ..engine.ops.batch import Gradients, check_gradients, make_batch
from ..engine.ops.exact_sum import add_partial_sums, compute_partial_sum
from ..engine.optim.row_optimizer import RowOptimizer
from ..engine.options.lookup import Lookup
from ..engine.table.table import OpenTable, PinnedBatch
from ..engine.table.table_report import count_new_rows
from .handshake import Handshake
from .id_prefetch import IdPrefetcher
from .rank_group import PendingAllToAll
from .row_exchange import IdExchange, LocalBatch, RankBuffers, Traffic, concat_lookups, start_exchange, zero_out_rank
from .world import World, try_call

Method = TypeVar("Method", bound=Callable[..., Any])


class ShardedBatch:
    """A batch pinned on all ranks. It has the rows that this rank looked up, and the rows that it sends to others.

    A new batch's rows are still in flight, and the batch's first use waits for them. `send` starts to send gradients.
    """

    def __init__(
        self,
        table: ShardedTable,
        op: str,
        local_batch: LocalBatch,
        requested_lookups: list[Lookup],
        has_pooling: bool,
        owner_batch: PinnedBatch | None,
        error: BaseException | None,
        dtype: torch.dtype,
    ) -> None:
        """has_pooling: True if any rank pools rows. owner_batch: requested rows; None after an `error`."""
        self.batch: Any = local_batch.batch
        self.lookups, self.dtype = local_batch.lookups, dtype
        self.local_batch, self.requested_lookups, self.owner_batch = local_batch, requested_lookups, owner_batch
        self._table, self._world, self._op = table, table.world, op
        self._requested_counts = [len(lookup.ids) for lookup in requested_lookups]
        self._dim = local_batch.spec.dim
        # unpooled rows are rounded to the output dtype before they are sent; the result is the same
        wire_dtype = dtype if not has_pooling and self._world.row_dtype == torch.float32 else self._world.row_dtype
        self._keeps_own_rows = wire_dtype == torch.float32  # if False, this rank's own rows are rounded like sent rows
        received = zero_out_rank(local_batch.counts, self._world.rank) if self._keeps_own_rows else local_batch.counts
        self._received_buffers = RankBuffers(self._world, received, self._dim, wire_dtype)
        self._rows: Tensor | None = None  # the received rows, [m, dim] float32
        self._gradient_transfer: PendingAllToAll | None = None
        self._received_sums: RankBuffers | None = None  # gradients of the rows that this rank owns, by sending rank
        self._own_sums = torch.empty(0)  # gradients of rows that this rank both owns and looked up
        rows, new = (0, 0) if owner_batch is None else table.count_rows_and_new(owner_batch)
        outgoing, op = self._gather_blocks(wire_dtype), f"rows of {op}"
        self._handshake = Handshake(self._world, op, error, counts=[new] * self._world.size, payload=rows)
        self._row_transfer = start_exchange(self._world, op, outgoing, self._received_buffers, table.traffic)
        table.traffic.rows_received += sum(zero_out_rank(local_batch.counts, self._world.rank))

    def _gather_blocks(self, wire_dtype: torch.dtype) -> RankBuffers:
        """Return the requested rows that this rank owns, one block per requesting rank."""
        own_rank = self._world.rank
        blocks = RankBuffers(self._world, zero_out_rank(self._requested_counts, own_rank), self._dim, wire_dtype)
        if self.owner_batch is not None:
            for rank in range(self._world.size):
                if rank == own_rank and self._keeps_own_rows:
                    continue
                block = (self._received_buffers if rank == own_rank else blocks).blocks[rank]
                if wire_dtype == torch.float32 and self.owner_batch.lookups[rank].ids.device.type == "cpu":
                    self.owner_batch.gather(rank, out=block)
                else:
                    block.copy_(self.owner_batch.gather(rank))
        self._table.traffic.rows_sent += len(blocks.rows)
        return blocks

    def wait_for_rows(self) -> None:
        """Wait for the rows. Raises on every rank if any rank could not send rows, or if `capacity` is exceeded."""
        if self._rows is not None:
            return
        with undo_on_error(self.unpin_rows):
            self._row_transfer.wait()
            answer = self._handshake.wait()
            self._table.check_capacity(answer.payloads, answer.counts)
        self._rows = self._received_buffers.rows.to(self.local_batch.processor.device, torch.float32)
        assert self.owner_batch is not None
        own_offset = sum(self._requested_counts[: self._world.rank])
        own = (self.owner_batch.batch, own_offset) if self._keeps_own_rows else None
        self.local_batch.processor.set_lookup_rows(self.batch, self._rows, self.local_batch.owner_order.indices, own)

    def gather(self, index: int, weights: Tensor | None = None) -> Tensor:
        """Return the rows of lookup number `index`, as `PinnedBatch.gather` does."""
        with self._while_pinned():
            return self.local_batch.processor.gather(self.batch, index, self.lookups[index], weights, self.dtype)

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """Return the weight gradient of lookup number `index`, as `PinnedBatch.weights_grad` does."""
        with self._while_pinned():
            return self.local_batch.processor.weights_grad(self.batch, index, self.lookups[index], grad)

    def send(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> None:
        """Sum the gradients per unique row, and start to send the sums to the owners.

        Errors are raised on this rank alone. A rank that failed calls `send_nothing`; the next handshake reports it.
        """
        all_weights = weights or [None] * len(self.lookups)
        with self._while_pinned():
            spec = self.local_batch.spec
            sums = self._sum_gradients(check_gradients(spec, self.lookups, grads, all_weights, self.dtype))
        self._start_sending(sums)

    def send_nothing(self) -> None:
        """Take part in the gradient exchange without valid gradients, if `send` failed or was not called."""
        if self._gradient_transfer is not None:
            return
        world = self._world
        try:
            self._start_sending(RankBuffers(world, self.local_batch.counts, self._dim, world.grad_dtype))
        except BaseException as error:
            if not world.must_report(error):
                raise
            # otherwise the other ranks would wait for gradients
            raise world.abort(f"gradients of {self._op}", f"failed with {error!r}") from error

    def _sum_gradients(self, gradients: Gradients) -> RankBuffers:
        local_batch, wire_dtype, device = self.local_batch, self._world.grad_dtype, self.local_batch.processor.device
        blocks = RankBuffers(self._world, local_batch.counts, self._dim, wire_dtype)
        needs_no_copy = wire_dtype == torch.float32 and device.type == "cpu"
        sums = blocks.rows if needs_no_copy else torch.empty(blocks.rows.shape, dtype=torch.float32, device=device)
        local_batch.processor.sum_gradients(self.batch, gradients, local_batch.owner_order.indices, sums)
        if not needs_no_copy:
            blocks.rows.copy_(sums)
        return blocks

    def _start_sending(self, outgoing: RankBuffers) -> None:
        world, op = self._world, f"gradients of {self._op}"
        self._received_sums = RankBuffers(world, self._requested_counts, self._dim, world.grad_dtype)
        self._own_sums = outgoing.blocks[world.rank]
        self._gradient_transfer = start_exchange(world, op, outgoing, self._received_sums, self._table.traffic)
        world.num_step_collectives += 1

    def wait_for_gradients(self) -> None:
        """Wait for the exchange of gradients."""
        assert self._gradient_transfer is not None
        self._gradient_transfer.wait()

    def _receive_gradients(self) -> list[Tensor]:
        """Return the gradients received from each rank: float32 [rows that the rank requested, dim]."""
        self.wait_for_gradients()
        assert self._received_sums is not None
        sums = [*self._received_sums.blocks]
        sums[self._world.rank] = self._own_sums
        return [part.to(self.local_batch.processor.device, torch.float32) for part in sums]

    def compute_squared_norm(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """Return the sum of squared gradients over all rows and ranks. The sum is the same on every rank."""
        owner_batch, sums = self._prepare(grads, weights), self._receive_gradients()
        world, op = self._world, f"norm of {self._op}"
        squares, error = try_call(lambda: owner_batch.compute_squared_norm_part(sums))
        with world.collective_block(op):
            pending_handshake = Handshake(world, op, error)
            own_parts = torch.from_numpy(compute_partial_sum(np.empty(0, np.float32)) if squares is None else squares)
            parts = world.start_all_to_all(op, own_parts.repeat(world.size)).wait()
            pending_handshake.wait()
        return add_partial_sums([part.numpy() for part in parts.split(len(own_parts))])

    def update(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None] | None = None,
        scale: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        """Apply the optimizer to the rows that this rank owns, with the gradients of all ranks, and unpin.

        scale: factor for a row's summed gradient. The default, 1 / number of ranks, trains the mean of the ranks'
        losses. If `send` was not called, sends the gradients first. If this fails on a rank, all ranks raise the error.
        Any later error is raised on this rank alone, and then no rank can use the rows.
        """
        owner_batch = self._prepare(grads, weights)
        sums = self._receive_gradients()
        try:
            self._table.local.count_write()
            owner_batch.update(sums, None, 1.0 / self._world.size if scale is None else scale, clip_value)
        except BaseException as error:
            self.mark_diverged(error)
            raise
        self._table.pinned = None

    def mark_diverged(self, error: BaseException) -> None:
        """If this rank's update did not finish, mark the rows as diverged, since other ranks updated their rows."""
        if self._table.pinned is self:
            self._table.mark_diverged(self._op, error)

    def unpin_rows(self) -> None:
        """Unpin the rows without changing them."""
        self._table.unpin_rows()

    def _prepare(self, grads: list[Tensor], weights: list[Tensor | None] | None) -> PinnedBatch:
        """Send the gradients if `send` was not called, and return the pinned rows that this rank owns."""
        if self._gradient_transfer is None:
            self._check_pinned()
            self.wait_for_rows()
            _, error = try_call(lambda: self.send(grads, weights))
            self.send_nothing()
            with undo_on_error(self.unpin_rows):
                self._world.handshake(f"gradients of {self._op}", error)
        assert self.owner_batch is not None
        return self.owner_batch

    @contextmanager
    def _while_pinned(self) -> Iterator[None]:
        """Wrap a block that needs pinned rows. Locks the local table, so the rows stay pinned there too."""
        self._check_pinned()
        self.wait_for_rows()
        assert self.owner_batch is not None
        with self.owner_batch.table.lock:
            self.owner_batch.table.check_pinned(self.owner_batch)
            yield

    def _check_pinned(self) -> None:
        if self._table.pinned is not self:
            raise StoreError(
                f"embedding {self.local_batch.spec.name!r}: the batch is no longer pinned, because put, delete or "
                "a load was called in the middle of the step; write to an embedding from one thread at a time"
            )


def _collective(operation: str) -> Callable[[Method], Method]:
    """Decorator for methods that make several collectives. Runs a method in a `World.collective_block`.

    An error before the first collective is raised on all ranks. operation: the method's name in error messages.
    """

    def with_name(method: Method) -> Method:
        @wraps(method)
        def collective(self: ShardedTable, *arguments: Any, **keywords: Any) -> Any:
            op = f"{operation} of embedding {self.name!r}"
            with self.world.collective_block(op), self.world.raise_on_all_ranks(op):
                return method(self, *arguments, **keywords)

        return cast(Method, collective)

    return with_name


class ShardedTable:
    """All rows of an embedding. Each rank's local table holds the rows that the rank owns."""

    def __init__(
        self, world: World, local: Any, capacity: int | None, before_step: Callable[[], None], request_handler: Any
    ) -> None:
        """local: this rank's `LocalTable`. capacity: maximum rows over all ranks; None if each rank has its own limit.

        before_step: called on all ranks before a step. request_handler: the ranks' common `RankRequestHandler`.
        """
        self.world, self.local, self.capacity, self.traffic = world, local, capacity, Traffic()
        self._before_step, self._request_handler = before_step, request_handler
        self.pinned: ShardedBatch | None = None
        self._divergence = ""  # describes an update that failed on this rank alone; "" if there is none
        self.id_prefetcher = IdPrefetcher(
            world, self.name, self.traffic, lambda requested: self.open_table.announce(requested)
        )

    @property
    def name(self) -> str:
        return str(self.local.name)

    @property
    def open_table(self) -> OpenTable:
        """This rank's table. Raises ClosedError."""
        table: OpenTable = self.local.table
        return table

    @property
    def optimizer(self) -> RowOptimizer | None:
        table: OpenTable | None = self.local.table_if_open
        return None if table is None else table.optimizer

    @_collective("step")
    def pin(self, lookups: list[Lookup], dtype: torch.dtype = torch.float32, sibling: Any = None) -> ShardedBatch:
        """Begin a training step on all ranks, as `OpenTable.pin` does. The batch's rows are in flight on return."""
        op = f"embedding {self.name!r}, step {self.open_table.step + 1}"
        self.unpin_rows()
        self._before_step()
        local_batch, requested_lookups, has_pooling = self._request(op, lookups, sibling, dtype)
        owner_sibling = None if sibling is None else sibling.owner_batch
        owner_batch, error = try_call(lambda: self._pin_requested(requested_lookups, owner_sibling))
        self.pinned = ShardedBatch(self, op, local_batch, requested_lookups, has_pooling, owner_batch, error, dtype)
        if self.world.pinned_batches is not None:
            self.world.pinned_batches.append(self.pinned)
        return self.pinned

    def _clear_clean_marker(self) -> None:
        """Remove the marker of a clean close from this rank's rows, before any rank writes rows. Raises StoreError."""
        with self.open_table.lock:
            self.open_table.before_write(self.open_table.step)

    def _pin_requested(self, requested: list[Lookup], sibling: PinnedBatch | None) -> PinnedBatch:
        self._clear_clean_marker()
        pinned = self.open_table.pin(requested, torch.float32, sibling)
        self.open_table.raise_deferred_error()  # all ranks then raise the error in this step
        return pinned

    def _request(
        self, op: str, lookups: list[Lookup], sibling: Any = None, dtype: torch.dtype | None = None
    ) -> tuple[LocalBatch, list[Lookup], bool]:
        """Exchange ids. Returns this rank's unique rows, the rows each rank requests, and True if a rank pools rows.

        dtype: the dtype of the rows that a step gathers; None if this is not a step.
        """
        world, table, is_step = self.world, self.open_table, dtype is not None
        announced_step = self.id_prefetcher.find(lookups, table.processor) if is_step else None
        number = 0 if announced_step is None else announced_step.number
        has_pooling = any(lookup.pooling is not None for lookup in lookups)
        shared_values: dict[str, Any] = {"graph": world.collectives, "shared lookups": sibling is not None}

        def prepare() -> LocalBatch:
            self._check_diverged()
            if is_step:
                optimizer = table.require_optimizer()
                numbers = optimizer.compute_numbers(table.step + 1)
                shared_values.update({"output_dtype": str(dtype), "optimizer": optimizer.rule, "its numbers": numbers})
            if announced_step is not None and announced_step.local_batch is not None and sibling is None:
                return announced_step.local_batch
            other_batch = None if sibling is None else sibling.local_batch
            return LocalBatch(table.processor, table.spec, lookups, world, other_batch)

        local_batch, error = try_call(prepare)
        counts = [0] * world.size if local_batch is None else local_batch.counts
        try:
            needs_call = self._request_handler.can_serve()
            payload = 2 * number + has_pooling
            answer = world.handshake(op, error, shared_values, counts=counts, payload=payload, needs_call=needs_call)
        finally:
            world.num_step_collectives += 1
        assert local_batch is not None
        if is_step:
            self.id_prefetcher.advance()  # after the handshake, because a failed rank makes no further collective
        if answer.needs_call:
            self._request_handler.serve()
        has_pooling = any(payload & 1 for payload in answer.payloads)
        if sibling is not None:
            self.id_prefetcher.skip(number)
            return local_batch, sibling.requested_lookups, has_pooling
        if announced_step is not None and all(payload >> 1 == number for payload in answer.payloads):
            return local_batch, self.id_prefetcher.take(announced_step), has_pooling
        self.id_prefetcher.skip(number)
        ids = IdExchange(world, f"ids of {op}", local_batch, answer.counts, self.traffic).wait()
        return local_batch, ids, has_pooling

    def read(
        self,
        lookup: Lookup,
        weights: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        is_training: bool = False,
    ) -> Tensor:
        """Read rows or pooled bags, as `OpenTable.read` does. All ranks make this call, each with its own ids."""
        local_batch = self._look_up(lookup, is_training)
        return local_batch.processor.gather(local_batch.batch, 0, lookup, weights, dtype)

    def get(self, lookup: Lookup) -> Tensor:
        return self.read(lookup)

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """Return the weight gradient of a read-only lookup, as `OpenTable.read_weights_grad` does."""
        local_batch = self._look_up(lookup, is_training=True)
        return local_batch.processor.weights_grad(local_batch.batch, 0, lookup, grad)

    @_collective("lookup")
    def _look_up(self, lookup: Lookup, is_training: bool) -> LocalBatch:
        """Return the unique rows of this rank's lookup, received from the ranks that own the rows."""
        op = f"embedding {self.name!r}, lookup at step {self.open_table.step}"
        local_batch, requested, _ = self._request(op, [lookup])
        counts = [len(part.ids) for part in requested]
        rows, error = try_call(lambda: self.open_table.get(concat_lookups(requested), is_training))
        source, target = (
            RankBuffers(self.world, c, local_batch.spec.dim, self.world.row_dtype) for c in (counts, local_batch.counts)
        )
        if rows is not None:
            for rank, part in enumerate(rows.split(counts)):
                (target if rank == self.world.rank else source).blocks[rank].copy_(part)
        self.traffic.rows_sent += sum(counts) - counts[self.world.rank]
        self.traffic.rows_received += sum(local_batch.counts) - local_batch.counts[self.world.rank]
        pending_handshake = Handshake(self.world, f"rows of {op}", error)
        start_exchange(self.world, f"rows of {op}", source, target, self.traffic).wait()
        pending_handshake.wait()
        received_rows = target.rows.to(local_batch.processor.device, torch.float32)
        local_batch.processor.set_lookup_rows(local_batch.batch, received_rows, local_batch.owner_order.indices)
        local_batch.keepalive_rows = received_rows
        return local_batch

    @_collective("put")
    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write rows, as `OpenTable.put` does. If several ranks write one key, the last rank's row is kept."""
        op = f"put of embedding {self.name!r} at step {self.open_table.step}"
        requested, rows = self._scatter(op, lookup, values)
        if self.capacity is not None:
            num_new, error = try_call(lambda: count_new_rows(self.open_table, requested))
            new_counts = [num_new or 0] * self.world.size
            num_rows = self.open_table.counts.num_rows
            answer = self.world.handshake(f"{op}: room", error, counts=new_counts, payload=num_rows)
            self.check_capacity(answer.payloads, answer.counts)
        self.local.count_write()
        _, error = try_call(lambda: self.open_table.put(requested, rows))
        self.world.handshake(f"{op}: done", error)

    def check_capacity(self, counts: list[int], new_counts: list[int]) -> None:
        """Raise CapacityError on all ranks if rows exceed `capacity`. counts, new_counts: old and new rows by rank."""
        if self.capacity is not None and any(new_counts) and sum(counts) + sum(new_counts) > self.capacity:
            self.world.raise_shared_error(
                CapacityError(
                    f"embedding {self.name!r}: capacity={self.capacity} rows over all ranks, but {sum(counts)} exist "
                    f"and {sum(new_counts)} new ones would be added; give a larger capacity, or an eviction policy"
                )
            )

    @_collective("delete")
    def delete(self, lookup: Lookup) -> int:
        """Delete rows, as `OpenTable.delete` does. Returns how many ids had rows, summed across ranks."""
        op = f"delete of embedding {self.name!r} at step {self.open_table.step}"
        requested, _ = self._scatter(op, lookup, None)
        self.local.count_write()
        num_deleted, error = try_call(lambda: self.open_table.delete(requested))
        return sum(self.world.handshake(f"{op}: done", error, payload=num_deleted or 0).payloads)

    def _scatter(
        self, op: str, lookup: Lookup, values: NDArray[np.float32] | None
    ) -> tuple[Lookup, NDArray[np.float32]]:
        """Send ids and values [n, dim] to the owners. Returns what this rank receives, ordered by sending rank."""
        world, spec = self.world, self.open_table.spec
        host_lookup = Lookup(lookup.ids.cpu(), None if lookup.table_ids is None else lookup.table_ids.cpu())
        batch = make_batch(spec, [host_lookup])  # an error here or in the next two lines is raised on all ranks
        self._check_diverged()
        self._clear_clean_marker()
        owners = _core.find_owners(batch.tables, batch.keys, world.size)
        order = np.argsort(owners, kind="stable")
        send_counts = np.bincount(owners, minlength=world.size).tolist()
        receive_counts = world.handshake(op, None, counts=send_counts).counts
        ids = np.stack((batch.keys[order].view(np.int64), batch.tables[order].astype(np.int64)), 1)
        received_ids = world.start_all_to_all(f"ids of {op}", torch.from_numpy(ids), send_counts, receive_counts).wait()
        keys, tables = (column.contiguous().to(lookup.ids.device) for column in received_ids.unbind(1))
        requested = Lookup(keys, tables)
        if values is None:
            return requested, np.empty((0, spec.dim), np.float32)
        picks = np.empty(batch.num_unique, np.int64)
        picks[batch.inverse] = np.arange(len(batch.inverse))  # a repeated id keeps its last value
        sent_rows = torch.from_numpy(values[picks[order]])
        rows = world.start_all_to_all(f"rows of {op}", sent_rows, send_counts, receive_counts).wait()
        return requested, rows.numpy()

    @_collective("size")
    def size(self) -> int:
        """Return the number of rows over all ranks."""
        num_rows, error = try_call(lambda: self.open_table.size())
        return sum(self.world.handshake(f"size of embedding {self.name!r}", error, payload=num_rows or 0).payloads)

    @_collective("announcement")
    def announce(self, lookups: list[Lookup] | None, is_collective: bool = False) -> None:
        """Announce a later step, as `OpenTable.announce` does. All ranks call this. lookups: None if unknown here.

        is_collective: True if all ranks are known to make this call. An error of one rank is then raised by the step.
        """
        if not is_collective:
            _, error = try_call(self._check_diverged)
            self.world.handshake(f"announcement of embedding {self.name!r} at step {self.open_table.step}", error)
        self.id_prefetcher.announce(
            lookups, lambda: LocalBatch(self.open_table.processor, self.open_table.spec, lookups or [], self.world)
        )

    def count_rows_and_new(self, owner_batch: PinnedBatch) -> tuple[int, int]:
        """Return this rank's row count and the number of rows that a pinned batch adds; (0, 0) without `capacity`."""
        if self.capacity is None:
            return 0, 0
        num_written = int(owner_batch.table.processor.count_written(owner_batch.batch).sum())
        return self.open_table.counts.num_rows, owner_batch.batch.num_unique - num_written

    def mark_diverged(self, op: str, error: BaseException) -> None:
        """Called after this rank failed in an update. No rank can use the rows until a load."""
        try_call(self.unpin_rows)  # this may raise: after a failure the pin cannot end normally
        self._divergence = f"{op} raised {error!r} on this rank during its updates, and other ranks made theirs"
        self.local.mark_failed(error)

    def _check_diverged(self) -> None:
        if self._divergence and self.open_table.failure is not None:  # a load replaces the failed table by a new one
            raise StoreError(f"{self._divergence}; on all ranks, load snapshots of all embeddings from the same step")

    def unpin_rows(self) -> None:
        """Unpin the batch that a failed step may have left pinned."""
        self.pinned = None
        if (table := self.local.table_if_open) is not None:
            table.unpin_rows()
