"""The open table of an embedding: its tiers, the rows' layout, the step, and the way of one batch through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import _core
from .errors import ClosedError, OptimizerError, StoreError, TierbedError
from .inputs import Lookup, check_grad, check_weights
from .interrupts import uninterrupted
from .lifecycle import Lifecycle
from .optim.rule import catches_up
from .pinned import PinnedBatch
from .prefetch import Prefetcher
from .scanned import line_addresses
from .segments import rows_of
from .store.contract import Chunks, Keys, Room, Store, Tables
from .store.stack import Stack

if TYPE_CHECKING:
    from .ops.processor import Processor
    from .optimizers import RowOptimizer
    from .row_state import RowState
    from .spec import TableSpec


class OpenTable:
    """Rows in a stack of tiers, used on a processor.

    `stored_rows` were there when it was opened; `step` counts the updates of the whole table. `state` is what rows
    carry beside the embedding; `optimizer` is None where the table is open for reading and `put` alone. `before_write`
    is told, before each write, the step that it is of.
    """

    def __init__(
        self,
        spec: TableSpec,
        processor: Processor[Any],
        stack: Stack,
        state: RowState,
        lifecycle: Lifecycle,
        before_write: Callable[[int], None],
        io_threads: int,
    ) -> None:
        self.spec = spec
        self.processor = processor
        self.layout = processor.layout
        self.stack: Stack | None = stack
        self.state = state
        self.hyper: list[float] = []  # the rule's numbers at its last update; empty before its first
        self.optimizer: RowOptimizer | None = None
        self.stored_rows = 0
        self.step = 0
        self.failure: BaseException | None = None  # what left the rows in doubt
        self.lifecycle = lifecycle
        self._leaving: tuple[Tables, Keys, int, str] | None = None  # what `_erase` was told and has not finished
        self._before_write = before_write
        self._pinned: PinnedBatch | None = None
        self._prefetcher = Prefetcher(processor, stack.top, io_threads)
        self.lock = RLock()  # native loops let other threads of Python run

    @property
    def rows(self) -> int:
        """How many were written so far and did not leave; may wait for the device."""
        return self.stored_rows + self.processor.written - self.lifecycle.gone

    def describe(self) -> dict[str, Any]:
        return self.spec.describe(self.state, self.hyper, self.step)

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

    def pin(self, lookups: list[Lookup], dtype: torch.dtype = torch.float32) -> PinnedBatch:
        """Deduplicate the ids, bring their rows up and pin them. `dtype`: of what is gathered, and of gradients.

        Raises CapacityError and pins nothing where they do not fit.
        """
        self._check_optimizer()
        with self.lock, uninterrupted():
            pinned = self._pin(lookups, dtype)
            self._settle(pinned.core)
            return pinned

    def announce(self, lookups: list[Lookup]) -> None:
        """A coming step has these lookups: its batch may be made ready ahead. Steps are announced in their order."""
        self._check_optimizer()
        with self.lock, uninterrupted():
            self._store()
            if self.processor.ahead:
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
        self._check_grads(pinned, grads, weights)
        rule = self.optimizer.rule
        with self.lock:
            self._check_pinned(pinned)
            squares = self.processor.square_gradients(pinned.core, pinned.lookups, grads, weights, pinned.dtype, rule)
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
        step = self.step + 1
        hyper = self.optimizer.hyper(step, clip_value)
        self._check_grads(pinned, grads, weights)
        rule = self.optimizer.rule
        with self.lock, uninterrupted():
            with self._writing(pinned, step):
                self.processor.update(
                    pinned.core, pinned.lookups, grads, weights, pinned.dtype, rule, hyper, step, scale
                )
                self.step, self.hyper = step, hyper
                self.lifecycle.written(pinned.core, step)
            if expired := self.lifecycle.expired(step):
                with suppress(StoreError):  # this step was taken: the next call erases them, or says why it cannot
                    self._erase(*expired, "expired")

    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write values [n, dim] to the rows of n ids; of a repeated id the last stands. Optimizer state stays."""
        if self.state.names and self.optimizer is None:
            raise OptimizerError(
                f"embedding {self.spec.name!r} is open for reading: its rows carry the state of optimizer "
                f"{self.state.rule}; add that optimizer before put"
            )
        with self.lock, uninterrupted():
            pinned = self._pin([lookup], torch.float32, is_step=False)
            self.check()
            with self._writing(pinned, self.step):
                if rule := self._lagging:
                    self.processor.catch_up(pinned.core, rule, self._hyper_now(), self.step + 1)
                self.processor.assign(pinned.core, values, self.step)
                self.lifecycle.written(pinned.core, self.step)

    def delete(self, lookup: Lookup) -> int:
        """Forget the rows of ids, in every tier. Returns how many had been written."""
        with self.lock, uninterrupted():
            self.release()
            with self._prefetcher.step(None):
                count = self.processor.count_written(self._peek(lookup))
                self.check()
                if count:
                    self._erase(*rows_of(self.spec, lookup), "deleted", count)
                return count

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        with self.lock, uninterrupted():
            pinned, self._pinned = self._pinned, None
            if pinned is not None:
                self._unpin(pinned, dirty=False)

    def scan(self) -> Chunks:
        """Every written row, as `Tier.scan`. Raises ClosedError if the table is closed or replaced on the way."""
        chunks = self._store().scan()
        while True:
            with self.lock, uninterrupted():
                self._store()
                chunk = next(chunks, None)
            if chunk is None:
                return
            yield chunk

    def settled(self) -> Chunks:
        """`scan`, with every row as it is after the last step, where rows catch up late."""
        for bucket, rows in self.scan():
            if rule := self._lagging:
                rows = rows.copy()
                with self.lock:
                    _core.catch_up(self.layout, line_addresses(rows), rule, self._hyper_now(), self.step + 1)
            yield bucket, rows

    def flush(self) -> None:
        with self.lock, uninterrupted():
            self._store().flush()

    def compact(self) -> None:
        with self.lock, uninterrupted():
            self._store()
            assert self.stack is not None
            self.stack.compact()

    @property
    def has_thread(self) -> bool:
        """Whether one makes announced batches ready."""
        return self._prefetcher.has_thread

    def rest(self) -> None:
        """Forget announced batches, and end the thread that makes them ready."""
        with self.lock, uninterrupted():
            self._prefetcher.close()

    def close(self) -> None:
        """Release memory and files without flushing. May be called again."""
        with self.lock, uninterrupted():
            stack, self.stack, self._pinned = self.stack, None, None
            if stack is not None:
                self._prefetcher.close()
                stack.top.close()

    def metrics(self) -> dict[str, dict[str, float]]:
        with self.lock:
            store = self._opened()
            self.check()
            counts = {**self.lifecycle.metrics, **self._prefetcher.counts}
            return {"table": {"rows": self.rows, "step": self.step, **counts}, **store.metrics()}

    def where(self, lookup: Lookup) -> tuple[list[dict[str, Any]], str | None]:
        """Where the row of one id is, `Level.where`, and why it is not stored; None where it is. Changes nothing."""
        with self.lock:
            store = self._store()
            self.check()
            tables, keys = rows_of(self.spec, lookup)
            if not len(keys):
                return [], f"padding_idx={self.spec.padding_idx} is no row"
            tiers = store.where(int(tables[0]), int(keys[0]))
            if not tiers:
                return [], self.lifecycle.why_absent()
            return tiers, None if tiers[0]["updates"] else "brought up for a step that has not written it"

    def check(self) -> None:
        """Wait for the processor, and raise what an earlier call did wrong. InputError, CapacityError."""
        self._raise_late(wait=True)

    def late_error(self, wait: bool) -> TierbedError | None:
        """What an earlier call did wrong and the processor found late, once; the steps since did not happen."""
        late = self.processor.late(wait)
        if late is None:
            return None
        self.step -= late.undone
        if late.undone and self.optimizer is not None:
            self.hyper = self.optimizer.hyper(self.step) if self.step else []
        return late.error

    def _raise_late(self, wait: bool) -> None:
        error = self.late_error(wait)
        if error is not None:
            raise error

    def _pin(self, lookups: list[Lookup], dtype: torch.dtype, is_step: bool = True) -> PinnedBatch:
        self.release()
        self._store()  # what is leaving has left before rows are counted
        with self._prefetcher.step(lookups if is_step else None) as prepared:
            batch = self._batch(lookups) if prepared is None else prepared
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

    def _erase(self, tables: Tables, keys: Keys, cause: str, count: int | None = None) -> None:
        """Take rows out of every tier; `count` of them had been written, all where it is None.

        Where StoreError is raised, some may be out and some not: no tier is used before the rest is out as well.
        """
        self._leaving = tables, keys, len(keys) if count is None else count, cause
        self._store()

    def _finish_erase(self, store: Store[Any], tables: Tables, keys: Keys, count: int, cause: str) -> None:
        with uninterrupted():
            self._before_write(self.step)
            try:
                store.erase(tables, keys)
                self.lifecycle.left(tables, keys, count, cause)
                self._leaving = None
            except StoreError:
                raise  # erased again by the next call
            except BaseException as error:
                self.failure = error
                raise

    def _peek(self, lookup: Lookup) -> Any:
        batch = self._batch([lookup])
        self._store().peek(batch)
        self._settle(batch)
        return batch

    @property
    def _lagging(self) -> str | None:
        """The rule, where rows may lack steps that they take when they are next used."""
        return self.state.rule if self.hyper and catches_up(self.state.rule) else None

    def _settle(self, batch: Any) -> None:
        """Let lookups of the batch see rows as they are after the last step."""
        if rule := self._lagging:
            self.processor.settle(batch, rule, self._hyper_now(), self.step + 1)

    def _hyper_now(self) -> list[float]:
        return self.hyper if self.optimizer is None else self.optimizer.hyper(self.step + 1)

    @contextmanager
    def _writing(self, pinned: PinnedBatch, step: int) -> Iterator[None]:
        """Around what writes the lines of a pinned batch at `step`; ends the pin."""
        self._check_pinned(pinned)
        with uninterrupted():
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
            raise StoreError(f"embedding {self.spec.name!r}: the batch is no longer pinned; prefetch it again")

    def _check_grads(self, pinned: PinnedBatch, grads: list[Tensor], weights: list[Tensor | None]) -> None:
        for lookup, grad, given in zip(pinned.lookups, grads, weights, strict=True):
            check_grad(self.spec, lookup, grad, pinned.dtype)
            check_weights(self.spec, lookup, given)

    def _check_optimizer(self) -> None:
        if self.optimizer is None:
            raise OptimizerError(f"embedding {self.spec.name!r} has no optimizer; pass its parameters to add_optimizer")

    def _store(self) -> Store[Any]:
        store = self._opened()
        if self._leaving is not None:
            self._finish_erase(store, *self._leaving)
        return store

    def _opened(self) -> Store[Any]:
        if self.stack is None:
            raise ClosedError(f"embedding {self.spec.name!r} was closed or its rows were replaced; use it anew")
        if self.failure is not None:
            raise StoreError(
                f"embedding {self.spec.name!r} failed in the middle of a write ({self.failure!r}); create it again: "
                "with a persistent_path it goes back to its last snapshot"
            ) from self.failure
        return self.stack.top

    def _batch(self, lookups: list[Lookup]) -> Any:
        self._raise_late(wait=False)
        return self.processor.batch(lookups)
