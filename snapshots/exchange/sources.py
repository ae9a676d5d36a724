"""Reads rows to import, in bounded memory, from arrays, dense embeddings, snapshots and files."""

from __future__ import annotations

import json
import os
import pickle
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor, nn

from ...engine.errors import InputError, SnapshotError, TierbedError
from ...engine.options.table_names import is_table_name
from ...engine.row_format import STORED_DTYPES
from ..files.reader import Snapshot
from .array_files import Column, NamedArrays, make_column, map_npy, open_npz, open_safetensors
from .columns import EMBEDDING, KEY, KEY_DTYPES, TABLE, Columns, compute_chunk_rows
from .descriptions import validate_description
from .parquet import ParquetReader, open_parquet

# the exceptions that libraries raise for a damaged file
_DAMAGED = OSError, ValueError, EOFError, RuntimeError, pickle.UnpicklingError, BadZipFile, zlib.error, SafetensorError

Shape = tuple[str, tuple[int, ...]]  # an array's dtype name and shape


class _SnapshotReader:
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._columns = Columns(snapshot.description)
        self.metadata = json.dumps(snapshot.description)
        types, rows = self._columns.list_types(), snapshot.manifest.rows
        self.column_types = {name: (str(dtype), (rows, *shape)) for name, (dtype, shape) in types.items()}

    def batches(self, names: Iterable[str], max_rows: int) -> Iterator[dict[str, NDArray[Any]]]:
        for _, rows in self._snapshot.chunks(max_rows):
            columns = self._columns.split(rows)
            yield {name: columns[name] for name in names}


OpenFile = NamedArrays | ParquetReader | _SnapshotReader  # `metadata`: an exported table's description, as JSON
FileOpener = Callable[[], AbstractContextManager[OpenFile]]


class SourceTable(NamedTuple):
    """A table in a source. columns: maps names in `Columns` to the source's names. identifier: id, name or None."""

    columns: dict[str, str]
    identifier: int | str | None = None


class Source:
    """Rows to import from a file or arrays. Only headers are read before a call of `batches`."""

    def __init__(
        self,
        label: str,
        opener: FileOpener,
        choose_tables: Callable[[Mapping[str, Shape]], list[SourceTable]],
        states: Iterable[str] = (),
        padding_idx: int | None = None,
    ) -> None:
        """choose_tables: chooses the tables among the file's arrays. Raises InputError, SnapshotError, OptionError."""
        self.label = label  # names the source in error messages
        self.states = frozenset(states)  # names of optimizer states that were passed for dense tables
        self.padding_idx = padding_idx  # the padding_idx if the source is an `nn.Embedding`
        self._opener = opener
        with _convert_errors(label), opener() as file:
            shapes, metadata = file.column_types, file.metadata
            self._tables = choose_tables(shapes)
        self.names = frozenset(self._tables[0].columns)
        self.num_tables = None if TABLE in self.names else len(self._tables)  # None if a column names each row's table
        self.table_names = [_parse_torchrec_table(each.columns[EMBEDDING]) for each in self._tables]  # None if unnamed
        self.dim, self.num_rows = 0, 0
        for table in self._tables:
            self._add_table(table, shapes)
        self.key_type = shapes[self._tables[0].columns[KEY]][0] if KEY in self.names else None
        if self.key_type not in (None, *KEY_DTYPES):
            raise InputError(f"{label}: {KEY} is {self.key_type}; save keys as one of {', '.join(KEY_DTYPES)}")
        self.description = None if metadata is None else _parse_description(metadata, label)  # None if not in the file

    def _add_table(self, table: SourceTable, shapes: Mapping[str, Shape]) -> None:
        name = table.columns[EMBEDDING]
        dtype, shape = shapes[name]
        if dtype not in STORED_DTYPES or len(shape) != 2 or shape[1] < 1:
            raise InputError(
                f"{self.label}: {name} has dtype {dtype} and shape {shape}. Convert it to shape (n, dim) and to one of "
                f"these dtypes: {', '.join(STORED_DTYPES)}"
            )
        if self.dim not in (0, shape[1]):
            raise InputError(f"{self.label}: {name} has {shape[1]} floats per row, but another tensor has {self.dim}")
        for other in table.columns.values():
            if shapes[other][1][:1] != shape[:1]:
                raise InputError(f"{self.label}: {other} has shape {shapes[other][1]}, but {name} has shape {shape}")
        self.dim = shape[1]
        self.num_rows += shape[0]

    def batches(self, names: Iterable[str]) -> Iterator[dict[str, Any]]:
        """Yields the columns called `names`, in bounded chunks. Without keys, the column KEY has int64 row numbers.

        Raises SnapshotError if columns cannot be read, and InputError if a value is invalid.
        """
        present = [name for name in names if name in self.names]
        with _convert_errors(self.label), self._opener() as file:
            for table in self._tables:
                begin = 0
                for batch in file.batches([table.columns[name] for name in present], compute_chunk_rows(4 * self.dim)):
                    columns: dict[str, Any] = {name: batch[table.columns[name]] for name in present}
                    end = begin + len(columns[EMBEDDING])
                    columns[EMBEDDING] = columns[EMBEDDING].astype(np.float32, copy=False)
                    for state in self.states.intersection(columns):
                        values = _to_float32(columns[state], f"states[{state!r}]")
                        columns[state] = values[:, None] if values.ndim == 1 else values
                    columns.setdefault(KEY, np.arange(begin, end))
                    begin = end
                    yield columns if table.identifier is None else {**columns, TABLE: table.identifier}


