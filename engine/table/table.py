"""The open table of an embedding: the way of one batch through its tiers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import OptimizerError, StoreError
from ..interrupts import uninterrupted
from ..ops.segments import rows_of
from ..row_format import LAST_STEP
from ..spec.inputs import Gradients, Lookup, check_grad, check_weights
from ..store.contract import Room
from .open_rows import OpenRows
from .pinned import PinnedBatch


class OpenTable(OpenRows):
    """Rows in a stack of tiers, used on a processor: a batch at a time."""

    def read(self, lookup: Lookup, weights: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows of ids, or pooled bags of them: lookup.shape + (dim,). Unknown rows are initial and stay unknown."""
        with self.lock:
            batch = self._peek(lookup)
            return self.processor.gather(batch, 0, lookup, weights, dtype)

    def get(self, lookup: Lookup) -> Tensor:
        """`read`, once it is known that nothing was wrong with it."""
        with self.lock:
            rows = self.read(lookup)
            self.check()
            return rows

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """The gradient of the weights of a lookup that only reads; grad is lookup.shape + (dim,)."""
        with self.lock:
            batch = self._peek(lookup)
            return self.processor.weights_grad(batch, 0, lookup, grad)

    def pin(
        self, lookups: list[Lookup], dtype: torch.dtype = torch.float32, like: PinnedBatch | None = None
    ) -> PinnedBatch:
        """Deduplicate the ids, bring their rows up and pin them. `dtype`: of what is gathered, and of gradients.

        like: a batch of another table, as `Processor.batch` takes it; one that was made ahead for this table comes
        first. Raises CapacityError and pins nothing where they do not fit.
        """
        self.give_way()
        with self.lock, uninterrupted():
            pinned = self._pin(lookups, dtype, like)
            self._set_numbers()
            self._settle(pinned.core)
            return pinned

    def give_way(self) -> None:
        """Before a training step: let a visitor of the boundary go first."""
        self._check_optimizer()
        self._next_step()
        if self.boundary.wanted:
            self.boundary.give_way(self)

    def announce(self, lookups: list[Lookup]) -> None:
        """A coming step has these lookups: its batch may be made ready ahead. Steps are announced in their order."""
        self._check_optimizer()
        with self.lock, uninterrupted():
            self._store()
            self._prefetcher.announce(lookups)

    def gather(self, pinned: PinnedBatch, index: int, weights: Tensor | None) -> Tensor:
        with self.lock:
            self._check_pinned(pinned)
            return self.processor.gather(pinned.core, index, pinned.lookups[index], weights, pinned.dtype)

    def weights_grad(self, pinned: PinnedBatch, index: int, grad: Tensor) -> Tensor:
        with self.lock:
            self._check_pinned(pinned)
            return self.processor.weights_grad(pinned.core, index, pinned.lookups[index], grad)

    def square_gradients(self, pinned: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None]) -> float:
        assert self.optimizer is not None
        gradients = self._gradients(pinned, grads, weights)
        with self.lock:
            self._check_pinned(pinned)
            squares = self.processor.square_gradients(pinned.core, gradients, self.optimizer.rule)
            return float(squares.cpu().numpy().sum(dtype=np.float64))  # NumPy's order depends on no threads

    def update(
        self,
        pinned: PinnedBatch,
        grads: list[Tensor],
        weights: list[Tensor | None],
        scale: float,
        clip_value: float | None,
    ) -> None:
        assert self.optimizer is not None
        rule, step = self.optimizer.rule, self._next_step()
        hyper = self.optimizer.hyper(step, clip_value)
        gradients = self._gradients(pinned, grads, weights)
        self._wait_for_image()
        with self.lock, uninterrupted():
            with self._writing(pinned, step):
                self.processor.set_numbers(rule, hyper, step, scale)
                self.processor.update(pinned.core, gradients, rule)
                self.updated(step, hyper)
                self.lifecycle.written(pinned.core, step)
            if expired := self.lifecycle.expired(step):
                with suppress(StoreError):  # this step was taken: the next call erases them, or says why it cannot
                    self._erase(*expired, "expired")

    @property
    def recorded(self) -> Hashable | None:
        """What the `record_` calls depend on: while it stays, what they launched may be run again.

        None while it may not: a snapshot is being saved in the background, and what changes has to be kept for it.
        """
        if self._image is not None:
            return None
        return self.optimizer and self.optimizer.rule, self._lagging, self._changes

    def record_pin(self, lookups: list[Lookup], dtype: torch.dtype, like: PinnedBatch | None) -> PinnedBatch:
        """The launches of `pin` alone, for a device that records them. What else a step does is `begin_replay`'s."""
        batch = self.processor.batch(lookups, None if like is None else like.core)
        self._opened().pin(batch, self._room)
        self._settle(batch)
        self._pinned = PinnedBatch(self, batch, lookups, dtype)
        return self._pinned

    def record_update(self, pinned: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None]) -> None:
        """Those of `update`."""
        assert self.optimizer is not None
        self._check_pinned(pinned)
        self._before_batch(pinned.core)
        self.processor.update(pinned.core, self._gradients(pinned, grads, weights), self.optimizer.rule)
        self.release()

    def record_peek(self, lookup: Lookup) -> Any:
        """Those of a lookup that only reads, up to what it is read for."""
        batch = self.processor.batch([lookup])
        self._opened().peek(batch)
        self._settle(batch)
        return batch

    def begin_replay(self, trains: bool, clip_value: float | None) -> tuple[int, list[float]]:
        """Before what was recorded runs: what the host does in `pin` and `update`, or in `read`, up to the launches.

        Returns step and numbers for `updated`. Raises what they do, and nothing has changed.
        """
        if trains:
            self.release()
            with self._prefetcher.step(()):
                pass  # a recorded step makes its batch itself
        self._store()
        self._raise_late(wait=False)
        if not trains:
            self._set_numbers()
            return self.step, self.hyper
        assert self.optimizer is not None
        step = self._next_step()
        hyper = self.optimizer.hyper(step, clip_value)
        self._before_write(step)
        self.processor.set_numbers(self.optimizer.rule, hyper, step)
        return step, hyper

    def updated(self, step: int, hyper: list[float]) -> None:
        """An update was launched."""
        self.step, self.hyper = step, hyper
        self.updates += 1

    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write values [n, dim] to the rows of n ids; of a repeated id the last stands. Optimizer state stays."""
        if self.state.names and self.optimizer is None:
            raise OptimizerError(
                f"embedding {self.spec.name!r} is open for reading: its rows carry the state of optimizer "
                f"{self.state.rule}; add that optimizer before put"
            )
        self._wait_for_image()
        with self.lock, uninterrupted():
            pinned = self._pin([lookup], torch.float32, None, is_step=False)
            self.check()
            with self._writing(pinned, self.step):
                if rule := self._lagging:
                    self._set_numbers()
                    self.processor.catch_up(pinned.core, rule)
                self.processor.assign(pinned.core, values, self.step)
                self.lifecycle.written(pinned.core, self.step)

    def delete(self, lookup: Lookup) -> int:
        """Forget the rows of ids, in every tier. Returns how many had been written."""
        self._wait_for_image()
        with self.lock, uninterrupted():
            self.release()
            with self._prefetcher.step(None):
                there = self.processor.count_written(self._peek(lookup))
                self.check()
                if there.any():
                    self._erase(*rows_of(self.spec, lookup), "deleted", there)
                return int(there.sum())

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        with self.lock, uninterrupted():
            pinned, self._pinned = self._pinned, None
            if pinned is not None:
                self._unpin(pinned, dirty=False)

    def _pin(
        self, lookups: list[Lookup], dtype: torch.dtype, like: PinnedBatch | None, is_step: bool = True
    ) -> PinnedBatch:
        self.release()
        self._store()  # what is leaving has left before rows are counted
        with self._prefetcher.step(lookups if is_step else None) as prepared:
            batch = self._batch(lookups, like) if prepared is None else prepared
            step = self.step + is_step
            if victims := self.lifecycle.admit(batch, self.layout, step, training=is_step):
                self._erase(*victims, "evicted")
            self._store().pin(batch, self._room)
        self._pinned = PinnedBatch(self, batch, lookups, dtype)
        return self._pinned

    def _unpin(self, pinned: PinnedBatch, dirty: bool) -> None:
        self._store().unpin(pinned.core, dirty)
        self._prefetcher.ended()

    @property
    def _room(self) -> Room | None:
        """What the store watches: it is the one to count new rows where nothing remembers them."""
        capacity = self.lifecycle.capacity
        if capacity is None or self.lifecycle.remembers:
            return None
        return Room(self.spec.name, capacity, lambda: max(capacity - self.rows, 0))

    def _peek(self, lookup: Lookup) -> Any:
        batch = self._batch([lookup])
        self._store().peek(batch)
        self._set_numbers()
        self._settle(batch)
        return batch

    def _settle(self, batch: Any) -> None:
        """Let lookups of the batch see rows as they are after the last step."""
        if rule := self._lagging:
            self.processor.settle(batch, rule)

    def _set_numbers(self) -> None:
        """Those of the step that comes, where rows may lag."""
        if rule := self._lagging:
            self.processor.set_numbers(rule, self._hyper_now(), self.step + 1)

    @contextmanager
    def _writing(self, pinned: PinnedBatch, step: int) -> Iterator[None]:
        """Around what writes the lines of a pinned batch at `step`; ends the pin."""
        self._check_pinned(pinned)
        with uninterrupted():
            self._before_batch(pinned.core)
            self._before_write(step)
            written = False
            try:
                yield
                written, self._pinned = True, None
                self._unpin(pinned, dirty=True)
            except BaseException as error:
                if written or not isinstance(error, (TypeError, ValueError)):  # those refuse before anything is written
                    # lines, counters and the tiers below may disagree: nothing here may be served or marked clean
                    self.failure, self._pinned = error, None
                raise

    def _check_pinned(self, pinned: PinnedBatch) -> None:
        if pinned is not self._pinned:
            raise StoreError(
                f"embedding {self.spec.name!r}: the batch is no longer pinned: put, delete or a load let its rows go "
                "in the middle of the step; let one thread at a time write to it"
            )

    def _gradients(self, pinned: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None]) -> Gradients:
        for lookup, grad, given in zip(pinned.lookups, grads, weights, strict=True):
            check_grad(self.spec, lookup, grad, pinned.dtype)
            check_weights(self.spec, lookup, given)
        return Gradients(pinned.lookups, grads, weights, pinned.dtype)

    def _check_optimizer(self) -> None:
        if self.optimizer is None:
            raise OptimizerError(f"embedding {self.spec.name!r} has no optimizer; pass its parameters to add_optimizer")

    def _next_step(self) -> int:
        """The step that comes. Raises StoreError where rows could not keep its number."""
        if self.step >= LAST_STEP:
            raise StoreError(
                f"embedding {self.spec.name!r} is of step {self.step}, the last that rows can keep: save a snapshot "
                "and load it with weights_only=True, from where steps and the optimizer's state begin anew"
            )
        return self.step + 1

    def _batch(self, lookups: list[Lookup], like: PinnedBatch | None = None) -> Any:
        self._raise_late(wait=False)
        return self.processor.batch(lookups, None if like is None else like.core)
