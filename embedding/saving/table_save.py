"""Writes snapshots of one or several tables, in one process or across ranks.

Each rank writes its rows into temporary folders. Once all folders are durable, rank 0 renames them to the snapshots'
names. One write of the group's record then makes all the snapshots valid at once. If a rank fails, no snapshot remains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ...distributed.world import World, try_call
from ...engine.durable import make_temporary_path
from ...engine.row_format import Change, Chunks
from ...engine.table.background_save import BackgroundSave, ForegroundSave
from ...engine.table.table import OpenTable
from ...snapshots.files.format import HashShard, RowFile
from ...snapshots.files.reader import Snapshot
from ...snapshots.files.writer import NewSnapshots, ProgressCallback, write_manifest
from ...snapshots.store.group import PendingSave, record_save
from ...snapshots.store.retention import remove_backups
from ...snapshots.store.save import SaveInputs, WrittenFiles, write_files


@dataclass(eq=False)
class TableSave:
    """One table's snapshot, begun on all ranks. Each rank writes its rows as they were when the snapshot began."""

    table: OpenTable
    pending_save: PendingSave | None  # how the record describes these rows, on rank 0
    folder: Path  # the snapshot's final path
    kind: str
    inputs: SaveInputs
    parent: Snapshot | None  # for an incremental snapshot: this rank's shard of its parent
    shard: HashShard | None  # this rank's shard; None for all rows
    is_state_snapshot: bool  # saved for a `state_dict()` or without a store, so it never becomes a parent snapshot
    on_saved: Callable[[str], None]  # called with the snapshot's id
    _image: ForegroundSave | None = None
    _changes_since: str | None = None  # the parent's id if the image has only the rows that changed since
    _written: WrittenFiles = field(default_factory=lambda: WrittenFiles(0, {}))

    def begin_image(self, ending: ExitStack) -> bool:
        """Begin an image of the rows as they are now, so that other threads can train during the save.

        The image lasts until `ending` closes. Returns False if no image is possible, as on a GPU: then scan rows
        under the lock.
        """
        if self.shard is None and self.kind != "checkpoint" and not self.table.processor.defers_errors:
            self._prepare_image()
            label = f"snapshot {self.folder.name!r}"
            self._image = self.table.observers.begin_foreground_save(label, self._changes_since)
            ending.callback(self._image.end)
        return self._image is not None

    def begin_in_background(self, write: Callable[[Chunks], None], max_bytes: int) -> BackgroundSave:
        """Start a thread that passes the rows, as they are now, to `write`."""
        self._prepare_image()
        label = f"snapshot {self.folder.name!r}"
        return self.table.observers.save_in_background(label, write, max_bytes, self._changes_since)

    def _prepare_image(self) -> None:
        observers = self.table.observers
        if self.parent is not None and observers.knows_changes_since(self.parent.manifest.id):
            self._changes_since = self.parent.manifest.id
        if not self.is_state_snapshot:
            observers.track_during_save()

    def write(self, progress: ProgressCallback | None = None, parts: Sequence[Chunks] = ()) -> None:
        """Write this rank's rows. parts: the image's rows, or its changes since the parent, if there is an image."""
        if self._image is not None and not parts:
            self._image.read(lambda parts: self.write(progress, parts))
            return
        if self.kind == "checkpoint":
            self.table.flush()
        changes = None if self._changes_since is None else cast(Iterator[Change], parts[0])
        self._written = write_files(
            self.folder, self.kind, self.inputs, self.parent, progress, self.shard, parts, changes
        )

    def describe_part(self) -> list[Any]:
        """Return the row count and the files that this rank has written. Rank 0 passes them to `write_manifest`."""
        files = {name: [file.rows, file.bytes, file.crc32] for name, file in self._written.files.items()}
        return [self._written.num_rows, files]

    def write_manifest(self, parts: Sequence[list[Any]]) -> str:
        """Write the snapshot's manifest on rank 0 and return its id. Afterwards the snapshot lacks only its name.

        parts: each rank's result of `describe_part`.
        """
        entries = sorted((name, entry) for _, files in parts for name, entry in files.items())
        manifest = write_manifest(
            make_temporary_path(self.folder),
            self.inputs.description,
            sum(rows for rows, _ in parts),
            files={name: RowFile(*entry) for name, entry in entries},
            rocksdb=self._written.rocksdb,
            parent=self.parent,
            num_shards=None if self.shard is None else len(parts),
            id=self.inputs.id,
            table_rows=self.inputs.table_rows if self.shard is None else None,
        )
        return manifest.id

    def end(self, id: str, from_image: bool) -> None:
        """Called when the snapshot got its name. The snapshot is the parent of the next incremental snapshot."""
        with self.table.lock:
            observers = self.table.observers
            if from_image or self._image is not None:
                observers.record_save(id)
            elif not self.is_state_snapshot:
                observers.track_changes(id)
            self.on_saved(id)
            if self.pending_save is not None and self.shard is None:
                remove_backups(self.pending_save.member.store.snapshot_store)


def write_and_commit(
    world: World,
    op: str,
    saves: Sequence[TableSave],
    new_snapshots: NewSnapshots,
    locks: ExitStack,
    progress: ProgressCallback | None = None,
) -> None:
    """Write and name snapshots that have begun. If every save has an image, releases `locks` before writing."""
    with ExitStack() as ending:
        have_images = [save.begin_image(ending) for save in saves]
        if all(have_images):
            locks.close()

        def write() -> None:
            for save in saves:
                save.write(progress)

        ids = commit(world, op, saves, new_snapshots, try_call(write)[1])
        for save, id in zip(saves, ids, strict=True):
            save.end(id, from_image=False)


def commit(
    world: World, op: str, saves: Sequence[TableSave], new_snapshots: NewSnapshots, error: BaseException | None
) -> list[str]:
    """Name all snapshots once every rank has written its rows. Returns their ids. A rank's `error` is raised on all."""

    def describe_part() -> list[Any]:
        if error is not None:
            raise error
        return [save.describe_part() for save in saves]

    ranks = world.all_gather_object(op, describe_part)

    def publish() -> list[str]:
        ids = [save.write_manifest([parts[number] for parts in ranks]) for number, save in enumerate(saves)]
        is_parent = not all(save.is_state_snapshot for save in saves)
        pending_saves = {s.pending_save: id for s, id in zip(saves, ids, strict=True) if s.pending_save is not None}
        new_snapshots.call_after_publish(lambda: record_save(pending_saves, is_parent=is_parent))
        new_snapshots.publish()
        return ids

    return list(world.call_on_rank_0(f"{op}: in place", publish))
