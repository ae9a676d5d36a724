"""An embedding's open table passes batches through its tiers.

A training step makes three calls. `pin` deduplicates ids, fetches their rows into the top tier and pins the rows there.
(If the prefetcher has prepared the batch, `pin` uses it.) `PinnedBatch.gather` copies rows or pooled bags into tensors.
`PinnedBatch.update` applies the optimizer to the rows and unpins the rows. The lifecycle decides which new rows to keep
and which rows to delete. Snapshots need observers: the table notifies its observers before rows change. A GPU runs
asynchronously, so a later call raises the input errors that kernels find (deferred errors).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from threading import RLock
from time import sleep
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..cache.cache_tier import CpuCacheTier
from ..errors import ClosedError, OptimizerError, StoreError, TierbedError
from ..lifecycle.lifecycle import Lifecycle
from ..ops.batch import Gradients, check_gradients, find_unique_rows
from ..ops.exact_sum import PartialSum, add_partial_sums, compute_partial_sum
from ..optim.row_optimizer import RowOptimizer
from ..optim.row_state import RowState
from ..optim.rule import needs_catch_up
from ..options.lookup import Lookup
from ..options.table_spec import ID_LIMITS_FIELD, RUN_ID_FIELD, TableSpec
from ..processors.processor import Processor
from ..row_format import MAX_STEP, Chunks, Keys, TableIds
from ..signals import defer_signals
from ..store.interfaces import CapacityLimit, TopTier
from ..store.rocksdb import RocksDB
from ..store.table_counts import Counts, count_by_table
from .change_observers import ChangeObservers
from .prefetch import Prefetcher
from .row_counts import RowCounts
from .row_scan import iterate_locked, scan_table
from .stack import FIRST_CHECK_STEP, SmallCacheDetector, Stack
from .step_gate import StepGate

_PAUSE_SECONDS = 0.0005  # how long `flush_ahead` leaves the lock to other threads
_NO_PREFETCHER = nullcontext()


class RowsReplacedError(ClosedError):
    """A load replaced the rows while a call waited. A read-only call is repeated with the new rows."""


class PinnedBatch:
    """The unique rows of all lookups in a step, pinned in the top tier until `update` or `release`."""

    def __init__(self, table: OpenTable, batch: Any, lookups: list[Lookup], dtype: torch.dtype) -> None:
        """`batch` is the processor's batch; gathered rows have `dtype`."""
        self.table, self.batch, self.lookups, self.dtype = table, batch, lookups, dtype

    def gather(self, index: int, weights: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Returns the rows or pooled bags of lookup number `index`: [*lookup.shape, dim], in `dtype`.

        `weights` are float32 in the shape of the ids. `out` may be a contiguous tensor to write the result to.
        """
        with self.table.lock:
            self.table.check_pinned(self)
            return self.table.processor.gather(self.batch, index, self.lookups[index], weights, self.dtype, out)

    def weights_grad(self, index: int, grad: Tensor) -> Tensor:
        """Returns the gradient of the weights, in the ids' shape. grad: the gradient of what `gather` returned."""
        with self.table.lock:
            self.table.check_pinned(self)
            return self.table.processor.weights_grad(self.batch, index, self.lookups[index], grad)

    def compute_squared_norm(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> float:
        """Returns the sum of squared row gradients. A row's gradients are summed before they are squared."""
        return add_partial_sums([self.compute_squared_norm_part(grads, weights)])

    def compute_squared_norm_part(self, grads: list[Tensor], weights: list[Tensor | None] | None = None) -> PartialSum:
        """Returns `compute_squared_norm` as a partial sum (engine/ops/exact_sum.py) that other ranks can add to."""
        gradients = self.check_gradients(grads, weights)
        with self.table.lock:
            self.table.check_pinned(self)
            return compute_partial_sum(self.table.processor.compute_squared_norms(self.batch, gradients).cpu().numpy())

    def update(
        self,
        grads: list[Tensor],
        weights: list[Tensor | None] | None = None,
        scale: float = 1.0,
        clip_value: float | None = None,
    ) -> None:
        """Apply the optimizer and unpin the rows.

        `grads` holds the gradient of each lookup's result. `weights` holds the weights that pooled this result. A row's
        summed gradient is multiplied by `scale`. Then each element is clipped to [-clip_value, clip_value].
        """
        try:
            self.table.update(self, self.check_gradients(grads, weights), scale, clip_value)
        except BaseException:
            self.table.mark_update_failed()
            raise

    def unpin_rows(self) -> None:
        """Unpin the rows without changing them."""
        self.table.unpin_rows()

    def check_gradients(self, grads: list[Tensor], weights: list[Tensor | None] | None) -> Gradients:
        """Check the arguments `grads` and `weights` of `update`. Raises InputError."""
        weights = weights or [None] * len(self.lookups)
        return check_gradients(self.table.spec, self.lookups, grads, weights, self.dtype)


class OpenTable:
    """An embedding's rows in a stack of tiers. `before_write(step)` is called before each write at that step."""

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
        self.spec, self.state, self.row_format = spec, state, spec.make_row_format(state)
        self.processor, self.layout = processor, processor.layout
        self.stack: Stack | None = stack
        self.hyperparams: list[float] = []  # the rule's numbers at the table's last update; empty before it
        self.optimizer: RowOptimizer | None = None  # None if the table allows reads and `put`, but no training
        self.step = 0  # counts the table's updates
        self.run_id = ""  # a random id; a table that starts without rows gets a new one
        self.id_limits = spec.read_id_limits(None)
        self.num_updates = 0  # the number of updates launched on the processor
        self.num_scans = 0  # the number of calls of `scan` in progress
        self.failure: BaseException | None = None  # the error that left the rows inconsistent
        self.is_replaced = False  # another table has replaced this one in the embedding
        self.last_metrics: dict[str, dict[str, Any]] | None = None  # returned while another thread holds the lock
        self.lifecycle, self._io_threads = lifecycle, io_threads
        self.before_write = before_write or (lambda step: None)
        self._pinned: PinnedBatch | None = None
        self.has_failed_update = False  # True if an update of the pinned rows raised
        self.prefetcher: Prefetcher | None = None  # made by the first announcement
        self.reader_error: TierbedError | None = None  # a reader's error, which the next call raises
        self.step_gate = StepGate()
        self.lock = RLock()  # needed because native loops release the interpreter lock
        self.counts, self.observers = RowCounts(spec.num_tables, processor, lifecycle), ChangeObservers(self)
        self.on_close: Callable[[], None] = lambda: None  # called before the tiers close
        # rows to erase that tiers may still hold, as (table ids, keys, row count of each table, reason to erase them)
        self.pending_erasure: tuple[TableIds, Keys, Counts, str] | None = None
        self.small_cache_detector = SmallCacheDetector(spec.name)
        self._next_check_step = FIRST_CHECK_STEP

    @property
    def is_inconsistent(self) -> bool:
        """True if rows are inconsistent because a call failed halfway. Inconsistent rows get no clean marker."""
        bottom = None if self.stack is None else self.stack.bottom
        return self.failure is not None or (isinstance(bottom, RocksDB) and bottom.has_failed)

    @property
    def is_in_step(self) -> bool:
        return self._pinned is not None

    @property
    def rule(self) -> str:
        """The rule of the next update. Raises OptimizerError if there is no optimizer."""
        return self.require_optimizer().rule

    def start(self, optimizer: RowOptimizer | None, run_id: str, stored: Mapping[str, Any] | None) -> None:
        """Set the optimizer and the run id. If `stored` describes existing rows, restore their step and row counts."""
        self.optimizer, self.run_id = optimizer, run_id
        if stored is not None:
            self.id_limits, self.step = self.spec.read_id_limits(stored), stored["step"]
            self.counts.set_initial_rows(stored["rows"])
            self.hyperparams = stored["hyper"] if stored["optimizer"] == self.state.rule else []

    def use_optimizer(self, optimizer: RowOptimizer, state: RowState) -> None:
        """Switch to another optimizer. The rows must have room for that optimizer's state."""
        self.optimizer, self.state = optimizer, state

    def reset_id_limits(self) -> None:
        """Use the spec's id limits. The caller has checked that no stored id exceeds these limits."""
        self.id_limits = self.spec.read_id_limits(None)

    def rename(self, name: str) -> None:
        self.spec = replace(self.spec, name=name)

    def set_step_gate(self, gate: StepGate) -> None:
        """Use the training group's gate, so steps also wait for readers of the group's other tables."""
        self.step_gate = gate

    def mark_replaced(self) -> None:
        """Record that another table has replaced this one in the embedding."""
        self.is_replaced = True

    def describe(self) -> dict[str, Any]:
        limits = {} if self.spec.max_ids is None else {ID_LIMITS_FIELD: self.id_limits}
        return {**self.spec.describe(self.state, self.hyperparams, self.step), RUN_ID_FIELD: self.run_id, **limits}

    def scan(self) -> Chunks:
        """Yield all written rows, in the order of `Tier.scan`. Raises ClosedError if the table is closed meanwhile.

        If a load replaces the rows, a scan in memory continues with the old rows, but a scan of RocksDB raises.
        """
        yield from scan_table(self)

    def flush(self) -> None:
        with self.lock, defer_signals():
            self.prepare_top_tier().flush()

    def flush_ahead(self) -> None:
        """Flush most rows in parts, so that a later `flush` is short. Other threads may use the table between parts."""
        with suppress(RowsReplacedError):  # `flush` will flush the new rows
            top_tier = self.prepare_top_tier()
            if isinstance(top_tier, CpuCacheTier):
                for _ in iterate_locked(top_tier.flush_pieces(), self.lock, self.finish_erasures):
                    sleep(_PAUSE_SECONDS)  # the lock is not fair: without a pause, other threads would not get it

    @property
    def has_thread(self) -> bool:
        return self.prefetcher is not None and self.prefetcher.has_thread

    def stop_prefetch(self) -> None:
        with self.lock, defer_signals():
            if self.prefetcher is not None:
                self.prefetcher.close()

    def close(self, keeps_tiers: bool = False) -> None:
        """Release memory and files without flushing. May be called again. keeps_tiers: another table uses the tiers."""
        with self.lock, defer_signals():
            stack, self.stack, self._pinned = self.stack, None, None
            if stack is not None:
                self.observers.close()
                self.stop_prefetch()
                if not keeps_tiers:
                    self.on_close()
                    stack.top.close()

    def raise_deferred_error(self, wait: bool = True) -> None:
        """Raise the deferred error of an earlier call, an InputError or CapacityError, if there is one."""
        if (error := self.take_deferred_error(wait)) is not None:
            raise error

    def size(self) -> int:
        with self.lock:
            self.raise_deferred_error()
            return self.counts.num_rows

    def take_deferred_error(self, wait: bool) -> TierbedError | None:
        """Returns a deferred error once. Steps without effect no longer count. `wait`: True to wait for all work."""
        reader_error, self.reader_error = self.reader_error, None
        if reader_error is not None or not self.processor.defers_errors:
            return reader_error
        if (deferred := self.processor.take_deferred_error(wait)) is None:
            return None
        undone, self.num_updates = self.num_updates - deferred.num_updates, deferred.num_updates  # these did nothing
        self.step -= undone
        if undone and self.optimizer is not None:
            previous = self.hyperparams
            self.hyperparams = self.optimizer.compute_hyperparams(self.step, None, previous) if self.step else []
        return deferred.error

    def defer_error(self, error: TierbedError) -> None:
        """Make the next call raise a deferred error that a reader found between steps."""
        self.reader_error = error

    def _erase(self, tables: TableIds, keys: Keys, cause: str, existing_counts: Counts | None = None) -> None:
        """Erase rows from all tiers. `existing_counts` counts the written rows in each table; None if all were written.

        After a StoreError, either no row is erased, or the next call finishes the erasure before it uses a tier.
        """
        existing_counts = count_by_table(tables, self.spec.num_tables) if existing_counts is None else existing_counts
        self.before_write(self.step)  # called first: if it fails on a full disk, the rows remain readable
        self.pending_erasure = tables, keys, existing_counts, cause
        self.counts.erasing_counts = existing_counts  # these rows already count as erased
        self.finish_erasures()

    def prepare_top_tier(self) -> TopTier[Any]:
        """Finish pending erasures and return the top tier. Raises ClosedError, StoreError."""
        if self.pending_erasure is not None:
            self.finish_erasures()
        return self.require_top_tier()

    def finish_erasures(self) -> None:
        """Erase rows that an earlier call failed to erase. Raises ClosedError, StoreError."""
        top_tier = self.require_top_tier()
        if self.pending_erasure is not None:
            with self.lock, defer_signals():
                if self.pending_erasure is None:  # another thread has finished the erasure
                    return
                tables, keys, existing_counts, cause = self.pending_erasure
                self.observers.before_erase(tables, keys)
                self.before_write(self.step)
                try:
                    top_tier.erase(tables, keys)
                    self.lifecycle.record_removal(tables, keys, existing_counts, cause)
                    self.pending_erasure = self.counts.erasing_counts = None
                except StoreError:
                    raise  # the next call tries again
                except BaseException as error:
                    self.failure = error
                    raise

    def require_top_tier(self) -> TopTier[Any]:
        """Returns the top tier. Raises ClosedError if the table is closed, StoreError if the table is inconsistent."""
        if self.stack is None:
            label = f"embedding {self.spec.name!r}"
            if self.is_replaced:
                raise RowsReplacedError(f"a load replaced the rows of {label} during this call; repeat the call")
            raise ClosedError(f"{label} was closed; create it again")
        if self.failure is not None:
            raise StoreError(
                f"embedding {self.spec.name!r} failed in the middle of a write ({self.failure!r}); load a snapshot, "
                "or create the embedding again: with a persistent_path, it recovers its last snapshot"
            ) from self.failure
        return self.stack.top

    @property
    def catch_up_rule(self) -> str | None:
        """The optimizer's rule, or None if this rule does not apply missed steps at a row's next use."""
        return self.state.rule if self.hyperparams and needs_catch_up(self.state.rule) else None

    def compute_hyperparams(self) -> list[float]:
        hyperparams, optimizer = self.hyperparams, self.optimizer
        return hyperparams if optimizer is None else optimizer.compute_hyperparams(self.step + 1, None, hyperparams)

    def read(
        self,
        lookup: Lookup,
        weights: Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        is_training: bool = False,
    ) -> Tensor:
        """Returns rows or pooled bags [*lookup.shape, dim]. Unwritten rows have initial values and are not inserted."""
        with self.lock:
            self.raise_deferred_error(wait=False)
            if weights is None and not self.catch_up_rule:
                rows = self.processor.gather_rows(self.prepare_top_tier(), lookup, dtype, is_training)
                if rows is not None:
                    return rows
            return self.processor.gather(self._peek(lookup, is_training), 0, lookup, weights, dtype)

    def get(self, lookup: Lookup, is_training: bool = False) -> Tensor:
        """Like `read`, but also waits for deferred errors and raises them."""
        with self.lock:
            rows = self.read(lookup, is_training=is_training)
            self.raise_deferred_error()
            return rows

    def read_weights_grad(self, lookup: Lookup, grad: Tensor) -> Tensor:
        """Returns the weights' gradient for a lookup that only reads. `grad` has the shape lookup.shape + (dim,)."""
        with self.lock:
            return self.processor.weights_grad(self._peek(lookup, is_training=True), 0, lookup, grad)

    def pin(
        self, lookups: list[Lookup], dtype: torch.dtype = torch.float32, sibling: PinnedBatch | None = None
    ) -> PinnedBatch:
        """Deduplicate the ids, fetch their rows and pin them. Gathered rows and gradients have `dtype`.

        Uses a prefetched batch if there is one. Otherwise `sibling` goes to `Processor.make_batch`. If `pin` raises
        CapacityError, nothing is pinned. To defer signals until the update is done, call both in `run_row_step`.
        """
        self.yield_to_reader()
        with self.lock:
            pinned = self._pin(lookups, dtype, sibling)
            if self.catch_up_rule:
                self.send_hyperparams()
                self.preview_catch_up(pinned.batch)
            return pinned

    def yield_to_reader(self) -> None:
        """Called before a training step: if another thread is waiting to read the rows, let that thread read first."""
        self.require_optimizer()
        self.check_next_step()
        if self.step_gate.has_reader:
            self.step_gate.yield_to_reader(self)

    def announce(self, lookups: list[Lookup]) -> None:
        """Announce the lookups of a future step for prefetching, in the order of steps."""
        self.require_optimizer()
        with self.lock, defer_signals():
            top_tier = self.prepare_top_tier()
            if self.prefetcher is None:
                self.prefetcher = Prefetcher(self.processor, top_tier, self._io_threads)
            self.prefetcher.announce(lookups)

    def update(self, pinned: PinnedBatch, gradients: Gradients, scale: float, clip_value: float | None) -> None:
        optimizer, step = self.require_optimizer(), self.check_next_step()
        rule, hyperparams = optimizer.rule, optimizer.compute_hyperparams(step, clip_value, self.hyperparams)

        def write() -> None:
            self.processor.send_hyperparams(rule, hyperparams, step, scale)
            self.processor.update(pinned.batch, gradients, rule)
            self.record_update(step, hyperparams)

        if self.observers.image is not None:
            self.observers.wait_for_memory()
        with self.lock:
            self._write(pinned, step, write)
            if self.lifecycle.has_ledger and (expired := self.lifecycle.find_expired(step)):
                with suppress(StoreError):  # the step itself succeeded; the next call erases the rows, or raises
                    self._erase(*expired, "expired")

    def record_update(self, step: int, hyperparams: list[float]) -> None:
        """Record that the update of `step` was launched with `hyperparams`, the rule's numbers."""
        self.step, self.hyperparams = step, hyperparams
        self.num_updates += 1

    def put(self, lookup: Lookup, values: NDArray[np.float32]) -> None:
        """Write values [n, dim] to the rows of n ids; an id's last value wins. Optimizer state stays unchanged."""
        if self.state.names and self.optimizer is None:
            raise OptimizerError(
                f"embedding {self.spec.name!r} is only open for reading, because its rows have the state of optimizer "
                f"{self.state.rule}; add that optimizer before put"
            )

        def write() -> None:
            if rule := self.catch_up_rule:
                self.send_hyperparams()
                self.processor.catch_up(pinned.batch, rule)
            self.processor.assign(pinned.batch, values, self.step)

        self.observers.wait_for_memory()
        with self.lock, defer_signals():
            pinned = self._pin([lookup], torch.float32, None, is_step=False)
            self.raise_deferred_error()
            self._write(pinned, self.step, write)

    def delete(self, lookup: Lookup) -> int:
        """Delete the rows of ids from all tiers. Returns how many of these rows had been written."""
        self.observers.wait_for_memory()
        with self.lock, defer_signals():
            self.unpin_rows()
            with self.enter_announced_step(None):
                existing_counts = self.count_written(lookup)
                if existing_counts.any():
                    self._erase(*find_unique_rows(self.spec, lookup), "deleted", existing_counts)
                return int(existing_counts.sum())

    def list_unique_rows(self, lookups: list[Lookup]) -> Lookup:
        """Returns the unique rows of a micro-batch's lookups. On a CPU, raises InputError for illegal ids."""
        with self.lock:
            self.require_top_tier()
            return self.processor.list_unique_rows(self.processor.make_batch(lookups, is_future=True))

    def sum_gradients(
        self, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None], dtype: torch.dtype
    ) -> tuple[Lookup, Tensor]:
        """Reduce a micro-batch: returns its unique rows [n] and their summed gradients [n, dim] in float32.

        `grads` and `weights` are as in `PinnedBatch.update`; `grads` have `dtype`. Raises InputError.
        """
        gradients = check_gradients(self.spec, lookups, grads, weights, dtype)
        with self.lock:
            self.require_top_tier()
            batch = self.processor.make_batch(lookups)
            return self.processor.list_unique_rows(batch), self.processor.sum_gradients(batch, gradients)

    def compute_squared_norm(self, lookups: list[Lookup], grads: list[Tensor], weights: list[Tensor | None]) -> float:
        """Returns `PinnedBatch.compute_squared_norm` for lookups that are not pinned. Raises InputError."""
        gradients = check_gradients(self.spec, lookups, grads, weights, grads[0].dtype)
        with self.lock:
            self.require_top_tier()
            squares = self.processor.compute_squared_norms(self.processor.make_batch(lookups), gradients)
            return add_partial_sums([compute_partial_sum(squares.cpu().numpy())])

    def count_written(self, lookup: Lookup) -> Counts:
        """Returns, for each table, how many of the lookup's rows exist. A row exists once it was written."""
        with self.lock:
            counts = self.processor.count_written(self._peek(lookup))
            self.raise_deferred_error()
            return counts

    def unpin_rows(self) -> None:
        """Unpin the rows that a failed step left pinned."""
        with self.lock, defer_signals():
            self._unpin_rows()

    def _unpin_rows(self) -> None:
        pinned, self._pinned, self.has_failed_update = self._pinned, None, False
        if pinned is not None:
            self._unpin(pinned, is_dirty=False)

    def _pin(
        self, lookups: list[Lookup], dtype: torch.dtype, sibling: PinnedBatch | None, is_step: bool = True
    ) -> PinnedBatch:
        self._unpin_rows()
        top_tier = self.prepare_top_tier()  # finish pending erasures before counting rows
        with self.enter_announced_step(lookups if is_step else None) as batch:
            if batch is None:
                self.raise_deferred_error(wait=False)
                batch = self.processor.make_batch(lookups, None if sibling is None else sibling.batch)
            step = self.step + is_step
            if self.lifecycle.has_ledger and (victims := self.lifecycle.admit(batch, self.layout, step, is_step)):
                self._erase(*victims, "evicted")
            top_tier.pin(batch, self.capacity_limit)
        return self.set_pinned(batch, lookups, dtype)

    def set_pinned(self, batch: Any, lookups: list[Lookup], dtype: torch.dtype) -> PinnedBatch:
        """Record the batch that the top tier has pinned for a step."""
        self._pinned = PinnedBatch(self, batch, lookups, dtype)
        return self._pinned

    def enter_announced_step(self, lookups: Sequence[Lookup] | None) -> AbstractContextManager[Any]:
        """Returns `Prefetcher.enter_step`'s context manager. Without a prefetcher, the context manager yields None."""
        return _NO_PREFETCHER if self.prefetcher is None else self.prefetcher.enter_step(lookups)

    def _unpin(self, pinned: PinnedBatch, is_dirty: bool) -> None:
        self.require_top_tier().unpin(pinned.batch, is_dirty)
        if self.prefetcher is not None:
            self.prefetcher.record_step_end()

    @property
    def capacity_limit(self) -> CapacityLimit | None:
        """The capacity limit that the store checks. None if there is no capacity, or if the lifecycle checks it."""
        capacity = self.lifecycle.capacity
        if capacity is None or self.lifecycle.has_ledger:
            return None
        return CapacityLimit(self.spec.name, capacity, lambda: max(capacity - self.counts.num_rows, 0))

    def _peek(self, lookup: Lookup, is_training: bool = False) -> Any:
        self.raise_deferred_error(wait=False)
        batch = self.processor.make_batch([lookup])
        self.prepare_top_tier().peek(batch, is_training)
        if self.catch_up_rule:
            self.send_hyperparams()
            self.preview_catch_up(batch)
        return batch

    def preview_catch_up(self, batch: Any) -> None:
        """Prepare the batch, so that `gather` applies missed steps to the returned rows."""
        if rule := self.catch_up_rule:
            self.processor.preview_catch_up(batch, rule)

    def send_hyperparams(self) -> None:
        """If rows may have missed steps, give the processor the rule's hyper-parameters for the next step."""
        if rule := self.catch_up_rule:
            self.processor.send_hyperparams(rule, self.compute_hyperparams(), self.step + 1)

    def _write(self, pinned: PinnedBatch, step: int, write: Callable[[], None]) -> None:
        """Write a pinned batch's lines at `step` by calling `write`, and unpin the batch. Signals are deferred."""
        self.check_pinned(pinned)
        if self.observers.image is not None:
            self.observers.before_update(pinned.batch)
        self.before_write(step)
        is_written = False
        try:
            write()
            if self.observers.trackers:
                self.observers.after_update(pinned.batch)
            if self.lifecycle.has_ledger:
                self.lifecycle.record_write(pinned.batch, step)
            is_written, self._pinned = True, None
            self._unpin(pinned, is_dirty=True)
        except BaseException as error:
            if is_written or not isinstance(error, (TypeError, ValueError)):  # these are raised before any write
                # Lines, counters and lower tiers may disagree: never serve these rows, and write no clean marker.
                self.failure, self._pinned = error, None
            raise

    def mark_update_failed(self) -> None:
        self.has_failed_update = True

    def record_failure(self, error: BaseException) -> None:
        """Record the error that left rows inconsistent. Such rows are never served again, and get no clean marker."""
        self.failure = self.failure or error

    def check_pinned(self, pinned: PinnedBatch) -> None:
        if pinned is not self._pinned:
            raise StoreError(
                f"embedding {self.spec.name!r}: the batch is no longer pinned, because put, delete or a load "
                "was called in the middle of the step; write to an embedding from one thread at a time"
            )

    def require_optimizer(self) -> RowOptimizer:
        """Returns the rows' optimizer. Raises OptimizerError if there is none."""
        if self.optimizer is None:
            raise OptimizerError(f"embedding {self.spec.name!r} has no optimizer; pass its parameters to add_optimizer")
        return self.optimizer

    def check_next_step(self) -> int:
        """Returns the number of the next step. Raises StoreError if rows cannot store that number."""
        if self.step >= self._next_check_step:
            self._check_step_and_caches()
        return self.step + 1

    def _check_step_and_caches(self) -> None:
        """Check that the step number is not too large, and look for caches that are too small. Few steps call this."""
        if self.step >= MAX_STEP:
            raise StoreError(
                f"embedding {self.spec.name!r} is at step {self.step}, the last step number that rows can store; "
                "save a snapshot and load it with weights_only=True. This load resets the step and the optimizer state"
            )
        with self.lock, suppress(StoreError):  # if the store has failed, the next call that needs rows raises
            tiers = self.require_top_tier().metrics()
            self.small_cache_detector.check(tiers)
            self._next_check_step = min(2 * self.step, MAX_STEP) if len(tiers) > 1 else MAX_STEP
