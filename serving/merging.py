"""Sorts encoded rows by hash, and merges sorted rows. Memory is bounded, however many rows there are."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterable, Iterator
from functools import reduce
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

SORT_BYTES = 1 << 26  # how many bytes of rows are sorted in memory
PIECE_ROWS = 1 << 16


class Piece(NamedTuple):
    """Some of a table's rows, with ascending hashes.

    hashes: uint64 [n]. rows: encoded, uint8 [n, row bytes]. is_deleted: bool [n], True for marks of deleted rows.
    """

    hashes: NDArray[np.uint64]
    rows: NDArray[np.uint8]
    is_deleted: NDArray[np.bool_]

    def take(self, index: NDArray[np.integer] | NDArray[np.bool_] | slice) -> Piece:
        """Returns the rows that `index` selects."""
        row = self.rows.view(np.dtype((np.void, self.rows.shape[1]))).reshape(-1)  # NumPy copies these faster
        return Piece(self.hashes[index], row[index].view(np.uint8).reshape(-1, row.itemsize), self.is_deleted[index])

    def sort(self) -> Piece:
        return self.take(np.argsort(self.hashes))


Pieces = Iterator[Piece]


def concatenate(pieces: Iterable[Piece]) -> Piece:
    """Returns the rows of all pieces, of which there is at least one."""
    return Piece(*map(np.concatenate, zip(*pieces, strict=True)))


class PieceCursor:
    """Reads sorted pieces up to given hashes. `piece` has the next rows, or is None at the end."""

    def __init__(self, pieces: Iterable[Piece]) -> None:
        self._pieces = iter(piece for piece in pieces if len(piece.hashes))
        self.piece: Piece | None = next(self._pieces, None)

    def read_until(self, last: int) -> Pieces:
        """Yields the rows with hashes up to `last`."""
        while self.piece is not None and int(self.piece.hashes[0]) <= last:
            piece, count = self.piece, int(np.searchsorted(self.piece.hashes, np.uint64(last), "right"))
            self.piece = piece.take(slice(count, None)) if count < len(piece.hashes) else next(self._pieces, None)
            yield piece.take(slice(count))


def merge(older: Iterable[Piece], newer: Iterable[Piece]) -> Pieces:
    """Merge two sorted streams. If both have a hash, yields the row or mark in `newer`. Keeps a piece of each."""
    old, new = PieceCursor(older), PieceCursor(newer)
    while old.piece is not None or new.piece is not None:
        last = min(int(cursor.piece.hashes[-1]) for cursor in (old, new) if cursor.piece is not None)
        parts = [[*cursor.read_until(last)] for cursor in (old, new)]
        if parts[0] and parts[1]:
            before, after = map(concatenate, parts)
            where = np.searchsorted(before.hashes, after.hashes)
            where = where[before.hashes[np.minimum(where, len(before.hashes) - 1)] == after.hashes]
            kept = np.ones(len(before.hashes), np.bool_)
            kept[where] = False
            yield concatenate([before.take(kept), after]).sort()
        else:
            yield from parts[0] or parts[1]


class HashSorter:
    """Accepts a table's rows in any order, and yields them by ascending hash. No hash may occur twice.

    Beyond `SORT_BYTES`, sorted rows wait in nameless temporary files in `folder`, which the kernel removes when the
    process ends. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting: list[Piece] = []
        self._num_bytes = 0
        self._runs: list[IO[bytes]] = []

    def add(self, piece: Piece) -> None:
        self._waiting.append(piece)
        self._num_bytes += sum(array.nbytes for array in piece)
        if self._num_bytes > SORT_BYTES:
            run = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
            self._runs.append(run)
            for part in self._sort_waiting():
                pickle.dump(part, run, protocol=5)  # copies no arrays

    def pieces(self) -> Pieces:
        """Yields all rows added since the last call, by ascending hash."""
        yield from reduce(merge, [*map(_read_run, self._runs), self._sort_waiting()])
        self.close()

    def close(self) -> None:
        """Remove the temporary files, if there are any."""
        while self._runs:
            self._runs.pop().close()

    def _sort_waiting(self) -> Pieces:
        waiting, self._waiting, self._num_bytes = self._waiting, [], 0
        if waiting:
            piece = concatenate(waiting).sort()
            waiting.clear()
            for begin in range(0, len(piece.hashes), PIECE_ROWS):
                yield piece.take(slice(begin, begin + PIECE_ROWS))


def _read_run(run: IO[bytes]) -> Pieces:
    """Yields the pieces in a temporary file."""
    end = run.tell()
    run.seek(0)
    while run.tell() < end:
        yield pickle.load(run)
