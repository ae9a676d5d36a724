"""Reads and writes Parquet files of rows. pyarrow is imported only when a file is opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...engine.errors import InputError, OptionError
from .array_files import METADATA
from .columns import TABLE, TABLE_NAME, Columns

_GROUP_ROWS = 1 << 18
_GROUP_BYTES = 1 << 25


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet  # type: ignore[import-untyped]
    except ImportError as error:
        raise OptionError(f"Parquet needs pyarrow ({error}): pip install 'tierbed[parquet]'") from error
    return pyarrow


def write_parquet(path: Path, columns: Columns, chunks: Iterable[NDArray[np.void]], metadata: str) -> None:
    """Write rows in row groups of about 32 MiB, floats as fixed-size lists, and `metadata` as the file's metadata."""
    pa = _import_pyarrow()
    types = {name: _make_arrow_type(pa, dtype, shape) for name, (dtype, shape) in columns.list_types().items()}
    fields = [pa.field(name, kind, nullable=False) for name, kind in types.items()]
    names = pa.array([*columns.table_names, None], pa.string())
    name_fields = [pa.field(TABLE_NAME, pa.string())] if any(columns.table_names) else []  # for other programs
    schema = pa.schema([*fields, *name_fields], {METADATA: metadata})
    # floats rarely repeat, so a dictionary would save no space
    with pa.parquet.ParquetWriter(path, schema, use_dictionary=[TABLE_NAME], write_page_checksum=True) as writer:
        for rows in _regroup(chunks):
            arrays = columns.split(rows)
            arrow_arrays = [_make_arrow_array(pa, arrays[name], kind) for name, kind in types.items()]
            indexes = np.minimum(arrays[TABLE], len(columns.table_names))  # a row of an unknown table gets no name
            arrow_arrays += [names.take(pa.array(indexes)) for _ in name_fields]
            writer.write_table(pa.table(arrow_arrays, schema))


def _make_arrow_type(pa: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
    plain = pa.from_numpy_dtype(dtype)
    return pa.list_(pa.field("element", plain, nullable=False), *shape) if shape else plain


def _make_arrow_array(pa: Any, array: NDArray[Any], kind: Any) -> Any:
    return pa.FixedSizeListArray.from_arrays(array.reshape(-1), type=kind) if array.ndim > 1 else pa.array(array)


def _regroup(chunks: Iterable[NDArray[np.void]]) -> Iterator[NDArray[np.void]]:
    """Yields the rows in chunks of a fixed size, so a file does not depend on the sizes of the input chunks."""
    pending: list[NDArray[np.void]] = []
    count = 0
    for rows in chunks:
        group_rows = max(1, min(_GROUP_ROWS, _GROUP_BYTES // rows.itemsize))
        rest = rows.copy()  # the caller may reuse the memory of `rows`
        while count + len(rest) >= group_rows:
            pending.append(rest[: group_rows - count])
            rest, count = rest[group_rows - count :], 0
            yield np.concatenate(pending)
            pending = []
        pending.append(rest)
        count += len(rest)
    if count:
        yield np.concatenate(pending)


class ParquetReader:
    """The rows in an open Parquet file. column_types: each column's dtype name and shape."""

    def __init__(self, file: Any, pa: Any) -> None:
        self._file, self._pa = file, pa
        metadata = (file.schema_arrow.metadata or {}).get(METADATA.encode())
        self.metadata = None if metadata is None else metadata.decode()
        self.column_types = {field.name: self._read_column_type(field) for field in file.schema_arrow}

    def _read_column_type(self, field: Any) -> tuple[str, tuple[int, ...]]:
        types, count = self._pa.types, self._file.metadata.num_rows
        if types.is_fixed_size_list(field.type):
            return self._name_dtype(field.type.value_type), (count, field.type.list_size)
        if types.is_list(field.type) or types.is_large_list(field.type):
            first = next(self._file.iter_batches(1, columns=[field.name]), None)  # all rows must be this long
            length = 0 if first is None or not first.column(0).is_valid()[0].as_py() else len(first.column(0)[0])
            return self._name_dtype(field.type.value_type), (count, length)
        return self._name_dtype(field.type), (count,)

    def _name_dtype(self, kind: Any) -> str:
        return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))

    def batches(self, names: Iterable[str], max_rows: int) -> Iterator[dict[str, NDArray[Any]]]:
        """Yields rows of the columns `names`, `max_rows` rows at a time. Raises InputError if a value is missing."""
        names = list(names)
        for batch in self._file.iter_batches(max_rows, columns=names):
            yield {name: self._to_numpy(name, batch.column(name)) for name in names}

    def _to_numpy(self, name: str, array: Any) -> NDArray[Any]:
        pa, shape = self._pa, self.column_types[name][1]
        if len(shape) > 1:
            try:
                array = array.cast(pa.list_(array.type.value_type, shape[1])) if array.null_count == 0 else array
            except pa.ArrowInvalid as error:
                raise InputError(
                    f"column {name!r} has lists of several lengths; the first has {shape[1]} items. Give equal lengths"
                ) from error
        flat = array.flatten() if len(shape) > 1 else array
        if array.null_count or flat.null_count:
            raise InputError(f"column {name!r} has rows without a value; leave out these rows")
        values: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
        return values.reshape(-1, *shape[1:])


@contextmanager
def open_parquet(path: Path) -> Iterator[ParquetReader]:
    """Yield a file's rows. Raises OptionError if pyarrow is missing, ValueError or OSError for an unreadable file."""
    pa = _import_pyarrow()
    with pa.parquet.ParquetFile(path, page_checksum_verification=True) as file:
        yield ParquetReader(file, pa)
