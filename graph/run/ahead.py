"""Announcing the batches of a run to its embeddings, which make their rows ready."""

from __future__ import annotations

import contextlib
from collections import defaultdict

from ...engine.errors import TierbedError
from ...engine.ops.rows_contract import Rows
from ...engine.options.inputs import Lookup
from ..passes.lookahead import Coming
from ..passes.step_end import StepEnd


class Announcer:
    """Announces the batches of one run in their order, those of accumulated steps together: as rows will be pinned."""

    def __init__(self, end: StepEnd) -> None:
        self._end = end
        self._together: dict[Rows, list[Lookup]] = defaultdict(list)
        self._count = 0  # how many accumulated steps

    def add(self, between: int, coming: Coming | None) -> None:
        """Announce what the next batch looks up, None where unknown. `between` other batches run before it."""
        number = (self._end.steps + between) % self._end.every
        if number == 0:
            self._together.clear()
            self._count = 0
        if number != self._count or coming is None:
            return  # some lookups of this update are not known, or not of this run
        try:
            for embedding, lookups in coming:
                # accumulated calls give the rows of each call, as `StepEnd.keep` does
                self._together[embedding] += lookups if self._end.every == 1 else [embedding.unique_rows(lookups)]
        except TierbedError:  # the call itself will raise it
            return
        self._count += 1
        if self._count == self._end.every:
            for embedding, lookups in self._together.items():
                with contextlib.suppress(TierbedError):
                    embedding.announce(lookups)