def _to_float32(values: NDArray[Any], label: str) -> NDArray[np.float32]:
    """Convert numbers to float32. Raises InputError for integers, and for numbers that overflow float32."""
    if values.dtype.kind in "iub":
        raise InputError(f"{label} has dtype {values.dtype}; give floats that fit into float32")
    with np.errstate(over="ignore"):
        single: NDArray[np.float32] = values.astype(np.float32, copy=False)
    if (np.isfinite(values) & ~np.isfinite(single)).any():
        raise InputError(f"{label} overflows float32; give floats that fit into float32")
    return single


def open_source(
    source: Any, keys: Any = None, table_ids: Any = None, tensor: Any = None, states: Mapping[str, Any] | None = None
) -> Source:
    """Open the rows that `importing.import_snapshot` imports when it gets these arguments."""
    if isinstance(source, Source):
        return source
    states = states or {}
    is_name = isinstance(table_ids, str) and not table_ids.endswith(".npy")  # a table's name
    arguments = ((KEY, keys, "keys"), (TABLE, None if is_name else table_ids, "table_ids"))
    extras = {name: _open_column(value, argument) for name, value, argument in arguments if _is_array(value)}
    if tensor is None:
        for name, value in states.items():
            if not _is_array(value):
                raise InputError(f"states[{name!r}]={type(value).__name__}: give an array, a tensor or a .npy file")
            extras[name] = _open_column(value, f"states[{name!r}]")
    table = None if TABLE in extras else table_ids
    if TABLE in extras and KEY not in extras:
        raise InputError("table_ids: an array of table ids needs keys; give keys, or one table id")

    def wrap_array(label: str, name: str, array: NDArray[Any] | Tensor, padding_idx: int | None = None) -> Source:
        arrays = NamedArrays({name: make_column(array), **extras})
        return Source(label, lambda: nullcontext(arrays), _choose_dense(name, extras, table), states, padding_idx)

    if isinstance(source, nn.Embedding):
        return wrap_array("nn.Embedding", "weight", source.weight, source.padding_idx)
    if isinstance(source, (Tensor, np.ndarray)):
        return wrap_array(type(source).__name__, "values", source)
    if not isinstance(source, (str, os.PathLike)):
        raise InputError(
            f"source: got {type(source).__name__}; give a path, a NumPy array, a tensor or an nn.Embedding"
        )
    path = Path(source)
    label = f"source={str(path)!r}"
    if path.suffix == ".npy":
        if tensor is not None:
            raise InputError(f"tensor={tensor!r}: a .npy file is one array; leave tensor out")
        return wrap_array(label, "values", _map_npy(path, "source"))
    opener = _find_opener(path)
    if tensor is not None:
        return Source(label, partial(_open_with, opener, extras), _choose_dense(tensor, extras, table, states), states)
    if extras or table is not None:
        raise InputError("keys and table_ids are only for dense tables; give tensor=, or leave out keys and table_ids")
    return Source(label, opener, _choose_by_name, states)


def _find_opener(path: Path) -> FileOpener:
    if os.path.isdir(path):  # unlike Path.is_dir, this never raises for an invalid path
        return lambda: nullcontext(_SnapshotReader(Snapshot.open(path)))
    openers: dict[str, Callable[[Path], AbstractContextManager[OpenFile]]] = {
        ".npz": open_npz,
        ".parquet": open_parquet,
        ".safetensors": open_safetensors,
        **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), _open_state_dict),
    }
    if path.suffix not in openers:
        raise InputError(
            f"source={str(path)!r}: the suffix is unknown; give the folder of a snapshot, or a file that ends in "
            f".npy, {', '.join(openers)}"
        )
    return partial(openers[path.suffix], path)


