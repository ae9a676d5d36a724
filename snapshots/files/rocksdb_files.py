"""Links a store's RocksDB files into a RocksDB checkpoint, and back. Checks a checkpoint's files, and scans its rows.

A separate process scans the rows, because forged files may crash RocksDB.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.spawn import get_executable
from pathlib import Path
from time import monotonic
from typing import IO, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ...engine import _core
from ...engine.durable import check_regular, open_regular
from ...engine.errors import SnapshotError, StoreError
from ...engine.options.store_options import require_rocksdb
from ...engine.row_format import Chunks, RowFormat
from ...engine.store.rocksdb import SCAN_BYTES, DatabaseFile, RocksDB
from .format import ROCKSDB, Manifest, RocksDBFiles
from .pipeline import sync_new_files
from .read_errors import ReadIOError, find_os_error, make_damage_error, make_read_error
from .rocksdb_child import END, FAILED, HEADER, READY

log = logging.getLogger("tierbed")

_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP)
_PIPE_BYTES = 1 << 20
_STDERR_BYTES = 500
_PIECE_BYTES = 4 << 20


def checkpoint_chunks(folder: Path, manifest: Manifest, max_rows: int = 65536) -> Chunks:
    """Yields a RocksDB checkpoint's rows, like `Snapshot.chunks`. First checks all files of the checkpoint.

    The checkpoint's files may be hard links to the running store's files; then damage to the store is found too.
    Raises SnapshotError that names a missing, changed or foreign file.
    """
    assert manifest.rocksdb is not None
    try:
        require_rocksdb()
    except StoreError as error:
        reason = str(error).partition(": ")[2]
        raise SnapshotError(f"snapshot {folder.name!r} is a checkpoint of RocksDB's files: {reason}") from error
    _check_files(folder, manifest.rocksdb.files)
    try:
        yield from _scan(folder, manifest.row_format, manifest.rocksdb.shards, max_rows)
    except OSError as error:
        raise make_read_error(folder / ROCKSDB, error, folder) from error


def _scan(folder: Path, row_format: RowFormat, num_shards: int, max_rows: int) -> Chunks:
    """Yields the rows in a checkpoint's files, at most `max_rows` at a time. Raises SnapshotError, OSError."""
    dtype = row_format.dtype
    chunk_rows = max(1, min(max_rows, SCAN_BYTES // dtype.itemsize))
    with _start_child(folder, row_format.width, num_shards, chunk_rows) as (stdout, stderr, process):
        if stdout.read(HEADER.size) != HEADER.pack(READY, 0):
            stdout.close()  # the process may run anything instead of our script, and may write forever
            raise _make_start_error(folder, f"{_python()!r} {_describe_end(process, stderr)}")
        while True:
            header = stdout.read(HEADER.size)
            if len(header) < HEADER.size:
                break
            bucket, count = HEADER.unpack(header)
            if bucket == END:
                return
            if bucket == FAILED:
                text = stdout.read(count).decode("utf-8", "replace")
                raise _make_scan_error(folder, text.rpartition("; ")[0] or text)  # omit the advice: it only fits stores
            rows = np.empty(min(count, chunk_rows), dtype)
            if stdout.readinto(rows.view(np.uint8).data) < rows.nbytes:  # type: ignore[attr-defined]
                break
            yield bucket, rows
        raise _make_scan_error(folder, f"the process that reads it {_describe_end(process, stderr)}")


def _make_scan_error(folder: Path, problem: str) -> SnapshotError:
    """Returns the error for a scan that ended early because RocksDB refused the files or crashed."""
    if (system_error := find_os_error(problem)) is not None:
        return make_read_error(folder / ROCKSDB, system_error, folder)
    return make_damage_error(folder / ROCKSDB, problem, folder)


def _make_start_error(folder: Path, problem: str) -> ReadIOError:
    return ReadIOError(
        f"{str(folder / ROCKSDB)!r} cannot be read: the Python that reads it did not start: {problem}. The snapshot "
        "may be intact. Free memory, or give a Python interpreter's path to multiprocessing.set_executable(). Then try "
        "again"
    )


@contextlib.contextmanager
def _start_child(
    folder: Path, width: int, num_shards: int, chunk_rows: int
) -> Iterator[tuple[IO[bytes], int, subprocess.Popen[bytes]]]:
    script = str(Path(__file__).with_name("rocksdb_child.py"))
    assert _core.__file__ is not None
    arguments = [_core.__file__, str((folder / ROCKSDB).absolute()), str(width), str(num_shards), str(chunk_rows)]
    with open(os.memfd_create("tierbed"), "rb") as stderr:
        try:
            process = subprocess.Popen(
                [_python(), "-I", "-S", script, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                process_group=0,  # Ctrl-C then reaches only the parent process, and the parent kills the child
            )
        except OSError as error:
            if error.filename is None:  # `fork` raised it
                raise
            raise _make_start_error(folder, str(error)) from error
        assert process.stdout is not None
        with process:
            try:
                with contextlib.suppress(OSError):  # this user may have reached the limit for pipe buffers
                    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
                yield process.stdout, stderr.fileno(), process
            finally:
                process.kill()


def _python() -> str:
    """Returns the path of the Python that `multiprocessing` starts. Programs that embed Python can set this path."""
    return os.fsdecode(get_executable() or "")


def _describe_end(process: subprocess.Popen[bytes], stderr: int) -> str:
    """Describes how a process ended, with the last line that it wrote to stderr."""
    status = process.wait()
    if status == -signal.SIGKILL:  # the system sends it when memory runs out; a user may send it too
        raise ChildProcessError(errno.ECHILD, "the process that reads the checkpoint was killed")
    end = f"ended with status {status}" if status >= 0 else f"was ended by signal {-status}"
    with contextlib.suppress(ValueError):
        end = f"was ended by {signal.Signals(-status).name}"
    size = os.fstat(stderr).st_size
    lines = os.pread(stderr, _STDERR_BYTES, max(0, size - _STDERR_BYTES)).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{end}: {last}" if last else end


def compute_checksum(path: Path, size: int) -> int:
    """Returns the crc32c of the first `size` bytes in a file. Raises OSError."""
    checksum = _core.Crc32c()
    with open_regular(path) as file:
        for piece in read_pieces(file, size):
            checksum.update(piece)
    return checksum.finish()


def read_pieces(file: BinaryIO, size: int) -> Iterator[NDArray[np.uint8]]:
    """Yields a file's first `size` bytes in pieces that share one buffer. Raises OSError if the file is shorter."""
    memory = np.empty(min(size, _PIECE_BYTES), np.uint8)
    while size:
        piece = memory[: min(size, len(memory))]
        if file.readinto(piece.data) != len(piece):  # type: ignore[attr-defined]
            raise OSError(errno.EIO, "the file ended while it was read", str(file.name))
        size -= len(piece)
        yield piece


def link_checkpoint(folder: Path, files: RocksDBFiles, target: Path) -> None:
    """Durably make `target` a folder with a checkpoint's databases. Row files are hard-linked, and not read.

    Checks all names and sizes, and the checksums of files without rows. Raises SnapshotError; raises OSError if the
    file system lacks hard links.
    """
    _check_files(folder, files.files, reads_rows=False)
    for name, entry in files.files.items():
        file = DatabaseFile(name, entry["bytes"], entry["crc32c"], None)
        source, path = folder / ROCKSDB / name, target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _has_rows(name):
            _copy(source, path, file)
        elif (error := _link(source, path, file)) is not None:
            raise error
    sync_new_files(target)


def find_damaged_file(folder: Path, files: RocksDBFiles, wait: Callable[[float], bool]) -> SnapshotError | None:
    """Returns an error that names the first row file with a wrong checksum, or None. May run beside training.

    wait: called after each piece of a file, with the seconds that reading the piece took. If True, ends the check.
    """
    for name, entry in files.files.items():
        if not _has_rows(name):
            continue
        path, checksum, begin = folder / ROCKSDB / name, _core.Crc32c(), monotonic()
        try:
            with open_regular(path) as file:
                for piece in read_pieces(file, entry["bytes"]):
                    checksum.update(piece)
                    if wait(monotonic() - begin):
                        return None
                    begin = monotonic()
        except FileNotFoundError:  # the snapshot was removed or replaced meanwhile
            continue
        except OSError as error:
            return make_read_error(path, error, folder)
        if checksum.finish() != entry["crc32c"]:
            return make_damage_error(path, "its checksum does not match", folder)
    return None


def _has_rows(name: str) -> bool:
    """True if RocksDB stores rows in the file `name`, and never changes the file."""
    return name.endswith(".sst")


def _check_files(folder: Path, files: dict[str, dict[str, int]], reads_rows: bool = True) -> None:
    """Raises SnapshotError if the folder does not contain exactly `files`, with their sizes and checksums.

    reads_rows: if False, checksums of files with rows are not checked.
    """
    top = folder / ROCKSDB
    try:
        present = {str(path.relative_to(top)): path for path in _files_in(top)}
    except OSError as error:
        raise make_read_error(top, error, folder) from error
    for name in sorted(present.keys() - files.keys()):
        raise SnapshotError(f"{str(top / name)!r} is a foreign file in snapshot {folder.name!r}: remove it")
    for name, entry in files.items():
        if name not in present:
            raise make_damage_error(top / name, "it is missing", folder)
        path = present[name]
        try:
            check_regular(path)
            size = path.stat().st_size
            if size != entry["bytes"]:
                raise make_damage_error(path, f"it has {size} bytes instead of {entry['bytes']}", folder)
            if (reads_rows or not _has_rows(name)) and compute_checksum(path, size) != entry["crc32c"]:
                raise make_damage_error(path, "its checksum does not match", folder)
        except OSError as error:
            raise make_read_error(path, error, folder) from error


def _files_in(folder: Path) -> Iterator[Path]:
    """Yields the files in a folder and in its direct subfolders. A subfolder may be a link."""
    for entry in os.scandir(folder):
        if entry.is_dir():
            yield from (folder / entry.name / inner for inner in os.listdir(entry))
        else:
            yield folder / entry.name


def write_rocksdb(
    temporary: Path, name: str, rows: int, tier: RocksDB, progress: Callable[[int], None] | None = None
) -> RocksDBFiles:
    """Write a RocksDB checkpoint of `tier` into the folder `temporary`. Raises OSError, SnapshotError, StoreError.

    name: the snapshot's name. rows: the number of rows. Row files are hard-linked, so their size does not matter.
    RocksDB has stored their checksums. If the file system lacks hard links, copies files and logs a warning.
    """
    top, entries, refusal = temporary / ROCKSDB, dict[str, dict[str, int]](), None
    with tier.hold_files() as files:
        size, bytes_written = sum(file.size for file in files), 0
        for file in files:
            source, target = tier.folder / file.name, top / file.name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not _has_rows(file.name):
                crc32c = _copy(source, target, file)
            elif (link_error := _link(source, target, file)) is None:
                assert file.crc32c is not None
                crc32c = file.crc32c
            else:
                refusal, crc32c = link_error, _copy(source, target, file)
            entries[file.name] = {"bytes": file.size, "crc32c": crc32c}
            rows_reported, bytes_written = rows * bytes_written // size, bytes_written + file.size
            if progress is not None and (count := rows * bytes_written // size - rows_reported):
                progress(count)
        sync_new_files(top)
    if refusal is not None:
        is_other = refusal.errno == errno.EXDEV
        reason = f"is on another filesystem than {tier.folder}" if is_other else f"cannot have links: {refusal}"
        log.warning("snapshot %r: copied, not linked, because %s %s", name, temporary.parent, reason)
    return RocksDBFiles(tier.shards, entries)


def _link(source: Path, target: Path, file: DatabaseFile) -> OSError | None:
    """Hard-link a durable row file. If the file system lacks hard links, returns the error, otherwise None."""
    try:
        os.link(source.resolve(), target)  # `resolve` follows symbolic links
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return error
    if (size := target.stat().st_size) != file.size:
        raise _make_store_error(source, f"it has {size} bytes instead of {file.size}")
    return None


def _copy(source: Path, target: Path, file: DatabaseFile) -> int:
    """Copy a file, or write its `content`. Returns the checksum after comparing it with RocksDB's checksum."""
    checksum = _core.Crc32c()
    with open_regular(source) as from_, target.open("xb") as to:
        content = file.content
        pieces = read_pieces(from_, file.size) if content is None else [np.frombuffer(content, np.uint8)]
        for piece in pieces:
            checksum.update(piece)
            to.write(piece.data)
    crc32c = checksum.finish()
    if file.crc32c not in (None, crc32c):
        raise _make_store_error(source, "its checksum does not match")
    return crc32c


def _make_store_error(path: Path, problem: str) -> SnapshotError:
    return SnapshotError(f"file {str(path)!r} of the running store is damaged: {problem}; load the last snapshot")
