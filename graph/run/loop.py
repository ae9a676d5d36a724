"""`Graph.run`: train on a loader while the rows of the next batches are fetched.

A run draws batches ahead of their steps and announces their ids, so that caches can fetch and pin the rows early.
Announcements are only hints: a step reads its rows when it runs, after the previous step's update. Results are
therefore the same as in a plain loop.

Over ranks, every rank plans its next steps: for each step, the rank reports whether its loader has a batch, and sends
the announced ids. These reports are collectives, so all ranks must make reports in the same order. A rank starts a
report when it draws a batch, and waits for the other ranks' reports only after the current step.
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
from ...engine.signals import uninterrupted
from ...engine.table.prefetch import WINDOW
from ..passes.lookups import KnownLookups
from ..passes.step_epilogue import StepEpilogue, dense_steps
from .rank_step import RankStepState, world_of

AHEAD = 8
CHECK_STEPS = 8  # steps between two checks of the miss rate
# Over SSD, look ahead if caches miss at least this fraction of rows: it halves the misses (see benchmarks/README.md).
MIN_MISS_RATE = 1 / 8
UNEVEN = ("stop", "join")
# bits of a rank's report on a step: the rank has a batch, the batch's ids are known, the rank's loader raised
_BATCH, _KNOWN, _FAILED = 1, 2, 4
# errors after which the same batch may succeed later
_TRANSIENT = StoreError | SnapshotError | OSError | MemoryError
log = logging.getLogger("tierbed")


class RunProgress:
    """A progress bar with steps, time left and samples per second. Samples are rows of the batch's first tensor."""

    def __init__(self, batches: Iterable[Any], label: str) -> None:
        """label: text before the bar. If it is empty, no bar is shown."""
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
        self._samples = 0
        self._task = self._bar.add_task(label, total=operator.length_hint(batches) or None, rate="")

    def advance(self, batch: tuple[Any, ...]) -> None:
        if self._bar is None:
            return
        self._bar.start()  # only the first call has an effect
        sizes = (len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        self._samples += next(sizes, 1)
        elapsed = self._bar.tasks[self._task].elapsed
        rate = f"{self._samples / elapsed:,.0f} samples/s" if elapsed else ""
        self._bar.update(self._task, advance=1, rate=rate)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Announcer:
    """Announces one run's batches in order, equally on all ranks. Calls pinned together are announced together."""

    def __init__(self, root: nn.Module, epilogue: StepEpilogue, world: World) -> None:
        self._epilogue, self._world = epilogue, world
        self._embeddings: list[Any] = embeddings_of(root)
        self._calls: list[dict[Any, list[Lookup] | None]] = []  # for each accumulated call, the lookups to pin or None

    def add(self, between: int, known: KnownLookups | None) -> None:
        """Announce the next batch's lookups. `between` other batches run before it.

        known: None if this rank does not know the lookups, [] if this rank lacks a batch.
        """
        call_index = (self._epilogue.waiting_calls + between) % self._epilogue.accumulate_steps
        if call_index == 0:
            self._calls.clear()
        if call_index != len(self._calls):
            return  # an earlier run made some of the accumulated calls
        trained = [embedding for embedding in self._embeddings if embedding.row_optimizer is not None]
        lookups_of = {embedding: [] for embedding in trained} if known == [] else dict(known or [])
        self._calls.append({embedding: self._pinned(embedding, lookups_of.get(embedding)) for embedding in trained})
        if len(self._calls) == self._epilogue.accumulate_steps:
            for embedding in trained:
                calls = [pinned for call in self._calls if (pinned := call.get(embedding)) is not None]
                is_known = len(calls) == len(self._calls)
                lookups = [*chain.from_iterable(calls)] if is_known else None
                if self._world.size > 1:
                    embedding.table_handle().table.announce(lookups, together=True)
                elif lookups is not None:
                    with contextlib.suppress(TierbedError):  # the call itself raises it
                        embedding.announce(lookups)

    def _pinned(self, embedding: Any, lookups: list[Lookup] | None) -> list[Lookup] | None:
        """Return the lookups that a call pins. Accumulated calls pin unique rows, as in `StepEpilogue.add`."""
        if lookups is None or self._epilogue.accumulate_steps == 1:
            return lookups
        try:
            return [embedding.table_handle().open_table.unique_rows(lookups)]
        except Exception:  # the call itself raises it
            return None


def arguments(batch: Any) -> tuple[Any, ...]:
    """Return the arguments of `build` for a batch: the items of a list or tuple, or the batch itself."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def iterate(batches: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError:
        raise InputError(
            f"batches: got {type(batches).__name__}; give a DataLoader, or another iterable of batches"
        ) from None


class _PlannedStep(Handshake):
    """One rank's report on a later step. The report is in flight until the other ranks' reports have arrived."""

    def __init__(self, world: World, op: str, bits: int, known: KnownLookups | None) -> None:
        super().__init__(world, op, note=bits)
        self.known, self.is_announced = known, False


class Run(Iterator[Any]):
    """Iterates over the results of `build`, one per batch, in the loader's order. A run can continue after an error.

    A step that raises uses up its batch; `failed` is then that batch. One exception: if a step fails because of
    the store, a file or memory (a full disk, say) before it trained anything, its batch is kept. The next call
    retries that batch; `skip` drops it. An exception of the loader is raised after the steps of all batches drawn
    earlier. Ctrl-C is raised when the current step ends; the step's result is lost, but later batches remain.

    Over ranks, each rank runs its own loader, and all ranks call `next` together.

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
        uneven: str,
        known_lookups: Callable[..., KnownLookups | None],
        progress: RunProgress,
        abandoned: list[None],
    ) -> None:
        """ahead: None means `AHEAD` if a thread can hide row reads, otherwise 0. Over SSD, it follows the miss rate.

        known_lookups: returns the lookups of a call with these arguments. abandoned: gets an item if the run is
        garbage-collected before its end, at any time and in any thread.
        """
        if uneven not in UNEVEN:
            raise InputError(f"uneven={uneven!r}: give one of {', '.join(map(repr, UNEVEN))}")
        self._world, self._uneven, self._rank_state = world_of(graph) or World.single(), uneven, rank_state
        embeddings, name = embeddings_of(graph), type(graph).__name__
        # embeddings whose disk reads or GPU work a prefetch thread can hide
        slow = [e for e in embeddings if e.store_options.store == "cached_ssd" or e.device.type != "cpu"]
        pays = self._world.size > 1 or bool(slow)
        is_over_ssd = self._world.size == 1 and all(embedding.device.type == "cpu" for embedding in slow)
        self._checked_caches = slow if is_over_ssd else []
        self._hits_and_misses: list[int] = []  # counts of `_checked_caches` at the last check
        self._adapts = ahead is None and bool(self._checked_caches)
        if self._adapts:
            pays = any(cache.has_cache_misses for cache in slow)
        count = as_int(AHEAD * pays if ahead is None else ahead, 0, WINDOW)
        if count is None:
            raise InputError(f"ahead={ahead!r}: give a whole number of batches from 0 to {WINDOW}, or None")
        if count and embeddings and not pays:
            log.warning("%s: ahead=%d makes steps slower, because all rows are in memory; leave it out", name, count)
        self._graph, self._known_lookups, self._num_ahead, self._epilogue = graph, known_lookups, count, epilogue
        self._embeddings = [embedding for embedding in embeddings if isinstance(embedding, SnapshotEmbedding)]
        self.failed: Any = None
        self._retries_batch = False  # True if the last step's batch waits for a retry
        self._announcer = Announcer(graph, epilogue, self._world)
        self.left: list[Any] = []
        self._batches = iterate(batches)
        self._window: deque[Any] = deque()
        self._tensors: deque[list[Tensor]] = deque()  # tensors of the window's batches; fewer after Ctrl-C
        self._plans: deque[_PlannedStep] = deque()  # the next steps; the window holds the first steps' batches
        self._last_known: KnownLookups | None = None  # lookups of the last drawn batch
        self._loader_ended_by: Exception | None = None  # the loader's error, raised once the window is empty
        self._op = f"run of {type(graph).__name__}"
        self._has_started = self._has_ended = False
        self._mismatches = self._world.num_mismatches
        self._steps = 0
        self._progress = progress
        self._finalizer = weakref.finalize(self, _abandon, abandoned, progress)
        self._finalizer.atexit = False

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if not self._has_started:
            self._world.handshake(self._op, shared_values={"ahead": self._num_ahead, "uneven": self._uneven})
            self._has_started = True
        if self._has_mismatch or self._retries_batch:  # reports were lost, or a batch is planned again
            self._mismatches = self._world.num_mismatches
            self._forget_planned()
        try:
            while True:
                if self._checked_caches and self._steps % CHECK_STEPS == 1:
                    self._adjust_look_ahead()
                self._fill()
                reports = self._plans[0].wait().notes
                if any(bits & _FAILED for bits in reports):
                    self._raise_loader_error()
                missing = [rank for rank, bits in enumerate(reports) if not bits & _BATCH]
                if len(missing) == len(reports) or (missing and self._uneven == "stop"):
                    self._stop(missing)
                self._steps += 1
                if self._world.rank not in missing:
                    return self._step()
                with uninterrupted(), self._keep_batch_on_error():
                    self._plans.popleft()
                    self._rank_state.join(self._graph)
                self._announce_planned()  # the other ranks announce after their step
        finally:
            if self._world.size > 1:
                self._announce_planned()

    @property
    def _has_mismatch(self) -> bool:
        """True if ranks were in different calls since this run last checked."""
        return self._mismatches != self._world.num_mismatches

    def _adjust_look_ahead(self) -> None:
        """Look ahead only while caches miss rows. If caches have all rows, looking ahead only costs time."""
        before = self._hits_and_misses
        counts = [embedding.hit_counts() for embedding in self._checked_caches]
        self._hits_and_misses = now = [sum(column) for column in zip(*counts, strict=True)]
        if not before or now == before:  # the prefetch thread updates counts only now and then
            return
        hits, misses = now[0] - before[0], now[1] - before[1]
        miss_rate = misses / max(hits + misses, 1)
        hit_rate = f"have {100 * hits / max(hits + misses, 1):.0f} % of the rows"
        pays = miss_rate > (MIN_MISS_RATE / 2 if self._num_ahead else MIN_MISS_RATE)
        for cache in self._checked_caches:
            cache.has_cache_misses = pays  # the next run starts with this result
        if self._adapts:
            if self._num_ahead != AHEAD * pays:
                log.info("%s: looks %d batches ahead, because caches %s", self._op, AHEAD * pays, hit_rate)
            self._num_ahead = AHEAD * pays
        elif self._num_ahead and miss_rate < MIN_MISS_RATE / 4:
            log.warning(
                "%s: ahead=%d makes steps slower, because caches %s; leave it out",
                type(self._graph).__name__, self._num_ahead, hit_rate,
            )  # fmt: skip
            self._checked_caches = []

    def _fill(self) -> None:
        """Draw batches and report each. A loader's exception is raised only after the steps of earlier batches."""
        is_first = not self._plans
        while len(self._plans) <= self._num_ahead:
            index, self._last_known = len(self._plans), None
            if index >= len(self._window) and self._loader_ended_by is None:
                self._draw()
            bits = 0
            if index < len(self._window):
                bits = _BATCH | _KNOWN * (self._last_known is not None)
            elif index == len(self._window) and not isinstance(self._loader_ended_by, StopIteration):
                bits = _FAILED
            with uninterrupted():  # either all ranks plan the step, or no rank does
                self._plans.append(_PlannedStep(self._world, f"{self._op}, next step", bits, self._last_known))
                if self._world.size == 1:  # announce each batch before drawing the next
                    self._announce_planned()
        if is_first:
            self._announce_planned()

    def _announce_planned(self) -> None:
        """Announce the steps that all ranks have reported, equally on all ranks. RuntimeError if no thread starts."""
        with uninterrupted():
            for index, plan in enumerate(self._plans):
                can_send = not self._has_mismatch and self._world.failure is None
                if plan.is_announced or not self._num_ahead or not can_send:
                    continue
                plan.is_announced = True
                reports = plan.wait().notes
                runs = any(reports) if self._uneven == "join" else all(bits & _BATCH for bits in reports)
                if runs and any(bits & _KNOWN for bits in reports):
                    lacks_batch = not reports[self._world.rank] & _BATCH
                    self._announcer.add(index, [] if lacks_batch else plan.known)

    def _step(self) -> Any:
        if not self._window:  # the loader overwrote batches in the window
            error = self._loader_ended_by
            self._plans.popleft()
            if self._world.size == 1:
                self._plans.clear()
                self._loader_ended_by = StopIteration()
            self._world.handshake(self._op, error)
        with uninterrupted():  # at Ctrl-C, either batch and plan stay queued or the step is done
            batch, tensors = self._window.popleft(), [self._tensors.popleft()] if self._tensors else []
            with self._keep_batch_on_error([batch], tensors):
                self._plans.popleft()
                result = self._graph(*arguments(batch))
        self._progress.advance(arguments(batch))
        return result

    @contextlib.contextmanager
    def _keep_batch_on_error(self, batch: Sequence[Any] = (), tensors: Sequence[Any] = ()) -> Iterator[None]:
        """Keep the batch of a step that raised, if the step trained nothing and may succeed later."""
        before, self.failed, self._retries_batch = self._progress_counts(), None, False
        try:
            yield
        except BaseException as error:
            self.failed = next(iter(batch), None)
            may_pass = isinstance(error, _TRANSIENT) and not isinstance(error, ClosedError)
            self._retries_batch = may_pass and not any(map(operator.gt, self._progress_counts(), before))
            if self._retries_batch:
                self._steps -= 1
                self._window.extendleft(batch)
                self._tensors.extendleft(tensors)
            raise

    def _progress_counts(self) -> tuple[int, int, int]:
        """Return counts of row updates, dense updates, and calls whose gradients wait for an update."""
        rows = sum(embedding.table_handle().open_table.updates for embedding in self._embeddings if embedding.is_open)
        return rows, dense_steps.count, self._epilogue.waiting_calls

    def skip(self) -> None:
        """Drop the batch that waits for a retry."""
        if self._retries_batch and self.failed is not None:
            self._window.popleft()
            self._tensors = deque(islice(self._tensors, 1, None))
            self.failed = None

    def _draw(self) -> None:
        length, versions = len(self._window), [(t, t._version) for tensors in self._tensors for t in tensors]
        try:
            self._window.extend(islice(self._batches, 1))  # a single C call, so Ctrl-C cannot lose the batch
        except Exception as error:
            self._loader_ended_by = error
            return
        if len(self._window) == length:
            self._loader_ended_by = StopIteration()
            return
        self._tensors.extend(map(_versioned_tensors, islice(self._window, len(self._tensors), None)))
        pointers = {tensor.data_ptr() for tensor in self._tensors[-1]}
        if any(tensor._version != version and tensor.data_ptr() in pointers for tensor, version in versions):
            self._window.clear()
            self._tensors.clear()
            self._loader_ended_by = InputError(
                f"ahead={self._num_ahead}: the loader reuses the tensors of a batch that has not been trained "
                "yet; make it return new tensors, as a DataLoader does, or pass ahead=0"
            )
        if self._num_ahead and self._window:
            self._last_known = self._known_lookups(*arguments(self._window[-1]))

    def _raise_loader_error(self) -> None:
        """Raise a loader's exception on all ranks. Batches already drawn stay, and the loader may continue."""
        error = None if self._window or isinstance(self._loader_ended_by, StopIteration) else self._loader_ended_by
        if error is not None:
            self._loader_ended_by = None
        self._forget_planned()
        self._world.handshake(self._op, error)

    def _stop(self, missing: list[int]) -> None:
        self._forget_planned()
        self._has_ended = True
        self.left = list(self._window)
        if len(missing) < self._world.size:
            log.info(
                "%s ended after %d steps, because rank %s has no more batches; this rank drew %d more, now in the "
                "run's `left`, and has not used up its loader",
                self._op,
                self._steps,
                ", ".join(map(str, missing)),
                len(self.left),
            )
        self.close()
        raise StopIteration

    def _forget_planned(self) -> None:
        for plan in self._plans:
            if plan.raised_error is None:  # all ranks have made this report
                plan.wait()  # leave no report in flight
        self._plans.clear()
        forget_announced(self._graph)

    def close(self) -> None:
        """Forget all announcements and stop the prefetch threads. A run also closes when it ends."""
        if self._finalizer.detach() is not None:
            self._progress.close()
            forget_announced(self._graph)


def _versioned_tensors(batch: Any) -> list[Tensor]:
    """Return a batch's tensors, except tensors whose writes torch does not count."""
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_inference()]


def embeddings_of(root: nn.Module) -> list[EmbeddingBase]:
    return [module for module in root.modules() if isinstance(module, EmbeddingBase)]


def forget_announced(root: nn.Module) -> None:
    """Drop all announcements of the embeddings under `root`, and stop their prefetch threads."""
    for embedding in embeddings_of(root):
        embedding.forget_announced()


def _abandon(abandoned: list[None], progress: RunProgress) -> None:
    progress.close()
    abandoned.append(None)