def _choose_by_name(shapes: Mapping[str, Shape]) -> list[SourceTable]:
    columns = {name: name for name, (_, shape) in shapes.items() if shape}  # a 0-d array is not a column
    if not {KEY, EMBEDDING} <= columns.keys():
        raise InputError(
            f"columns found: {', '.join(sorted(columns)) or 'none'}. Columns {KEY!r} and {EMBEDDING!r} are needed. "
            "To import a dense table, name it with tensor="
        )
    return [SourceTable(columns)]


def _choose_dense(
    tensor: Any, extras: Mapping[str, Column], table: Any, states: Mapping[str, Any] | None = None
) -> Callable[[Mapping[str, Shape]], list[SourceTable]]:
    """Choose one array as the table, or several as tables. states: names of the arrays with optimizer states."""

    def choose_tables(shapes: Mapping[str, Shape]) -> list[SourceTable]:
        lists = {
            column: [value] if isinstance(value, str) else list(value)
            for column, value in {EMBEDDING: tensor, **(states or {})}.items()
        }
        names = lists[EMBEDDING]
        for state, value in lists.items():
            if len(value) != len(names):
                raise InputError(f"states[{state!r}]={value!r}: give one tensor name for each of {names}")
        for name in chain(*lists.values()):
            if name not in shapes:
                raise InputError(f"tensor={name!r} does not exist; give one of {', '.join(sorted(shapes))}")
        tables = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
        if isinstance(tensor, str):
            return [SourceTable({**tables[0], **{name: name for name in extras}}, table)]
        if extras or table is not None or not names:
            raise InputError(f"tensor={tensor!r}: give a list of names, one per table; leave out keys and table_ids")
        return [SourceTable(columns, index) for index, columns in enumerate(tables)]

    return choose_tables


def _parse_torchrec_table(tensor: str) -> str | None:
    """Find the table's name in a tensor's name. Return None if the tensor is not from TorchRec's state_dict()."""
    match = re.search(r"(?:^|\.)(?:embedding_bags|embeddings)\.([^.]+)\.weight$", tensor)
    return match[1] if match is not None and is_table_name(match[1]) else None


@contextmanager
def _open_with(opener: FileOpener, extras: Mapping[str, Column]) -> Iterator[NamedArrays]:
    """Open a file, and yield the file's arrays together with the arrays in `extras`."""
    with opener() as file:
        if not isinstance(file, NamedArrays):
            raise InputError("tensor= is only for .npz, .safetensors and torch files; leave it out")
        yield NamedArrays({**file.columns, **extras})


def to_path(value: Any, argument: str) -> Path:
    """Return `value` as a path. Raises InputError if `value` is not a path."""
    if not isinstance(value, (str, os.PathLike)):
        raise InputError(f"{argument}={value!r}: give a path, as str or pathlib.Path")
    return Path(value)


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, Tensor, str, os.PathLike))


def _open_column(value: Any, argument: str) -> Column:
    return make_column(value if isinstance(value, Tensor | np.ndarray) else _map_npy(Path(value), argument))


def _map_npy(path: Path, argument: str) -> NDArray[Any]:
    with _convert_errors(f"{argument}={str(path)!r}", "give a .npy file that numpy.save wrote"):
        return map_npy(path)


@contextmanager
def _open_state_dict(path: Path) -> Iterator[NamedArrays]:
    """Yield the memory-mapped tensors in a `torch.save` file. Runs no code from the file: it must be plain data."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # replaces torch's message, which recommends running the file's code
        raise InputError(
            f"{str(path)!r} is damaged or holds more than tensors: save the state_dict() of a module, not the module"
        ) from None
    yield NamedArrays({name: make_column(tensor) for name, tensor in _iterate_tensors(loaded, "")})


def _iterate_tensors(value: Any, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield prefix.removesuffix(".") or "tensor", value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _iterate_tensors(inner, f"{prefix}{name}.")


def _parse_description(metadata: str, label: str) -> dict[str, Any]:
    try:
        description = json.loads(metadata)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{label}: its description is not JSON: {error}; give a description") from error
    return validate_description(description, f"{label}: its description")


@contextmanager
def _convert_errors(label: str, remedy: str = "write the file again, or give another file") -> Iterator[None]:
    """Convert errors that libraries raise for a damaged or foreign file to SnapshotError."""
    try:
        yield
    except TierbedError as error:
        raise type(error)(error if label.removeprefix("source=") in str(error) else f"{label}: {error}") from error
    except _DAMAGED as error:
        raise SnapshotError(f"{label} cannot be read: {error}; {remedy}") from error
