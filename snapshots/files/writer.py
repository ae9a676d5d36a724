"""Writes a snapshot into a temporary folder, syncs the files, and renames the folder.

Several writers, such as ranks, can each write a shard of one snapshot if all of them see the snapshot's folder.
The first writer opens a `NewSnapshots` block, and each writer calls `write_rows` in the snapshot's temporary folder.
After all writers have returned, the first writer calls `write_manifest` and `publish`. If any writer fails, the block
must raise an exception, so that all files are removed. Snapshots of several stores are written in the same way.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from copy import copy
from functools import partial
from itertools import cycle, groupby, takewhile
from pathlib import Path
from threading import Event, Lock
from typing import Any

import numpy as np

from ...engine import _core
from ...engine.checksum import crc32
from ...engine.durable import NewFolder, UnsyncedError, check_exchange, fsync_dir
from ...engine.errors import SnapshotError
from ...engine.row_format import BUCKETS, Change, Chunks, RowArray, RowFormat
from ...engine.signals import defer_signals
from .format import (
    LAST_SEQUENCE,
    MANIFEST,
    HashShard,
    Kind,
    Manifest,
    Parent,
    RocksDBFiles,
    RowFile,
    check_description,
    check_name,
    count_file_bytes,
    count_header_bytes,
    find_dtype,
    is_deletion,
    make_bucket_name,
    make_deleted_name,
    make_npy_header,
    make_validator,
    read_snapshot_id,
)
from .pipeline import Task, TaskThread, run_syncs
from .reader import ProgressCallback as ProgressCallback
from .reader import Snapshot, list_snapshots

RowFiles = dict[str, RowFile]
_OPEN_FILES = 8  # how many files per table may wait for a sync; many tables may be saved together
_SYNC_THREADS = 2  # so that the disk writes a file's data while it commits the file before
_SMALL_BYTES = 1 << 18  # for fewer bytes, a write is faster than passing the bytes to a thread


def write_changes(
    folder: Path,
    description: dict[str, Any],
    changes: Iterable[Change],
    progress: ProgressCallback | None = None,
    shard: HashShard | None = None,
) -> RowFiles:
    """Write the row files of an incremental snapshot, like `write_rows`. changes: see `write_incremental`."""
    deleted: list[tuple[int, RowArray]] = []

    def yield_rows() -> Iterator[tuple[int, RowArray]]:
        for bucket, rows, keys in changes:
            if len(keys):
                deleted.append((bucket, keys))
            if len(rows):
                yield bucket, rows

    files = write_rows(folder, description, yield_rows(), progress, shard)
    return files | write_rows(folder, description, deleted, progress, shard, make_deleted_name)


def write_rows(
    folder: Path,
    description: dict[str, Any],
    chunks: Iterable[tuple[int, RowArray]],
    progress: ProgressCallback | None = None,
    shard: HashShard | None = None,
    make_file_name: Callable[[int, int | None], str] = make_bucket_name,
) -> RowFiles:
    """Write `chunks` (see `write_snapshot`) durably, to one file per bucket. shard: the shard that the rows belong to.

    Threads write and sync large chunks while the caller makes the next chunk. File names are durable only after the
    folder is synced. Raises SnapshotError for invalid rows. Raises OSError.
    """
    files, small_syncs = dict[str, _RowFile](), list[Task]()
    writer: TaskThread | None = None
    submit: Callable[[Task], object]
    submit_sync: Callable[[Task], object]
    last_bucket, row_format = -1, RowFormat.from_description(description)
    with ExitStack() as open_files, ExitStack() as workers:
        for bucket, group in groupby(chunks, key=lambda chunk: int(chunk[0])):
            if not last_bucket < bucket < BUCKETS:
                raise SnapshotError(
                    f"bucket {bucket} came after bucket {last_bucket}: buckets must ascend and be below {BUCKETS}"
                )
            last_bucket, name = bucket, make_file_name(bucket, None if shard is None else shard.shard_index)
            file, submit, submit_sync = None, (lambda task: task()), small_syncs.append
            dtype, validator = find_dtype(name, row_format), make_validator(description, bucket, shard)
            for rows in _yield_valid(bucket, dtype, validator, group):
                if file is None:
                    file = files[name] = open_files.enter_context(closing(_RowFile(f"{folder}/{name}", rows.dtype)))
                    if rows.nbytes >= _SMALL_BYTES:
                        if writer is None:
                            syncs = [workers.enter_context(TaskThread("tierbed-sync")) for _ in range(_SYNC_THREADS)]
                            sync_threads = cycle(syncs)
                            writer = workers.enter_context(TaskThread("tierbed-write"))  # ends before the sync threads
                        submit, submit_sync = writer.submit, next(sync_threads).submit
                submit(partial(file.write, rows))
                if progress is not None:
                    progress(len(rows))
            if file is not None:
                submit(partial(file.write_header, submit_sync))
            if len(small_syncs) == _OPEN_FILES:
                run_syncs(small_syncs)
                small_syncs.clear()
        run_syncs(small_syncs)
    return {name: file.entry for name, file in files.items()}


def write_parts(
    folder: Path,
    description: dict[str, Any],
    parts: Sequence[Chunks],
    progress: ProgressCallback | None = None,
    shard: HashShard | None = None,
) -> RowFiles:
    """Write rows that are divided into `parts` by bucket, like `write_rows`, with a thread for each part."""
    failed, lock = Event(), Lock()

    def report(count: int) -> None:
        with lock:
            if progress is not None:
                progress(count)

    def write(chunks: Chunks) -> RowFiles:
        try:
            return write_rows(folder, description, takewhile(lambda _: not failed.is_set(), chunks), report, shard)
        except BaseException:
            failed.set()  # ends the other parts early
            raise

    with ExitStack() as stack:
        threads = [stack.enter_context(TaskThread("tierbed-part")) for _ in parts[1:]]
        for thread, part in zip(threads, parts[1:], strict=True):
            thread.add(partial(write, part))
        files = write(parts[0])
        for thread in threads:
            files |= thread.next_result()
    return files


class _RowFile:
    """A row file that is being written. Call `write` for each chunk of rows, then `write_header`."""

    def __init__(self, path: str, dtype: np.dtype[np.void]) -> None:
        self._dtype = dtype
        self._file = open(path, "xb")  # noqa: SIM115
        self._file.write(bytes(count_header_bytes(dtype)))  # space for the header, which needs the row count
        self._count = self._checksum = 0

    def write(self, rows: RowArray) -> None:
        data = rows.view(np.uint8).data
        self._file.write(data)
        self._checksum = crc32(data, self._checksum)
        self._count += len(rows)

    def write_header(self, submit_sync: Callable[[Task], object]) -> None:
        """Write the file's header. Then call `submit_sync` with a task that makes the file durable."""
        self._file.seek(0)
        self._file.write(make_npy_header(self._dtype, self._count))
        self._file.flush()
        submit_sync(self._sync)

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        self._file.close()

    @property
    def entry(self) -> RowFile:
        return RowFile(self._count, count_file_bytes(self._dtype, self._count), self._checksum)


