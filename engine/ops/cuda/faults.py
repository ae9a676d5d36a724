"""Mistakes that only the device sees. The device changes no row from then on; the host raises them at a later call."""

from __future__ import annotations

import torch

from ...errors import CapacityError, InputError, TierbedError
from .batch import Batch
from .device import Device

NO_ROOM, BAD_TABLE, BAD_OFFSETS, BAD_ID = 1, 2, 4, 16  # as in items.h
CHANGED = 8


class Faults:
    """The fault word of a table: `word` [1], uint32 as int32 on the device, whose bits kernels set."""

    def __init__(self, device: Device, name: str, num_tables: int, capacity: int | None) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._seen = device.host_memory(1, torch.int32)
        self._seen.zero_()
        self._name, self._num_tables, self._capacity = name, num_tables, capacity

    def post(self, batch: Batch) -> None:
        """Send the word to the host without waiting, with the faults of a batch whose step this is."""
        if batch.faults is not self.word:
            self.word |= batch.faults | batch.wrong
        self._seen.copy_(self.word, non_blocking=True)

    def seen(self, wait: bool) -> int:
        """The bits that have arrived at the host; with `wait`, the bits that are set on the device."""
        return int(self.word if wait else self._seen)

    def take(self, found: int) -> TierbedError | None:
        """The error that the bits `found` mean. Clears the word."""
        if not found:
            return None
        self.seen(wait=True)  # what was sent earlier must not arrive after this
        self.word.zero_()
        self._seen.zero_()
        where, since = f"embedding {self._name!r}", "Its batch and the steps since changed nothing"
        if found & BAD_TABLE:
            return InputError(f"table_ids of {where}: one is not from 0 to {self._num_tables - 1}. {since}")
        if found & BAD_OFFSETS:
            return InputError(f"offsets of {where}: they do not ascend from 0 to the number of ids. {since}")
        if found & BAD_ID:
            return InputError(
                f"ids of {where}: one is no id of its table, whose ids are 0 to ids - 1; correct the ids, or make the "
                f"table with a larger ids, ids=None for any id, or bad_ids='drop' to leave such ids out. {since}"
            )
        if found & CHANGED:
            return InputError(
                f"ids of {where}: between being announced and their step they were changed by what torch does not see, "
                f"such as .data, NumPy or DLPack; change them by torch's in-place ops, or give ahead=0. {since}"
            )
        return CapacityError(
            f"capacity of {where}: a batch brought more new rows than {self._capacity} leaves room for; raise "
            f"capacity, or leave unseen ids out. {since}"
        )

    def check(self) -> None:
        """Wait for the device, and raise the fault that there is. InputError, CapacityError."""
        error = self.take(self.seen(wait=True))
        if error is not None:
            raise error
