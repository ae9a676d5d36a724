"""`Graph.run`: steps over a loader, with the rows of the batches to come brought up while a step computes.

Batches are drawn ahead of their steps, and their ids announced. A step reads rows when it runs, after the update of the
step before. So its results are those of the plain loop.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...engine.errors import InputError
from ...engine.numeric import whole
from ...engine.ops.rows_contract import Rows
from ...engine.signals import uninterrupted
from ...engine.table.prefetch import WINDOW
from ..passes.lookahead import Coming
from .ahead import Announcer
from .progress import Progress

AHEAD = 8


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
        coming: Callable[..., Coming | None],
        progress: Progress,
        left: list[None],
        announcer: Announcer,
    ) -> None:
        """coming: tells what a call with these arguments looks up.

        left: gets an item where the run is collected before its end, which may be at any time, in any thread.
        """
        most = whole(ahead, 0, WINDOW)
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
        if isinstance(module, Rows):
            module.forget_announced()


def _leave(left: list[None], progress: Progress) -> None:
    progress.close()
    left.append(None)