def _yield_valid(
    bucket: int, dtype: np.dtype[np.void], validator: _core.RowValidator, group: Iterable[tuple[int, RowArray]]
) -> Iterator[RowArray]:
    """Checks the chunks of a bucket, and yields all chunks that are not empty, as contiguous arrays."""
    for _, rows in group:
        if rows.dtype != dtype or rows.ndim != 1:
            raise SnapshotError(f"bucket {bucket} has {rows.dtype} {rows.shape} instead of {dtype}")
        if len(rows) == 0:
            continue
        contiguous = np.ascontiguousarray(rows)
        if problem := validator.find_problem(contiguous.view(np.uint8), dtype.itemsize):
            raise SnapshotError(f"bucket {bucket} cannot be written: {problem}")
        yield contiguous


def find_children(folder: Path) -> list[str]:
    """Returns names of snapshots whose parent is `folder`. Raises SnapshotError if snapshots are unreadable."""
    own_id, listing = read_snapshot_id(folder), list_snapshots(folder.parent)
    for name, error in listing.damaged.items():
        if name != folder.name and os.path.lexists(folder.parent / name / MANIFEST):
            raise SnapshotError(f"{name!r} may be a child of {folder.name!r}, but cannot be read: {error}") from error
    parents = ((snapshot.name, snapshot.manifest.parent) for snapshot in listing.snapshots)
    return [name for name, parent in parents if parent and parent.name == folder.name and own_id in ("", parent.id)]


