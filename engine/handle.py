"""An embedding's hold on its open table: from the first use to `close`, or the end of the embedding or the process."""

from __future__ import annotations

import os
import weakref

from .errors import ClosedError, OptimizerError, StoreError
from .home import TableHome
from .optimizers import RowOptimizer
from .options import StoreOptions
from .spec import TableSpec
from .table import OpenTable

_by_folder: weakref.WeakValueDictionary[str, TableHandle] = weakref.WeakValueDictionary()


class TableHandle:
    """Opens the table. A process holds a folder once: opening it again, as notebooks do, closes the older handle.

    Raises StoreError, OptionError, OptimizerError.
    """

    def __init__(self, spec: TableSpec, options: StoreOptions, optimizer: RowOptimizer | None) -> None:
        self._name = spec.name
        self._process = os.getpid()
        self._table: OpenTable | None = None
        folder = None
        if options.persistent_path is not None:
            folder = os.path.realpath(os.path.join(options.persistent_path, spec.name))
            older = _by_folder.get(folder)
            if older is not None:
                older.close()
        self._home = TableHome(spec, options)
        try:
            self._table = self._home.open(optimizer)
        except BaseException:
            self._home.release()
            raise
        if folder is not None:
            _by_folder[folder] = self

    @property
    def table(self) -> OpenTable:
        """Raises ClosedError after `close`, StoreError in a forked process, which shares the folder with its parent."""
        if self._table is None:
            raise ClosedError(
                f"embedding {self._name!r} was closed, or another embedding opened its folder; create it again"
            )
        if self._home.folder is not None and self._process != os.getpid():
            raise StoreError(
                f"embedding {self._name!r} was opened by process {self._process}, which holds its folder; use it there"
            )
        return self._table

    def accepts(self, optimizer: RowOptimizer) -> bool:
        """Whether the open table can be trained by it as it is; False where it must be opened again, which loses nothing.

        Raises OptimizerError where its rows carry the state of another.
        """
        table = self.table
        current = table.optimizer
        wanted = (optimizer.rule, optimizer.initial)
        if current is not None and (current.rule, current.initial) == wanted:
            return True
        other = table.states != optimizer.states or table.rule not in (None, optimizer.rule)
        if current is not None or (table.rows and other):
            raise OptimizerError(
                f"embedding {self._name!r} has rows of optimizer {table.rule} with state {list(table.states)}, not of "
                f"{optimizer.rule}; keep to one optimizer, add it before rows are put, or take another name"
            )
        return not table.states and not optimizer.states

    def release(self) -> None:
        """Drop the pin that a failed step left, if the table is open."""
        if self._table is not None:
            self._table.release()

    def save_snapshot(self, name: str) -> None:
        self._home.save_snapshot(self.table, name)

    def load_snapshot(self, name: str) -> None:
        self._table = self._home.load_snapshot(self.table, name)

    def close(self) -> None:
        """Bring the rows down and let the folder go. May be called again; does nothing in a forked process."""
        table, self._table = self._table, None
        if table is not None and self._process == os.getpid():
            self._home.close(table)
