"""Deduplicates a step's lookups on the GPU.

The host never waits for the number of unique rows. The host launches kernels for as many rows as there are positions
(ids). The kernels stop at `count`, the number of unique rows on the device. Kernels also check the input. After an
error, kernels set a bit in a fault word and change no rows; a later call raises the error on the host.
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
from ..batch import invert_feature_columns
from .device import Argument, Device, launch, make_struct, make_struct_type
from .program import Program

FAULT_NO_ROOM, FAULT_BAD_TABLE, FAULT_BAD_OFFSETS, FAULT_BAD_ID = 1, 2, 4, 16  # as in items.h
CHANGED = 8
SLOT_HASH = _core.slot_hash()  # the SlotHash in kernels/hash.h, passed by value
_PROGRAM = Program("ops/cuda/batch.cu")
_LEGAL_IDS = make_struct_type("uint64 padding max_ids drops_illegal dropped_counts", "uint32 has_padding num_tables")


class Faults:
    """A table's fault word: `word` [1], uint32 stored as int32 on the device. Kernels set a bit per kind of error."""

    def __init__(self, device: Device, name: str, num_tables: int, capacity: int | None) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._host_word = device.allocate_host_memory(1, torch.int32)
        self._host_word.zero_()
        self._name, self._num_tables, self._capacity = name, num_tables, capacity

    def post(self, batch: Batch) -> None:
        """Add the batch's faults to the table's word, and start to copy the word to the host."""
        if batch.faults is not self.word:
            self.word |= batch.faults | batch.input_faults
        self._host_word.copy_(self.word, non_blocking=True)

    def read(self, wait: bool) -> int:
        """Return the bits last copied to the host; with `wait`, the bits now set on the device."""
        return int(self.word if wait else self._host_word)

    def take_error(self, bits: int) -> TierbedError | None:
        """Clear the fault word and return the error for `bits`, or None if no bit is set."""
        if not bits:
            return None
        self.read(wait=True)  # an earlier copy must not arrive after the word is cleared
        self.word.zero_()
        self._host_word.zero_()
        where, effect = f"embedding {self._name!r}", "Its batch and the steps since changed nothing"
        mistakes = {
            FAULT_BAD_TABLE: f"table_ids of {where}: one is not from 0 to {self._num_tables - 1}",
            FAULT_BAD_OFFSETS: f"offsets of {where}: they do not ascend from 0 to the number of ids",
            FAULT_BAD_ID: f"ids of {where}: one is no id of its table, whose ids are 0 to ids - 1; correct the ids, or "
            "make the table with a larger ids, ids=None to allow any id, or bad_ids='drop' to leave such ids out",
            CHANGED: f"ids of {where}: they changed between being announced and their step, in a way torch does not "
            "track, such as .data, NumPy or DLPack; change them with torch's in-place ops, or give ahead=0",
        }
        for bit, mistake in mistakes.items():
            if bits & bit:
                return InputError(f"{mistake}. {effect}")
        return CapacityError(
            f"capacity of {where}: a batch has too many new rows for the capacity of {self._capacity} rows; raise "
            f"capacity, or leave unseen ids out. {effect}"
        )

    def check(self) -> None:
        """Wait for the device. Raises InputError or CapacityError if the device found a fault."""
        if error := self.take_error(self.read(wait=True)):
            raise error


class LookupTensors(NamedTuple):
    """One lookup's ids."""

    keys: Tensor  # [n] int64
    tables: Tensor | None = None  # [bags] int64, or [columns] with feature_columns
    bags: int | Tensor | None = None  # one length for all bags, offsets [bags + 1] int64, or None without pooling
    feature_columns: tuple[int, ...] | None = None  # as in `Lookup.feature_columns`


@dataclass(frozen=True)
class LegalIds:
    """An embedding's legal ids. `max_ids` and `drops_illegal`: [num_tables], as in `TableSpec`, or None."""

    num_tables: int
    padding: int | None = None
    max_ids: Tensor | None = None  # uint64 as int64
    drops_illegal: Tensor | None = None  # bool

    def make_struct(self, dropped_counts: Tensor | None) -> np.ndarray:
        """Return the kernels' argument `ids`. Kernels count dropped ids in `dropped_counts` [num_tables], int64."""
        return make_struct(
            _LEGAL_IDS, padding=self.padding, has_padding=self.padding is not None, num_tables=self.num_tables,
            max_ids=self.max_ids, drops_illegal=self.drops_illegal, dropped_counts=dropped_counts,
        )  # fmt: skip


@dataclass(frozen=True)
class LookupSpan:
    """One lookup's positions and output rows in a batch."""

    first_position: int  # the lookup's first position
    first_output_row: int  # the lookup's first output row
    num_ids: int
    num_bags: int  # also the number of output rows
    bag_length: int  # positions per bag, if `bag_offsets` is None
    bag_offsets: Tensor | None  # [bags + 1] int64, each bag's first position
    is_pooled: bool
    feature_by_column: Tensor | None  # [columns] int32, each column's feature; None without feature_columns
    feature_columns: Tensor | None  # [features] int32, each feature's column or -1