class NewSnapshots(AbstractContextManager["NewSnapshots"]):
    """The snapshots of one save. All become durable under temporary names before any of them gets its final name.

    So a failed save leaves no snapshot, except if the error says so. After a kill between two renames, some snapshots
    exist, but recovery ignores these snapshots because no record names them. Use this class in a `with` statement. The
    end of the `with` block removes all snapshots that still have temporary names.
    """

    def __init__(self) -> None:
        self._id_prefix = secrets.token_hex(8)
        self._new_folders: list[NewFolder] = []
        self._callbacks: list[Callable[[], object]] = []

    def __exit__(self, *_: object) -> None:
        while self._new_folders:
            self._new_folders.pop().drop()

    def pop_all(self) -> NewSnapshots:
        """Move the snapshots to a new object, for a `with` block that ends later. The old object removes nothing."""
        later = copy(self)
        self._new_folders = []
        return later

    def make_id(self) -> str:
        """Returns a new snapshot id. All ids of one save share their first half."""
        return self._id_prefix + secrets.token_hex(8)

    def begin(self, folder: Path, description: dict[str, Any], overwrite: bool = False) -> Path:
        """Begin the snapshot `folder`. Returns its temporary folder. Raises the same errors as `write_snapshot`."""
        check_name_free(folder, overwrite)
        try:
            check_description(description)
        except ValueError as error:
            raise SnapshotError(f"snapshot {folder.name!r} cannot be written: {error}") from error
        with convert_write_errors(folder):
            self._new_folders.append(NewFolder(folder, overwrite))
        return self._new_folders[-1].temporary

    def call_after_publish(self, call: Callable[[], object]) -> None:
        """Register a function to call after all snapshots were renamed. If the function raises, `publish` is undone."""
        self._callbacks.append(call)

    def publish(self) -> None:
        """Rename all snapshots, then call the registered functions. A SnapshotError tells which snapshots exist."""
        for new in self._new_folders:
            with convert_write_errors(new.path):
                fsync_dir(new.temporary)
        published: list[NewFolder] = []
        with defer_signals(), ExitStack() as cleanup:  # Ctrl-C leaves either no snapshot or all
            while self._new_folders:
                new = self._new_folders[0]
                try:
                    new.publish()
                except UnsyncedError as error:  # the new folder exists, but may be lost in a power failure
                    del self._new_folders[0]
                    raise self._make_error(new.path, "was", error, [*published, new]) from error
                except OSError as error:
                    raise self._make_error(new.path, "was not", error, published) from error
                published.append(self._new_folders.pop(0))
                cleanup.callback(new.drop)  # removes the replaced folder
            try:
                for call in self._callbacks:
                    call()
            except BaseException:
                for new in published:
                    new.undo_publish()
                raise

    def _make_error(self, folder: Path, verb: str, error: OSError, published: list[NewFolder]) -> SnapshotError:
        text = f"snapshot {folder.name!r} {verb} written to {str(folder.parent)!r}: {error}"
        if published and self._new_folders:
            saved = ", ".join(repr(str(new.path.parent)) for new in published)
            missing = ", ".join(repr(str(new.path.parent)) for new in self._new_folders)
            text += f". The snapshot is saved in {saved}, but not in {missing}: save all again with overwrite=True"
        return SnapshotError(text)


@contextmanager
def convert_write_errors(folder: Path, shard: HashShard | None = None) -> Iterator[None]:
    """Wrap a block that writes the snapshot `folder`, or one shard of it. Turns an OSError into a SnapshotError."""
    try:
        yield
    except OSError as error:
        what = f"snapshot {folder.name!r}" if shard is None else "shard {} of {} of a snapshot".format(*shard)
        raise SnapshotError(f"{what} was not written to {str(folder.parent)!r}: {error}") from error


def write_snapshot(
    folder: Path,
    description: dict[str, Any],
    chunks: Iterable[tuple[int, RowArray]],
    progress: ProgressCallback | None = None,
    overwrite: bool = False,
    id: str | None = None,
) -> Manifest:
    """Durably and atomically write the full snapshot `folder`. Only one writer at a time may use the parent folder.

    A failed write leaves no files, except if the error says that the snapshot exists but may be lost in a power cut.

    Args:
        folder: The path of the new snapshot. Missing parent folders are created.
        description: Describes the rows' table, like the description in a manifest.
        chunks: (bucket, rows) pairs, like `Tier.scan`. Rows are arrays [n] with the dtype of `RowFormat`. Buckets
            ascend, and (table, key) strictly ascends within a bucket. A few chunks are kept in memory.
        progress: Called with the number of rows in each chunk.
        overwrite: Atomically replace an existing snapshot once the new one is durable.
        id: The snapshot's id. Default: random.

    Returns:
        The manifest.

    Raises:
        SnapshotError: If the name is invalid or taken, or if the existing folder cannot be replaced. Also if the
            description or a chunk is invalid, or if the disk fails. Errors that `chunks` raises are passed on.
    """
    with new_snapshot(folder, description, overwrite) as temporary:
        files = write_rows(temporary, description, chunks, progress)
        rows = sum(file.rows for file in files.values())
        return write_manifest(temporary, description, rows, files=files, id=id)


def write_incremental(
    folder: Path,
    parent: Snapshot,
    description: dict[str, Any],
    rows: int,
    changes: Iterable[Change],
    progress: ProgressCallback | None = None,
    overwrite: bool = False,
    id: str | None = None,
) -> Manifest:
    """Write an incremental snapshot, with the changes since the snapshot `parent` in the same parent folder.

    Args:
        rows: The number of rows in the whole table. See `write_snapshot` for other arguments.
        changes: (bucket, rows, keys) triples. `rows` [n] are the changed rows as they are now, and `keys` [m] are the
            deleted rows' keys (`ROW_KEY_DTYPE`). Both are sorted like `chunks` in `write_snapshot` and share no key.
    """
    folder = Path(folder)
    check_parent(folder, parent, description)
    with new_snapshot(folder, description, overwrite) as temporary:
        files = write_changes(temporary, description, changes, progress)
        return write_manifest(temporary, description, rows, files=files, parent=parent, id=id)


