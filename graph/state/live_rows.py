"""The rows of one step that `graph.publish` publishes while training goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...embedding.saving.table_save import TableSave
from ...engine.errors import ServingError
from ...engine.options.table_spec import RUN_ID_FIELD
from ...engine.row_format import ROW_KEY_DTYPE, Change, Chunks, RowArray, RowFormat
from ...engine.table.background_save import BackgroundSave
from ...engine.table.table import OpenTable
from ...serving.folder import ServingFolder
from ...serving.source import settle_changes
from ...serving.version import SnapshotEntry
from ...snapshots.files.format import HashShard, Kind, Manifest, Parent, RowFile, is_deletion
from ...snapshots.files.reader import Snapshot, read_changes
from ...snapshots.files.writer import ProgressCallback, write_changes
from ...snapshots.store.recovery_rule import EMPTY_RECORD
from ...snapshots.store.save import SaveInputs, WrittenFiles
from ...snapshots.store.selection import Selection, convert_rows

_NO_KEYS: RowArray = np.empty(0, ROW_KEY_DTYPE)


class LiveRows:
    """The rows of an open table at one step: a `RowSource`. Made between two steps, while the tables are locked."""

    catches_up = False  # new bases merge files, because the image contains only changed rows

    def __init__(self, manager: Any, id: str, since: str | None, consumer: str) -> None:
        """`id` names these rows. `since` is the id of the folder's last version, if its changes are known."""
        self.table: OpenTable = manager.local.table
        self.consumer, self.since = consumer, since
        spec, self.stored = self.table.spec, self.table.describe()
        self.description = Selection(includes_state=False).describe(self.stored) | {
            "ids": [options.ids for options in spec.tables],
            "bad_ids": [options.bad_ids for options in spec.tables],
            "zero_key": spec.zero_key,
        }
        self.label, self.row_format = f"embedding {spec.name!r}", self.table.row_format
        self.origin = SnapshotEntry(id, str(self.stored[RUN_ID_FIELD]), self.table.step, self.table.counts.num_rows)
        self.table.observers.track_during_save(consumer)
        self._read: Callable[[], Iterator[Change]]  # set by `open_image` or `read_files`

    def open_image(self, ending: ExitStack) -> None:
        """Read the rows from an image. `ending` closes the image."""
        save = self.table.observers.begin_foreground_save(f"a publish of {self.label}", self.since, self.consumer)
        ending.callback(save.end)
        self._read = lambda: self.settle(save.chunks())

    def settle(self, chunks: Iterator[Any]) -> Iterator[Change]:
        """Yield the rows of this table's image as changes."""
        if self.since is None:
            chunks = ((bucket, rows, _NO_KEYS) for bucket, rows in chunks)
        return settle_changes(self.stored, chunks)

    def read_since(self, id: str) -> Iterator[Change] | None:
        return self._read() if id == self.since else None

    def read_all(self) -> Iterator[Change]:
        if self.since is not None:
            raise ServingError(f"another publisher has published {self.label} meanwhile: publish it again")
        return self._read()

    def record_publish(self) -> None:
        """From now on, track changes since these rows."""
        self.table.observers.record_save(self.origin.id, self.consumer)

    def read_files(self, snapshot: Snapshot) -> None:
        """Read the rows of all ranks from the files that `ShardSave` wrote."""
        self.row_format, self.origin = snapshot.manifest.row_format, replace(self.origin, rows=snapshot.manifest.rows)
        self._read = lambda: read_changes([snapshot])


class ShardSave(TableSave):
    """Writes one rank's rows, without optimizer state, to a folder where rank 0 reads the rows of all ranks."""

    def __init__(self, rows: LiveRows, target: ServingFolder, folder: Path, shard: HashShard) -> None:
        inputs = SaveInputs(rows.description, rows.origin.rows, rows.table.scan, EMPTY_RECORD, "", id=rows.origin.id)
        super().__init__(rows.table, None, folder, "full", inputs, None, shard, True, lambda id: None)
        self._rows, self._target = rows, target

    def begin_in_background(self, write: Callable[[Chunks], None], max_bytes: int) -> BackgroundSave:
        rows, label = self._rows, f"a publish of {self._rows.label}"
        save = self.table.observers.save_in_background(label, write, max_bytes, rows.since, rows.consumer)
        save.skip_pauses()
        return save

    def write(self, progress: ProgressCallback | None = None, parts: Sequence[Chunks] = ()) -> None:
        with self._target.convert_errors("write to"):
            files = write_changes(
                self.folder, self.inputs.description, self._drop_state(parts[0]), progress, self.shard
            )
        self._written = WrittenFiles(self.inputs.num_rows, files)

    def _drop_state(self, chunks: Chunks) -> Iterator[Change]:
        stored, kept = self._rows.row_format, RowFormat.from_description(self.inputs.description)
        for bucket, rows, deleted in self._rows.settle(chunks):
            converted = convert_rows(rows, stored, kept, self.inputs.description["key_type"] != "uint64")
            converted["step"] = 0
            yield bucket, converted, deleted

    def write_manifest(self, parts: Sequence[list[Any]]) -> str:
        """Pass the files of all ranks to `LiveRows`. Writes no manifest, because no other run reads the files."""
        id, since = self._rows.origin.id, self._rows.since
        files = {name: RowFile(*entry) for _, files in parts for name, entry in sorted(files.items())}
        deleted = sum(file.rows for name, file in files.items() if is_deletion(name))
        num_rows, parent = sum(rows for rows, _ in parts), None if since is None else Parent("published", since)
        kind: Kind = "full" if parent is None else "incremental"
        manifest = Manifest(
            kind, id, parent, self.inputs.description, num_rows, deleted, files, None, time.time_ns(), 1, len(parts)
        )
        self._rows.read_files(Snapshot(self.folder, manifest))
        return id

    def end(self, id: str, from_image: bool) -> None:
        """Nothing: the rows count as published once rank 0 has published them."""
