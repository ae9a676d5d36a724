"""Hits and misses of each table, which many threads of a device count."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .layout import Layout

_COPIES = 64  # as in items.h
_COUNTERS = np.dtype([("counts", "<u8"), ("size", "<u8")])


class HitCounters:
    """Counts [tables, 2]. On the device they are several arrays, whose sum they are."""

    def __init__(self, layout: Layout) -> None:
        self._copies = torch.zeros((_COPIES, layout.tables, 2), dtype=torch.int64, device=layout.device.torch_device)
        self.struct = np.array((self._copies.data_ptr(), 2 * layout.tables), _COUNTERS)  # the Counters of items.h

    def add(self, counts: Tensor) -> None:
        """Add counts [tables, 2] to them."""
        self._copies[0] += counts

    def total(self) -> Tensor:
        """[tables, 2] int64."""
        return self._copies.sum(0)
