"""`Graph.run`: steps over a loader, while the rows of the next batches are fetched.

Batches are drawn ahead of their steps, and their ids announced. A step reads rows when it runs, after the update of the
step before. So its results are those of the plain loop.

Over ranks, each rank reports before a step what its loader has left, and announced ids are exchanged. Every exchange is
made at a point of the run that all ranks reach in one order: once a batch is drawn its rank reports it, and waits for
the others' reports when the current step has ended.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...distributed.world import Handshake
from ...engine.checks import as_int
from ...engine.errors import InputError, TierbedError
from ...engine.ops.rows_contract import EmbeddingBase
from ...engine.options.lookup import Lookup
from ...engine.signals import uninterrupted
from ...engine.table.prefetch import WINDOW
from ..passes.lookups import KnownLookups
from ..passes.step_epilogue import StepEpilogue
from .rank_step import RankStepState, world_of

if TYPE_CHECKING:
    from ...distributed.world import World

AHEAD = 8
UNEVEN = ("stop", "join")
_BATCH, _KNOWN, _FAILED = 1, 2, 4  # bits of what a rank tells of a step: a batch, its ids, an exception of the loader
log = logging.getLogger("tierbed")


class RunProgress:
    """The progress of a run: with a label, a bar with steps done and to do, time left, and samples per second.

    The samples of a batch are the rows of its first tensor.
    """

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
        self._task = self._bar.add_task(label, total=_length(batches), rate="")

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


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # raised by a DataLoader over an iterable dataset
        return None


class Announcer:
    """Announces the batches of one run in their order, those of accumulated steps together: as rows will be pinned."""

    def __init__(self, end: StepEpilogue) -> None:
        self._end = end
        self._together: dict[EmbeddingBase, list[Lookup]] = defaultdict(list)
        self._count = 0  # how many accumulated steps

    def add(self, between: int, coming: KnownLookups | None) -> None:
        """Announce what the next batch looks up, None where unknown. `between` other batches run before it."""
        number = (self._end.steps + between) % self._end.every
        if number == 0:
            self._together.clear()
            self._count = 0
        if number != self._count or coming is None:
            return  # some lookups of this update are not known, or not of this run
        try:
            for embedding, lookups in coming:
                # accumulated calls give the rows of each call, as `StepEpilogue.keep` does
                self._together[embedding] += lookups if self._end.every == 1 else [embedding.unique_rows(lookups)]
        except TierbedError:  # the call itself will raise it
            return
        self._count += 1
        if self._count == self._end.every:
            for embedding, lookups in self._together.items():
                with contextlib.suppress(TierbedError):
                    embedding.announce(lookups)


def arguments(batch: Any) -> tuple[Any, ...]:
    """The arguments of a call for a batch: the items of a list or a tuple, else the batch itself."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def iterate(batches: Iterable[Any]) -> Iterator[Any]:
    """An iterator over batches. InputError for what is no loader."""
    try:
        return iter(batches)
    except TypeError:
        raise InputError(
            f"batches: got {type(batches).__name__}; give a DataLoader, or another iterable of batches"
        ) from None


