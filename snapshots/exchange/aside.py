"""Columns of rows written one beside the other, for formats that hold them one after the other."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from numpy.typing import NDArray

from .columns import Columns


@dataclass
class ColumnAside:
    """A column in a file of its own. The file has no name, so it is gone when the process ends, however it ends."""

    file: IO[bytes]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]


class ColumnsAside(dict[str, ColumnAside]):
    """The columns of rows by name, each file at its beginning. `place`: a folder with room for all rows."""

    def __init__(self, place: Path, columns: Columns, chunks: Iterable[NDArray[np.void]]) -> None:
        super().__init__()
        with ExitStack() as files:
            for name, (dtype, shape) in columns.shapes().items():
                file = files.enter_context(tempfile.TemporaryFile(dir=place))
                self[name] = ColumnAside(file, dtype, (0, *shape))
            count = 0
            for rows in chunks:
                count += len(rows)
                for name, array in columns.split(rows).items():
                    self[name].file.write(array.data)
            for column in self.values():
                column.shape = (count, *column.shape[1:])
                column.file.seek(0)
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()
