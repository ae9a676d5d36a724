"""The open table of an embedding: the path of one batch through its tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ClosedError, OptimizerError, StoreError, TierbedError
from ..lifecycle.lifecycle import Lifecycle
from ..ops.batch import rows_of
from ..ops.exact_sum import partial, total
from ..optim.row_optimizer import RowOptimizer
from ..optim.row_state import RowState
from ..optim.rule import catches_up
from ..options.lookup import Gradients, Lookup, checked_gradients
from ..options.table_spec import TableSpec
from ..processors.processor import Processor
from ..row_format import LAST_STEP, Chunks, Keys, TableIds
from ..signals import uninterrupted
from ..store.contract import CapacityLimit, TopTier
from ..store.rocksdb import RocksDB
from ..store.table_counts import Counts, counted, counted_chunks
from .change_observers import ChangeObservers
from .prefetch import Prefetcher
from .row_scan import checked_rows, locked
from .stack import FIRST_STEP, SmallCaches, Stack
from .step_gate import StepGate


class Steps(Protocol):
    """What a step needs of the table that pinned its rows."""

    lock: RLock
    processor: Processor[Any]
    spec: TableSpec
    watch: ChangeObservers
    refused: bool

    @property
    def rule(self) -> str:
        """The rule that the next update follows. OptimizerError."""

    def check_pinned(self, pinned: PinnedBatch) -> None:
        """Raise StoreError where the rows of the batch were let go."""

    def update(self, pinned: PinnedBatch, gradients: Gradients, scale: float, clip_value: float | None) -> None: ...

    def release(self) -> None: ...


class PinnedBatch:
    """A `Pinned` for the rows of one table. The table's `release` ends the pin as well."""

    def __init__(self, table: Steps, core: Any, lookups: list[Lookup], dtype: torch.dtype) -> None:
        self.core = core  # the processor's batch
        self.lookups = lookups
        self.dtype = dtype
        self.table = table

    def gather(self, index: int, weights: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """The rows of lookup number `index`, or its pooled bags: lookup.shape + (dim,), of `dtype`.

        weights: float32 of the shape of its ids, or None. out: a contiguous tensor of the result's elements, to be
        written and returned.
        """
        with self.table.lock:
            self.table.check_pinned(self)
            return self.table.processor.gather(self.core, index, self.lookups[index], weights, self.dtype, out)

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """The gradient of the weights of lookup number `index`, of the shape of its ids; grad is as its result."""
        with self.table.lock:
            self.table.check_pinned(self)
            return self.table.processor.weights_grad(self.core, index, self.lookups[index], grad)

    def square_gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """The sum of the squares of the gradients of the rows, each summed over its occurrences, as `update` does."""
        return total([self.partial_squares(grads, weights)])

    def partial_squares(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> NDArray[np.int64]:
        """The same as a partial sum of engine/ops/exact_sum.py, to be added to those of other ranks."""
        gradients = self.gradients(grads, weights)
        with self.table.lock:
            self.table.check_pinned(self)
            return partial(self.table.processor.square_gradients(self.core, gradients).cpu().numpy())

    def update(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None] | None = None,
        scale: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        """Apply the optimizer. For each lookup: the gradient of its result, and the weights that it was pooled with.

        A row's summed gradient is multiplied by `scale`, then each element clipped to [-clip_value, clip_value].
        """
        given = weights or [None] * len(self.lookups)
        try:
            self.table.update(self, Gradients(self.lookups, grads, given, self.dtype), scale, clip_value)
        except BaseException as error:
            self.table.refused = True
            if isinstance(error, TypeError | ValueError):
                self.gradients(grads, weights)  # raises InputError for gradients that the processor refused
            raise

    def release(self) -> None:
        """End the pin; the rows stay as they are."""
        self.table.release()

    def gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None) -> Gradients:
        """The gradients of a step, checked. `grads` and `weights` are as in `update`. Raises InputError."""
        given = weights or [None] * len(self.lookups)
        return checked_gradients(self.table.spec, self.lookups, grads, given, self.dtype)


class PendingErase:
    """The erasing of rows from a table. Where a tier has no room to erase, the next call of the table tries again.

    `before_write(step)` is called before a tier is written at that step.
    """

    def __init__(
        self, counts: RowCounts, lifecycle: Lifecycle, watch: ChangeObservers, before_write: Callable[[int], None]
    ) -> None:
        self._counts, self._lifecycle, self._watch, self._before_write = counts, lifecycle, watch, before_write
        self.asked: tuple[TableIds, Keys, Counts, str] | None = None  # the rows to erase: some may be in a tier yet

    def ask(self, tables: TableIds, keys: Keys, there: Counts, cause: str, step: int) -> None:
        """Ask for rows to leave by the next `finish`. there: by table, how many were written. Raises StoreError."""
        self._before_write(step)  # first: where there is no room to write, the rows can still be read
        self.asked = tables, keys, there, cause
        self._counts.leaving = there  # they count as gone

    def prepare(self, step: int) -> None:
        """Tell the watchers of the rows to erase, before any tier changes; `finish` comes next. StoreError."""
        assert self.asked is not None
        self._watch.before_erase(*self.asked[:2])
        self._before_write(step)

    def finish(self, store: TopTier[Any]) -> None:
        """Take the rows out of every tier. After a StoreError some are out, and no tier may be used before all are."""
        assert self.asked is not None
        tables, keys, there, cause = self.asked
        store.erase(tables, keys)
        self._lifecycle.left(tables, keys, there, cause)
        self.asked = self._counts.leaving = None


class RowCounts:
    """The number of rows in each table of an embedding: rows that were written and did not leave since.

    `stored_rows` is the number at the opening. `stored` is the same by table, or None where it is not known by table.
    `leaving` is the number by table of rows that are being erased, or None.
    """

    def __init__(self, num_tables: int, processor: Processor[Any], lifecycle: Lifecycle) -> None:
        self._num_tables, self._processor, self._lifecycle = num_tables, processor, lifecycle
        self.stored_rows = 0
        self.stored: Counts | None = np.zeros(num_tables, np.int64)
        self.leaving: Counts | None = None

    @property
    def rows(self) -> int:
        """How many rows there are, all tables together; may wait for the device."""
        return self.stored_rows + int(self._change.sum())

    @property
    def known_by_table(self) -> Counts | None:
        """How many rows each table has, where it is known without a scan."""
        return None if self.stored is None else self.stored + self._change

    def by_table(self, scan: Callable[[], Chunks]) -> Counts:
        """How many rows each table has; all are scanned once where that is not known. StoreError, SnapshotError."""
        if self.stored is None:
            chunks = checked_rows(scan(), self._num_tables)
            self.stored = counted_chunks(chunks, self._num_tables) - self._change
        return self.stored + self._change

    @property
    def _change(self) -> Counts:
        """How many rows of each table came since it was opened and did not leave."""
        leaving = self.leaving  # read once: another thread may change it, since `status` holds no lock
        change = self._processor.written - self._lifecycle.gone
        return change if leaving is None else change - leaving


def unique_rows(table: OpenTable, lookups: list[Lookup]) -> Lookup:
    """A lookup of the rows of a coming call, each once. InputError for ids that the host finds wrong."""
    with table.lock:
        table.opened()
        return table.processor.unique_rows(table.processor.batch(lookups, ahead=True))


def sum_gradients(
    table: OpenTable, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None], dtype: torch.dtype
) -> tuple[Lookup, Tensor]:
    """The rows of a call [n], each once, and the gradient [n, dim] float32 of each; dtype: of `grads`. InputError."""
    gradients = checked_gradients(table.spec, lookups, grads, weights, dtype)
    with table.lock:
        table.opened()
        batch = table.processor.batch(lookups)
        return table.processor.unique_rows(batch), table.processor.sum_gradients(batch, gradients)