class Run(Iterator[Any]):
    """Iterates over what `build` returned for each batch, in the loader's order. May go on after an exception.

    A batch is taken once, by the step that runs on it, whether the step ends or raises. An exception of the loader
    comes after the steps of the batches that the loader gave before. Ctrl-C comes when the step under way has ended;
    the result of that step is lost, and the other batches are left for the next call.
    """

    def __init__(
        self,
        graph: nn.Module,
        batches: Iterable[Any],
        ahead: int,
        coming: Callable[..., KnownLookups | None],
        progress: RunProgress,
        left: list[None],
        announcer: Announcer,
    ) -> None:
        """coming: tells what a call with these arguments looks up.

        left: gets an item where the run is collected before its end, which may be at any time, in any thread.
        """
        most = as_int(ahead, 0, WINDOW)
        if most is None:
            raise InputError(f"ahead={ahead!r}: give a whole number of batches from 0 to {WINDOW}")
        self._graph, self._coming_of, self._ahead = graph, coming, most
        self._announcer = announcer
        self.left: list[Any] = []  # batches that were drawn and will have no step
        self._batches = iterate(batches)
        self._window: deque[Any] = deque()
        self._tensors: deque[list[Tensor]] = deque()  # tensors of the window's batches; fewer where Ctrl-C came between
        self._end: Exception | None = None  # an exception of the loader, for when the window is empty
        self._progress = progress
        self._left = weakref.finalize(self, _leave, left, progress)
        self._left.atexit = False

    def __next__(self) -> Any:
        while self._end is None and len(self._window) <= self._ahead:
            self._draw()
        if not self._window:
            assert self._end is not None
            end = self._end
            if isinstance(end, StopIteration):
                self.close()
            else:
                self._end = None  # the loader may go on
            raise end
        return self._step()

    def _step(self) -> Any:
        with uninterrupted():  # Ctrl-C finds a batch in the window, or its step done
            batch = arguments(self._window.popleft())
            if self._tensors:
                self._tensors.popleft()
            result = self._graph(*batch)
        self._progress.advance(batch)
        return result

    def _draw(self) -> None:
        count, before = len(self._window), [[tensor._version for tensor in kept] for kept in self._tensors]
        try:
            self._window.extend(islice(self._batches, 1))  # Ctrl-C cannot come between, and lose the batch
        except Exception as error:
            self._end = error
            return
        if len(self._window) == count:
            self._end = StopIteration()
            return
        self._tensors.extend(map(_counted, islice(self._window, len(self._tensors), None)))
        self._refuse_overwritten(before)
        if self._ahead:
            self._look_ahead(count, arguments(self._window[-1]))

    def _look_ahead(self, between: int, batch: tuple[Any, ...]) -> None:
        """Announce a batch that was drawn. `between` others have their step before it. RuntimeError: no thread."""
        self._announcer.add(between, self._coming_of(*batch))

    def _refuse_overwritten(self, before: list[list[int]]) -> None:
        """InputError where the loader wrote its last batch over a batch that waits for its step."""
        drawn = {tensor.data_ptr() for tensor in self._tensors[-1]}
        for kept, versions in zip(self._tensors, before, strict=False):
            for tensor, version in zip(kept, versions, strict=True):
                if tensor._version != version and tensor.data_ptr() in drawn:
                    self._window.clear()
                    self._tensors.clear()
                    self._end = StopIteration()
                    raise InputError(
                        f"ahead={self._ahead}: the loader fills the tensors of a batch anew for the next one, and "
                        "batches are drawn before their steps; give new tensors, as a DataLoader does, or ahead=0"
                    )

    def close(self) -> None:
        """Forget what was announced, and end the threads that make batches ready. A run that ends closes itself."""
        if self._left.detach() is not None:
            self._progress.close()
            forget_announced(self._graph)


def _counted(batch: Any) -> list[Tensor]:
    """The tensors of a batch whose writes torch counts."""
    leaves = (leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor))
    return [leaf for leaf in leaves if leaf.layout == torch.strided and not leaf.is_inference()]


def forget_announced(root: nn.Module) -> None:
    """Let the embeddings under `root` forget what was announced, and end their threads."""
    for module in root.modules():
        if isinstance(module, EmbeddingBase):
            module.forget_announced()


def _leave(left: list[None], progress: RunProgress) -> None:
    progress.close()
    left.append(None)


