"""Hits and misses of each table, which many threads of a device count."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from .device import struct_of, struct_type
from .layout import Layout

_COPIES = 64  # as in items.h
_COUNTERS = struct_type("uint64 counts size")


class HitCounters:
    """Counts [tables, 2]. On the device they are several arrays, whose sum they are."""

    def __init__(self, layout: Layout) -> None:
        self._copies = torch.zeros((_COPIES, layout.tables, 2), dtype=torch.int64, device=layout.device.torch_device)
        self.struct = struct_of(_COUNTERS, counts=self._copies, size=2 * layout.tables)  # the Counters of items.h

    def total(self) -> NDArray[np.int64]:
        """[tables, 2]; waits for the device."""
        return np.asarray(self._copies.sum(0).cpu())
