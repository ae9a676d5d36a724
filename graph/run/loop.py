"""`Graph.run`: steps over a loader, while the rows of the next batches are fetched.

Batches are drawn ahead of their steps, and their ids announced. A step reads rows when it runs, after the update of the
step before. So its results are those of the plain loop.

Over ranks, each rank reports before a step whether its loader has a batch, and sends the announced ids. All ranks make
these collectives in one order: a rank reports a batch when it is drawn, and waits for the reports of the others when
the current step has ended.
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
from ...embedding.state_dict.saved_rows import SavedRows
from ...engine.checks import as_int
from ...engine.errors import ClosedError, InputError, SnapshotError, StoreError, TierbedError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from ...engine.signals import uninterrupted
from ...engine.table.prefetch import WINDOW
from ..passes.lookups import KnownLookups
from ..passes.step_epilogue import StepEpilogue, dense_steps
from .rank_step import RankStepState, world_of

AHEAD = 8
JUDGED = 8  # steps after which a run judges whether it gains by looking ahead
# of its rows, which a cache over SSD misses at least for that; benchmarks/README.md has figures. Looking ahead, it
# misses about half as many
MISSES = 1 / 8
UNEVEN = ("stop", "join")
# bits that a rank reports of a step: it has a batch, its ids are known, its loader raised
_BATCH, _KNOWN, _FAILED = 1, 2, 4
# after errors of a disk or of memory, the same batch may train later
_PASSING = StoreError | SnapshotError | OSError | MemoryError
log = logging.getLogger("tierbed")


class RunProgress:
    """The progress of a run: with a label, a bar of steps, time left, and samples (rows of a first tensor) a second."""

    def __init__(self, batches: Iterable[Any], label: str) -> None:
        """label: text before the bar; with an empty one there is no bar."""
        self._bar: Any = None
        if not label:
            return
        from rich import progress  # imported late, since it takes a while

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
        self._bar.start()  # has an effect only the first time
        sizes = (len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        self._samples += next(sizes, 1)
        elapsed = self._bar.tasks[self._task].elapsed
        rate = f"{self._samples / elapsed:,.0f} samples/s" if elapsed else ""
        self._bar.update(self._task, advance=1, rate=rate)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Announcer:
    """Announces the batches of one run in their order, accumulated calls together, as their rows will be pinned.

    Over ranks, all of them announce the same embeddings in the same order.
    """

    def __init__(self, root: nn.Module, end: StepEpilogue, world: World) -> None:
        self._end, self._world = end, world
        self._embeddings: list[Any] = embeddings_of(root)
        self._calls: list[dict[Any, list[Lookup] | None]] = []  # what the accumulated calls pin; None if unknown

    def add(self, between: int, known: KnownLookups | None) -> None:
        """Announce the lookups of the next batch. `between` other batches run before it.

        known: None if this rank knows no lookups, [] if it has no batch.
        """
        number = (self._end.waiting_calls + between) % self._end.accumulate_steps
        if number == 0:
            self._calls.clear()
        if number != len(self._calls):
            return  # a call of this update was not made in this run
        trained = [embedding for embedding in self._embeddings if embedding.row_optimizer is not None]
        lookups_of = {one: [] for one in trained} if known == [] else dict(known or [])
        self._calls.append({embedding: self._pinned(embedding, lookups_of.get(embedding)) for embedding in trained})
        if len(self._calls) == self._end.accumulate_steps:
            for embedding in trained:
                calls = [one for call in self._calls if (one := call.get(embedding)) is not None]
                is_known = len(calls) == len(self._calls)
                lookups = [*chain.from_iterable(calls)] if is_known else None
                if self._world.size > 1:
                    embedding.table_handle().table.announce(lookups, together=True)
                elif lookups is not None:
                    with contextlib.suppress(TierbedError):  # the call itself will raise it
                        embedding.announce(lookups)

    def _pinned(self, embedding: Any, lookups: list[Lookup] | None) -> list[Lookup] | None:
        """What is pinned of the lookups of a call: of accumulated calls the rows, as `StepEpilogue.add` has them."""
        if lookups is None or self._end.accumulate_steps == 1:
            return lookups
        try:
            return [embedding.table_handle().local_table.unique_rows(lookups)]
        except Exception:  # the call itself will raise it
            return None


def arguments(batch: Any) -> tuple[Any, ...]:
    """The arguments of a call for a batch: the items of a list or a tuple, else the batch itself."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def iterate(batches: Iterable[Any]) -> Iterator[Any]:
    try:
        return iter(batches)
    except TypeError:
        raise InputError(
            f"batches: got {type(batches).__name__}; give a DataLoader, or another iterable of batches"
        ) from None


