"""Every exception that tierbed raises for a user's mistake or a store's fault.

Messages name the argument, the value and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence


class TierbedError(Exception):
    """The root: `except TierbedError` catches all of them."""


class OptionError(TierbedError, ValueError):
    """An option or argument has a value that cannot work."""


class InputError(TierbedError, ValueError):
    """Ids, table ids or rows have a wrong dtype, shape or value."""


class OptimizerError(TierbedError, ValueError):
    """Rows cannot follow the optimizer, or it is missing, or the stored rows have the state of another optimizer."""


class CapacityError(TierbedError, RuntimeError):
    """The batch would bring more rows than `capacity` allows. Nothing was changed; the store stays usable."""


class StoreError(TierbedError, RuntimeError):
    """A store folder is locked, foreign, unclean or unwritable, or its device failed."""


class ClosedError(StoreError):
    """The embedding's store was closed."""


class SnapshotError(TierbedError, RuntimeError):
    """A snapshot is missing, foreign, damaged, or of another table. The running table stays as it was."""


class GraphError(TierbedError, RuntimeError):
    """`build` does something that a static graph cannot hold."""


class GroupError(TierbedError, RuntimeError):
    """A rank did not answer, or did otherwise than the others; `ranks` are those that did not answer."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


for _error in (
    TierbedError, OptionError, InputError, OptimizerError, CapacityError, StoreError, ClosedError, SnapshotError,
    GraphError, GroupError,
):  # fmt: skip
    _error.__module__ = "tierbed"  # from where users import it, as tracebacks name it
