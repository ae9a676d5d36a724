"""Where a table's rows live between runs: opens, closes, saves and restores the table of one store folder.

The live rows are scratch while a table is written: the mark goes before the first write and comes back with a clean
close. What is found without a mark is never served; the last snapshot is.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..snapshots.format import check_description, check_name
from ..snapshots.reader import Snapshot, latest_snapshot
from ..snapshots.writer import write_snapshot
from .errors import OptimizerError, SnapshotError, StoreError
from .optimizers import RowOptimizer
from .options import CachedSsdOptions, StoreOptions
from .spec import KEY_TYPES, TableSpec
from .store.folder import StoreFolder
from .store.rocksdb import SHARDS, RocksDB
from .store.stack import build_stack
from .table import OpenTable, load_rows

log = logging.getLogger("tierbed")

Chunks = Iterator[tuple[int, NDArray[np.void]]]


class TableHome:
    """The store folder of an embedding, held while this object lives, or nothing where the options name no path."""

    def __init__(self, spec: TableSpec, options: StoreOptions) -> None:
        self.spec = spec
        self.options = options
        path = options.persistent_path
        self.folder = None if path is None else StoreFolder(Path(path) / spec.name)
        self._on_disk = isinstance(options, CachedSsdOptions)
        self._fresh = options.open == "fresh"
        self._shards = SHARDS
        self._scratch = False  # whether the live rows in the folder differ from the table's

    def open(self, optimizer: RowOptimizer | None) -> OpenTable:
        """The table with the rows that the folder says are good. Raises StoreError, OptionError, OptimizerError."""
        if self.folder is None:
            return self._build(optimizer, None, None)
        mark = None if self._fresh else self.folder.read_mark()
        if mark is not None:
            return self._resume(optimizer, mark, self.folder)
        if self.folder.begun and not self._fresh:
            return self._recover(optimizer, self.folder)
        return self._start_empty(optimizer, self.folder)

    def close(self, table: OpenTable) -> None:
        """Bring written rows down and mark the folder clean, so that the next run resumes from them.

        Where that fails, as on a full disk, the table stays open, to be closed again. One whose write failed is
        closed without a mark: the next run goes back to the last snapshot.
        """
        if self.folder is not None and self._scratch and table.failure is None:
            table.release()
            if self._on_disk:
                table.flush()
            else:
                shutil.rmtree(self.folder.incoming, ignore_errors=True)
                write_snapshot(self.folder.incoming, table.describe(), table.scan())
                self.folder.replace_live(self.folder.incoming)
            self._set_mark(table)
        table.close()

    def release(self) -> None:
        """Let the folder go as it is."""
        if self.folder is not None:
            self.folder.release()

    def save_snapshot(self, table: OpenTable, name: str) -> None:
        """Raises SnapshotError, StoreError."""
        write_snapshot(self._snapshot_folder(name), table.describe(), table.scan())

    def load_snapshot(self, table: OpenTable, name: str) -> OpenTable:
        """The table with the rows of a snapshot. Until this returns, `table` and its rows stay as they were."""
        snapshot = Snapshot.open(self._snapshot_folder(name))
        self._check(snapshot.description, table.optimizer, SnapshotError, f"snapshot {name!r}")
        return self._restore(table.optimizer, snapshot, table)

    def _start_empty(self, optimizer: RowOptimizer | None, folder: StoreFolder) -> OpenTable:
        new = not folder.begun
        folder.discard_live()
        try:
            table = self._build(optimizer, None, folder.live)
        except BaseException:
            if new:
                folder.forget()
            raise
        self._fresh, self._scratch = False, True
        return table

    def _resume(self, optimizer: RowOptimizer | None, mark: dict[str, Any], folder: StoreFolder) -> OpenTable:
        where = f"store folder {str(folder.path)!r}"
        try:
            check_description(mark)
        except ValueError as error:
            raise StoreError(f"{where} was written by another version of tierbed: its mark has {error}") from error
        self._check(mark, optimizer, StoreError, where)
        try:
            if mark["live"] == "rows":
                return self._restore(optimizer, Snapshot.open(folder.live), None)
            if self._on_disk:
                return self._build(optimizer, mark, folder.live)
            table = self._build(optimizer, mark, None)
            assert table.stack is not None
            with contextlib.closing(RocksDB(folder.live, mark["width"], mark["shards"])) as source:
                load_rows(table.stack, source.scan(), mark["width"])
            return table
        except (SnapshotError, StoreError) as error:
            raise StoreError(
                f"the live rows of {where} are marked clean and cannot be read: {error}. Go back to a snapshot with "
                '`tierbed snapshot load`, or start over with open="fresh"'
            ) from error

    def _recover(self, optimizer: RowOptimizer | None, folder: StoreFolder) -> OpenTable:
        """The last run did not close: its live rows are of different steps."""
        if self.options.open == "error":
            raise StoreError(
                f"store folder {str(folder.path)!r} was not closed by its last run, so its live rows cannot be used; "
                'open="resume" restores the last snapshot or starts empty'
            )
        snapshot = latest_snapshot(folder.snapshots)
        if snapshot is None:
            found = "started empty: it has no snapshot"
            table = self._start_empty(optimizer, folder)
        else:
            found = f"restored its last snapshot {snapshot.name!r}"
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
        folder, stored = self.folder, {**snapshot.description, "rows": snapshot.manifest.rows, "shards": None}
        place = folder.incoming if self._on_disk else None
        shutil.rmtree(folder.incoming, ignore_errors=True)
        table = self._build(optimizer, stored, place)
        try:
            assert table.stack is not None
            load_rows(table.stack, snapshot.chunks(), table.layout.width)
            if self._on_disk:
                table.flush()
            if snapshot.folder != folder.live:
                self._begin_writing()
        except BaseException:
            table.close()
            shutil.rmtree(folder.incoming, ignore_errors=True)
            raise
        if running is not None:
            running.close()
        if place is None:
            return table
        table.close()
        folder.replace_live(place)
        self._set_mark(table)
        return self._build(optimizer, folder.read_mark(), folder.live)

    def _build(self, optimizer: RowOptimizer | None, stored: dict[str, Any] | None, place: Path | None) -> OpenTable:
        """A table over an empty stack, or over RocksDB in `place`, with the step and the row count of `stored`."""
        source = {"optimizer": None, "states": [], "initial": []} if stored is None else stored
        rule, states, initial = source["optimizer"], source["states"], source["initial"]
        if optimizer is not None:
            rule, states, initial = optimizer.rule, optimizer.states, optimizer.initial
        layout = self.spec.layout(initial)
        if optimizer is not None:
            self.options.check_row(self.spec.dim, layout.width)
        shards = None if stored is None else stored["shards"]
        self._shards = shards or SHARDS
        stack = build_stack(self.options, layout, place, shards)
        table = OpenTable(self.spec, layout, stack, rule, states, initial, self.options.capacity, self._begin_writing)
        table.optimizer = optimizer
        if stored is not None:
            table.rows, table.step = stored["rows"], stored["step"]
        return table

    def _begin_writing(self) -> None:
        """Before the first write: from here on the live rows in the folder are not the table's."""
        if self._scratch or self.folder is None:
            return
        if self._on_disk:
            self.folder.clear_mark()
        else:
            self.folder.discard_live()
        self._scratch = True

    def _set_mark(self, table: OpenTable) -> None:
        assert self.folder is not None
        live: dict[str, Any] = {"live": "rocksdb", "shards": self._shards} if self._on_disk else {"live": "rows"}
        self.folder.set_mark({**table.describe(), **live, "rows": table.rows})
        self._scratch = False

    def _snapshot_folder(self, name: str) -> Path:
        if self.folder is None:
            raise SnapshotError(
                f"embedding {self.spec.name!r} has no persistent_path, so no place for snapshots; give one in its "
                f"store options"
            )
        check_name(name)
        return self.folder.snapshots / name

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
        if (stored["seed"], stored["tables"][: self.spec.num_tables]) != (
            self.spec.seed,
            self.spec.plain_tables()[: len(stored["tables"])],
        ):
            log.warning(
                "%s began its rows with another seed or other initializers: rows not yet stored begin differently", what
            )
        if optimizer is None or stored.get("rows") == 0:
            return
        same_rule = stored["optimizer"] in (None, optimizer.rule)
        if not same_rule or tuple(stored["states"]) != tuple(optimizer.states):
            raise OptimizerError(
                f"{what} holds rows of optimizer {stored['optimizer']} with state {stored['states']}, not of "
                f"{optimizer.rule}; "
                "train with that optimizer, or take another name or persistent_path"
            )
