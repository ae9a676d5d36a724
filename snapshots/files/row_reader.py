"""Reading the files of rows that a manifest names: checked, and those of a bucket in parts as one."""

from __future__ import annotations

import os
import zlib
from collections.abc import Generator, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...engine.durable import open_regular
from ...engine.row_format import Chunks, Rows
from .format import Manifest
from .merged import merged
from .row_files import Part, RowFile, bucket_of, dtype_of, header_bytes, npy_header, part_of, row_check
from .threads import ahead
from .unread import SnapshotError, damaged, unread

_CHUNK_BYTES = 1 << 25

Piece = tuple[str, Rows]  # file, rows


class RowReader:
    """The rows in the files of a snapshot's folder, or those of them that one part has."""

    def __init__(self, folder: Path, manifest: Manifest, part: Part | None) -> None:
        self._folder = folder
        self._manifest = manifest
        self._part = part

    @property
    def files(self) -> dict[str, RowFile]:
        """The files that may have rows of the part."""
        return {name: file for name, file in self._manifest.files.items() if self._meets(self._part_of(name))}

    def read(self, files: dict[str, RowFile], max_rows: int) -> Chunks:
        """The rows in some of the manifest's files, as `Snapshot.chunks` has them."""
        for name, entry in files.items():
            with self._open(name, entry):
                pass
        if self._manifest.parts is None:
            with ahead(self._read(files, max_rows)) as pieces, ahead(self._sums(pieces)) as chunks:
                yield from self.in_part(chunks)
        else:
            with ahead(self._merged(files, max_rows)) as chunks:
                yield from chunks

    def in_part(self, chunks: Chunks) -> Chunks:
        """The rows of the part among those of files."""
        part = self._part
        for bucket, rows in chunks:
            yield bucket, rows if part is None or part.of == self._manifest.parts else part.rows(rows)

    def _merged(self, files: dict[str, RowFile], max_rows: int) -> Generator[tuple[int, Rows], None, None]:
        """The rows of buckets in parts."""
        for bucket, names in groupby(files, key=bucket_of):
            entries = {name: files[name] for name in names}
            most = max_rows // len(entries), _CHUNK_BYTES // (2 * len(entries))  # each holds two chunks
            parts = [self.in_part(self._sums(self._read({name: entries[name]}, *most))) for name in entries]
            for rows in merged([(rows for _, rows in part) for part in parts]):
                for begin in range(0, len(rows), max_rows):
                    yield bucket, rows[begin : begin + max_rows]

    def _sums(self, pieces: Iterator[Piece]) -> Generator[tuple[int, Rows], None, None]:
        """The rows of files as (bucket, rows). A file's checksum is compared before its last chunk is passed on."""
        for name, group in groupby(pieces, key=itemgetter(0)):
            entry, count, checksum = self._manifest.files[name], 0, 0
            check = row_check(self._manifest.description, bucket_of(name), self._part_of(name))
            for _, rows in group:
                data = rows.view(np.uint8)
                checksum = zlib.crc32(data.data, checksum)
                count += len(rows)
                if count == entry.rows and checksum != entry.crc32:
                    raise self._damaged(name, "its checksum does not match")
                if problem := check.problem(data, rows.dtype.itemsize):
                    raise self._damaged(name, problem)
                yield bucket_of(name), rows

    def _read(
        self, files: dict[str, RowFile], max_rows: int, max_bytes: int = _CHUNK_BYTES
    ) -> Generator[Piece, None, None]:
        # read, not mapped: a failing disk raises here, where a mapping would kill the process
        for name, entry in files.items():
            dtype = dtype_of(name, self._manifest.form)
            limit = max(1, min(max_rows, max_bytes // dtype.itemsize))
            for begin in range(0, entry.rows, limit):
                rows = np.empty(min(limit, entry.rows - begin), dtype)
                data = rows.view(np.uint8).data
                with self._open(name, entry) as file:  # for each piece: a bucket may have as many files as ranks wrote
                    try:
                        file.seek(header_bytes(dtype) + begin * dtype.itemsize)
                        got = file.readinto(data)  # type: ignore[attr-defined]
                    except OSError as error:
                        raise unread(self._folder / name, error, self._folder) from error
                if got != data.nbytes:
                    raise self._damaged(name, "it was truncated while being read")
                yield name, rows

    def _open(self, name: str, entry: RowFile) -> BinaryIO:
        """The open file, whose header was checked."""
        try:
            file = open_regular(self._folder / name)
        except OSError as error:
            raise unread(self._folder / name, error, self._folder) from error
        size, dtype = os.fstat(file.fileno()).st_size, dtype_of(name, self._manifest.form)
        if size != entry.bytes:
            problem = f"it has {size} bytes instead of {entry.bytes}"
        elif file.read(header_bytes(dtype)) != npy_header(dtype, entry.rows):
            problem = "its header is not that of these rows"
        else:
            return file
        file.close()
        raise self._damaged(name, problem)

    def _part_of(self, name: str) -> Part | None:
        """The part that a file is of; None without parts."""
        number, of = part_of(name), self._manifest.parts
        return None if number is None or of is None else Part(number, of)

    def _meets(self, part: Part | None) -> bool:
        return part is None or self._part is None or self._part.meets(part)

    def _damaged(self, name: str, problem: str) -> SnapshotError:
        return damaged(self._folder / name, problem, self._folder)