def check_parent(folder: Path, parent: Snapshot, description: dict[str, Any]) -> None:
    """Raises SnapshotError if `parent` cannot be the parent of the new snapshot `folder`."""
    if RowFormat.from_description(description).dtype != parent.manifest.row_format.dtype:
        raise SnapshotError(
            f"snapshot {folder.name!r} cannot be based on {parent.name!r}, whose rows have other optimizer state or "
            'another dtype. Save the snapshot with kind="full"'
        )
    if folder.name == parent.name:
        raise SnapshotError(
            f"snapshot {folder.name!r} cannot be based on the snapshot that it replaces: save with "
            'kind="full", or choose another name'
        )


@contextmanager
def new_snapshot(folder: Path, description: dict[str, Any], overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder for the snapshot `folder`. The block calls `write_manifest`. Raises SnapshotError."""
    folder = Path(folder)
    with NewSnapshots() as new:
        temporary = new.begin(folder, description, overwrite)
        with convert_write_errors(folder):
            yield temporary
        new.publish()


def check_name_free(folder: Path, overwrite: bool | None = False) -> None:
    """Raises SnapshotError if a new snapshot's name is invalid, or is taken by a snapshot that must not be replaced.

    overwrite: True allows replacing a snapshot without children, if the file system can exchange two folders.
    Callers that never replace a snapshot pass None; then the error does not recommend overwriting.
    """
    check_name(folder.name)
    if not os.path.lexists(folder):
        return
    is_snapshot = os.path.lexists(folder / MANIFEST)
    if not overwrite:
        replaceable = overwrite is not None and is_snapshot
        remedy = ", or save with overwrite=True (--overwrite in a shell)" if replaceable else ""
        raise SnapshotError(f"snapshot {str(folder)!r} exists: choose another name, or delete it first{remedy}")
    if not is_snapshot:
        raise SnapshotError(
            f"{str(folder)!r} is not a snapshot, but only snapshots can be overwritten: choose another name"
        )
    if children := ", ".join(map(repr, find_children(folder))):
        raise SnapshotError(
            f"snapshot {str(folder)!r} cannot be overwritten: it is the parent of {children}. Choose another name, "
            f"or remove {children} first"
        )
    try:
        check_exchange(folder)
    except OSError as error:
        raise SnapshotError(f"snapshot {str(folder)!r} cannot be overwritten: {error}. Choose another name") from error


def write_manifest(
    folder: Path,
    description: dict[str, Any],
    rows: int,
    files: dict[str, RowFile] | None = None,
    rocksdb: RocksDBFiles | None = None,
    *,
    parent: Snapshot | None = None,
    num_shards: int | None = None,
    id: str | None = None,
    table_rows: list[int] | None = None,
) -> Manifest:
    """Write the manifest for the durable files in the folder `folder`. Raises OSError, SnapshotError.

    rocksdb: the files of a RocksDB checkpoint. parent: the parent of an incremental snapshot. If both are None,
    the snapshot is full. num_shards: the number of shards; None if there was one writer. table_rows: see `Manifest`.
    """
    files = files or {}
    deleted = sum(file.rows for name, file in files.items() if is_deletion(name))
    latest = max(list_snapshots(folder.parent).snapshots, key=lambda snapshot: snapshot.manifest.sequence, default=None)
    sequence = 1 if latest is None else latest.manifest.sequence + 1
    if latest is not None and sequence > LAST_SEQUENCE:
        raise SnapshotError(
            f"snapshot {latest.name!r} has the largest sequence number, {LAST_SEQUENCE}, so no later snapshot can be "
            f"saved. tierbed did not make {latest.name!r}. Move {str(latest.folder)!r} elsewhere, or remove it"
        )
    id = id or secrets.token_hex(16)
    link = None if parent is None else Parent(parent.name, parent.manifest.id)
    kind: Kind = "checkpoint" if rocksdb is not None else "full" if parent is None else "incremental"
    manifest = Manifest(
        kind, id, link, description, rows, deleted, files, rocksdb, time.time_ns(), sequence, num_shards, table_rows
    )
    write_manifest_file(folder, manifest)
    return manifest


def write_manifest_file(folder: Path, manifest: Manifest) -> None:
    """Durably write a manifest into a snapshot's folder. Raises OSError, SnapshotError."""
    try:
        data = manifest.encode()
    except ValueError as error:
        raise SnapshotError(f"the table's description cannot be stored: {error}") from error
    with (folder / MANIFEST).open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
