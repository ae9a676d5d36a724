"""The unique rows of one or several lookups, found on the device.

Numbers of rows stay on the device, too: kernels are launched for as many rows as there are positions, and stop at
`count`. After a fault that only the device sees, it changes no row; the host raises the error at a later call.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import _core
from ...errors import CapacityError, InputError, TierbedError
from ..batch import features_of
from .device import Argument, Device, launch, struct_of, struct_type
from .program import Program

NO_ROOM, BAD_TABLE, BAD_OFFSETS, BAD_ID = 1, 2, 4, 16  # as in items.h
CHANGED = 8
SLOT_HASH = _core.slot_hash()  # kernels/hash.h's SlotHash of this process, by value
_PROGRAM = Program("ops/cuda/batch.cu")
_IDS = struct_type("uint64 padding last drops dropped", "uint32 has_padding num_tables")


class Faults:
    """The fault word of a table: `word` [1], uint32 as int32 on the device, whose bits kernels set."""

    def __init__(self, device: Device, name: str, num_tables: int, capacity: int | None) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._seen = device.host_memory(1, torch.int32)
        self._seen.zero_()
        self._name, self._num_tables, self._capacity = name, num_tables, capacity

    def post(self, batch: Batch) -> None:
        """Copy the word to the host without waiting, together with the faults of the step's batch."""
        if batch.faults is not self.word:
            self.word |= batch.faults | batch.wrong
        self._seen.copy_(self.word, non_blocking=True)

    def seen(self, wait: bool) -> int:
        """The bits that were copied to the host; with `wait`, the bits that are set on the device."""
        return int(self.word if wait else self._seen)

    def take(self, found: int) -> TierbedError | None:
        """The error for the bits `found`. Clears the word."""
        if not found:
            return None
        self.seen(wait=True)  # earlier copies must not arrive after this
        self.word.zero_()
        self._seen.zero_()
        where, since = f"embedding {self._name!r}", "Its batch and the steps since changed nothing"
        mistakes = {
            BAD_TABLE: f"table_ids of {where}: one is not from 0 to {self._num_tables - 1}",
            BAD_OFFSETS: f"offsets of {where}: they do not ascend from 0 to the number of ids",
            BAD_ID: f"ids of {where}: one is no id of its table, whose ids are 0 to ids - 1; correct the ids, or make "
            "the table with a larger ids, ids=None for any id, or bad_ids='drop' to leave such ids out",
            CHANGED: f"ids of {where}: between being announced and their step they were changed by what torch does not "
            "see, such as .data, NumPy or DLPack; change them by torch's in-place ops, or give ahead=0",
        }
        for bit, mistake in mistakes.items():
            if found & bit:
                return InputError(f"{mistake}. {since}")
        return CapacityError(
            f"capacity of {where}: a batch brought more new rows than {self._capacity} leaves room for; raise "
            f"capacity, or leave unseen ids out. {since}"
        )

    def check(self) -> None:
        """Wait for the device, and raise the error of a fault. InputError, CapacityError."""
        if error := self.take(self.seen(wait=True)):
            raise error


class Segment(NamedTuple):
    """The ids of one lookup."""

    keys: Tensor  # [n] int64
    tables: Tensor | None = None  # [bags] int64, or [columns] with feature_columns
    bags: int | Tensor | None = None  # None for no bags, their length, or offsets [bags + 1] int64
    feature_columns: tuple[int, ...] | None = None  # as `Lookup.feature_columns`


@dataclass(frozen=True)
class Ids:
    """The legal ids of an embedding's tables. `last` and `drops` are [num_tables], as in `TableSpec`, or None."""

    num_tables: int
    padding: int | None = None
    last: Tensor | None = None  # uint64 as int64
    drops: Tensor | None = None  # bool

    def struct(self, dropped: Tensor | None) -> np.ndarray:
        """The argument of kernels. dropped [num_tables] int64 counts dropped ids."""
        return struct_of(
            _IDS, padding=self.padding, has_padding=self.padding is not None, num_tables=self.num_tables,
            last=self.last, drops=self.drops, dropped=dropped,
        )  # fmt: skip


@dataclass(frozen=True)
class LookupSpan:
    """A segment of a batch: the positions and output rows of one lookup."""

    begin: int  # its first position
    source: int  # its first output row
    size: int
    bags: int  # output rows
    length: int  # positions per bag, if there are no begins
    begins: Tensor | None
    pooled: bool
    features: Tensor | None  # [columns] int32, the feature of each column; None without feature_columns
    places: Tensor | None  # [features] int32, the column of each feature or -1


