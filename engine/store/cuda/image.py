"""The rows of a full table on a device as they were at one instant."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...ops.cuda.batch import Batch, rows_of
from ...ops.cuda.layout import Layout
from ...ops.cuda.staging import Staging
from ...row_format import BUCKETS, Keys, Tables, row_dtype
from .table import CudaFullTable

Kept = tuple[NDArray[np.int64], NDArray[np.uint8]]  # places [n], ascending, and lines [n, stored_bytes]


@dataclass(frozen=True)
class Held:
    """Written rows [n], by bucket and within it by (table, key). `bounds`: where each bucket begins, and the end."""

    tables: Tables
    keys: Keys
    lines: Tensor
    numbers: Tensor  # the number of each line
    bounds: NDArray[np.int64]  # [BUCKETS + 1]


class TableImage:
    """`TableImage` of `engine/store/contract.py` on a GPU. Rows are kept aside in host memory.

    A call that keeps rows waits for the device. The image may read a row from its line until another row takes that
    line; before that the first row is erased, and so kept aside. The caches above bring down only rows that were kept
    aside before they were written.
    """

    def __init__(self, table: CudaFullTable, layout: Layout, held: Callable[[], Held], faults: Tensor) -> None:
        """held: returns what the table has at the time of the call."""
        self._table, self._layout, self._faults = table, layout, faults
        device = self._layout.device.torch_device
        self._layout.device.wait()  # steps may run on another stream than this thread
        self._held = held()
        self._staging = Staging(self._layout)
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        # by the number of a line + 1: the place in `_held` of a row that was neither read nor kept so far, or -1
        self._places = torch.full((self._table.room + 1,), -1, dtype=torch.int64, device=device)
        self._places[self._held.numbers + 1] = torch.arange(len(self._held.keys), device=device)
        self._kept: list[list[Kept]] = [[] for _ in range(BUCKETS)]
        self._bucket = self._at = 0
        self.kept_bytes = 0
        self._layout.device.wait()

    def keep(self, batch: Batch) -> None:
        with self._table.alone():
            self._keep(self._table.lines_of(batch))

    def keep_rows(self, tables: Tables, keys: Keys) -> None:
        self.keep(rows_of(self._layout.device, tables, keys, self._faults))

    def list(self, bucket: int) -> None:
        self._bucket, self._at = bucket, int(self._held.bounds[bucket])
        if len(parts := self._kept[bucket]) > 1:
            places, lines = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            order = np.argsort(places)
            self._kept[bucket] = [(places[order], lines[order])]

    def sort(self) -> None:
        """Does nothing: the rows of `held` are sorted already."""

    def next(self, rows: NDArray[np.uint8]) -> int:
        most = len(rows) // row_dtype(self._layout.width).itemsize
        begin, end = self._at, min(self._at + most, int(self._held.bounds[self._bucket + 1]))
        if begin == end:
            self.kept_bytes -= sum(places.nbytes + kept.nbytes for places, kept in self._kept[self._bucket])
            self._kept[self._bucket] = []
            return 0
        packed = rows.view(row_dtype(self._layout.width))[: end - begin]
        held = self._held
        # after what the training thread has launched, and before what it will launch
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            lines = self._staging.pack(held.tables[begin:end], held.keys[begin:end], held.lines[begin:end], packed)
            self._places[held.numbers[begin:end] + 1] = -1
        for places, kept in self._kept[self._bucket]:
            part = slice(*np.searchsorted(places, (begin, end)))
            lines[places[part] - begin] = kept[part]
        self._at = end
        return end - begin

    def _keep(self, lines: Tensor) -> None:
        numbers = self._table.numbers_of(lines) + 1
        numbers = torch.where(numbers < len(self._places), numbers, 0)
        places = self._places[numbers]
        wanted = (places >= 0).nonzero()[:, 0]
        places, order = places[wanted].sort()
        if len(order) == 0:
            return
        was = self._staging.read(lines[wanted[order]])[:, : self._layout.stored_bytes]
        there = places.cpu().numpy()
        bounds = np.searchsorted(there, self._held.bounds)
        parts = [
            (bucket, (there[begin:end].copy(), was[begin:end].copy()))  # copied, so that each bucket is freed by itself
            for bucket, (begin, end) in enumerate(itertools.pairwise(bounds.tolist()))
            if begin < end
        ]
        self._places[numbers[wanted]] = -1
        for bucket, part in parts:
            self._kept[bucket].append(part)
        self.kept_bytes += there.nbytes + was.nbytes
