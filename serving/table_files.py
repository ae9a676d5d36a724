"""Writes the files of a version: a table's base or delta, and dense weights."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import save
from torch import Tensor

from ..engine.checksum import crc32
from ..engine.durable import fsync_dir, fsync_file
from ..engine.errors import InputError, OptionError, ServingError
from ..engine.row_format import EMBEDDING, Change, Keys, RowArray
from .folder import ServingFolder
from .merging import HashSorter, Piece, PieceCursor, Pieces, merge
from .row_file import RowFile, RowFileWriter, compute_bound, decode, encode, hash_rows
from .source import RowSource
from .version import RowFileEntry, ServedEmbedding, ServedFile, ServedTable

_BUCKET_SHIFT = 58  # the bits of a hash after the bucket's
_NUM_CANARIES = 64  # how many rows of each file are looked up before readers see the file


class NewFiles(ExitStack):
    """The files that a publish writes, in a `with` block. If the block raises, they are closed and removed."""

    def __init__(self, folder: ServingFolder, encoding: str) -> None:
        super().__init__()
        self.folder, self.encoding = folder, encoding
        self._paths: list[Path] = []

    def name(self, prefix: str, suffix: str) -> Path:
        """Returns the path of a new file."""
        path = self.folder.files / f"{prefix}-{secrets.token_hex(8)}{suffix}"
        self._paths.append(path)
        return path

    def keep(self) -> None:
        """Do not remove the files any more, because a version names them."""
        self._paths.clear()

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        super().__exit__(kind, *details)
        for path in self._paths if kind else ():
            with suppress(OSError):  # the next publish removes files that no version names
                path.unlink()

    def sync(self) -> None:
        """Make the files' names durable. Their contents already are. Raises ServingError."""
        with self.folder.convert_errors("sync"):
            fsync_dir(self.folder.files)

    def read(self, entry: RowFileEntry | None) -> Pieces:
        """Yields a file's rows, after all of it was compared with its checksum. Raises ServingError."""
        if entry is None:
            return
        if problem := self.folder.check_file(entry):
            raise ServingError(f"{problem}. Publish with rebase=True, which does not read it")
        yield from RowFile(self.folder.find_file(entry)).pieces()

    def write_tensors(self, tensors: Mapping[str, Tensor]) -> ServedFile:
        """Write dense weights. Raises OptionError, ServingError."""
        if not isinstance(tensors, Mapping) or not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
            raise OptionError(f"tensors={tensors!r:.80}: give a dict of tensors, such as model.state_dict()")
        if wrong := [name for name in tensors if not isinstance(name, str) or name in ("", "__metadata__")]:
            raise OptionError(f"tensors: safetensors cannot store a tensor named {wrong[0]!r}; give it another name")
        if bad := [name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.isnan().any()]:
            raise InputError(f"tensors: {bad[0]!r} has NaN: restore an earlier state of the model, and publish that")
        try:
            data = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
        except (SafetensorError, ValueError, TypeError, KeyError) as error:
            raise OptionError(f"tensors: safetensors cannot store them: {error}; convert them") from error
        path = self.name("tensors", ".safetensors")
        with self.folder.convert_errors("write to"):
            path.write_bytes(data)
            fsync_file(path)
        return ServedFile(path.name, len(data), crc32(data))