class _PlannedStep:
    """A coming step: what this rank has for it, and what all ranks have."""

    def __init__(self, world: World, op: str, has: int, coming: KnownLookups | None) -> None:
        """has: bits that this rank tells. coming: what it looks up, where that is known."""
        self.coming = coming
        self.is_announced = False
        self._telling = Handshake(world, op, note=has)
        self._told: list[int] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether a rank was in another call, of which all were told."""
        return self._telling.refused is not None

    def told(self) -> list[int]:
        """What each rank told. Waits for it."""
        if self._told is None:
            self._told = self._telling.wait().notes
        return self._told


class RankRun(Run):
    """A `Run` of which each rank has its own, over its own loader, and all call `next` in turn.

    left: after a run that ended with another rank's loader, the batches of this rank that were drawn and not trained.
    """

    def __init__(self, world: World, uneven: str, join: Callable[[], None], graph: nn.Module, *rest: Any) -> None:
        """join: takes part in a step without a batch. rest: the other arguments of `Run`."""
        super().__init__(graph, *rest)
        self._world, self._uneven, self._join = world, uneven, join
        self._op = f"run of {type(graph).__name__}"
        self._slots: deque[_PlannedStep] = deque()
        self._coming: KnownLookups | None = None  # of the batch that was drawn last
        self._begun = self._ended = False
        self._differed = world.mismatches
        self._steps = 0

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self._begun:
            self._world.handshake(self._op, same={"ahead": self._ahead, "uneven": self._uneven})
            self._begun = True
        if self._differs:  # some of what ranks told was heard by none
            self._differed = self._world.mismatches
            self._forget_slots()
        try:
            while True:
                self._fill()
                told = self._slots[0].told()
                if any(has & _FAILED for has in told):
                    self._fail()
                missing = [rank for rank, has in enumerate(told) if not has & _BATCH]
                if len(missing) == len(told) or (missing and self._uneven == "stop"):
                    self._stop(missing)
                self._slots.popleft()
                self._steps += 1
                if self._world.rank not in missing:
                    return self._step()
                with uninterrupted():
                    self._join()
                self._announce_slots()  # as the others do after their step
        finally:
            self._announce_slots()

    @property
    def _differs(self) -> bool:
        """Whether ranks were in different calls since this run looked."""
        return self._differed != self._world.mismatches

    def _fill(self) -> None:
        """Draw batches, and tell of each. What goes wrong in the loader waits for its turn."""
        is_first = not self._slots
        while len(self._slots) <= self._ahead:
            place, self._coming = len(self._slots), None
            if place >= len(self._window) and self._end is None:
                try:
                    self._draw()
                except Exception as error:
                    self._end = error
            has = 0
            if place < len(self._window):
                has = _BATCH | _KNOWN * (self._coming is not None)
            elif place == len(self._window) and not isinstance(self._end, StopIteration):
                has = _FAILED
            with uninterrupted():  # every rank has a slot, or none
                self._slots.append(_PlannedStep(self._world, f"{self._op}, coming step", has, self._coming))
        if is_first:
            self._announce_slots()

    def _look_ahead(self, between: int, batch: Any) -> None:
        self._coming = self._coming_of(*batch)

    def _announce_slots(self) -> None:
        """Announce the steps of which all ranks have told, on all ranks alike."""
        with uninterrupted():
            self._announce_told_slots()

    def _announce_told_slots(self) -> None:
        for place, slot in enumerate(self._slots):
            if not self._ahead or slot.is_announced or self._differs or self._world.failure is not None:
                continue
            told, slot.is_announced = slot.told(), True
            runs = any(told) if self._uneven == "join" else all(has & _BATCH for has in told)
            if runs and any(has & _KNOWN for has in told):
                has_none = not told[self._world.rank] & _BATCH
                self._announcer.add(place, [] if has_none else slot.coming)

    def _step(self) -> Any:
        if not self._window:  # the loader wrote over batches that waited
            self._world.handshake(self._op, self._end)
        return super()._step()

    def _fail(self) -> None:
        """Raise on all ranks what a loader raised. The loader may go on, and batches that are there stay."""
        error = None if self._window or isinstance(self._end, StopIteration) else self._end
        if error is not None:
            self._end = None
        self._forget_slots()
        self._world.handshake(self._op, error)

    def _stop(self, missing: list[int]) -> None:
        self._forget_slots()
        self._ended = True
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

    def _forget_slots(self) -> None:
        for slot in self._slots:
            if not slot.is_refused:
                slot.told()  # so that nothing is on its way
        self._slots.clear()
        forget_announced(self._graph)


class _Announcer(Announcer):
    """Announces the batches of all ranks: the same embeddings on each, in one order."""

    def __init__(self, end: StepEpilogue, root: nn.Module) -> None:
        super().__init__(end)
        self._root = root
        self._unknown: set[EmbeddingBase] = set()

    def add(self, between: int, coming: KnownLookups | None) -> None:
        """As `Announcer.add`, on all ranks. coming: None where this rank knows nothing, [] where it has no batch."""
        number = (self._end.steps + between) % self._end.every
        if number == 0:
            self._together.clear()
            self._unknown.clear()
            self._count = 0
        if number != self._count:
            return
        known = dict(coming or [])
        embeddings: list[Any] = [
            m for m in self._root.modules() if isinstance(m, EmbeddingBase) and m.row_optimizer is not None
        ]
        for embedding in embeddings:
            lookups = [] if coming == [] else known.get(embedding)
            if lookups is None:
                self._unknown.add(embedding)
            else:
                self._together[embedding] += self._part(embedding, lookups)
        self._count += 1
        if self._count == self._end.every:
            for embedding in embeddings:
                given = None if embedding in self._unknown else self._together[embedding]
                embedding.opened().table.announce(given, together=True)

    def _part(self, embedding: EmbeddingBase, lookups: list[Lookup]) -> list[Lookup]:
        try:
            return lookups if self._end.every == 1 else [embedding.unique_rows(lookups)]
        except Exception:  # the call itself will raise it
            self._unknown.add(embedding)
            return []


def make_run(
    graph: nn.Module,
    together: RankStepState,
    end: StepEpilogue,
    batches: Iterable[Any],
    ahead: int,
    coming: Callable[..., KnownLookups | None],
    progress: RunProgress,
    left: list[None],
    uneven: str,
) -> Run:
    """A run of this process, or of all ranks where embeddings of the graph have a world. InputError."""
    if uneven not in UNEVEN:
        raise InputError(f"uneven={uneven!r}: give one of {', '.join(map(repr, UNEVEN))}")
    world = world_of(graph)
    if world is None:
        return Run(graph, batches, ahead, coming, progress, left, Announcer(end))
    announcer, join = _Announcer(end, graph), partial(together.join, graph)
    return RankRun(world, uneven, join, graph, batches, ahead, coming, progress, left, announcer)
