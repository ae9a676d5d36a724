"""Exchange the ids of announced steps before the steps begin. Each rank can then prefetch the rows it must send.

Every exchange is a collective, so all ranks must start and finish exchanges at the same points of the program. If ranks
started a collective whenever data arrived, different ranks would start collectives in different orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ..engine.ops.fingerprint import are_lookups_equal, copy_lookup
from ..engine.options.lookup import Lookup
from ..engine.processors.processor import Processor
from ..engine.table.prefetch import MAX_QUEUE
from .handshake import Handshake
from .row_exchange import IdExchange, LocalBatch, Traffic
from .world import World


class AnnouncedStep:
    """An announced step. Ranks exchange headers first, then ids. Afterwards `requested_lookups` is known."""

    def __init__(
        self,
        world: World,
        op: str,
        number: int,
        lookups: Sequence[Lookup] | None,
        local_batch: LocalBatch | None,
        traffic: Traffic,
    ) -> None:
        self.number = number  # the announcement's number, the same on all ranks
        self.local_batch, self._world, self._op, self._traffic = local_batch, world, op, traffic
        self.requested_lookups: list[Lookup] | None = None  # one per rank; empty if some rank did not know its lookups
        # None if no step of this rank will use the announcement
        self.lookups = None if lookups is None else [copy_lookup(lookup) for lookup in lookups]
        counts = [0] * world.size if local_batch is None else local_batch.counts
        self._handshake = Handshake(world, op, counts=counts, payload=local_batch is None)
        self._ids: IdExchange | None = None

    @property
    def is_refused(self) -> bool:
        """True if the handshake failed because a rank was in another call. In that case, all ranks raised an error."""
        return self._handshake.raised_error is not None

    @property
    def is_complete(self) -> bool:
        """True if no transfer of this announcement is in flight."""
        return self.requested_lookups is not None or self.is_refused

    @property
    def is_needed(self) -> bool:
        """True if a step of this rank may still use the announcement."""
        return self.lookups is not None and self.requested_lookups != [] and not self.is_refused

    def matches(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> bool:
        # a table that was closed and opened again has another processor
        is_current = self.is_needed and self.local_batch is not None and self.local_batch.processor is processor
        return is_current and are_lookups_equal(self.lookups or (), lookups)

    def advance(self) -> None:
        """Wait for the exchange in flight, and start the next exchange. Call this until `is_complete`."""
        if self._ids is not None:
            self.requested_lookups = self._ids.wait()
        elif any((answer := self._handshake.wait()).payloads) or self.local_batch is None:
            self.requested_lookups = []
        else:
            self._ids = IdExchange(self._world, f"ids of {self._op}", self.local_batch, answer.counts, self._traffic)


class IdPrefetcher:
    """The announced steps of one embedding, in order. on_ids: called with rows that ranks request from this rank."""

    def __init__(self, world: World, name: str, traffic: Traffic, on_ids: Callable[[list[Lookup]], None]) -> None:
        self._world, self._name, self._traffic, self._on_ids = world, name, traffic, on_ids
        self._steps: deque[AnnouncedStep] = deque()
        self._num_announced = 0

    def announce(self, lookups: Sequence[Lookup] | None, make_batch: Callable[[], LocalBatch]) -> None:
        """Announce a step on all ranks. lookups: None if this rank does not know them; then no rank prefetches.

        make_batch: deduplicates the lookups. Its errors are ignored here, because the step itself raises them.
        """
        self.advance()
        local_batch = None
        if lookups is not None:
            try:
                local_batch = make_batch()
            except Exception:
                lookups = None
        number = self._num_announced + 1
        op = f"announced step {number} of embedding {self._name!r}"
        self._steps.append(AnnouncedStep(self._world, op, number, lookups, local_batch, self._traffic))
        self._num_announced = number  # if the line above raises, no rank has announced this step
        if len(self._steps) > MAX_QUEUE and self._steps[0].is_complete:
            self._steps.popleft()

    def advance(self) -> None:
        """Advance every announced step. All ranks call this method at the same points."""
        self._drop_finished()
        for step in self._steps:
            self._advance(step)
        self._drop_finished()

    def find(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> AnnouncedStep | None:
        """Return the announced step with these lookups and this processor, or None."""
        return next((step for step in self._steps if step.matches(lookups, processor)), None)

    def take(self, step: AnnouncedStep) -> list[Lookup]:
        """Return one lookup per rank i: the rows that rank i requests. Drops the step and all earlier steps."""
        while not step.is_complete:
            self._advance(step)
        self.skip(step.number)
        assert step.requested_lookups is not None
        return step.requested_lookups

    def skip(self, number: int) -> None:
        """Mark the announcements up to this number as unused."""
        for step in self._steps:
            if step.number <= number:
                step.lookups = None
        self._drop_finished()

    def skip_all(self) -> None:
        """Mark all announcements as unused on this rank. Transfers in flight still arrive."""
        self.skip(self._num_announced)

    def _drop_finished(self) -> None:
        """Release announcements that are complete and no longer needed."""
        if self._steps and self._steps[-1].is_refused:
            self._num_announced -= 1  # the other ranks did not announce the step either
        self._steps = deque(step for step in self._steps if step.is_needed or not step.is_complete)

    def _advance(self, step: AnnouncedStep) -> None:
        if not step.is_complete:
            step.advance()
            if step.requested_lookups:
                with suppress(Exception):  # prefetching is optional; the step itself raises errors, on all ranks
                    self._on_ids(step.requested_lookups)
