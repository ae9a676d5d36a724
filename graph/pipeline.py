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

from ..engine.embedding import MultiTableMultiColumnEmbedding
from ..engine.errors import InputError
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
    after the steps of the batches that it gave before; Ctrl-C comes at once, and leaves them for the next call.
    """

    def __init__(
        self, graph: Graph, batches: Iterable[Any], ahead: int, announce: Callable[..., None], progress: Progress
    ) -> None:
        if isinstance(ahead, bool) or not isinstance(ahead, int) or not 0 <= ahead <= WINDOW:
            raise InputError(f"ahead={ahead!r}: give a whole number of batches from 0 to {WINDOW}")
        self._graph, self._announce, self._ahead = graph, announce, ahead
        self._batches = iterate(batches)
        self._window: deque[Any] = deque()
        self._end: Exception | None = None  # of the loader, for when the window is empty
        self._progress = progress
        self._close = weakref.finalize(self, _forget, weakref.ref(graph), progress)
        self._close.atexit = False

    def __next__(self) -> Any:
        while self._end is None and len(self._window) <= self._ahead:
            self._draw()
        if not self._window:
            end = self._end or StopIteration()
            self._end = StopIteration()
            self.close()
            raise end
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
            self._announce(*arguments(self._window[-1]))

    def close(self) -> None:
        """Forget what was announced, and end the threads that make batches ready. A run that ends closes itself."""
        self._close()


def _forget(graph: weakref.ref[Graph], progress: Progress) -> None:
    progress.close()
    root = graph()
    for module in [] if root is None else root.modules():
        if isinstance(module, MultiTableMultiColumnEmbedding):
            module.forget_announced()
