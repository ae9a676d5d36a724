"""Every exception that tierbed raises for a mistake of a user or a failure of a store.

Messages name the argument, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class TierbedError(Exception):
    """The base class: `except TierbedError` catches all of them."""


class OptionError(TierbedError, ValueError):
    """An option or argument has a value that cannot work."""


class InputError(TierbedError, ValueError):
    """Ids, table ids or rows have a wrong dtype, shape or value."""


class OptimizerError(TierbedError, ValueError):
    """The optimizer cannot train rows, or it is missing, or the stored rows have the state of another optimizer."""


class CapacityError(TierbedError, RuntimeError):
    """The batch has more new rows than `capacity` allows. Nothing was changed, and the store can still be used."""


class StoreError(TierbedError, RuntimeError):
    """A store folder is locked, foreign, unclean or unwritable, or its device failed."""


class ClosedError(StoreError):
    """The embedding's store was closed."""


class SnapshotError(TierbedError, RuntimeError):
    """A snapshot is missing, foreign, damaged, or of another table. The open table is unchanged."""


class GraphError(TierbedError, RuntimeError):
    """`build` does something that a trace cannot record."""


class GroupError(TierbedError, RuntimeError):
    """A rank did not answer, or made another call than the others; `ranks` are those that did not answer."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


for _error in (
    TierbedError, OptionError, InputError, OptimizerError, CapacityError, StoreError, ClosedError, SnapshotError,
    GraphError, GroupError,
):  # fmt: skip
    _error.__module__ = "tierbed"  # where users import it from, for tracebacks
