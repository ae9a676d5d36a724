"""The exceptions that tierbed raises. Messages name the argument, its value and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class TierbedError(Exception):
    """Base class of tierbed's exceptions."""


class OptionError(TierbedError, ValueError):
    """An option or argument is wrong."""


class InputError(TierbedError, ValueError):
    """Ids, table ids, rows or other input have the wrong dtype, shape or value."""


class OptimizerError(TierbedError, ValueError):
    """The optimizer is missing, cannot train rows, or does not match the state of the stored rows."""


class CapacityError(TierbedError, RuntimeError):
    """A batch has more new rows than `capacity` allows. No row has changed, and the store remains usable."""


class StoreError(TierbedError, RuntimeError):
    """A store's folder is locked, foreign, unclean or unwritable, or its device failed."""


class ClosedError(StoreError):
    """The embedding's store is closed."""


class SnapshotError(TierbedError, RuntimeError):
    """A snapshot is missing, foreign, damaged, or belongs to another table. The open table is unchanged."""


class ServingError(TierbedError, RuntimeError):
    """A serving folder or a version in it is missing, damaged, locked, or of another model."""


class GraphError(TierbedError, RuntimeError):
    """A graph's `build` does something that cannot be traced."""


class GroupError(TierbedError, RuntimeError):
    """A rank did not answer, or made a different call than others. `ranks` lists the ranks that did not answer."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


for _error in (
    TierbedError, OptionError, InputError, OptimizerError, CapacityError, StoreError, ClosedError, SnapshotError,
    ServingError, GraphError, GroupError,
):  # fmt: skip
    _error.__module__ = "tierbed"  # tracebacks show the module that users import


@contextmanager
def undo_on_error(undo: Callable[..., object], *args: object) -> Iterator[None]:
    """Call `undo(*args)` if the block raises any exception. The exception is then raised."""
    try:
        yield
    except BaseException:
        undo(*args)
        raise