@dataclass(frozen=True)
class Occurrences:
    """All positions, sorted by row and ascending within a row. Padding comes first."""

    rows: Tensor  # [positions] int32, each position's row, -1 for padding
    order: Tensor  # [positions] int64, positions
    positions: Tensor  # [positions] uint32 as int32, equal to `order`
    output_rows: Tensor  # [positions], each position's output row; equals the tensor `positions` if nothing is pooled
    offsets: Tensor  # [unique + 1], where each row's positions begin; allocated with positions + 1 elements


def make_row_batch(device: Device, tables: NDArray[np.uint32], keys: NDArray[np.uint64], faults: Tensor) -> Batch:
    """Make a batch of distinct rows [n] from host arrays, in the arrays' order."""
    table_ids = torch.from_numpy(tables.astype(np.int64)).to(device.torch_device)
    ids = torch.from_numpy(keys.view(np.int64)).to(device.torch_device)
    return Batch(device, [LookupTensors(ids, table_ids)], LegalIds(int(tables.max(initial=0)) + 1), faults)


def make_single_row_batch(device: Device, table: int, key: int, faults: Tensor) -> Batch:
    """Make a one-row batch. key: 64 bits, unsigned."""
    return make_row_batch(device, np.array([table], np.uint32), np.array([key], np.uint64), faults)


def find_lines(resident: Sequence[Batch], rows: Batch, faults: Tensor) -> Tensor:
    """Find each row's line in other batches, [positions] int64; 0 for a row in no batch. Waits for the device."""
    lines = torch.zeros_like(rows.lines)
    for batch in resident:
        lines = torch.where(lines == 0, _find_lines_in(batch, rows, faults), lines)
    return lines


def _find_lines_in(pinned: Batch, rows: Batch, faults: Tensor) -> Tensor:
    """Find each row's line in `pinned` by deduplicating both batches together."""
    count = pinned.num_unique
    if count == 0:
        return torch.zeros_like(rows.lines)
    table_ids = [batch.tables[: batch.num_unique].to(torch.int64) for batch in (pinned, rows)]
    inputs = [LookupTensors(batch.keys, tables) for batch, tables in zip((pinned, rows), table_ids, strict=True)]
    num_tables = 1 + max(int(tables.max()) for tables in table_ids if len(tables))
    index = Batch(rows.device, inputs, LegalIds(num_tables), faults).inverse[count:]
    lines = pinned.lines[index.clamp(max=count - 1).to(torch.int64)]
    return torch.where(index < count, lines, 0)


def recover_keys(device: Device, hashes: Tensor, tables: Tensor) -> Tensor:
    """Recover row keys [n], int64, from hashes [n] and tables [n]."""
    keys = torch.empty_like(hashes)
    inputs = (hashes.contiguous(), tables.contiguous(), np.uint64(len(hashes)))
    launch(device, _PROGRAM, "recover_keys", len(hashes), 1, *inputs, keys, SLOT_HASH)
    return keys


