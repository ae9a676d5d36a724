"""Rows of RocksDB's files, read by a process of its own: forged files may end the process that reads them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
from collections.abc import Iterator
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import IO

import numpy as np

from ...engine import _core
from ...engine.row_format import Chunks, RowForm
from ...engine.store.rocksdb import SCAN_BYTES
from .reader_child import END, FAILED, HEADER, READY

_PIPE_BYTES = 1 << 20
_SAID_BYTES = 500


class ApartError(Exception):
    """The other process did not reach the end of the rows: RocksDB refused the files, or the files ended it."""


class NotStartedError(Exception):
    """The other process could not begin to read."""


def rows_apart(folder: Path, form: RowForm, shards: int, max_rows: int) -> Chunks:
    """The rows of `form` in `folder`, as `RocksDB.scan` yields their words, `max_rows` at a time.

    Raises ApartError, NotStartedError, OSError.
    """
    dtype = form.dtype
    most = max(1, min(max_rows, SCAN_BYTES // dtype.itemsize))
    with _child(folder, form.width, shards, most) as (rows_from, said_to, process):
        if rows_from.read(HEADER.size) != HEADER.pack(READY, 0):
            rows_from.close()  # a process that is not our reader may write for ever
            status = _status_of(process)
            raise NotStartedError(f"{_python()!r} {_end_of(status)}{_last_words(said_to)}")
        while True:
            header = rows_from.read(HEADER.size)
            if len(header) < HEADER.size:
                break
            bucket, count = HEADER.unpack(header)
            if bucket == END:
                return
            if bucket == FAILED:
                text = rows_from.read(count).decode("utf-8", "replace")
                raise ApartError(text.rpartition("; ")[0] or text)  # without the advice, which is for a store
            rows = np.empty(min(count, most), dtype)
            if rows_from.readinto(rows.view(np.uint8).data) < rows.nbytes:  # type: ignore[attr-defined]
                break
            yield bucket, rows
        status = _status_of(process)
        raise ApartError(f"the process that reads it {_end_of(status)}{_last_words(said_to)}")


@contextlib.contextmanager
def _child(
    folder: Path, width: int, shards: int, most: int
) -> Iterator[tuple[IO[bytes], int, subprocess.Popen[bytes]]]:
    script = str(Path(__file__).with_name("reader_child.py"))
    assert _core.__file__ is not None
    arguments = [_core.__file__, str(Path(folder).absolute()), str(width), str(shards), str(most)]
    said_to = os.memfd_create("tierbed")
    try:
        try:
            process = subprocess.Popen(
                [_python(), "-I", "-S", script, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said_to,
                process_group=0,  # Ctrl-C goes to this process, which then ends the other
            )
        except OSError as error:
            if error.filename is None:  # raised by the fork
                raise
            raise NotStartedError(str(error)) from error
        assert process.stdout is not None
        try:
            with contextlib.suppress(OSError):  # a user may have no more room for pipes
                fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
            yield process.stdout, said_to, process
        finally:
            process.kill()
            process.stdout.close()
            process.wait()
    finally:
        os.close(said_to)


def _python() -> str:
    """The Python that `multiprocessing` starts. A program that embeds Python can set it there."""
    return os.fsdecode(get_executable() or "")


def _status_of(process: subprocess.Popen[bytes]) -> int:
    status = process.wait()
    if status == -signal.SIGKILL:  # by the system where memory runs out, or by a user
        raise ChildProcessError(errno.ECHILD, "the process that reads it was killed")
    return status


def _end_of(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-status).name}"
    return f"was ended by signal {-status}"


def _last_words(said_to: int) -> str:
    size = os.fstat(said_to).st_size
    lines = os.pread(said_to, _SAID_BYTES, max(0, size - _SAID_BYTES)).decode("utf-8", "replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f": {last}" if last else ""
