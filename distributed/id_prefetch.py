"""The ids of coming steps, exchanged before their steps, so that each rank can make ready what it will be asked for.

All exchanges begin and are waited for at points that every rank reaches in the same order: no rank looks at what has
arrived so far.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

from ..engine.options.lookup import Lookup
from ..engine.table.prefetch import QUEUE, copied, same_lookups
from .row_exchange import IdExchange, LocalBatch, Traffic
from .world import Handshake

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from ..engine.processors.processor import Processor
    from .world import World


class AnnouncedStep:
    """An announced step. Its headers are on their way, then its ids, then `asked` is there."""

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
        self.asked: list[Lookup] | None = None
        self.dropped = False  # whether a rank does not know its lookups
        self._group, self._op, self._traffic = group, op, traffic
        self._lookups = None if lookups is None else [copied(lookup) for lookup in lookups]
        counts = [0] * group.size if local is None else local.counts
        self._headers = Handshake(group, op, counts=counts, note=local is None)
        self._ids: IdExchange | None = None

    @property
    def is_refused(self) -> bool:
        """Whether a rank was in another call, of which all were told."""
        return self._headers.refused is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing of it is to come."""
        return self.dropped or self.asked is not None or self.is_refused

    @property
    def is_wanted(self) -> bool:
        """Whether a step of this rank may still take it."""
        return self._lookups is not None and not self.dropped and not self.is_refused

    def forget(self) -> None:
        """No step of this rank takes it any more."""
        self._lookups = None

    def is_of(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> bool:
        if self._lookups is None or not self.is_wanted or self.local is None or self.local.processor is not processor:
            return False  # a table that was opened anew has another processor
        return same_lookups(self._lookups, lookups)

    def advance(self) -> None:
        """Wait for what is on its way, and begin what comes after it. Called until `is_over`."""
        if self._ids is not None:
            self.asked = self._ids.wait()
            return
        answer = self._headers.wait()
        self.dropped = any(answer.notes)
        if not self.dropped:
            assert self.local is not None
            self._ids = IdExchange(self._group, f"ids of {self._op}", self.local, answer.counts, self._traffic)


class IdPrefetcher:
    """The announced steps of one embedding, in their order. `tell` gets what the ranks will ask of this one."""

    def __init__(self, group: World, name: str, traffic: Traffic, tell: Callable[[list[Lookup]], None]) -> None:
        self._group, self._name, self._traffic, self._tell = group, name, traffic, tell
        self._coming: deque[AnnouncedStep] = deque()
        self._count = 0

    def announce(self, lookups: Sequence[Lookup] | None, make: Callable[[], LocalBatch]) -> None:
        """Announce a step on all ranks. lookups: None where this rank does not know them; then nobody is told.

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
        op = f"coming step {number} of embedding {self._name!r}"
        self._coming.append(AnnouncedStep(self._group, op, number, lookups, local, self._traffic))
        self._count = number  # only now: on no rank it is announced where the headers before these are refused
        if len(self._coming) > QUEUE and self._coming[0].is_over:
            self._coming.popleft()

    def advance(self) -> None:
        """Go on with every announced step. All ranks call this at the same points."""
        self._free()
        for coming in self._coming:
            self._advance(coming)
        self._free()

    def number_of(self, lookups: Sequence[Lookup], processor: Processor[Any]) -> int:
        """The number of the announcement of these lookups on a processor, from 1; 0 where there is none."""
        return next((coming.number for coming in self._coming if coming.is_of(lookups, processor)), 0)

    def local_of(self, number: int) -> LocalBatch:
        """The unique rows of an announced step."""
        local = self._of(number).local
        assert local is not None
        return local

    def take(self, number: int) -> list[Lookup]:
        """What ranks ask of this one in an announced step. Earlier ones are not wanted any more."""
        found = self._of(number)
        while not found.is_over:
            self._advance(found)
        self.skip(number)
        assert found.asked is not None
        return found.asked

    def skip(self, number: int) -> None:
        """No step takes the announcements up to this one any more."""
        for coming in self._coming:
            if coming.number <= number:
                coming.forget()
        self._free()

    def forget(self) -> None:
        """No step of this rank takes what was announced. What is on its way still arrives."""
        self.skip(self._count)

    def _free(self) -> None:
        """Let go of what is over and taken by no step."""
        if self._coming and self._coming[-1].is_refused:
            self._count -= 1  # the others announced nothing, or as little as this rank
        self._coming = deque(coming for coming in self._coming if coming.is_wanted or not coming.is_over)

    def _of(self, number: int) -> AnnouncedStep:
        return next(coming for coming in self._coming if coming.number == number)

    def _advance(self, coming: AnnouncedStep) -> None:
        if not coming.is_over:
            coming.advance()
            if coming.asked is not None:
                with suppress(Exception):  # a hint: the step raises what is wrong, on all ranks
                    self._tell(coming.asked)
