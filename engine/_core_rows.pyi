"""The part of the native core for files of snapshots and the packed rows in them: `_core` has what is here."""

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]

class Crc32c:
    """The checksum that RocksDB keeps of each file of rows, of bytes that come in pieces."""

    def __init__(self) -> None: ...
    def update(self, bytes: U8) -> None: ...
    def finish(self) -> int:
        """The checksum. Nothing is called after."""

class RowCheck:
    """What no snapshot holds among the rows of a bucket, or names of rows (table u32, key u64), that come in parts.

    `tables`: how many there are; `int32`: whether keys are; `part`: the owner of the rows among `parts`.
    """

    def __init__(self, bucket: int, tables: int, int32: bool, part: int, parts: int) -> None: ...
    def problem(self, rows: U8, row_bytes: int) -> str | None:
        """What is wrong with rows that follow those before: their order, bucket, part, table, key or record."""

def join_rows(before: U8, after: U8, row_bytes: int) -> tuple[U8, U8]:
    """Compare packed rows of one bucket, each side in strictly ascending order, until either side has no more.

    Of those of `before` that were compared: 1 where `after` lacks the row. Of those of `after`: 0 where it is the same,
    1 where its bytes differ, 2 where `before` lacks it.
    """

def merge_parts(parts: list[U8], more: list[bool], row_bytes: int) -> tuple[U8, list[int]]:
    """The packed rows of several parts of one bucket, in one order, until a part of which `more` come has no row left.

    Each part is in strictly ascending order, and no row is in two. The rows, and how many of each part were taken.
    """

def merge_rows(before: U8, after: U8, gone: U8, row_bytes: int) -> tuple[U8, int, int, int, bool]:
    """The packed rows `before` of one bucket as they are after changes: those of `after`, and without the names `gone`.

    Each side is in strictly ascending order, and is taken up to the least of their last names; a side may be empty. The
    rows, how many of each side were taken, and whether a name is both in `after` and `gone`.
    """