@dataclass(frozen=True)
class Groups:
    """Occurrences grouped by row, ascending within a row; padding comes first."""

    rows: Tensor  # [size] int32, the row of each, -1 for padding
    order: Tensor  # [size] int64, positions
    positions: Tensor  # [size] uint32 as int32
    sources: Tensor  # [size], output rows; `positions` if nothing is pooled
    offsets: Tensor  # [unique + 1], at which each row's occurrences begin; the memory is larger


def rows_of(device: Device, tables: NDArray[np.uint32], keys: NDArray[np.uint64], faults: Tensor) -> Batch:
    """A batch of distinct rows [n] with keys of the host; its unique rows are in this order."""
    owners = torch.from_numpy(tables.astype(np.int64)).to(device.torch_device)
    ids = torch.from_numpy(keys.view(np.int64)).to(device.torch_device)
    return Batch(device, [Segment(ids, owners)], Ids(int(tables.max(initial=0)) + 1), faults)


def one_row(device: Device, table: int, key: int, faults: Tensor) -> Batch:
    """A batch of one row with a key of the host. key: its 64 bits, unsigned."""
    return rows_of(device, np.array([table], np.uint32), np.array([key], np.uint64), faults)


def lines_among(resident: Sequence[Batch], rows: Batch, faults: Tensor) -> Tensor:
    """[rows.size] int64: the line of each row of `rows` in the batches `resident`, 0 if it is in none; waits."""
    lines = torch.zeros_like(rows.lines)
    for batch in resident:
        lines = torch.where(lines == 0, _lines_in(batch, rows, faults), lines)
    return lines


def _lines_in(pinned: Batch, rows: Batch, faults: Tensor) -> Tensor:
    count = pinned.unique
    if count == 0:
        return torch.zeros_like(rows.lines)
    owners = [batch.tables[: batch.unique].to(torch.int64) for batch in (pinned, rows)]
    segments = [Segment(batch.keys, tables) for batch, tables in zip((pinned, rows), owners, strict=True)]
    most = 1 + max(int(tables.max()) for tables in owners if len(tables))
    index = Batch(rows.device, segments, Ids(most), faults).inverse[count:]
    lines = pinned.lines[index.clamp(max=count - 1).to(torch.int64)]
    return torch.where(index < count, lines, 0)


def keys_of(device: Device, hashes: Tensor, tables: Tensor) -> Tensor:
    """The keys [n] int64 of rows, from their hashes [n] and tables [n]."""
    keys = torch.empty_like(hashes)
    given = (hashes.contiguous(), tables.contiguous(), np.uint64(len(hashes)))
    launch(device, _PROGRAM, "recover_keys", len(hashes), 1, *given, keys, SLOT_HASH)
    return keys


