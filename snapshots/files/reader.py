"""Reading snapshots: opening, verifying, the rows of a chain in chunks, and the latest snapshot of a folder."""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...engine.checks import checked_arguments
from ...engine.durable import open_regular, read_record
from ...engine.errors import SnapshotError
from ...engine.row_format import Chunks, RowArray, keys_of
from .format import (
    MANIFEST,
    ROCKSDB,
    HashShard,
    Kind,
    Manifest,
    RowFile,
    bucket_file,
    bucket_of,
    deleted_file,
    dtype_of,
    fits,
    header_bytes,
    is_deleted,
    npy_header,
    row_check,
    shard_number,
    snapshot_id,
)
from .merging import changed, merge_sorted
from .pipeline import read_ahead
from .read_errors import ReadIOError, damaged, read_error, remedy_of

_CHUNK_BYTES = 1 << 25

Piece = tuple[str, RowArray]  # file, rows
ProgressCallback = Callable[[int], None]
MAX_CHAIN = 100  # of snapshots; each is read by its own files and threads


def count_progress(chunks: Chunks, progress: ProgressCallback | None, keys_only: bool = False) -> Chunks:
    """The chunks. `progress` is called with the rows of each; then, if `keys_only`, the chunks are keys."""
    for bucket, rows in chunks:
        if progress is None:
            yield bucket, rows
        else:
            progress(len(rows))
            yield bucket, keys_of(rows) if keys_only else rows


def read_all(chunks: Chunks) -> None:
    """Read all chunks and drop them."""
    deque(chunks, maxlen=0)