@cache
def _copy_feature_columns(feature_columns: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return `LookupSpan.feature_by_column` and `LookupSpan.feature_columns`."""
    features = torch.from_numpy(invert_feature_columns(feature_columns).view(np.int32)).to(device)
    return features, torch.tensor(feature_columns, dtype=torch.int32, device=device)


class Batch:
    """Unique rows in a step's lookups, by first occurrence.

    Row arrays have `num_positions` elements, but only the first `count` [1] elements (unique rows) are used.
    Bad table ids and bad offsets set bits in `input_faults` [1]; the ids concerned count as padding. `faults` [1] is
    the table's fault word. A batch made ahead of its step has its own `faults` word.
    """

    def __init__(self, device: Device, inputs: Sequence[LookupTensors], ids: LegalIds, faults: Tensor) -> None:
        self.device = device
        self.input_faults = torch.zeros_like(faults)  # fault bits for errors in the ids themselves
        # how many ids were dropped, [num_tables]; None if no table drops ids
        flags = ids.drops_illegal
        self.dropped_counts = None if flags is None else torch.zeros_like(flags, dtype=torch.int64)
        self.lookups: list[LookupSpan] = []
        self.num_positions = self.num_output_rows = 0
        for arrays in inputs:
            self._add_lookup(arrays)
        self.is_pooled = any(lookup.is_pooled for lookup in self.lookups)
        hashes, tables = self.empty(torch.int64), self.empty(torch.int32)
        self._output_rows = self.empty(torch.int32) if self.is_pooled else None
        legal = ids.make_struct(self.dropped_counts)
        for lookup, arrays in zip(self.lookups, inputs, strict=True):
            parts = lookup.num_bags if lookup.bag_offsets is None else len(lookup.bag_offsets) - 1
            columns = 1 if lookup.feature_by_column is None else len(lookup.feature_by_column)
            self._run(
                "hash_ids", lookup.num_ids, arrays.keys, arrays.tables, lookup.bag_offsets, np.uint64(parts),
                np.uint64(lookup.bag_length), np.uint64(lookup.num_ids), legal, lookup.feature_columns,
                np.uint64(columns), np.uint64(lookup.num_bags // columns), np.uint64(lookup.first_position),
                np.uint64(lookup.first_output_row), SLOT_HASH, hashes, tables, self._output_rows, self.input_faults,
            )  # fmt: skip
        self._find_unique(hashes, tables)
        self._occurrences: list[Occurrences] = []  # shared with sibling batches; filled at first use
        self._reset_lines(faults)

    def make_sibling(self, faults: Tensor) -> Batch:
        """Return a batch with the same ids for another table. Shares everything except lines and fault word."""
        other = copy(self)
        other._reset_lines(faults)
        return other

    def _reset_lines(self, faults: Tensor) -> None:
        self.faults = faults
        faults |= self.input_faults
        self.lines = torch.zeros_like(self.hashes)  # addresses
        self.lookup_lines = self.lines  # the lines that lookups read; `preview_catch_up` replaces them by copies
        self.has_float32_lines = False  # True if `lookup_lines` are float32 though the table stores 16-bit floats
        self._owned_memory: list[Tensor] = []

    @property
    def num_unique(self) -> int:
        """The number of unique rows. Waits for the device."""
        return int(self.count)

    @property
    def keys(self) -> Tensor:
        """The unique rows' keys, [unique] int64. Waits for the device."""
        count = self.num_unique
        return recover_keys(self.device, self.hashes[:count], self.tables[:count])

    @property
    def occurrences(self) -> Occurrences:
        """Positions grouped by row."""
        if not self._occurrences:
            self._occurrences.append(self._group_positions())
        return self._occurrences[0]

    def _group_positions(self) -> Occurrences:
        rows, order = torch.sort(self.inverse, stable=True)
        positions = self.empty(torch.int32)
        output_rows = self.empty(torch.int32) if self.is_pooled else None
        offsets = torch.zeros(self.num_positions + 1, dtype=torch.int32, device=rows.device)
        n = np.uint64(self.num_positions)
        self._run("group_rows", self.num_positions, rows, order, self._output_rows, n, offsets, positions, output_rows)
        return Occurrences(rows, order, positions, positions if output_rows is None else output_rows, offsets)

    def keep_alive(self, memory: Tensor) -> int:
        """Keep memory alive as long as the batch. Returns the memory's address."""
        self._owned_memory.append(memory)
        return memory.data_ptr()

    def record_stream(self) -> None:
        """Allow this thread to use another thread's batch. Torch keeps the batch until this thread's launches end."""
        parts = [*vars(self).values(), *self._owned_memory, *(lookup.bag_offsets for lookup in self.lookups)]
        for part in [*parts, *vars(self.occurrences).values()]:
            if isinstance(part, Tensor):
                self.device.record_stream(part)

    def empty(self, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor [positions]. Allocates at least one element, so that it has an address."""
        memory = torch.empty(max(self.num_positions, 1), dtype=dtype, device=self.device.torch_device)
        return memory if self.num_positions else memory[:0]

    def _add_lookup(self, arrays: LookupTensors) -> None:
        keys, _, bags, feature_columns = arrays
        size, count, length, offsets, features, columns = len(keys), len(keys), 1, None, None, None
        if isinstance(bags, Tensor):
            count, length, offsets = len(bags) - 1, 0, torch.empty_like(bags)
            self._run("check_offsets", count + 1, bags, np.uint64(count), np.uint64(size), offsets, self.input_faults)
        elif bags is not None:
            count, length = size // bags, bags
        if feature_columns is not None:
            features, columns = _copy_feature_columns(feature_columns, keys.device)
            count = count // len(columns) * len(features)
        begin, output_row, is_pooled = self.num_positions, self.num_output_rows, bags is not None
        self.lookups.append(LookupSpan(begin, output_row, size, count, length, offsets, is_pooled, features, columns))
        self.num_positions += size
        self.num_output_rows += count

    def _find_unique(self, hashes: Tensor, tables: Tensor) -> None:
        n = np.uint64(self.num_positions)
        num_slots = 1 << max(2 * self.num_positions - 1, 1).bit_length()
        hash_set = torch.full((num_slots,), -1, dtype=torch.int32, device=hashes.device)
        slots, first_flags = self.empty(torch.int32), self.empty(torch.int32)
        self._run("insert_rows", self.num_positions, hashes, tables, n, hash_set, np.uint32(num_slots - 1), slots)
        self._run("flag_first_positions", self.num_positions, tables, hash_set, slots, n, first_flags)
        prefix_sums = first_flags.cumsum(0, dtype=torch.int32)
        self.count = prefix_sums[-1:] if self.num_positions else torch.zeros(1, dtype=torch.int32, device=hashes.device)
        self.hashes, self.tables = self.empty(torch.int64), self.empty(torch.int32)
        self.inverse = self.empty(torch.int32)  # [positions], each position's row, -1 for padding
        unique = self.inverse, self.hashes, self.tables
        self._run("number_rows", self.num_positions, hashes, tables, hash_set, slots, prefix_sums, n, *unique)

    def _run(self, kernel: str, items: int, *arguments: Argument) -> None:
        launch(self.device, _PROGRAM, kernel, items, 1, *arguments)
