"""Opens and verifies snapshots, reads their rows in chunks, and finds the latest snapshot in a folder."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ...engine.checks import validate_arguments
from ...engine.checksum import crc32
from ...engine.durable import open_regular, read_record_bytes
from ...engine.errors import SnapshotError
from ...engine.row_format import Change, Chunks, RowArray, extract_row_keys
from ...engine.store.merging import merge_chain, merge_sorted
from .format import (
    MANIFEST,
    ROCKSDB,
    HashShard,
    Kind,
    Manifest,
    RowFile,
    count_header_bytes,
    find_dtype,
    is_compatible,
    is_deletion,
    make_bucket_name,
    make_deleted_name,
    make_npy_header,
    make_validator,
    parse_bucket,
    parse_shard_index,
)
from .pipeline import read_ahead
from .read_errors import ReadIOError, make_damage_error, make_read_error, make_remedy

_CHUNK_BYTES = 1 << 25

FileChunk = tuple[str, RowArray]  # the name of a file, and some of its rows
ProgressCallback = Callable[[int], None]
MAX_CHAIN = 100  # maximum length of a chain, because each snapshot in it needs its own open files and threads


def report_progress(chunks: Chunks, progress: ProgressCallback | None, keys_only: bool = False) -> Chunks:
    """Yields the chunks, or only their keys if `keys_only`. Calls `progress`, if given, with each chunk's row count."""
    for bucket, rows in chunks:
        if progress is None:
            yield bucket, rows
        else:
            progress(len(rows))
            yield bucket, extract_row_keys(rows) if keys_only else rows


def exhaust(items: Iterable[object]) -> None:
    deque(items, maxlen=0)


