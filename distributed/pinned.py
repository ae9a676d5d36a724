"""A step's hold on rows of several ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..engine.errors import CapacityError, StoreError
from ..engine.exact_sum import partial, total
from ..engine.options.inputs import Gradients, checked_gradients
from .agreement import Agreement, agree, attempt
from .asked import Local, without
from .blocks import Blocks, Message, Traffic, start

if TYPE_CHECKING:
    from ..engine.options.inputs import Lookup
    from ..engine.table.pinned import PinnedBatch
    from .group import Exchange, Group

T = TypeVar("T")


class Steps(Protocol):
    """What a step needs of the table that pinned its rows."""

    world: Group
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
        table: Steps,
        op: str,
        local: Local,
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
        taken = without(local.counts, self._world.rank) if self._stay else local.counts
        self._taken = Blocks(self._world, taken, self._dim, wire)
        self._rows: Tensor | None = None  # [m, dim] float32, those that travelled, once they are here
        self._sent: Exchange | None = None
        self._sums: Blocks | None = None  # the gradients of rows that this rank has, by rank
        self._own_sums = torch.empty(0)  # those of the rows that this rank asked itself for
        rows, new = (0, 0) if own is None else table.rows_and_new(own)
        self._coming = Message(
            self._world,
            f"rows of {op}",
            self._given(wire),
            self._taken,
            table.traffic,
            error,
            [new] * self._world.size,
            rows,
        )
        table.traffic.rows_received += sum(without(local.counts, self._world.rank))

    def _given(self, wire: torch.dtype) -> Blocks:
        """The rows that this rank has, for each other rank."""
        me = self._world.rank
        blocks = Blocks(self._world, without(self._asked_counts, me), self._dim, wire)
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
            self._world.told = no_room(self.local.spec.name, capacity, sum(answer.notes), sum(answer.counts))
            raise self._world.told
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
            self._start(Blocks(world, self.local.counts, self._dim, world.grads))
        except BaseException as error:
            if not world.untold(error):
                raise
            raise world.broken_off(f"gradients of {self._op}", f"failed by {error!r}") from error

    def _summed(self, gradients: Gradients) -> Blocks:
        """The gradients of this rank's unique rows."""
        local, wire = self.local, self._world.grads
        blocks = Blocks(self._world, local.counts, self._dim, wire)
        device = local.processor.device
        plain = wire == torch.float32 and device.type == "cpu"
        sums = blocks.rows if plain else torch.empty(blocks.rows.shape, dtype=torch.float32, device=device)
        local.processor.sum_gradients(self.core, gradients, local.by_owner.places, sums)
        if not plain:
            blocks.rows.copy_(sums)
        return blocks

    def _start(self, given: Blocks) -> None:
        world = self._world
        self._sums, self._own_sums = Blocks(world, self._asked_counts, self._dim, world.grads), given.of(world.rank)
        self._sent = start(world, f"gradients of {self._op}", given, self._sums, self._table.traffic)
        world.passed += 1

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
        squares, error = attempt(lambda: own.partial_squares(sums))
        with world.whole(op):
            headers = Agreement(world, op, error)
            given = torch.from_numpy(partial(np.empty(0, np.float32)) if squares is None else squares)
            sizes = [len(given)] * world.size
            given = given.repeat(world.size)
            parts = world.start(op, torch.empty_like(given), given, sizes, sizes).wait()
            headers.settle()
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
            _, error = attempt(lambda: self.send(grads, weights))
            self.send_nothing()
            self._ending(lambda: agree(self._world, f"gradients of {self._op}", error))
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