class Snapshot:
    """A finished snapshot. Opening reads its manifest; `chunks` and `verify` read and check the rows.

    shard: the shard of the rows that is read, None for every row. Manifests do not have the row count of a shard:
    `shard_rows` has it, by the name of each snapshot in the chain, after `chunks` has yielded its last chunk.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, shard: HashShard | None = None, shard_rows: dict[str, int] | None = None
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shard = shard
        self.shard_rows = {} if shard_rows is None else shard_rows

    @classmethod
    def open(cls, folder: Path) -> Snapshot:
        """Open a snapshot. Raises SnapshotError if it is missing, foreign, damaged or of an unknown format."""
        folder = Path(folder)
        if not os.path.isdir(folder):
            if _leads_nowhere(folder):
                problem = f"it is a link to {str(folder.readlink())!r}, which does not exist or cannot be reached"
                raise damaged(folder, problem, folder)
            names = ", ".join(repr(name) for name in _names(folder.parent)) or "none"
            raise SnapshotError(
                f"there is no snapshot {folder.name!r} in {str(folder.parent)!r}; existing ones: {names}"
            )
        try:
            return cls(folder, Manifest.decode(read_record(folder / MANIFEST)))
        except FileNotFoundError as error:
            raise SnapshotError(
                f"{str(folder)!r} has no {MANIFEST}: it is not a snapshot, or it is damaged and has to be restored "
                "from a copy; give <persistent_path>/<embedding name>/snapshots/<name>"
            ) from error
        except OSError as error:
            raise read_error(folder / MANIFEST, error, folder) from error
        except ValueError as error:
            raise SnapshotError(f"{str(folder / MANIFEST)!r} cannot be read: {error}. {remedy_of(folder)}") from error

    @property
    def name(self) -> str:
        """The name of the folder."""
        return self.folder.name

    @property
    def kind(self) -> Kind:
        return self.manifest.kind

    @property
    def description(self) -> dict[str, Any]:
        """The table of the rows, as the engine described it."""
        return self.manifest.description

    def of_shard(self, shard: HashShard) -> Snapshot:
        """The same snapshot, of whose chain one shard of the rows is read."""
        return Snapshot(self.folder, self.manifest, shard)

    @property
    def parent(self) -> Snapshot | None:
        """The parent of an incremental snapshot. Raises SnapshotError if it is missing."""
        wanted = self.manifest.parent
        if wanted is None:
            return None
        remedy = f"put {wanted.name!r} back next to {self.name!r}, with that name, or use another snapshot"
        try:
            parent = Snapshot.open(self.folder.parent / wanted.name)
        except ReadIOError:
            raise
        except SnapshotError as error:
            raise SnapshotError(f"snapshot {self.name!r} lacks its parent: {error}; {remedy}") from error
        if parent.manifest.id != wanted.id:
            raise SnapshotError(
                f"the parent {wanted.name!r} of snapshot {self.name!r} was replaced by another snapshot; {remedy}"
            )
        if parent.manifest.sequence >= self.manifest.sequence or not fits(parent.description, self.description):
            raise SnapshotError(f"snapshot {self.name!r} does not fit its parent {wanted.name!r}; {remedy}")
        return Snapshot(parent.folder, parent.manifest, self.shard, self.shard_rows)

    @property
    def chain(self) -> list[Snapshot]:
        """The snapshots that the rows are read from: the full one first, this one last. Raises SnapshotError."""
        chain = [self]
        while (parent := chain[-1].parent) is not None:  # the loop ends: sequences descend
            chain.append(parent)
        if len(chain) > MAX_CHAIN:
            raise SnapshotError(
                f"snapshot {self.name!r} has a chain of {len(chain) - 1} parents, and at most {MAX_CHAIN - 1} can be "
                "read: merge an earlier snapshot into a full one with `tierbed snapshot merge`, and use that"
            )
        return chain[::-1]

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read all files of the chain and check what a load checks. Raises SnapshotError naming the file.

        progress: called with the rows of each chunk; their sum is that of `own_rows` over the chain.
        """
        read_all(self._table(65536, progress or (lambda count: None)))

    def chunks(self, max_rows: int = 65536) -> Chunks:
        """Every row of the table as (bucket, rows [n] of its `RowForm.dtype`), ordered as by `Tier.scan`.

        n is at most `max_rows`, and a chunk at most about 32 MiB, for each snapshot in the chain. The existence, size
        and header of every file are checked before the first chunk, its checksum before its last chunk, and the number
        of rows after the last. A caller that must not keep damaged rows calls `verify` first, or uses what it builds
        only after the end. Raises SnapshotError naming the file.
        """
        return self._table(max_rows)

    def _table(self, max_rows: int, progress: ProgressCallback | None = None) -> Chunks:
        """As `chunks`. progress: called with the rows of each chunk; with it, several snapshots yield row keys only."""
        table: Chunks = iter(())
        for snapshot in (chain := self.chain):
            table = snapshot.apply_to(table, max_rows, progress, len(chain) > 1)
        return table

    def apply_to(
        self,
        table: Chunks | None,
        max_rows: int = 65536,
        progress: ProgressCallback | None = None,
        keys_only: bool = False,
    ) -> Chunks:
        """The rows of the table after this snapshot. Their number is checked at the end.

        table: before it, empty for a full one. If None, only the snapshot's own files are read and checked. progress,
        keys_only: as `count_progress`.
        """
        rows, deleted = (count_progress(part, progress, keys_only) for part in self.parts(max_rows))
        if self.manifest.parent is not None:
            rows = changed(iter(()) if table is None else table, rows, deleted, self._conflicting_key_error)
        return rows if table is None else self._counted(rows)

    def _counted(self, chunks: Chunks) -> Chunks:
        count = 0
        for bucket, rows in chunks:
            count += len(rows)
            yield bucket, rows
        if self.shard is not None:
            self.shard_rows[self.name] = count
        else:
            self.check_count(count)

    def parts(self, max_rows: int = 65536) -> tuple[Chunks, Chunks]:
        """Rows in its own files, as of `chunks`, and keys [n] of deleted ones. Checksums are known at the ends only."""
        if self.manifest.rocksdb is not None:
            from .rocksdb_files import checkpoint_chunks  # only for snapshots of RocksDB

            chunks = checkpoint_chunks(self.folder, self.manifest, max_rows)
            return self._unless_replaced(self._in_shard(self._checked(chunks))), iter(())
        files: tuple[dict[str, RowFile], dict[str, RowFile]] = {}, {}
        for name, file in self.manifest.files.items():
            shard = self._shard_of(name)
            if self.shard is None or shard is None or self.shard.meets(shard):
                files[is_deleted(name)][name] = file
        return self.read_files(files[0], max_rows), self.read_files(files[1], max_rows)

    def read_files(self, files: dict[str, RowFile], max_rows: int = 65536) -> Chunks:
        """The rows in some of the manifest's files, as `chunks` yields them. Raises SnapshotError naming the file."""
        return self._unless_replaced(self._of_files(files, max_rows))

    def _of_files(self, files: dict[str, RowFile], max_rows: int) -> Chunks:
        for name, entry in files.items():
            self._open(name, entry).close()
        if self.manifest.parts is None:
            with read_ahead(self._read(files, max_rows)) as pieces, read_ahead(self._sums(pieces)) as chunks:
                yield from self._in_shard(chunks)
        else:
            with read_ahead(self._merged(files, max_rows)) as chunks:
                yield from chunks

    def _merged(self, files: dict[str, RowFile], max_rows: int) -> Generator[tuple[int, RowArray], None, None]:
        """The rows of all shards, merged."""
        by_shard: dict[int | None, dict[str, RowFile]] = {}
        for name, entry in files.items():
            by_shard.setdefault(shard_number(name), {})[name] = entry
        most = max_rows // (len(by_shard) or 1), _CHUNK_BYTES // (2 * len(by_shard) or 1)  # each holds two chunks
        shards = [self._in_shard(self._sums(self._read(entries, *most))) for entries in by_shard.values()]
        for bucket, rows in merge_sorted(shards):
            for begin in range(0, len(rows), max_rows):
                yield bucket, rows[begin : begin + max_rows]

    def _in_shard(self, chunks: Chunks) -> Chunks:
        """The rows of the shard among those of files."""
        shard = self.shard
        for bucket, rows in chunks:
            yield bucket, rows if shard is None or shard.of == self.manifest.parts else shard.rows(rows)

    def _sums(self, pieces: Iterator[Piece]) -> Generator[tuple[int, RowArray], None, None]:
        """The rows of files as (bucket, rows). A file's checksum is compared before its last chunk is passed on."""
        for name, group in groupby(pieces, key=itemgetter(0)):
            entry, count, checksum = self.manifest.files[name], 0, 0
            check = row_check(self.description, bucket_of(name), self._shard_of(name))
            for _, rows in group:
                data = rows.view(np.uint8)
                checksum = zlib.crc32(data.data, checksum)
                count += len(rows)
                if count == entry.rows and checksum != entry.crc32:
                    raise self._damaged(name, "its checksum does not match")
                if problem := check.problem(data, rows.dtype.itemsize):
                    raise self._damaged(name, problem)
                yield bucket_of(name), rows

    def _checked(self, chunks: Chunks) -> Chunks:
        """The rows of a RocksDB checkpoint, checked."""
        for bucket, group in groupby(chunks, key=itemgetter(0)):
            check = row_check(self.description, bucket)
            for _, rows in group:
                if problem := check.problem(rows.view(np.uint8), rows.dtype.itemsize):
                    raise self._damaged(ROCKSDB, problem)
                yield bucket, rows

    def _read(
        self, files: dict[str, RowFile], max_rows: int, max_bytes: int = _CHUNK_BYTES
    ) -> Generator[Piece, None, None]:
        # read, not mapped: a failing disk raises here, where a mapping would kill the process
        for name, entry in files.items():
            dtype = dtype_of(name, self.manifest.form)
            limit = max(1, min(max_rows, max_bytes // dtype.itemsize))
            for begin in range(0, entry.rows, limit):
                rows = np.empty(min(limit, entry.rows - begin), dtype)
                # opened for each piece: a snapshot may have a file of each bucket and rank
                with self._open(name, entry) as file, self._read_errors(name):
                    file.seek(header_bytes(dtype) + begin * dtype.itemsize)
                    count = file.readinto(rows.view(np.uint8).data)  # type: ignore[attr-defined]
                if count != rows.nbytes:
                    raise self._damaged(name, "it was truncated while being read")
                yield name, rows

    def _open(self, name: str, entry: RowFile) -> BinaryIO:
        """The open file. Its header is checked."""
        with self._read_errors(name):
            file = open_regular(self.folder / name)
        size, dtype = os.fstat(file.fileno()).st_size, dtype_of(name, self.manifest.form)
        if size != entry.bytes:
            problem = f"it has {size} bytes instead of {entry.bytes}"
        elif file.read(header_bytes(dtype)) != npy_header(dtype, entry.rows):
            problem = "its header does not fit these rows"
        else:
            return file
        file.close()
        raise self._damaged(name, problem)

    @contextmanager
    def _read_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise read_error(self.folder / name, error, self.folder) from error

    def _shard_of(self, name: str) -> HashShard | None:
        """The shard that a file is of; None without shards."""
        number, of = shard_number(name), self.manifest.parts
        return None if number is None or of is None else HashShard(number, of)

    def _unless_replaced(self, chunks: Chunks) -> Chunks:
        """The chunks. If another snapshot has replaced this one meanwhile, their errors become a ReadIOError."""
        try:
            yield from chunks
        except ReadIOError:
            raise
        except SnapshotError as error:
            if snapshot_id(self.folder) in ("", self.manifest.id):
                raise
            raise ReadIOError(
                f"snapshot {str(self.folder)!r} was replaced by another while it was read: read it again"
            ) from error

    def check_count(self, rows: int) -> None:
        """Raises SnapshotError if the manifest has another number of rows."""
        if rows != self.manifest.rows:
            raise self._damaged("", f"it has {rows} rows instead of {self.manifest.rows}")

    def _conflicting_key_error(self, bucket: int) -> SnapshotError:
        """The error for a bucket that has a key both of a written and of a deleted row."""
        rows, keys = bucket_file(bucket), deleted_file(bucket)
        if self.manifest.parts is None:
            return self._damaged(keys, f"it has keys of rows that {rows} has")
        return self._damaged("", f"parts of {keys} have keys of rows that parts of {rows} have")

    def _damaged(self, name: str, problem: str) -> SnapshotError:
        """The error for damage to a file of the snapshot, or to all of it: ""."""
        return damaged(self.folder / name, problem, self.folder)


class Listing(NamedTuple):
    """The snapshots of a folder: the readable ones from the oldest to the latest, and an error for each other name."""

    snapshots: list[Snapshot]
    damaged: dict[str, SnapshotError]


@checked_arguments("folder")
def list_snapshots(folder: str | Path) -> Listing:
    """Open every snapshot in a folder, reading only manifests; none if the folder does not exist.

    Raises SnapshotError if the folder cannot be listed, or if this process lacks descriptors or memory.
    """
    listing = Listing([], {})
    for name in _names(Path(folder)):
        try:
            listing.snapshots.append(Snapshot.open(Path(folder) / name))
        except ReadIOError:
            raise
        except SnapshotError as error:
            listing.damaged[name] = error
    listing.snapshots.sort(key=lambda s: (s.manifest.sequence, s.manifest.created, s.name))
    return listing


@checked_arguments("folder")
def latest_snapshot(folder: str | Path) -> Snapshot | None:
    """The latest snapshot in a folder, verified; None if there is none.

    An older snapshot never replaces a damaged one: SnapshotError is raised if the latest does not verify, or if any
    manifest cannot be read, since that snapshot might be the latest.
    """
    snapshots, damaged = list_snapshots(folder)
    for error in damaged.values():
        raise SnapshotError(f"it is unknown which snapshot is the latest: {error}") from error
    if not snapshots:
        return None
    snapshots[-1].verify()
    return snapshots[-1]


def name_of(folder: Path, id: str) -> str | None:
    """The name of the snapshot of an id in a folder; None if there is none."""
    try:
        return snapshot_by_id(folder, id).name
    except SnapshotError:
        return None


def snapshot_by_id(folder: Path, id: str) -> Snapshot:
    """The snapshot of an id in a folder. Of several names, the one that a user gave. Raises SnapshotError."""
    snapshots, damaged = list_snapshots(folder)
    named = sorted((one for one in snapshots if one.manifest.id == id), key=lambda one: one.name.endswith(id))
    if named:
        return named[0]
    for error in damaged.values():
        raise error
    raise SnapshotError(f"{str(folder)!r} lacks the snapshot of id {id}: put it back, or load another snapshot")


def _names(folder: Path) -> list[str]:
    try:
        entries = (entry for entry in os.scandir(folder) if not entry.name.startswith("."))
        return sorted(entry.name for entry in entries if _leads_nowhere(Path(entry)) or entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SnapshotError(f"the snapshots in {str(folder)!r} cannot be listed: {error}") from error


def _leads_nowhere(path: Path) -> bool:
    return path.is_symlink() and not os.path.exists(path)