class Snapshot:
    """A finished snapshot. `open` reads the manifest; `chunks` and `verify` read and check the rows.

    Args:
        shard: read only this shard's rows; None reads all rows.
        shard_rows: receives the number of the shard's rows in each snapshot of the chain, by snapshot name. Manifests
            do not store these numbers, so they are known only after all of `chunks` has been read.

    Attributes:
        error: The error that this snapshot's own files caused in the last read, or None.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, shard: HashShard | None = None, shard_rows: dict[str, int] | None = None
    ) -> None:
        self.folder, self.manifest, self.shard = folder, manifest, shard
        self.shard_rows = {} if shard_rows is None else shard_rows
        self.error: SnapshotError | None = None

    @classmethod
    def open(cls, folder: Path) -> Snapshot:
        """Open a snapshot by reading its manifest.

        Args:
            folder: The snapshot's folder, `<persistent_path>/<embedding name>/snapshots/<name>`.

        Raises:
            SnapshotError: If the snapshot is missing, foreign, damaged or of an unknown format.
        """
        folder = Path(folder)
        if not os.path.isdir(folder):
            if _is_broken_link(folder):
                problem = f"it is a link to {str(folder.readlink())!r}, which does not exist or cannot be reached"
                raise make_damage_error(folder, problem, folder)
            names = ", ".join(repr(name) for name in _list_snapshot_names(folder.parent)) or "none"
            raise SnapshotError(
                f"there is no snapshot {folder.name!r} in {str(folder.parent)!r}; existing ones: {names}"
            )
        try:
            return cls(folder, Manifest.decode(read_record_bytes(folder / MANIFEST)))
        except FileNotFoundError as error:
            raise SnapshotError(
                f"{str(folder)!r} has no {MANIFEST}: it is not a snapshot, or is damaged. Restore the snapshot from a "
                "copy, or give <persistent_path>/<embedding name>/snapshots/<name>"
            ) from error
        except OSError as error:
            raise make_read_error(folder / MANIFEST, error, folder) from error
        except ValueError as error:
            raise SnapshotError(f"{str(folder / MANIFEST)!r} cannot be read: {error}. {make_remedy(folder)}") from error

    @property
    def name(self) -> str:
        """The snapshot's name, which is the name of its folder."""
        return self.folder.name

    @property
    def kind(self) -> Kind:
        return self.manifest.kind

    @property
    def description(self) -> dict[str, Any]:
        """The description of the table that the rows belong to."""
        return self.manifest.description

    def restrict_to_shard(self, shard: HashShard) -> Snapshot:
        """Returns a new object for the same snapshot. The new object reads only the rows of `shard`."""
        return Snapshot(self.folder, self.manifest, shard)

    @property
    def parent(self) -> Snapshot | None:
        """The parent of an incremental snapshot, otherwise None. Raises SnapshotError if the parent is missing."""
        link = self.manifest.parent
        if link is None:
            return None
        remedy = f"put {link.name!r} back next to {self.name!r}, with this name, or use another snapshot"
        try:
            parent = Snapshot.open(self.folder.parent / link.name)
        except ReadIOError:
            raise
        except SnapshotError as error:
            self._check_not_replaced(error)  # a prune may have folded the parent into this snapshot
            raise SnapshotError(f"snapshot {self.name!r} lacks its parent: {error}; {remedy}") from error
        if parent.manifest.id != link.id:
            raise SnapshotError(
                f"the parent {link.name!r} of snapshot {self.name!r} was replaced by another snapshot; {remedy}"
            )
        older, newer = parent.manifest, self.manifest
        if older.sequence >= newer.sequence or not is_compatible(older.description, newer.description):
            raise SnapshotError(f"snapshot {self.name!r} does not fit its parent {link.name!r}; {remedy}")
        return Snapshot(parent.folder, parent.manifest, self.shard, self.shard_rows)

    @property
    def chain(self) -> list[Snapshot]:
        """The snapshots that contain this snapshot's rows, from the full snapshot to this one. Raises SnapshotError."""
        chain = [self]
        while (parent := chain[-1].parent) is not None:  # this ends, because a parent's sequence is smaller
            chain.append(parent)
        if len(chain) > MAX_CHAIN:
            raise SnapshotError(
                f"snapshot {self.name!r} has a chain of {len(chain) - 1} parents, but at most {MAX_CHAIN - 1} can be "
                "read: merge an earlier snapshot into a full one with `tierbed snapshot merge`, and use the full one"
            )
        return chain[::-1]

    def verify(self, progress: Callable[[int], None] | None = None) -> None:
        """Read and check all files of the chain, as a load does. Raises SnapshotError that names a damaged file.

        progress: called with each chunk's row count. The sum of the counts is the sum of `num_entries` over the chain.
        """
        exhaust(read_changes(self.chain, progress=progress or (lambda count: None)))

    def chunks(self, max_rows: int = 65536) -> Chunks:
        """Yields every row of the table, sorted like `Tier.scan`.

        All files' sizes and headers are checked before the first chunk is yielded. A file's checksum is checked
        before the file's last chunk, and the row count after the last chunk. To be sure that no row is damaged, call
        `verify` first, or read all chunks before you use a row.

        Args:
            max_rows: The maximum number of rows in a chunk. A chunk has at most about 32 MiB per snapshot in the chain.

        Returns:
            An iterator of (bucket, rows), where rows is an array [n] with the dtype of `RowFormat`.

        Raises:
            SnapshotError: If a file is damaged or missing. The message names the file.
        """
        changes = read_changes(self.chain, max_rows)
        return ((bucket, rows) for bucket, rows, _ in changes if len(rows))

    def read_rows_and_deletions(self, max_rows: int = 65536) -> tuple[Chunks, Chunks]:
        """Returns the rows and deleted keys in the snapshot's own files. Compares a checksum at each file's end."""
        if self.manifest.rocksdb is not None:
            from .rocksdb_files import checkpoint_chunks  # needs RocksDB

            chunks = checkpoint_chunks(self.folder, self.manifest, max_rows)
            return self._detect_replacement(self._select_shard(self._yield_checked_checkpoint(chunks))), iter(())
        files: tuple[dict[str, RowFile], dict[str, RowFile]] = {}, {}
        for name, file in self.manifest.files.items():
            shard = self._find_shard(name)
            if self.shard is None or shard is None or self.shard.overlaps(shard):
                files[is_deletion(name)][name] = file
        return self.read_files(files[0], max_rows), self.read_files(files[1], max_rows)

    def read_files(self, files: dict[str, RowFile], max_rows: int = 65536) -> Chunks:
        """Yields the rows in some of the snapshot's files, like `chunks`. A SnapshotError names the damaged file."""
        return self._detect_replacement(self._read_file_rows(files, max_rows))

    def _read_file_rows(self, files: dict[str, RowFile], max_rows: int) -> Chunks:
        for name, entry in files.items():
            self._open_file(name, entry).close()
        if self.manifest.num_shards is None and sum(entry.bytes for entry in files.values()) < _CHUNK_BYTES:
            yield from self._select_shard(self._yield_checked(self._read(files, max_rows)))  # faster than threads
        elif self.manifest.num_shards is None:
            with read_ahead(self._read(files, max_rows)) as pieces, read_ahead(self._yield_checked(pieces)) as chunks:
                yield from self._select_shard(chunks)
        else:
            with read_ahead(self._merge_shards(files, max_rows)) as chunks:
                yield from chunks

    def _merge_shards(self, files: dict[str, RowFile], max_rows: int) -> Generator[tuple[int, RowArray], None, None]:
        by_shard: dict[int | None, dict[str, RowFile]] = {}
        for name, entry in files.items():
            by_shard.setdefault(parse_shard_index(name), {})[name] = entry
        # the merge keeps two chunks of each shard in memory
        limits = max_rows // (len(by_shard) or 1), _CHUNK_BYTES // (2 * len(by_shard) or 1)
        shards = [self._select_shard(self._yield_checked(self._read(part, *limits))) for part in by_shard.values()]
        for bucket, rows in merge_sorted(shards):
            for begin in range(0, len(rows), max_rows):
                yield bucket, rows[begin : begin + max_rows]

    def _select_shard(self, chunks: Chunks) -> Chunks:
        """Yields only the rows that belong to `self.shard`."""
        shard, num_shards = self.shard, self.manifest.num_shards
        for bucket, rows in chunks:
            yield bucket, rows if shard is None or shard.num_shards == num_shards else shard.select_rows(rows)

    def _yield_checked(self, pieces: Iterator[FileChunk]) -> Generator[tuple[int, RowArray], None, None]:
        """Yields (bucket, rows) pairs. Compares each file's checksum before it yields the file's last chunk."""
        for name, group in groupby(pieces, key=itemgetter(0)):
            entry, count, checksum = self.manifest.files[name], 0, 0
            validator = make_validator(self.description, parse_bucket(name), self._find_shard(name))
            for _, rows in group:
                data = rows.view(np.uint8)
                checksum = crc32(data.data, checksum)
                count += len(rows)
                if count == entry.rows and checksum != entry.crc32:
                    raise self._make_damage_error(name, "its checksum does not match")
                if problem := validator.find_problem(data, rows.dtype.itemsize):
                    raise self._make_damage_error(name, problem)
                yield parse_bucket(name), rows

    def _yield_checked_checkpoint(self, chunks: Chunks) -> Chunks:
        for bucket, group in groupby(chunks, key=itemgetter(0)):
            validator = make_validator(self.description, bucket)
            for _, rows in group:
                if problem := validator.find_problem(rows.view(np.uint8), rows.dtype.itemsize):
                    raise self._make_damage_error(ROCKSDB, problem)
                yield bucket, rows

    def _read(
        self, files: dict[str, RowFile], max_rows: int, max_bytes: int = _CHUNK_BYTES
    ) -> Generator[FileChunk, None, None]:
        # no memory map: if the disk fails, a read raises an error, but access to a memory map kills the process
        for name, entry in files.items():
            dtype = find_dtype(name, self.manifest.row_format)
            limit = max(1, min(max_rows, max_bytes // dtype.itemsize))
            for begin in range(0, entry.rows, limit):
                rows = np.empty(min(limit, entry.rows - begin), dtype)
                # reopen the file for each piece, because an open file per bucket and rank would be too many
                with self._open_file(name, entry) as file, self._convert_read_errors(name):
                    file.seek(count_header_bytes(dtype) + begin * dtype.itemsize)
                    count = file.readinto(rows.view(np.uint8).data)  # type: ignore[attr-defined]
                if count != rows.nbytes:
                    raise self._make_damage_error(name, "it was truncated while being read")
                yield name, rows

    def _open_file(self, name: str, entry: RowFile) -> BinaryIO:
        """Open a file, and check the file's size and header."""
        with self._convert_read_errors(name):
            file = open_regular(self.folder / name)
        size, dtype = os.fstat(file.fileno()).st_size, find_dtype(name, self.manifest.row_format)
        if size != entry.bytes:
            problem = f"it has {size} bytes instead of {entry.bytes}"
        elif file.read(count_header_bytes(dtype)) != make_npy_header(dtype, entry.rows):
            problem = "its header does not fit these rows"
        else:
            return file
        file.close()
        raise self._make_damage_error(name, problem)

    @contextmanager
    def _convert_read_errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise make_read_error(self.folder / name, error, self.folder) from error

    def _find_shard(self, name: str) -> HashShard | None:
        """Returns the shard that a file belongs to, or None if the snapshot is not sharded."""
        index, num_shards = parse_shard_index(name), self.manifest.num_shards
        return None if index is None or num_shards is None else HashShard(index, num_shards)

    def _detect_replacement(self, chunks: Chunks) -> Chunks:
        """Yields the chunks. Raises ReadIOError if a save or prune replaced or removed this snapshot meanwhile."""
        try:
            yield from chunks
        except ReadIOError:
            raise
        except SnapshotError as error:
            self._check_not_replaced(error)
            self.error = error
            raise

    def _check_not_replaced(self, cause: SnapshotError) -> None:
        """Raises ReadIOError if the folder was removed or has another manifest. cause: the error of a read."""
        try:
            if Snapshot.open(self.folder).manifest == self.manifest:
                return
        except ReadIOError:
            raise
        except SnapshotError:
            if os.path.isdir(self.folder):
                return
        raise ReadIOError(
            f"snapshot {str(self.folder)!r} was replaced or removed while it was read: read it again"
        ) from cause

    def check_count(self, num_rows: int) -> None:
        """Raises SnapshotError if the manifest's row count is not `num_rows`."""
        if num_rows != self.manifest.rows:
            raise self._make_damage_error("", f"it has {num_rows} rows instead of {self.manifest.rows}")

    def make_conflict_error(self, bucket: int) -> SnapshotError:
        """Returns the error for a bucket that contains a key as both written and deleted."""
        rows, keys = make_bucket_name(bucket), make_deleted_name(bucket)
        if self.manifest.num_shards is None:
            return self._make_damage_error(keys, f"it has keys of rows that {rows} also has")
        return self._make_damage_error("", f"parts of {keys} have keys of rows that parts of {rows} also have")

    def _make_damage_error(self, name: str, problem: str) -> SnapshotError:
        """Returns the error for a damaged file of the snapshot, or for the whole snapshot if `name` is ""."""
        self.error = make_damage_error(self.folder / name, problem, self.folder)
        return self.error


def read_changes(
    chain: Sequence[Snapshot], max_rows: int = 65536, progress: ProgressCallback | None = None
) -> Iterator[Change]:
    """Reads successive snapshots of a chain, merged as `merge_chain` does. Checks the row counts at the end.

    chain: the whole chain, or its increments from one snapshot on. Row counts are then not checked, because they depend
    on the rows of the snapshots that are not read. With `progress`, a chain of several snapshots yields only keys.
    """
    counts = np.zeros(len(chain), np.int64)
    streams: list[list[Chunks]] = [
        [report_progress(part, progress, len(chain) > 1) for part in snapshot.read_rows_and_deletions(max_rows)]
        for snapshot in chain
    ]
    merged = merge_chain(streams, counts, lambda index, bucket: chain[index].make_conflict_error(bucket))
    with read_ahead(merged) if len(chain) > 1 and progress is None else nullcontext(merged) as changes:
        yield from changes
    if chain and chain[0].manifest.parent is None:
        for snapshot, count in zip(chain, counts.cumsum().tolist(), strict=True):
            if snapshot.shard is None:
                snapshot.check_count(count)
            else:
                snapshot.shard_rows[snapshot.name] = count


class Listing(NamedTuple):
    """The readable snapshots in a folder, from oldest to latest, and {name: error} for unreadable snapshots."""

    snapshots: list[Snapshot]
    damaged: dict[str, SnapshotError]


@validate_arguments("folder")
def list_snapshots(folder: str | Path) -> Listing:
    """Open every snapshot in a folder. Reads only the manifests.

    Args:
        folder: A folder of snapshots. If the folder does not exist, the result is empty.

    Raises:
        SnapshotError: If the folder cannot be listed, or if this process is out of file descriptors or memory.
    """
    listing = Listing([], {})
    for name in _list_snapshot_names(Path(folder)):
        try:
            listing.snapshots.append(Snapshot.open(Path(folder) / name))
        except ReadIOError:
            raise
        except SnapshotError as error:
            listing.damaged[name] = error
    listing.snapshots.sort(key=lambda s: (s.manifest.sequence, s.manifest.created, s.name))
    return listing


@validate_arguments("folder")
def latest_snapshot(folder: str | Path) -> Snapshot | None:
    """Verify and return a folder's latest snapshot, or None if there is none. Never falls back to an older snapshot.

    Raises:
        SnapshotError: If the latest snapshot is damaged, or if an unreadable manifest might be the latest snapshot's.
    """
    snapshots, damaged = list_snapshots(folder)
    for error in damaged.values():
        raise SnapshotError(f"it is unknown which snapshot is the latest: {error}") from error
    if not snapshots:
        return None
    snapshots[-1].verify()
    return snapshots[-1]


def find_snapshot_name(folder: Path, id: str) -> str | None:
    """Returns the name of the snapshot with this id in a folder, or None if the folder lacks this snapshot."""
    try:
        return find_snapshot(folder, id).name
    except SnapshotError:
        return None


def find_snapshot(folder: Path, id: str) -> Snapshot:
    """Returns the snapshot with this id, preferably under a name that a user chose. Raises SnapshotError."""
    snapshots, damaged = list_snapshots(folder)
    matches = sorted((s for s in snapshots if s.manifest.id == id), key=lambda snapshot: snapshot.name.endswith(id))
    if matches:
        return matches[0]
    for error in damaged.values():
        raise error
    raise SnapshotError(f"{str(folder)!r} lacks the snapshot with id {id}: put the snapshot back, or load another")


def _list_snapshot_names(folder: Path) -> list[str]:
    try:
        entries = (entry for entry in os.scandir(folder) if not entry.name.startswith("."))
        return sorted(entry.name for entry in entries if _is_broken_link(Path(entry)) or entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SnapshotError(f"the snapshots in {str(folder)!r} cannot be listed: {error}") from error


def _is_broken_link(path: Path) -> bool:
    return path.is_symlink() and not os.path.exists(path)
