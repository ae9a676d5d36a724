"""A run over ranks: what each rank's loader has left is told to all before its step, and coming ids are exchanged.

Every exchange is made at a point of the run that all ranks reach in one order: once a batch is drawn its rank tells of
it, and waits for what others tell when the step under way has ended.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from ...distributed.agreement import Agreement, agree
from ...engine.errors import InputError
from ...engine.ops.rows_contract import Rows
from ...engine.options.inputs import Lookup
from ...engine.signals import uninterrupted
from ..passes.lookahead import Coming
from ..passes.step_end import StepEnd
from .ahead import Announcer
from .pipeline import Run, forget_announced
from .progress import Progress
from .together import Together, world_of

if TYPE_CHECKING:
    from ...distributed.world import World

UNEVEN = ("stop", "join")
_BATCH, _KNOWN, _FAILED = 1, 2, 4  # bits of what a rank tells of a step: a batch, its ids, an exception of the loader

log = logging.getLogger("tierbed")


class _Slot:
    """A coming step: what this rank has for it, and what all ranks have."""

    def __init__(self, world: World, op: str, has: int, coming: Coming | None) -> None:
        """has: bits that this rank tells. coming: what it looks up, where that is known."""
        self.coming = coming
        self.is_announced = False
        self._telling = Agreement(world, op, note=has)
        self._told: list[int] | None = None

    @property
    def is_refused(self) -> bool:
        """Whether a rank was in another call, of which all were told."""
        return self._telling.refused is not None

    def told(self) -> list[int]:
        """What each rank told. Waits for it."""
        if self._told is None:
            self._told = self._telling.settle().notes
        return self._told


class RunOfRanks(Run):
    """A `Run` of which each rank has its own, over its own loader, and all call `next` in turn.

    left: after a run that ended with another rank's loader, the batches of this rank that were drawn and not trained.
    """

    def __init__(self, world: World, uneven: str, join: Callable[[], None], graph: nn.Module, *rest: Any) -> None:
        """join: takes part in a step without a batch. rest: the other arguments of `Run`."""
        super().__init__(graph, *rest)
        self._world, self._uneven, self._join = world, uneven, join
        self._op = f"run of {type(graph).__name__}"
        self._slots: deque[_Slot] = deque()
        self._coming: Coming | None = None  # of the batch that was drawn last
        self._begun = self._ended = False
        self._differed = world.differed
        self._steps = 0

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if not self._begun:
            agree(self._world, self._op, same={"ahead": self._ahead, "uneven": self._uneven})
            self._begun = True
        if self._differs:  # some of what ranks told was heard by none
            self._differed = self._world.differed
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
        return self._differed != self._world.differed

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
                self._slots.append(_Slot(self._world, f"{self._op}, coming step", has, self._coming))
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
            agree(self._world, self._op, self._end)
        return super()._step()

    def _fail(self) -> None:
        """Raise on all ranks what a loader raised. The loader may go on, and batches that are there stay."""
        error = None if self._window or isinstance(self._end, StopIteration) else self._end
        if error is not None:
            self._end = None
        self._forget_slots()
        agree(self._world, self._op, error)

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

    def __init__(self, end: StepEnd, root: nn.Module) -> None:
        super().__init__(end)
        self._root = root
        self._unknown: set[Rows] = set()

    def add(self, between: int, coming: Coming | None) -> None:
        """As `Announcer.add`, on all ranks. coming: None where this rank knows nothing, [] where it has no batch."""
        number = (self._end.steps + between) % self._end.every
        if number == 0:
            self._together.clear()
            self._unknown.clear()
            self._count = 0
        if number != self._count:
            return
        known = dict(coming or [])
        embeddings: list[Any] = [m for m in self._root.modules() if isinstance(m, Rows) and m.row_optimizer is not None]
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

    def _part(self, embedding: Rows, lookups: list[Lookup]) -> list[Lookup]:
        try:
            return lookups if self._end.every == 1 else [embedding.unique_rows(lookups)]
        except Exception:  # the call itself will raise it
            self._unknown.add(embedding)
            return []


def make_run(
    graph: nn.Module,
    together: Together,
    end: StepEnd,
    batches: Iterable[Any],
    ahead: int,
    coming: Callable[..., Coming | None],
    progress: Progress,
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
    return RunOfRanks(world, uneven, join, graph, batches, ahead, coming, progress, left, announcer)
