"""`Graph.run`: steps over a loader, with the rows of the batches to come brought up while a step computes.

Batches are drawn ahead of their steps, and their ids announced. A step reads rows when it runs, after the update of the
step before, so that its results are those of the plain loop.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import nn

from ..engine.embedding import MultiTableMultiColumnEmbedding
from ..engine.errors import InputError
from ..engine.interrupts import uninterrupted
from ..engine.prefetch import WINDOW
from .progress import Progress

if TYPE_CHECKING:
    from .graph import Graph

AHEAD = 8


def arguments(batch: Any) -> tuple[Any, ...]:
    """Of a call of the graph: the parts of a list or a tuple, else the batch itself."""
    return tuple(batch) if isinstance(batch, list | tuple) else (batch,)


def iterate(batches: Iterable[Any]) -> Iterator[Any]:
    """InputError for what is no loader."""
    try:
        return iter(batches)
    except TypeError:
        raise InputError(
            f"batches: got {type(batches).__name__}; give a DataLoader, or another iterable of batches"
        ) from None


class Run(Iterator[Any]):
    """What `build` returned for each batch, in the loader's order. One that raised can be gone on with.

    A batch is taken once: by the step that runs on it, whether that ends or raises. An exception of the loader comes
    after the steps of the batches that it gave before. Ctrl-C comes when a step under way has ended, whose result is
    lost then, and leaves the other batches for the next call.
    """

    def __init__(
        self,
        graph: Graph,
        batches: Iterable[Any],
        ahead: int,
        announce: Callable[..., None],
        progress: Progress,
        left: list[None],
    ) -> None:
        """left: gets an item where this is collected without having ended, which may be at any time, in any thread."""
        if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= WINDOW:
            raise InputError(f"ahead={ahead!r}: give a whole number of batches from 0 to {WINDOW}")
        self._graph, self._announce, self._ahead = graph, announce, ahead
        self._batches = iterate(batches)
        self._window: deque[Any] = deque()
        self._end: Exception | None = None  # of the loader, for when the window is empty
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
                self._end = None  # it may go on
            raise end
        with uninterrupted():  # Ctrl-C finds a batch in the window, or its step made
            batch = arguments(self._window.popleft())
            result = self._graph(*batch)
        self._progress.advance(batch)
        return result

    def _draw(self) -> None:
        count = len(self._window)
        try:
            self._window.extend(islice(self._batches, 1))  # Ctrl-C cannot come between, and lose the batch
        except Exception as error:
            self._end = error
            return
        if len(self._window) == count:
            self._end = StopIteration()
        elif self._ahead:
            self._announce(count, *arguments(self._window[-1]))

    def close(self) -> None:
        """Forget what was announced, and end the threads that make batches ready. A run that ends closes itself."""
        if self._left.detach() is not None:
            self._progress.close()
            forget_announced(self._graph)


def forget_announced(root: nn.Module) -> None:
    """Let the embeddings under `root` forget what was announced, and end their threads."""
    for module in root.modules():
        if isinstance(module, MultiTableMultiColumnEmbedding):
            module.forget_announced()


def _leave(left: list[None], progress: Progress) -> None:
    progress.close()
    left.append(None)
