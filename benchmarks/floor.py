"""The memory floor as a contender: compiles floor.cpp, lays out its rows and finds its fastest settings."""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import time
from pathlib import Path

import numpy as np
import torch
from contenders import BETAS, EPS, LR, find_tables, initial_rows
from native import compile_library
from numpy.typing import NDArray
from torch import Tensor
from traces import Batch, Shape

_DISTANCES = (8, 16, 24)
_RULES = ("adagrad", "rowwise_adagrad", "adam")  # in floor.cpp's order
_POINTER = ctypes.c_void_p


class _Rows(ctypes.Structure):
    _fields_ = [("slots", _POINTER), ("starts", _POINTER), ("occurrences", _POINTER), ("count", ctypes.c_int64)]


class _Step(ctypes.Structure):
    _fields_ = [
        ("lines", _POINTER),
        ("stride", ctypes.c_int64),
        ("slots", _POINTER),
        ("bags", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("grads", _POINTER),
        ("out", _POINTER),
        ("forward", _Rows),
        ("backward", _Rows),
        ("dim", ctypes.c_int32),
        ("rule", ctypes.c_int32),
        ("distance", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("step", ctypes.c_uint32),
        *((name, ctypes.c_float) for name in ("lr", "eps", "beta1", "beta2", "correction1", "correction2")),
    ]


class _FloorBatch:
    """A batch as arrays for floor.cpp: the slot at each position, and the unique rows in two orders."""

    def __init__(self, shape: Shape, batch: Batch) -> None:
        first = (np.arange(shape.tables) * shape.rows)[:, None]
        self.slots = (batch.rows.numpy() + first).reshape(-1).astype(np.uint32)
        unique, seen, counts = np.unique(self.slots, return_index=True, return_counts=True)
        positions = np.argsort(self.slots, kind="stable")
        self._arrays: list[NDArray[np.uint32]] = []
        orders = {"slot": np.arange(len(unique)), "batch": np.argsort(seen, kind="stable")}
        self.orders = {
            name: self._rows(order, unique, counts, positions // shape.length) for name, order in orders.items()
        }

    def _rows(
        self, order: NDArray[np.int64], unique: NDArray[np.uint32], counts: NDArray[np.int64], bags: NDArray[np.int64]
    ) -> _Rows:
        ends = np.cumsum(counts)
        begins = ends - counts
        starts = np.concatenate([[0], np.cumsum(counts[order])])
        picks = np.repeat(begins[order] - starts[:-1], counts[order]) + np.arange(len(bags))
        arrays = [x.astype(np.uint32) for x in (unique[order], starts, bags[picks])]
        self._arrays += arrays
        return _Rows(*(x.ctypes.data for x in arrays), len(unique))


class Floor:
    """Slots are row numbers, so nothing is hashed. `settings` are the fastest of several, tried on these batches."""

    name = "floor"

    def __init__(self, shape: Shape, batches: list[Batch]) -> None:
        self._shape = shape
        # -fno-math-errno lets the compiler vectorise square roots
        native = compile_library(Path(__file__).with_suffix(".cpp"), "-march=native", "-fno-math-errno")
        self._floor_step = native.floor_step
        state = {"adagrad": shape.dim, "rowwise_adagrad": 1, "adam": 2 * shape.dim}[shape.optimizer]
        floats = -(-(shape.dim + state + 2) // 4) * 4
        count = shape.tables * shape.rows
        memory = mmap.mmap(-1, count * floats * 4, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self._lines = np.frombuffer(memory, np.float32).reshape(count, floats)
        self._fill()
        # allocated by numpy, which asks for huge pages too
        self._out = torch.from_numpy(np.empty((shape.batch, shape.tables, shape.dim), np.float32))
        self._batches = batches
        self._floor_batches = [_FloorBatch(shape, batch) for batch in batches]
        self._steps = 0
        self._settings = self._best()
        self._steps = 0
        self._fill()

    @property
    def settings(self) -> str:
        forward, backward, distance = self._settings
        return f"gather in {forward} order, update in {backward} order, prefetch {distance} ahead"

    def step(self, index: int) -> Tensor:
        forward, backward, distance = self._settings
        index %= len(self._batches)
        shape, batch = self._shape, self._floor_batches[index]
        self._steps += 1
        step = _Step(
            self._lines.ctypes.data,
            self._lines.strides[0],
            batch.slots.ctypes.data,
            shape.batch * shape.tables,
            shape.length,
            self._batches[index].grad.data_ptr(),
            self._out.data_ptr(),
            batch.orders["slot"] if forward == "slot" else _Rows(),
            batch.orders[backward],
            shape.dim,
            _RULES.index(shape.optimizer),
            distance,
            torch.get_num_threads(),
            self._steps,
            LR,
            EPS,
            *BETAS,
            1 - BETAS[0] ** self._steps,
            math.sqrt(1 - BETAS[1] ** self._steps),
        )
        if self._floor_step(ctypes.byref(step)) != 0:
            raise ValueError(f"floor.cpp has no instance for {shape.optimizer}, dim {shape.dim}")
        return self._out

    def rows(self, index: int) -> Tensor:
        batch = self._batches[index]
        return torch.from_numpy(self._lines[find_tables(batch) * self._shape.rows + batch.flat, : self._shape.dim])

    def _fill(self) -> None:
        shape = self._shape
        self._lines[:] = 0
        for table, rows in enumerate(initial_rows(shape)):
            self._lines[table * shape.rows : (table + 1) * shape.rows, : shape.dim] = rows.numpy()

    def _best(self) -> tuple[str, str, int]:
        """Return the orders and prefetch distance of the fastest step. (A minimum: other load only adds time.)"""
        gathers = ("batch", "slot") if self._shape.length == 1 else ("batch",)
        best = math.inf, ("batch", "batch", _DISTANCES[0])
        for setting in 2 * list(itertools.product(gathers, ("batch", "slot"), _DISTANCES)):
            self._settings = setting
            for index in range(len(self._floor_batches)):  # by its next turn, a batch's rows have left the caches
                begin = time.perf_counter()
                self.step(index)
                best = min(best, (time.perf_counter() - begin, setting))
        return best[1]
