"""Exchanges the ids of announced steps before the steps, so that each rank can prefetch the rows requested from it.

All exchanges start and are waited for at points that every rank reaches in the same order: no rank acts on what has
arrived so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..engine.ops.fingerprint import copied, same_lookups
from ..engine.options.lookup import Lookup
from ..engine.processors.processor import Processor
from ..engine.table.prefetch import QUEUE
from .handshake import Handshake
from .row_exchange import IdExchange, LocalBatch, Traffic
from .world import World


class AnnouncedStep:
    """An announced step. Its headers are in flight, then its ids, then `requested` is known."""

    def __init__(
        self,
        group: World,
        op: str,
        number: int,
        lookups: Sequence[Lookup] | None,
        local: LocalBatch | None,
        traffic: Traffic,
    ) -> None:
        self.number = number  # of the announcement, the same on all ranks
        self.local = local
        self.requested: list[Lookup] | None = None  # empty if a rank does not know its lookups
        self._group, self._op, self._traffic = group, op, traffic
        # None if no step of this rank will take it
        self.lookups = None if lookups is None else [copied(lookup) for lookup in lookups]
        counts = [0] * group.size if local is None else local.counts
        self._headers = Handshake(group, op, counts=counts, note=local is None)
        self._ids: IdExchange | None = None

    @property
    def is_refused(self) -> bool:
        """Whether a rank was in another call, which all ranks raised."""
        return self._headers.refused is not None

    @property
    def is_complete(self) -> bool:
        """Whether nothing of it is in flight."""
        return self.requested is not None or self.is_refused

    @property
    def is_wanted(self) -> bool:
        """Whether a step of this rank may still take it."""
        return self.lookups is not None and self.requested != [] and not self.is_refused

    def is_of(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> bool:
        # a table that was opened again has another processor
        is_here = self.is_wanted and self.local is not None and self.local.processor is processor
        return is_here and same_lookups(self.lookups or (), lookups)

    def advance(self) -> None:
        """Wait for what is in flight, and start what follows it. Called until `is_complete`."""
        if self._ids is not None:
            self.requested = self._ids.wait()
            return
        answer = self._headers.wait()
        if any(answer.notes) or self.local is None:
            self.requested = []
        else:
            self._ids = IdExchange(self._group, f"ids of {self._op}", self.local, answer.counts, self._traffic)


class IdPrefetcher:
    """The announced steps of one embedding, in their order. `on_ids` gets what the ranks will request of this one."""

    def __init__(self, group: World, name: str, traffic: Traffic, on_ids: Callable[[list[Lookup]], None]) -> None:
        self._group, self._name, self._traffic, self._on_ids = group, name, traffic, on_ids
        self._announced: deque[AnnouncedStep] = deque()
        self._count = 0

    def announce(self, lookups: Sequence[Lookup] | None, make: Callable[[], LocalBatch]) -> None:
        """Announce a step on all ranks. lookups: None if this rank does not know them; then no rank prefetches.

        make: deduplicates them. What it raises is left for the step.
        """
        self.advance()
        local = None
        if lookups is not None:
            try:
                local = make()
            except Exception:
                lookups = None
        number = self._count + 1
        op = f"announced step {number} of embedding {self._name!r}"
        self._announced.append(AnnouncedStep(self._group, op, number, lookups, local, self._traffic))
        self._count = number  # only now: no rank announces it if the headers before these are refused
        if len(self._announced) > QUEUE and self._announced[0].is_complete:
            self._announced.popleft()

    def advance(self) -> None:
        """Advance every announced step. All ranks call this at the same points."""
        self._free()
        for step in self._announced:
            self._advance(step)
        self._free()

    def find(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> AnnouncedStep | None:
        """The announced step of these lookups on a processor. Its rows are known."""
        return next((step for step in self._announced if step.is_of(lookups, processor)), None)

    def take(self, step: AnnouncedStep) -> list[Lookup]:
        """What ranks request of this one in an announced step. Earlier ones are dropped."""
        while not step.is_complete:
            self._advance(step)
        self.skip(step.number)
        assert step.requested is not None
        return step.requested

    def skip(self, number: int) -> None:
        """No step will take the announcements up to this one."""
        for step in self._announced:
            if step.number <= number:
                step.lookups = None
        self._free()

    def forget(self) -> None:
        """No step of this rank will take what was announced. What is in flight still arrives."""
        self.skip(self._count)

    def _free(self) -> None:
        """Release what is complete and taken by no step."""
        if self._announced and self._announced[-1].is_refused:
            self._count -= 1  # the other ranks announced nothing either
        self._announced = deque(step for step in self._announced if step.is_wanted or not step.is_complete)

    def _advance(self, step: AnnouncedStep) -> None:
        if not step.is_complete:
            step.advance()
            if step.requested:
                with suppress(Exception):  # a hint: the step raises what is wrong, on all ranks
                    self._on_ids(step.requested)