class TableFile:
    """A row file that is being written: the rows of `older`, and the rows added since, which replace those."""

    def __init__(
        self, files: NewFiles, name: str, table: int, kind: str, dim: int, older: Iterable[Piece] = ()
    ) -> None:
        self.path = files.name(f"{name}-{table}-{kind}", ".rows")
        self._name, self._table, self._dim, self._encoding = name, table, dim, files.encoding
        self._sorter = HashSorter(files.folder.files)
        self._older = PieceCursor(older)
        self._writer = RowFileWriter(self.path, dim, files.encoding, kind, table)
        for close in (self._writer.abort, self._sorter.close):
            files.callback(close)
        self._canaries: list[tuple[NDArray[np.uint64], NDArray[np.float32]]] = []  # some rows, to look up at the end

    def add_rows(self, keys: Keys, values: NDArray[np.float32], is_signed: bool) -> None:
        """Add rows [n] of one bucket, in any order. Raises InputError, which names a row that cannot be encoded."""
        hashes, values = hash_rows(self._table, keys), np.ascontiguousarray(values)
        label = f"{self._table} of embedding {self._name!r}"
        rows = encode(values, self._encoding, label, keys.view(np.int64) if is_signed else keys)
        self._sorter.add(Piece(hashes, rows, np.zeros(len(keys), np.bool_)))
        if len(self._canaries) < _NUM_CANARIES:
            self._canaries.append((hashes[:1], values[:1].copy()))

    def add_deleted(self, keys: Keys) -> None:
        """Add marks of deleted rows [n], in any order."""
        rows = np.zeros((len(keys), self._writer.row_bytes), np.uint8)
        self._sorter.add(Piece(hash_rows(self._table, keys), rows, np.ones(len(keys), np.bool_)))

    def end_bucket(self, bucket: int) -> None:
        last = (bucket + 1 << _BUCKET_SHIFT) - 1
        self.append(merge(self._older.read_until(last), self._sorter.pieces()))

    def append(self, pieces: Iterable[Piece]) -> None:
        """Write rows with higher hashes than all before."""
        for piece in pieces:
            self._writer.append_encoded(*piece)

    def close(self) -> RowFileEntry:
        """Write the rest of the older rows, and make the file durable."""
        self.append(self._older.read_until(2**64 - 1))
        entry = RowFileEntry(self.path.name, *self._writer.close())
        self._check_canaries()
        return entry

    def _check_canaries(self) -> None:
        """Look up some rows in the written file. Raises ServingError if they differ from those that were added."""
        if not self._canaries:
            return
        hashes, values = map(np.concatenate, zip(*self._canaries, strict=True))
        is_present, rows = RowFile(self.path).find(hashes)
        errors = np.abs(decode(rows, self._encoding, self._dim) - values[is_present])
        is_wrong = ~is_present
        is_wrong[is_present] = ~(errors <= compute_bound(values[is_present], self._encoding)).all(axis=1)  # NaN too
        if is_wrong.any():
            raise ServingError(
                f"{str(self.path)!r} does not answer with the rows that were written, such as the one with hash "
                f"{hashes[is_wrong][0]:#x}: check disk and memory of this machine, and publish again"
            )


def write_bases(files: NewFiles, source: RowSource) -> list[RowFileEntry]:
    """Write a base of each table with all rows. Raises SnapshotError, ServingError, InputError."""
    name, dim = source.description["name"], source.row_format.dim
    with files.folder.convert_errors("write to"):
        tables = [TableFile(files, name, table, "base", dim) for table in range(len(source.description["tables"]))]
        _write_changes(source, source.read_all(), lambda table: tables[table])
        return [table.close() for table in tables]


def write_deltas(
    files: NewFiles, source: RowSource, changes: Iterator[Change], old: Sequence[ServedTable]
) -> list[ServedTable]:
    """Write a delta of each table that changed. The other tables keep their files.

    old: the files with the rows before the changes. Raises SnapshotError, ServingError, InputError.
    """
    name, dim = source.description["name"], source.row_format.dim
    new, tables = list(old), dict[int, TableFile]()

    def find_file(number: int) -> TableFile:
        if number not in tables:
            tables[number] = TableFile(files, name, number, "delta", dim, files.read(old[number].delta))
        return tables[number]

    with files.folder.convert_errors("write to"):
        _write_changes(source, changes, find_file)
        for number, table in tables.items():
            delta = table.close()
            new[number] = ServedTable(old[number].base, delta, old[number].written + delta.rows + delta.deleted)
    return new


def merge_base(files: NewFiles, embedding: ServedEmbedding, number: int, table: ServedTable) -> RowFileEntry:
    """Write a new base from a table's base and delta. Raises ServingError."""
    with files.folder.convert_errors("write to"):
        new = TableFile(files, embedding.name, number, "base", embedding.spec.dim)
        pieces = merge(files.read(table.base), files.read(table.delta))
        new.append(piece.take(~piece.is_deleted) if piece.is_deleted.any() else piece for piece in pieces)
        return new.close()


def _write_changes(source: RowSource, changes: Iterator[Change], find_file: Callable[[int], TableFile]) -> None:
    """Pass changes, which come by bucket, table and key, to the tables' files."""
    is_signed = source.description["key_type"] != "uint64"
    for (bucket, table), parts in groupby(_split_by_table(changes), key=itemgetter(0)):
        file = find_file(table)
        for _, rows, deleted in parts:
            if len(rows):
                file.add_rows(rows["key"].copy(), source.row_format.values(rows, EMBEDDING), is_signed)
            if len(deleted):
                file.add_deleted(deleted["key"].copy())
        file.end_bucket(bucket)


def _split_by_table(changes: Iterator[Change]) -> Iterator[tuple[tuple[int, int], RowArray, RowArray]]:
    """Yields ((bucket, table), the table's rows, keys of its deleted rows)."""
    for bucket, *both in changes:
        tables = [part["table"].copy() for part in both]
        for table in np.union1d(*tables).tolist():
            bounds = [np.searchsorted(numbers, [table, table + 1]) for numbers in tables]
            rows, deleted = (part[slice(*bound)] for part, bound in zip(both, bounds, strict=True))
            yield (bucket, table), rows, deleted
