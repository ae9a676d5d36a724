"""Mistakes that only the device sees. It changes nothing from then on, and the host raises them at a later call."""

from __future__ import annotations

import torch

from ...errors import CapacityError, InputError
from .device import Device

NO_ROOM, BAD_TABLE, BAD_OFFSETS = 1, 2, 4  # as in items.h


class Faults:
    """`word` [1] uint32 as int32 on the device: bits that kernels set."""

    def __init__(self, device: Device, name: str, num_tables: int, capacity: int | None) -> None:
        self.word = torch.zeros(1, dtype=torch.int32, device=device.torch_device)
        self._seen = device.host_memory(1, torch.int32)
        self._seen.zero_()
        self._name, self._num_tables, self._capacity = name, num_tables, capacity

    def post(self) -> None:
        """Send the word to the host, without waiting."""
        self._seen.copy_(self.word, non_blocking=True)

    def check(self, wait: bool = False) -> None:
        """Raise what has arrived, or with `wait` what there is. InputError, CapacityError."""
        found = int(self.word if wait else self._seen)
        if not found:
            return
        self.word.zero_()
        self._seen.zero_()
        where = f"embedding {self._name!r}"
        if found & BAD_TABLE:
            raise InputError(
                f"table_ids of {where}: an id of an earlier batch is not from 0 to {self._num_tables - 1}; nothing was "
                "changed by it and the steps since"
            )
        if found & BAD_OFFSETS:
            raise InputError(
                f"offsets of {where}: those of an earlier batch do not ascend from 0 to the number of ids; nothing was "
                "changed by it and the steps since"
            )
        raise CapacityError(
            f"capacity of {where}: an earlier batch brought more new rows than {self._capacity} leaves room for; raise "
            "capacity, or leave unseen ids out. Nothing was changed by it and the steps since"
        )
