"""The progress bar of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree


class Progress(Protocol):
    def advance(self, batch: tuple[Any, ...]) -> None: ...
    def close(self) -> None: ...


class NoProgress:
    def advance(self, batch: tuple[Any, ...]) -> None:
        """Does nothing: no bar is shown."""

    def close(self) -> None:
        """Does nothing: no bar is shown."""


class Bar:
    """A bar with steps done and to do, time left, and samples per second.

    The samples of a batch are the rows of its first tensor.
    """

    def __init__(self, batches: Iterable[Any], label: str) -> None:
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
        self._bar.start()  # has an effect only the first time
        sizes = (len(leaf) for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
        self._samples += next(sizes, 1)
        elapsed = self._bar.tasks[self._task].elapsed
        rate = f"{self._samples / elapsed:,.0f} samples/s" if elapsed else ""
        self._bar.update(self._task, advance=1, rate=rate)

    def close(self) -> None:
        self._bar.stop()


def _length(batches: Iterable[Any]) -> int | None:
    try:
        return len(batches) if isinstance(batches, Sized) else None
    except TypeError:  # raised by a DataLoader over an iterable dataset
        return None