@cache
def _on_device(places: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """`LookupSpan.features` and `LookupSpan.feature_columns`."""
    given = (features_of(places).view(np.int32), np.array(places, np.int32))
    features, columns = (torch.from_numpy(part).to(device) for part in given)
    return features, columns


class Batch:
    """The unique rows of lookups in order of first occurrence; `count` [1] says how many, the arrays are as long as
    positions.

    A bad table id or bad offsets set a bit of `wrong` [1] and make padding. `faults` [1] is the fault word of the
    batch's table; a batch that is made ahead of its step has a word of its own.
    """

    def __init__(self, device: Device, segments: Sequence[Segment], ids: Ids, faults: Tensor) -> None:
        self.device = device
        self.wrong = torch.zeros_like(faults)  # with the ids
        # [num_tables], ids that were dropped; None if no table drops any
        self.dropped = None if ids.drops is None else torch.zeros_like(ids.drops, dtype=torch.int64)
        self.lookups: list[LookupSpan] = []
        self.size = self.sources = 0
        for segment in segments:
            self._add(segment)
        self.pooled = any(lookup.pooled for lookup in self.lookups)
        hashes, tables = self.empty(torch.int64), self.empty(torch.int32)
        self._sources = self.empty(torch.int32) if self.pooled else None
        legal = ids.struct(self.dropped)
        for lookup, segment in zip(self.lookups, segments, strict=True):
            parts = lookup.bags if lookup.begins is None else len(lookup.begins) - 1
            columns = 1 if lookup.features is None else len(lookup.features)
            self._run(
                "hash_ids", lookup.size, segment.keys, segment.tables, lookup.begins, np.uint64(parts),
                np.uint64(lookup.length), np.uint64(lookup.size), legal, lookup.places, np.uint64(columns),
                np.uint64(lookup.bags // columns), np.uint64(lookup.begin), np.uint64(lookup.source), SLOT_HASH, hashes,
                tables, self._sources, self.wrong,
            )  # fmt: skip
        self._find_unique(hashes, tables)
        self._groups: list[Groups] = []  # one element once a sibling has computed it
        self._begin(faults)

    def sibling(self, faults: Tensor) -> Batch:
        """A batch of the same ids for another table. It shares what depends on the ids alone, and has other lines."""
        other = copy(self)
        other._begin(faults)
        return other

    def _begin(self, faults: Tensor) -> None:
        """Begin as a batch of the table whose fault word is `faults`, with no lines set."""
        self.faults = faults
        faults |= self.wrong
        self.lines = torch.zeros_like(self.hashes)  # addresses
        self.views = self.lines  # for lookups
        self.has_wide_lines = False  # whether embeddings in them are float32, whatever the table's type
        self._owned: list[Tensor] = []

    @property
    def unique(self) -> int:
        """How many rows; waits for the device."""
        return int(self.count)

    @property
    def keys(self) -> Tensor:
        """[unique], int64; waits for the device."""
        count = self.unique
        return keys_of(self.device, self.hashes[:count], self.tables[:count])

    @property
    def groups(self) -> Groups:
        """The occurrences of each row."""
        if not self._groups:
            self._groups.append(self._group())
        return self._groups[0]

    def _group(self) -> Groups:
        rows, order = torch.sort(self.inverse, stable=True)
        positions = self.empty(torch.int32)
        sources = self.empty(torch.int32) if self.pooled else None
        offsets = torch.zeros(self.size + 1, dtype=torch.int32, device=rows.device)
        self._run(
            "group_rows", self.size, rows, order, self._sources, np.uint64(self.size), offsets, positions, sources
        )
        return Groups(rows, order, positions, positions if sources is None else sources, offsets)

    def own(self, memory: Tensor) -> int:
        """Keep memory as long as the batch exists. Returns the address of the memory."""
        self._owned.append(memory)
        return memory.data_ptr()

    def record_stream(self) -> None:
        """Let this thread use a batch of another thread: keep its memory until this thread's launches are complete."""
        parts = [*vars(self).values(), *self._owned, *(lookup.begins for lookup in self.lookups)]
        for part in [*parts, *vars(self.groups).values()]:
            if isinstance(part, Tensor):
                self.device.record_stream(part)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor [size], of at least one element."""
        memory = torch.empty(max(self.size, 1), dtype=dtype, device=self.device.torch_device)
        return memory if self.size else memory[:0]

    def _add(self, segment: Segment) -> None:
        keys, _, bags, feature_columns = segment
        size, count, length, begins, features, columns = len(keys), len(keys), 1, None, None, None
        if isinstance(bags, Tensor):
            count, length, begins = len(bags) - 1, 0, torch.empty_like(bags)
            self._run("check_offsets", count + 1, bags, np.uint64(count), np.uint64(size), begins, self.wrong)
        elif bags is not None:
            count, length = size // bags, bags
        if feature_columns is not None:
            features, columns = _on_device(feature_columns, keys.device)
            count = count // len(columns) * len(features)
        self.lookups.append(
            LookupSpan(self.size, self.sources, size, count, length, begins, bags is not None, features, columns)
        )
        self.size += size
        self.sources += count

    def _find_unique(self, hashes: Tensor, tables: Tensor) -> None:
        n = np.uint64(self.size)
        slots = 1 << max(2 * self.size - 1, 1).bit_length()
        marks = torch.full((slots,), -1, dtype=torch.int32, device=hashes.device)
        places, firsts = self.empty(torch.int32), self.empty(torch.int32)
        self._run("mark_rows", self.size, hashes, tables, n, marks, np.uint32(slots - 1), places)
        self._run("find_firsts", self.size, tables, marks, places, n, firsts)
        ranks = firsts.cumsum(0, dtype=torch.int32)
        self.count = ranks[-1:] if self.size else torch.zeros(1, dtype=torch.int32, device=hashes.device)
        self.hashes, self.tables = self.empty(torch.int64), self.empty(torch.int32)
        self.inverse = self.empty(torch.int32)  # [size], the row of each position, -1 for padding
        self._run(
            "number_rows", self.size, hashes, tables, marks, places, ranks, n, self.inverse, self.hashes, self.tables
        )

    def _run(self, kernel: str, items: int, *arguments: Argument) -> None:
        launch(self.device, _PROGRAM, kernel, items, 1, *arguments)