class _PlannedStep(Handshake):
    """The report of a later step: what this rank has for it, and what all ranks have."""

    def __init__(self, world: World, op: str, has: int, known: KnownLookups | None) -> None:
        """has: bits that this rank reports. known: what it looks up, if that is known."""
        super().__init__(world, op, note=has)
        self.known, self.is_announced = known, False

    def announced_notes(self) -> list[int]:
        """The bits of all ranks, by which the step is announced now."""
        self.is_announced = True
        return self.wait().notes


class Run(Iterator[Any]):
    """Iterates over what `build` returned for each batch, in the loader's order. Can continue after an exception.

    A step that raises uses up its batch, which is then in `failed`. One exception: after an error of the store, of a
    file or of memory, such as a full disk, a step that trained nothing keeps its batch. The next call runs it again,
    or `skip` drops it. An exception of the loader is raised after the steps of the batches that the loader gave
    before. Ctrl-C is raised when the current step has ended; the result of that step is lost, and the other batches
    remain for the next call.

    Over ranks, each rank has its own run, over its own loader, and all of them call `next`. left: after a run that
    ended with another rank's loader, the batches of this rank that were drawn and not trained. failed: the batch whose
    step raised last, None after a step that did not.
    """

    def __init__(
        self,
        graph: nn.Module,
        rank_state: RankStepState,
        end: StepEpilogue,
        batches: Iterable[Any],
        ahead: int | None,
        uneven: str,
        known_lookups: Callable[..., KnownLookups | None],
        progress: RunProgress,
        abandoned: list[None],
    ) -> None:
        """ahead: None for `AHEAD` if a thread can hide reads of rows, else 0; over SSD `_judge` follows the misses.

        known_lookups: returns what a call with these arguments looks up. abandoned: gets an item if the run is
        collected before its end, which may be at any time, in any thread.
        """
        if uneven not in UNEVEN:
            raise InputError(f"uneven={uneven!r}: give one of {', '.join(map(repr, UNEVEN))}")
        self._world, self._uneven, self._rank_state = world_of(graph) or World.of_one(), uneven, rank_state
        embeddings, name = embeddings_of(graph), type(graph).__name__
        # a thread can hide work of their steps: reads of the disk, or work of a GPU
        caches = [one for one in embeddings if one.store_options.store == "cached_ssd" or one.device.type != "cpu"]
        gains = self._world.size > 1 or bool(caches)
        is_over_ssd = self._world.size == 1 and all(embedding.device.type == "cpu" for embedding in caches)
        self._judged = caches if is_over_ssd else []
        self._hits_and_misses: list[int] = []  # of these caches, when they were last judged
        self._follows_misses = ahead is None and bool(self._judged)
        if self._follows_misses:
            gains = any(cache.misses_rows for cache in caches)
        most = as_int(AHEAD * gains if ahead is None else ahead, 0, WINDOW)
        if most is None:
            raise InputError(f"ahead={ahead!r}: give a whole number of batches from 0 to {WINDOW}, or None")
        if most and embeddings and not gains:
            log.warning("%s: ahead=%d makes steps slower, since all rows are in memory; leave it out", name, most)
        self._graph, self._known_lookups, self._num_ahead, self._end = graph, known_lookups, most, end
        self._embeddings = [embedding for embedding in embeddings if isinstance(embedding, SavedRows)]
        self.failed: Any = None
        self._is_kept = False  # whether the batch of the last step waits for another try
        self._announcer = Announcer(graph, end, self._world)
        self.left: list[Any] = []  # batches that were drawn and will not have a step
        self._batches = iterate(batches)
        self._window: deque[Any] = deque()
        self._tensors: deque[list[Tensor]] = deque()  # tensors of the window's batches; fewer after a Ctrl-C
        self._planned: deque[_PlannedStep] = deque()  # the next steps, of which the first have a batch in the window
        self._last_known: KnownLookups | None = None  # of the batch that was drawn last
        self._loader_ended_by: Exception | None = None  # raised once the window is empty
        self._op = f"run of {type(graph).__name__}"
        self._has_started = self._has_ended = False
        self._mismatches = self._world.mismatches
        self._steps = 0
        self._progress = progress
        self._finalizer = weakref.finalize(self, _abandon, abandoned, progress)
        self._finalizer.atexit = False

    def __next__(self) -> Any:
        if self._has_ended:
            raise StopIteration
        if not self._has_started:
            self._world.handshake(self._op, same={"ahead": self._num_ahead, "uneven": self._uneven})
            self._has_started = True
        if self._has_mismatch or self._is_kept:  # some reports reached no rank, or a batch is planned again
            self._mismatches = self._world.mismatches
            self._forget_planned()
        try:
            while True:
                if self._judged and self._steps % JUDGED == 1:
                    self._judge()
                self._fill()
                reports = self._planned[0].wait().notes
                if any(has & _FAILED for has in reports):
                    self._fail()
                missing = [rank for rank, has in enumerate(reports) if not has & _BATCH]
                if len(missing) == len(reports) or (missing and self._uneven == "stop"):
                    self._stop(missing)
                self._steps += 1
                if self._world.rank not in missing:
                    return self._step()
                with uninterrupted(), self._keeping_batch():
                    self._planned.popleft()
                    self._rank_state.join(self._graph)
                self._announce_planned()  # as other ranks do after their step
        finally:
            if self._world.size > 1:
                self._announce_planned()

    @property
    def _has_mismatch(self) -> bool:
        """Whether ranks were in different calls since this run last checked."""
        return self._mismatches != self._world.mismatches

    def _judge(self) -> None:
        """Look ahead only while caches miss rows: if they have all, it takes time and saves none."""
        before = self._hits_and_misses
        counts = [embedding.hit_counts() for embedding in self._judged]
        self._hits_and_misses = now = [sum(of_each) for of_each in zip(*counts, strict=True)]
        if not before or now == before:  # a thread that fetches ahead counts rows in lumps
            return
        hits, misses = now[0] - before[0], now[1] - before[1]
        share = misses / max(hits + misses, 1)
        gains = share > (MISSES / 2 if self._num_ahead else MISSES)
        for cache in self._judged:
            cache.misses_rows = gains  # the next run begins with it
        if self._follows_misses:
            if self._num_ahead != AHEAD * gains:
                log.info("%s: looks %d batches ahead, since caches %s", self._op, AHEAD * gains, _share(hits, misses))
            self._num_ahead = AHEAD * gains
        elif self._num_ahead and share < MISSES / 4:
            log.warning(
                "%s: ahead=%d makes steps slower, since caches %s; leave it out",
                type(self._graph).__name__, self._num_ahead, _share(hits, misses),
            )  # fmt: skip
            self._judged = []

    def _fill(self) -> None:
        """Draw batches, and report each. An exception of the loader waits for its turn."""
        is_first = not self._planned
        while len(self._planned) <= self._num_ahead:
            index, self._last_known = len(self._planned), None
            if index >= len(self._window) and self._loader_ended_by is None:
                self._draw()
            has = 0
            if index < len(self._window):
                has = _BATCH | _KNOWN * (self._last_known is not None)
            elif index == len(self._window) and not isinstance(self._loader_ended_by, StopIteration):
                has = _FAILED
            with uninterrupted():  # every rank plans the step, or none does
                self._planned.append(_PlannedStep(self._world, f"{self._op}, next step", has, self._last_known))
                if self._world.size == 1:  # a batch is announced before the next one is drawn
                    self._announce_planned()
        if is_first:
            self._announce_planned()

    def _announce_planned(self) -> None:
        """Announce the steps that all ranks have reported, on all ranks alike. RuntimeError if no thread starts."""
        with uninterrupted():
            for index, planned in enumerate(self._planned):
                can_reach = not self._has_mismatch and self._world.failure is None
                if planned.is_announced or not self._num_ahead or not can_reach:
                    continue
                reports = planned.announced_notes()
                runs = any(reports) if self._uneven == "join" else all(has & _BATCH for has in reports)
                if runs and any(has & _KNOWN for has in reports):
                    has_none = not reports[self._world.rank] & _BATCH
                    self._announcer.add(index, [] if has_none else planned.known)

    def _step(self) -> Any:
        if not self._window:  # the loader wrote over batches in the window
            error = self._loader_ended_by
            self._planned.popleft()
            if self._world.size == 1:
                self._planned.clear()
                self._loader_ended_by = StopIteration()
            self._world.handshake(self._op, error)
        with uninterrupted():  # at Ctrl-C a batch and its plan are in the window, or its step has ended
            batch, tensors = self._window.popleft(), [self._tensors.popleft()] if self._tensors else []
            with self._keeping_batch([batch], tensors):
                self._planned.popleft()
                result = self._graph(*arguments(batch))
        self._progress.advance(arguments(batch))
        return result

    @contextlib.contextmanager
    def _keeping_batch(self, batch: Sequence[Any] = (), tensors: Sequence[Any] = ()) -> Iterator[None]:
        """A block that runs a step. If it trained nothing and is worth another try, the step's batch stays."""
        before, self.failed, self._is_kept = self._trained(), None, False
        try:
            yield
        except BaseException as error:
            self.failed = next(iter(batch), None)
            may_pass = isinstance(error, _PASSING) and not isinstance(error, ClosedError)
            self._is_kept = may_pass and not any(map(operator.gt, self._trained(), before))
            if self._is_kept:
                self._steps -= 1
                self._window.extendleft(batch)
                self._tensors.extendleft(tensors)
            raise

    def _trained(self) -> tuple[int, int, int]:
        """Counts of what steps did: updates of rows, of dense parameters, and gradients that wait to be updated."""
        rows = sum(one.table_handle().local_table.updates for one in self._embeddings if one.is_open)
        return rows, dense_steps.count, self._end.waiting_calls

    def skip(self) -> None:
        """Drop the batch that waits for another try, after its step raised."""
        if self._is_kept and self.failed is not None:
            self._window.popleft()
            self._tensors = deque(islice(self._tensors, 1, None))
            self.failed = None

    def _draw(self) -> None:
        count, before = len(self._window), [(one, one._version) for tensors in self._tensors for one in tensors]
        try:
            self._window.extend(islice(self._batches, 1))  # one call of C: Ctrl-C cannot lose the batch
        except Exception as error:
            self._loader_ended_by = error
            return
        if len(self._window) == count:
            self._loader_ended_by = StopIteration()
            return
        self._tensors.extend(map(_counted, islice(self._window, len(self._tensors), None)))
        drawn = {tensor.data_ptr() for tensor in self._tensors[-1]}
        if any(tensor._version != version and tensor.data_ptr() in drawn for tensor, version in before):
            self._window.clear()
            self._tensors.clear()
            self._loader_ended_by = InputError(
                f"ahead={self._num_ahead}: the loader writes the next batch into the tensors of this one, and "
                "batches are drawn before their steps; give new tensors, as a DataLoader does, or ahead=0"
            )
        if self._num_ahead and self._window:
            self._last_known = self._known_lookups(*arguments(self._window[-1]))

    def _fail(self) -> None:
        """Raise on all ranks what a loader raised. The loader may continue, and drawn batches stay."""
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
                "%s ended after %d steps, since rank %s has no more batches; this rank has %d more that it drew, in "
                "`left` of the run, and the rest of its loader",
                self._op,
                self._steps,
                ", ".join(map(str, missing)),
                len(self.left),
            )
        self.close()
        raise StopIteration

    def _forget_planned(self) -> None:
        for planned in self._planned:
            if planned.refused is None:  # all ranks made this call
                planned.wait()  # so that no report is in flight
        self._planned.clear()
        forget_announced(self._graph)

    def close(self) -> None:
        """Forget what was announced, and end the threads that prefetch. A run that ends closes itself."""
        if self._finalizer.detach() is not None:
            self._progress.close()
            forget_announced(self._graph)


def _share(hits: int, misses: int) -> str:
    return f"have {100 * hits / max(hits + misses, 1):.0f} % of the rows"


def _counted(batch: Any) -> list[Tensor]:
    """The tensors of a batch whose writes torch counts."""
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_inference()]


def embeddings_of(root: nn.Module) -> list[EmbeddingBase]:
    return [module for module in root.modules() if isinstance(module, EmbeddingBase)]


def forget_announced(root: nn.Module) -> None:
    """Let the embeddings under `root` forget what was announced, and end their prefetch threads."""
    for embedding in embeddings_of(root):
        embedding.forget_announced()


def _abandon(abandoned: list[None], progress: RunProgress) -> None:
    progress.close()
    abandoned.append(None)