def square_gradients(
    table: OpenTable, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None], dtype: torch.dtype
) -> float:
    """The sum of the squares of the gradients of all rows, as that of a pinned batch; dtype: of `grads`. InputError."""
    gradients = checked_gradients(table.spec, lookups, grads, weights, dtype)
    with table.lock:
        table.opened()
        batch = table.processor.batch(lookups)
        return total([partial(table.processor.square_gradients(batch, gradients).cpu().numpy())])


class OpenTable:
    """Rows in a stack of tiers, used on a processor, a batch at a time.

    `step` counts the updates of the whole table. `state` is what rows carry beside the embedding, `form` of which
    numbers they are made; `optimizer` is None
    where the table is open for reading and `put` alone. `before_write(step)`, if there is one, is called before each
    write of that step.
    """

    def __init__(
        self,
        spec: TableSpec,
        processor: Processor[Any],
        stack: Stack,
        state: RowState,
        lifecycle: Lifecycle,
        before_write: Callable[[int], None] | None,
        io_threads: int,
    ) -> None:
        self.spec, self.state, self.form = spec, state, spec.form(state)
        self.processor, self.layout = processor, processor.layout
        self.stack: Stack | None = stack
        self.hyper: list[float] = []  # the rule's numbers at its last update; empty before its first
        self.optimizer: RowOptimizer | None = None
        self.step = 0
        self.updates = 0  # how many the processor was asked for
        self.failure: BaseException | None = None  # what left the rows in doubt
        self.lifecycle = lifecycle
        self.before_write = before_write or (lambda step: None)
        self._pinned: PinnedBatch | None = None
        self.refused = False  # whether an update of the pinned rows raised
        self.prefetcher: Prefetcher | None = None  # from the first announcement on
        self._io_threads = io_threads
        self.visitors_error: TierbedError | None = None  # found by a visitor between steps, raised by the next call
        self.between_steps = StepGate()
        self.lock = RLock()  # native loops let other threads of Python run
        self.counts = RowCounts(spec.num_tables, processor, lifecycle)
        self.watch = ChangeObservers(spec.name, stack, self.form.dtype, self.lock, self.use, self.check)
        self._erasure = PendingErase(self.counts, lifecycle, self.watch, self.before_write)
        self.small_caches = SmallCaches(spec.name)
        self._next_look = FIRST_STEP  # the step that does what few steps do

    @property
    def is_lost(self) -> bool:
        """Whether a call that failed in the middle left rows in doubt: they are never marked clean."""
        bottom = None if self.stack is None else self.stack.bottom
        return self.failure is not None or (isinstance(bottom, RocksDB) and bottom.failed)

    @property
    def in_step(self) -> bool:
        return self._pinned is not None

    @property
    def rule(self) -> str:
        """The rule that the next update follows. OptimizerError."""
        return self.check_optimizer().rule

    def describe(self) -> dict[str, Any]:
        return self.spec.describe(self.state, self.hyper, self.step)

    def scan(self) -> Chunks:
        """Every written row of `form`, as `Tier.scan`. ClosedError if the table is closed or replaced on the way."""
        yield from self.form.of_words(locked(self.use().scan(), self.lock, self.use))

    def flush(self) -> None:
        with self.lock, uninterrupted():
            self.use().flush()

    @property
    def has_thread(self) -> bool:
        """Whether a thread makes announced batches ready."""
        return self.prefetcher is not None and self.prefetcher.has_thread

    def rest(self) -> None:
        """Forget announced batches, and end the thread that makes them ready."""
        with self.lock, uninterrupted():
            if self.prefetcher is not None:
                self.prefetcher.close()

    def close(self) -> None:
        """Release memory and files without flushing. May be called again."""
        with self.lock, uninterrupted():
            stack, self.stack, self._pinned = self.stack, None, None
            if stack is not None:
                self.watch.close()
                self.rest()
                stack.top.close()

    def check(self, wait: bool = True) -> None:
        """Raise the error of an earlier call, as `deferred_error` returns it. InputError, CapacityError."""
        if (error := self.deferred_error(wait)) is not None:
            raise error

    def deferred_error(self, wait: bool) -> TierbedError | None:
        """The error of an earlier call, found late and given once; with `wait`, of any. Steps since changed nothing."""
        visitors_error, self.visitors_error = self.visitors_error, None
        late = self.processor.deferred_error(wait) if self.processor.defers_errors and visitors_error is None else None
        if late is None:
            return visitors_error
        undone, self.updates = self.updates - late.taken, late.taken
        self.step -= undone
        if undone and self.optimizer is not None:
            self.hyper = self.optimizer.hyper(self.step) if self.step else []
        return late.error

    def _erase(self, tables: TableIds, keys: Keys, cause: str, there: Counts | None = None) -> None:
        """Take rows out of every tier. there: by table, how many were written; None where all were.

        After a StoreError either all rows are there, or the next call takes the rest out before it uses a tier.
        """
        there = counted(tables, self.spec.num_tables) if there is None else there
        self._erasure.ask(tables, keys, there, cause, self.step)
        self.use()

    def use(self) -> TopTier[Any]:
        """The top of the stack, once all rows that are to leave have left. ClosedError, StoreError."""
        store = self.opened()
        if self._erasure.asked is not None:
            with uninterrupted():
                self._erasure.prepare(self.step)
                try:
                    self._erasure.finish(store)
                except StoreError:
                    raise  # erased again by the next call
                except BaseException as error:
                    self.failure = error
                    raise
        return store

    def opened(self) -> TopTier[Any]:
        if self.stack is None:
            raise ClosedError(f"embedding {self.spec.name!r} was closed or its rows were replaced; use it anew")
        if self.failure is not None:
            raise StoreError(
                f"embedding {self.spec.name!r} failed in the middle of a write ({self.failure!r}); load a snapshot, "
                "or create it again: with a persistent_path it goes back to its last snapshot"
            ) from self.failure
        return self.stack.top

    @property
    def lagging(self) -> str | None:
        """The rule, where rows may be behind the last step until their next use; else None."""
        return self.state.rule if self.hyper and catches_up(self.state.rule) else None

    def hyper_now(self) -> list[float]:
        return self.hyper if self.optimizer is None else self.optimizer.hyper(self.step + 1)

    def read(self, lookup: Lookup, weights: Tensor | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
        """Rows of ids, or pooled bags of them: lookup.shape + (dim,). Unknown rows are initial and stay unknown."""
        with self.lock:
            batch = self._peek(lookup)
            return self.processor.gather(batch, 0, lookup, weights, dtype)

    def get(self, lookup: Lookup) -> Tensor:
        """As `read`, after a wait for the errors that the processor finds late."""
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
        first. Raises CapacityError and pins nothing where new rows do not fit.
        """
        self.give_way()
        with self.lock, uninterrupted():
            pinned = self._pin(lookups, dtype, like)
            if self.lagging:
                self.set_numbers()
                self.settle(pinned.core)
            return pinned

    def give_way(self) -> None:
        """Before a training step: let a visitor go first."""
        self.check_optimizer()
        self.next_step()
        if self.between_steps.wanted:
            self.between_steps.give_way(self)

    def announce(self, lookups: list[Lookup]) -> None:
        """Announce a coming step by its lookups, so that it may be made ready ahead. Steps are announced in order."""
        self.check_optimizer()
        with self.lock, uninterrupted():
            store = self.use()
            if self.prefetcher is None:
                self.prefetcher = Prefetcher(self.processor, store, self._io_threads)
            self.prefetcher.announce(lookups)

    def update(self, pinned: PinnedBatch, gradients: Gradients, scale: float, clip_value: float | None) -> None:
        """Apply the optimizer to the rows of a batch, and end its pin."""
        optimizer, step = self.check_optimizer(), self.next_step()
        rule, hyper = optimizer.rule, optimizer.hyper(step, clip_value)
        self._wait_for_room()
        with self.lock, uninterrupted():
            with self._writing(pinned, step):
                self.processor.set_numbers(rule, hyper, step, scale)
                self.processor.update(pinned.core, gradients, rule)
                self.updated(step, hyper)
                if self.lifecycle.remembers:
                    self.lifecycle.written(pinned.core, step)
            if self.lifecycle.remembers and (expired := self.lifecycle.expired(step)):
                with suppress(StoreError):  # this step was taken: the next call erases them, or says why it cannot
                    self._erase(*expired, "expired")

    def updated(self, step: int, hyper: list[float]) -> None:
        """Note that the update of a step was launched. hyper: the rule's numbers in it."""
        self.step, self.hyper = step, hyper
        self.updates += 1

    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write values [n, dim] to the rows of n ids; of a repeated id the last stands. Optimizer state stays."""
        if self.state.names and self.optimizer is None:
            raise OptimizerError(
                f"embedding {self.spec.name!r} is open for reading: its rows carry the state of optimizer "
                f"{self.state.rule}; add that optimizer before put"
            )
        self._wait_for_room()
        with self.lock, uninterrupted():
            pinned = self._pin([lookup], torch.float32, None, is_step=False)
            self.check()
            with self._writing(pinned, self.step):
                if rule := self.lagging:
                    self.set_numbers()
                    self.processor.catch_up(pinned.core, rule)
                self.processor.assign(pinned.core, values, self.step)
                if self.lifecycle.remembers:
                    self.lifecycle.written(pinned.core, self.step)

    def delete(self, lookup: Lookup) -> int:
        """Forget the rows of ids, in every tier. Returns how many had been written."""
        self._wait_for_room()
        with self.lock, uninterrupted():
            self.release()
            with self.announced(None):
                there = self.count_written(lookup)
                if there.any():
                    self._erase(*rows_of(self.spec, lookup), "deleted", there)
                return int(there.sum())

    def count_written(self, lookup: Lookup) -> Counts:
        """How many rows of ids were ever written, by table."""
        with self.lock:
            there = self.processor.count_written(self._peek(lookup))
            self.check()
            return there

    def release(self) -> None:
        """Drop the pin that a failed step left."""
        with self.lock, uninterrupted():
            self._release()

    def _release(self) -> None:
        pinned, self._pinned, self.refused = self._pinned, None, False
        if pinned is not None:
            self._unpin(pinned, dirty=False)

    def _pin(
        self, lookups: list[Lookup], dtype: torch.dtype, like: PinnedBatch | None, is_step: bool = True
    ) -> PinnedBatch:
        self._release()
        self.use()  # what is leaving has left before rows are counted
        with self.announced(lookups if is_step else None) as prepared:
            batch = self._batch(lookups, like) if prepared is None else prepared
            step = self.step + is_step
            if self.lifecycle.remembers and (victims := self.lifecycle.admit(batch, self.layout, step, is_step)):
                self._erase(*victims, "evicted")
            self.use().pin(batch, self.room)
        return self.hold(batch, lookups, dtype)

    def hold(self, batch: Any, lookups: list[Lookup], dtype: torch.dtype) -> PinnedBatch:
        """The step's hold on a batch whose rows are up."""
        self._pinned = PinnedBatch(self, batch, lookups, dtype)
        return self._pinned

    def announced(self, lookups: Sequence[Lookup] | None) -> AbstractContextManager[Any]:
        """A block that pins the rows of a step, as `Prefetcher.step`."""
        return nullcontext() if self.prefetcher is None else self.prefetcher.step(lookups)

    def _wait_for_room(self) -> None:
        if self.watch.watches:
            self.watch.wait_for_room()

    def _unpin(self, pinned: PinnedBatch, dirty: bool) -> None:
        self.use().unpin(pinned.core, dirty)
        if self.prefetcher is not None:
            self.prefetcher.ended()

    @property
    def room(self) -> CapacityLimit | None:
        """The room that the store checks; None without a capacity, and where the lifecycle checks it."""
        capacity = self.lifecycle.capacity
        if capacity is None or self.lifecycle.remembers:
            return None
        return CapacityLimit(self.spec.name, capacity, lambda: max(capacity - self.counts.rows, 0))

    def _peek(self, lookup: Lookup) -> Any:
        batch = self._batch([lookup])
        self.use().peek(batch)
        if self.lagging:
            self.set_numbers()
            self.settle(batch)
        return batch

    def settle(self, batch: Any) -> None:
        """Let lookups of the batch see rows as they are after the last step."""
        if rule := self.lagging:
            self.processor.settle(batch, rule)

    def set_numbers(self) -> None:
        """Give the processor the rule's numbers of the coming step, where rows may be behind."""
        if rule := self.lagging:
            self.processor.set_numbers(rule, self.hyper_now(), self.step + 1)

    @contextmanager
    def _writing(self, pinned: PinnedBatch, step: int) -> Iterator[None]:
        """A block that writes the lines of a pinned batch at `step`, with signals held. Ends the pin."""
        self.check_pinned(pinned)
        if self.watch.watches:
            self.watch.before_batch(pinned.core)
        self.before_write(step)
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

    def check_pinned(self, pinned: PinnedBatch) -> None:
        if pinned is not self._pinned:
            raise StoreError(
                f"embedding {self.spec.name!r}: the batch is no longer pinned: put, delete or a load let its rows go "
                "in the middle of the step; let one thread at a time write to it"
            )

    def check_optimizer(self) -> RowOptimizer:
        """The optimizer of the rows. Raises OptimizerError where the table has none."""
        if self.optimizer is None:
            raise OptimizerError(f"embedding {self.spec.name!r} has no optimizer; pass its parameters to add_optimizer")
        return self.optimizer

    def next_step(self) -> int:
        """The step that comes. Raises StoreError where rows could not keep its number."""
        if self.step >= self._next_look:
            self._look()
        return self.step + 1

    def _look(self) -> None:
        """Do what few steps do: refuse the step after the last, and warn of a cache that is too small."""
        if self.step >= LAST_STEP:
            raise StoreError(
                f"embedding {self.spec.name!r} is of step {self.step}, the last that rows can keep: save a snapshot "
                "and load it with weights_only=True, from where steps and the optimizer's state begin anew"
            )
        with self.lock, suppress(StoreError):  # a store that failed raises where its rows are needed
            tiers = self.opened().metrics()
            self.small_caches.judge(tiers)
            self._next_look = min(2 * self.step, LAST_STEP) if len(tiers) > 1 else LAST_STEP

    def _batch(self, lookups: list[Lookup], like: PinnedBatch | None = None) -> Any:
        self.check(wait=False)
        return self.processor.batch(lookups, None if like is None else like.core)
