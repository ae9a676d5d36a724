"""`Graph.run`: train on a loader while the rows of the next batches are fetched.

A run draws batches ahead of their steps and announces their ids, so that caches can fetch and pin the rows early.
Announcements are only hints: a step reads its rows when it runs, after the previous step's update. Results are
therefore the same as in a plain loop.

With several ranks, every rank plans its next steps. For each planned step, a rank sends a report: its loader has a
batch, or lacks one. After the reports, the ranks exchange ids. Reports are collectives, so all ranks make them in the
same order. A rank starts a report when it draws a batch, and waits for the other reports only after the current step.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...distributed.handshake import Handshake
from ...distributed.world import World
from ...embedding.state_dict.saved_rows import SnapshotEmbedding
from ...engine.checks import as_int
from ...engine.errors import ClosedError, InputError, SnapshotError, StoreError, TierbedError
from ...engine.ops.embedding_base import EmbeddingBase
from ...engine.options.lookup import Lookup
from ...engine.signals import defer_signals
from ...engine.table.prefetch import MAX_WINDOW
from ..passes.lookups import KnownLookups
from ..passes.step_epilogue import StepEpilogue, dense_step_counter
from .look_ahead import LookAhead
from .rank_step import RankStepState, find_world

DEFAULT_AHEAD = 8
UNEVEN_MODES = ("stop", "join")
# bits of a rank's report on a step: the rank has a batch, the batch's ids are known, the rank's loader raised
_HAS_BATCH, _IDS_KNOWN, _LOADER_FAILED = 1, 2, 4
# errors after which the same batch may succeed later
_TRANSIENT_ERRORS = StoreError | SnapshotError | OSError | MemoryError
log = logging.getLogger("tierbed")


class RunProgress:
    """A progress bar with steps, time left and samples per second. Each row of a batch's first tensor is a sample."""

    def __init__(self, batches: Iterable[Any], label: str) -> None:
        """label: text before the bar, or an empty string to show no bar."""
        self._bar: Any = None
        if not label:
            return
        from rich import progress  # slow to import

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[rate]}"),
        )
        self._num_samples = 0
        self._task = self._bar.add_task(label, total=operator.length_hint(batches) or None, rate="")

    def advance(self, batch: tuple[Any, ...]) -> None:
        if self._bar is None:
            return
        self._bar.start()  # starts the bar in the first call
        sizes = (len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        self._num_samples += next(sizes, 1)
        elapsed = self._bar.tasks[self._task].elapsed
        rate = f"{self._num_samples / elapsed:,.0f} samples/s" if elapsed else ""
        self._bar.update(self._task, advance=1, rate=rate)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Announcer:
    """Announces a run's batches in order. All ranks announce the same steps. Announces accumulated calls together."""

    def __init__(self, root: nn.Module, epilogue: StepEpilogue, world: World) -> None:
        self._epilogue, self._world = epilogue, world
        self._embeddings: list[Any] = list_embeddings(root)
        self._calls: list[dict[Any, list[Lookup] | None]] = []  # per accumulated call: the lookups to pin, or None

    def add(self, num_batches_between: int, known_lookups: KnownLookups | None) -> None:
        """Announce the lookups of a batch that runs after `num_batches_between` other batches.

        known_lookups: None if this rank does not know the lookups, [] if this rank lacks a batch.
        """
        call_index = (self._epilogue.num_waiting_calls + num_batches_between) % self._epilogue.accumulate_steps
        if call_index == 0:
            self._calls.clear()
        if call_index != len(self._calls):
            return  # an earlier run made some of the accumulated calls
        embeddings = [embedding for embedding in self._embeddings if embedding.row_optimizer is not None]
        call_lookups = {embedding: [] for embedding in embeddings} if known_lookups == [] else dict(known_lookups or [])
        self._calls.append({e: self._find_pinned_lookups(e, call_lookups.get(e)) for e in embeddings})
        if len(self._calls) == self._epilogue.accumulate_steps:
            for embedding in embeddings:
                known_calls = [pinned for call in self._calls if (pinned := call.get(embedding)) is not None]
                is_known = len(known_calls) == len(self._calls)
                lookups = [*chain.from_iterable(known_calls)] if is_known else None
                if self._world.size > 1:
                    embedding.table_handle().table.announce(lookups, is_collective=True)
                elif lookups is not None:
                    with contextlib.suppress(TierbedError):  # the step itself raises this error later
                        embedding.announce(lookups)

    def _find_pinned_lookups(self, embedding: Any, lookups: list[Lookup] | None) -> list[Lookup] | None:
        """Return the lookups that a call pins. If gradients are accumulated, the call pins each row once."""
        if lookups is None or self._epilogue.accumulate_steps == 1:
            return lookups
        try:
            return [embedding.table_handle().open_table.list_unique_rows(lookups)]
        except Exception:  # the step itself raises this error later
            return None


def make_arguments(batch: Any) -> tuple[Any, ...]:
    """Return the arguments of `build` for a batch: the items of a list or tuple, or the batch itself."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def get_iterator(batches: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError:
        raise InputError(f"batches: got {type(batches).__name__}; give a DataLoader or iterable of batches") from None


class _PlannedStep(Handshake):
    """This rank's report on a planned step. The report is in flight until the other ranks' reports have arrived."""

    def __init__(self, world: World, label: str, report: int, known_lookups: KnownLookups | None) -> None:
        super().__init__(world, label, payload=report)
        self.known_lookups, self.is_announced = known_lookups, False


class Run(Iterator[Any]):
    """Iterates over the results of `build`, one per batch, in the loader's order. A run can continue after an error.

    If a step raises, the run drops the step's batch and stores it in `failed`. But if an error of the store, a file or
    memory stops a step before the step trains anything, the batch is kept. The next call retries the kept batch;
    `skip` drops it. An exception of the loader is raised after the steps of all batches drawn earlier. Ctrl-C is
    raised when the current step ends; the step's result is lost, but later batches remain.

    With several ranks, each rank runs its own loader, and all ranks call `next` together.

    Attributes:
        left: batches that this rank drew but did not train, because another rank's loader ended the run.
        failed: the batch of the last step, if that step raised; otherwise None.
    """

    def __init__(
        self,
        graph: nn.Module,
        rank_state: RankStepState,
        epilogue: StepEpilogue,
        batches: Iterable[Any],
        ahead: int | None,
        uneven_mode: str,
        find_lookups: Callable[..., KnownLookups | None],
        progress: RunProgress,
        abandoned_runs: list[None],
    ) -> None:
        """Prepare a run. The first `next` draws the first batch.

        Args:
            ahead: how many batches to look ahead. None means 8 batches if a prefetch thread can hide GPU work, or with
                several ranks. In one process over SSD, `LookAhead` chooses. Otherwise, None means 0.
            find_lookups: returns the lookups of a call, given the call's arguments.
            abandoned_runs: gets an item if the run is garbage-collected before its end. This may happen in any thread.
        """
        if uneven_mode not in UNEVEN_MODES:
            raise InputError(f"uneven={uneven_mode!r}: give one of {', '.join(map(repr, UNEVEN_MODES))}")
        self._world, self._uneven_mode, self._rank_state = find_world(graph) or World.single(), uneven_mode, rank_state
        embeddings, name = list_embeddings(graph), type(graph).__name__
        # a prefetch thread can hide the disk reads or the GPU work of these embeddings
        slow_embeddings = [e for e in embeddings if e.store_options.store == "cached_ssd" or e.device.type != "cpu"]
        is_useful = self._world.size > 1 or bool(slow_embeddings)
        is_over_ssd = self._world.size == 1 and all(embedding.device.type == "cpu" for embedding in slow_embeddings)
        depth = max((each.look_ahead for each in slow_embeddings), default=0) if is_over_ssd else DEFAULT_AHEAD
        count = as_int(depth if ahead is None else ahead, 0, MAX_WINDOW)
        if count is None:
            raise InputError(f"ahead={ahead!r}: give a whole number of batches from 0 to {MAX_WINDOW}, or None")
        if count and embeddings and not is_useful:
            log.warning("%s: ahead=%d makes steps slower, because all rows are in memory; leave it out", name, count)
        self._graph, self._find_lookups, self._epilogue = graph, find_lookups, epilogue
        self._look_ahead = LookAhead(name, slow_embeddings if is_over_ssd else [], count, ahead is None)
        self._embeddings = [embedding for embedding in embeddings if isinstance(embedding, SnapshotEmbedding)]
        self.failed: Any = None
        self._retries_batch = False  # True if the last step's batch waits for a retry
        self._announcer = Announcer(graph, epilogue, self._world)
        self.left: list[Any] = []
        self._batches = get_iterator(batches)
        self._window: deque[Any] = deque()
        self._window_tensors: deque[list[Tensor]] = deque()  # one list per batch in the window; fewer after Ctrl-C
        self._plans: deque[_PlannedStep] = deque()  # plan i belongs to batch i of the window, if this batch exists
        self._last_lookups: KnownLookups | None = None  # lookups of the last drawn batch
        self._loader_exception: Exception | None = None  # the loader's error, raised once the window is empty
        self._label = f"run of {type(graph).__name__}"
        self._has_started = self._has_ended = False
        self._num_mismatches = self._world.num_mismatches
        self._num_steps, self._progress_bar = 0, progress
        self._finalizer = weakref.finalize(self, _end_abandoned_run, abandoned_runs, progress)
        self._finalizer.atexit = False

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if not self._has_started:
            shared_values = {"ahead": self._look_ahead.depth, "uneven": self._uneven_mode}
            self._world.handshake(self._label, shared_values=shared_values)
            self._has_started = True
        if self._has_mismatch or self._retries_batch:  # reports were lost, or a batch is planned again
            self._num_mismatches = self._world.num_mismatches
            self._forget_plans()
        try:
            while True:
                self._look_ahead.begin_step(self._num_steps)
                self._plan_steps()
                reports = self._plans[0].wait().payloads
                if any(report & _LOADER_FAILED for report in reports):
                    self._raise_loader_error()
                ranks_without_batch = [rank for rank, report in enumerate(reports) if not report & _HAS_BATCH]
                if len(ranks_without_batch) == len(reports) or (ranks_without_batch and self._uneven_mode == "stop"):
                    self._end_run(ranks_without_batch)
                self._num_steps += 1
                if self._world.rank not in ranks_without_batch:
                    return self._run_step()
                with defer_signals(), self._keep_batch_on_error():
                    self._plans.popleft()
                    self._rank_state.join_step(self._graph)
                self._announce_plans()  # the other ranks announce after their step
        finally:
            if self._world.size > 1:
                self._announce_plans()

    @property
    def _has_mismatch(self) -> bool:
        """True if, since this run's last check, a handshake found that ranks were in different calls."""
        return self._num_mismatches != self._world.num_mismatches

    def _plan_steps(self) -> None:
        """Draw batches and report each one. A loader's exception is raised only after the steps of earlier batches."""
        is_first = not self._plans
        while len(self._plans) <= self._look_ahead.depth:
            index, self._last_lookups = len(self._plans), None
            if index >= len(self._window) and self._loader_exception is None:
                self._draw_batch()
            report = 0
            if index < len(self._window):
                report = _HAS_BATCH | _IDS_KNOWN * (self._last_lookups is not None)
            elif index == len(self._window) and not isinstance(self._loader_exception, StopIteration):
                report = _LOADER_FAILED
            with defer_signals():  # either all ranks plan the step, or no rank does
                self._plans.append(_PlannedStep(self._world, f"{self._label}, next step", report, self._last_lookups))
                if self._world.size == 1:  # announce each batch before drawing the next
                    self._announce_plans()
        if is_first:
            self._announce_plans()

    def _announce_plans(self) -> None:
        """Announce reported steps. All ranks announce the same steps. Raises RuntimeError if no thread can start."""
        with defer_signals():
            for index, plan in enumerate(self._plans):
                can_send = not self._has_mismatch and self._world.failure is None
                if plan.is_announced or not self._look_ahead.depth or not can_send:
                    continue
                plan.is_announced = True
                reports = plan.wait().payloads
                will_run = any(reports) if self._uneven_mode == "join" else all(flags & _HAS_BATCH for flags in reports)
                if will_run and any(flags & _IDS_KNOWN for flags in reports):
                    lacks_batch = not reports[self._world.rank] & _HAS_BATCH
                    self._announcer.add(index, [] if lacks_batch else plan.known_lookups)

    def _run_step(self) -> Any:
        if not self._window:  # the loader overwrote batches in the window
            error = self._loader_exception
            self._plans.popleft()
            if self._world.size == 1:
                self._plans.clear()
                self._loader_exception = StopIteration()
            self._world.handshake(self._label, error)
        with defer_signals():  # after Ctrl-C, the step is either done or still queued
            batch, tensors = self._window.popleft(), [self._window_tensors.popleft()] if self._window_tensors else []
            with self._keep_batch_on_error([batch], tensors):
                self._plans.popleft()
                result = self._graph(*make_arguments(batch))
        self._progress_bar.advance(make_arguments(batch))
        return result

    @contextlib.contextmanager
    def _keep_batch_on_error(self, batch: Sequence[Any] = (), tensors: Sequence[Any] = ()) -> Iterator[None]:
        """Keep the batch of a step that raised, if the step trained nothing and may succeed later."""
        old_counts, self.failed, self._retries_batch = self._count_progress(), None, False
        try:
            yield
        except BaseException as error:
            self.failed = next(iter(batch), None)
            may_succeed = isinstance(error, _TRANSIENT_ERRORS) and not isinstance(error, ClosedError)
            self._retries_batch = may_succeed and not any(map(operator.gt, self._count_progress(), old_counts))
            if self._retries_batch:
                self._num_steps -= 1
                self._window.extendleft(batch)
                self._window_tensors.extendleft(tensors)
            raise

    def _count_progress(self) -> tuple[int, int, int]:
        """Return counts of row updates, dense updates, and calls whose gradients are not applied yet."""
        rows = sum(item.table_handle().open_table.num_updates for item in self._embeddings if item.is_open)
        return rows, dense_step_counter.count, self._epilogue.num_waiting_calls

    def skip(self) -> None:
        """Drop the batch that waits for a retry."""
        if self._retries_batch and self.failed is not None:
            self._window.popleft()
            self._window_tensors = deque(islice(self._window_tensors, 1, None))
            self.failed = None

    def _draw_batch(self) -> None:
        old_size, versions = len(self._window), [(t, t._version) for tensors in self._window_tensors for t in tensors]
        try:
            self._window.extend(islice(self._batches, 1))  # a single C call, so Ctrl-C cannot lose the batch
        except Exception as error:
            self._loader_exception = error
            return
        if len(self._window) == old_size:
            self._loader_exception = StopIteration()
            return
        self._window_tensors.extend(map(_list_versioned_tensors, islice(self._window, len(self._window_tensors), None)))
        pointers = {tensor.data_ptr() for tensor in self._window_tensors[-1]}
        if any(tensor._version != version and tensor.data_ptr() in pointers for tensor, version in versions):
            self._window.clear()
            self._window_tensors.clear()
            self._loader_exception = InputError(
                f"ahead={self._look_ahead.depth}: the loader reuses the tensors of a batch that has not been trained "
                "yet; make it return new tensors, as a DataLoader does, or pass ahead=0"
            )
        if self._look_ahead.depth and self._window:
            self._last_lookups = self._find_lookups(*make_arguments(self._window[-1]))
            self._look_ahead.record_batch(self._last_lookups)

    def _raise_loader_error(self) -> None:
        """Raise a loader's exception on all ranks. Batches already drawn are kept, and the loader may continue."""
        error = None if self._window or isinstance(self._loader_exception, StopIteration) else self._loader_exception
        if error is not None:
            self._loader_exception = None
        self._forget_plans()
        self._world.handshake(self._label, error)

    def _end_run(self, ranks_without_batch: list[int]) -> None:
        self._forget_plans()
        self._has_ended = True
        self.left = list(self._window)
        if len(ranks_without_batch) < self._world.size:
            log.info(
                "%s ended after %d steps, because rank %s has no more batches; this rank drew %d more, now in the "
                "run's `left`, and has not used up its loader",
                self._label,
                self._num_steps,
                ", ".join(map(str, ranks_without_batch)),
                len(self.left),
            )
        self.close()
        raise StopIteration

    def _forget_plans(self) -> None:
        for plan in self._plans:
            if plan.raised_error is None:  # all ranks have made this report
                plan.wait()  # leave no report in flight
        self._plans.clear()
        forget_announced(self._graph)

    def close(self) -> None:
        """Forget all announcements and stop the prefetch threads. Called automatically when the run ends."""
        if self._finalizer.detach() is not None:
            self._progress_bar.close()
            forget_announced(self._graph)


def _list_versioned_tensors(batch: Any) -> list[Tensor]:
    """Return a batch's tensors that have a version. Torch increases the version at each write to the tensor."""
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_inference()]


def list_embeddings(root: nn.Module) -> list[EmbeddingBase]:
    return [module for module in root.modules() if isinstance(module, EmbeddingBase)]


def forget_announced(root: nn.Module) -> None:
    """Drop all announcements of the embeddings under `root`, and stop their prefetch threads."""
    for embedding in list_embeddings(root):
        embedding.forget_announced()


def _end_abandoned_run(abandoned_runs: list[None], progress: RunProgress) -> None:
    progress.close()
    abandoned_runs.append(None)
