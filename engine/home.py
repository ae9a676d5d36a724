"""Where a table's rows live between runs: opens, closes, saves and restores the table of one store folder.

The live rows are scratch while a table is written: the mark goes before the first write and comes back with a clean
close. What is found without a mark is never served; the last snapshot is.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..snapshots.reader import Snapshot, latest_snapshot
from ..snapshots.writer import write_snapshot
from .errors import OptimizerError, SnapshotError, StoreError
from .optimizers import RowOptimizer
from .options import CachedSsdOptions, StoreOptions
from .spec import KEY_TYPES, TableSpec
from .store.folder import StoreFolder
from .store.rocksdb import RocksDB
from .store.stack import build_stack
from .table import OpenTable, load_rows

log = logging.getLogger("tierbed")

Chunks = Iterator[tuple[int, NDArray[np.void]]]


class TableHome:
    """The store folder of an embedding, held while this object lives, or nothing where the options name no path."""

    def __init__(self, spec: TableSpec, options: StoreOptions) -> None:
        self.spec = spec
        self.options = options
        self.folder = (
            None if options.persistent_path is None else StoreFolder(Path(options.persistent_path) / spec.name)
        )
        self._on_disk = isinstance(options, CachedSsdOptions)
        self._fresh = options.open == "fresh"
        self._scratch = False  # whether the mark is cleared: rows were written since the last clean state

    def open(self, optimizer: RowOptimizer | None) -> OpenTable:
        """The table with the rows that the folder says are good. Raises StoreError, OptionError, OptimizerError."""
        if self.folder is None:
            return self._build(optimizer, None, None)
        mark = self.folder.read_mark()
        if self._fresh:
            self._fresh = False
            self.folder.discard_live()
        elif mark is not None:
            return self._resume(optimizer, mark, self.folder)
        elif self.folder.live.exists() or latest_snapshot(self.folder.snapshots) is not None:
            return self._recover(optimizer, self.folder)
        self.folder.discard_live()
        return self._build(optimizer, None, self.folder.live)

    def close(self, table: OpenTable) -> None:
        """Bring written rows down, mark the folder clean, so that the next run resumes from them, and release it."""
        try:
            table.release()
            if self.folder is not None and self._scratch and table.failure is None:
                if self._on_disk:
                    table.flush()
                    live = "rocksdb"
                else:
                    write_snapshot(self.folder.incoming, table.describe(), table.scan())
                    self.folder.replace_live(self.folder.incoming)
                    live = "rows"
                table.close()
                self._set_mark(table, live)
        finally:
            table.close()
            self.release()

    def release(self) -> None:
        """Let the folder go as it is."""
        if self.folder is not None:
            self.folder.release()

    def save_snapshot(self, table: OpenTable, name: str) -> None:
        write_snapshot(self._snapshots() / name, table.describe(), table.scan())

    def load_snapshot(self, table: OpenTable, name: str) -> OpenTable:
        """The table with the rows of a snapshot. Until this returns, `table` and its rows stay as they were."""
        snapshot = Snapshot.open(self._snapshots() / name)
        self._check(snapshot.description, table.optimizer, SnapshotError, f"snapshot {name!r}")
        return self._restore(table.optimizer, snapshot, table)

    def _resume(self, optimizer: RowOptimizer | None, mark: dict[str, Any], folder: StoreFolder) -> OpenTable:
        self._check(mark, optimizer, StoreError, f"store folder {str(folder.path)!r}")
        if mark["live"] == "rows":
            source: Snapshot | RocksDB = Snapshot.open(folder.live)
        elif self._on_disk:
            return self._build(optimizer, mark, folder.live)
        else:
            source = RocksDB(folder.live, mark["width"])
        if isinstance(source, Snapshot):
            return self._restore(optimizer, source, None)
        try:
            table = self._build(optimizer, mark, None)
            assert table.stack is not None
            load_rows(table.stack, source.scan(), mark["width"])
            return table
        finally:
            source.close()

    def _recover(self, optimizer: RowOptimizer | None, folder: StoreFolder) -> OpenTable:
        """The last run did not close: its live rows are of different steps."""
        snapshot = latest_snapshot(folder.snapshots)
        found = "restored its last snapshot " + repr(snapshot.name) if snapshot else "started empty: it has no snapshot"
        if self.options.open == "error":
            raise StoreError(
                f"store folder {str(folder.path)!r} was not closed by its last run, so its live rows cannot be used; "
                'open="resume" restores the last snapshot or starts empty'
            )
        if snapshot is None:
            folder.discard_live()
            table = self._build(optimizer, None, folder.live)
        else:
            self._check(snapshot.description, optimizer, StoreError, f"store folder {str(folder.path)!r}")
            table = self._restore(optimizer, snapshot, None)
        log.warning(
            "embedding %r: store folder %s was not closed by its last run; %s", self.spec.name, folder.path, found
        )
        return table

    def _restore(self, optimizer: RowOptimizer | None, snapshot: Snapshot, running: OpenTable | None) -> OpenTable:
        """A table with a snapshot's rows, built aside; checksums are verified while they are read.

        Closes `running` when it is built.
        """
        assert self.folder is not None
        folder, stored = self.folder, {**snapshot.description, "rows": snapshot.manifest.rows}
        place = folder.incoming if self._on_disk else None
        table = self._build(optimizer, stored, place)
        assert table.stack is not None
        try:
            load_rows(table.stack, snapshot.chunks(), table.layout.width)
            if self._on_disk:
                table.flush()
        except BaseException:
            table.close()
            if place is not None:
                shutil.rmtree(place, ignore_errors=True)
            raise
        if running is not None:
            self._begin_writing()
            running.close()
        if place is None:
            return table
        table.close()
        folder.replace_live(place)
        self._set_mark(table, "rocksdb")
        return self._build(optimizer, stored, folder.live)

    def _build(self, optimizer: RowOptimizer | None, stored: dict[str, Any] | None, place: Path | None) -> OpenTable:
        """A table over an empty stack, or over RocksDB in `place`, with the step and the row count of `stored`."""
        source = {"optimizer": None, "states": []} if stored is None else stored
        rule, states = source["optimizer"], source["states"]
        initial = [0.0] * len(states)  # read-only: new rows' state is never seen
        if optimizer is not None:
            rule, states, initial = optimizer.rule, optimizer.states, optimizer.initial
        layout = self.spec.layout(initial)
        if optimizer is not None:
            self.options.check_row(self.spec.dim, layout.width)
        stack = build_stack(self.options, layout, place)
        table = OpenTable(self.spec, layout, stack, rule, states, self.options.capacity, self._begin_writing)
        table.optimizer = optimizer
        if stored is not None:
            table.rows, table.step = stored["rows"], stored["step"]
        return table

    def _begin_writing(self) -> None:
        if self._scratch or self.folder is None:
            return
        if self._on_disk:
            self.folder.clear_mark()
        else:
            self.folder.discard_live()
            self.folder.live.mkdir()  # without a mark: says that a run began here and did not close
        self._scratch = True

    def _set_mark(self, table: OpenTable, live: str) -> None:
        assert self.folder is not None
        self.folder.set_mark({**table.describe(), "live": live, "rows": table.rows})
        self._scratch = False

    def _snapshots(self) -> Path:
        if self.folder is None:
            raise SnapshotError(
                f"embedding {self.spec.name!r} has no persistent_path, so no place for snapshots; give one in its "
                f"store options"
            )
        return self.folder.snapshots

    def _check(self, stored: dict[str, Any], optimizer: RowOptimizer | None, error: type[Exception], what: str) -> None:
        """Raises where the stored rows are of another table, or have no state of the optimizer to train them."""
        for field, argument, mine in (
            ("columns", "embedding_dim", list(self.spec.columns)),
            ("key_type", "key_type", KEY_TYPES[self.spec.key_type]),
            ("dtype", "dtype", "float32"),
        ):
            if stored[field] != mine:
                raise error(
                    f"{what} holds rows of {argument} {stored[field]}, not {mine}; give that {argument}, or another "
                    f"name or persistent_path"
                )
        if len(stored["tables"]) > self.spec.num_tables:
            raise error(
                f"{what} holds {len(stored['tables'])} tables, not {self.spec.num_tables}; give all of them, in "
                f"their order"
            )
        if optimizer is None:
            return
        same_rule = stored["optimizer"] in (None, optimizer.rule)
        if not same_rule or tuple(stored["states"]) != tuple(optimizer.states):
            raise OptimizerError(
                f"{what} holds rows of optimizer {stored['optimizer']} with state {stored['states']}, not of "
                f"{optimizer.rule}; "
                "train with that optimizer, or take another name or persistent_path"
            )
