"""The line's shape and initial values in device memory."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...spec.initializers import InitialValues
from .device import Device
from .program import Program

_VALUES = np.dtype([("kind", "<u4"), ("a", "<f4"), ("b", "<f4"), ("q0", "<f8"), ("q1", "<f8")], align=True)
_ROW = np.dtype(
    [
        ("seed", "<u8"),
        ("values", "<u8"),
        ("group_ends", "<u8"),
        ("groups", "<u4"),
        ("states", "<u8"),
        ("state_ends", "<u8"),
        ("state_count", "<u4"),
    ],
    align=True,
)


class Layout:
    """What a line looks like and how a new one begins. `initial` is kernels/initialise.h's InitialRow, by value."""

    def __init__(self, device: Device, initial: InitialValues) -> None:
        self.device = device
        self.dim = int(sum(initial.columns))
        self.tables = len(initial.kinds) // len(initial.columns)
        self.width = self.dim + sum(initial.state_widths)
        self.stored_bytes = self.width * 4 + 8  # of a line without its padding
        self.line_bytes = (self.stored_bytes + 15) // 16 * 16
        values = np.zeros(len(initial.kinds), _VALUES)
        values["kind"] = initial.kinds
        values["a"], values["b"] = np.asarray(initial.parameters).T
        values["q0"], values["q1"] = np.asarray(initial.quantiles).T
        state_ends = self.dim + np.cumsum(initial.state_widths, dtype=np.uint32)
        self._memory = [
            self._tensor(values),
            self._tensor(np.cumsum(initial.columns, dtype=np.uint32)),
            self._tensor(np.asarray(initial.states, np.float32)),
            self._tensor(state_ends.astype(np.uint32)),
        ]
        self.initial = np.zeros((), _ROW)
        self.initial["seed"] = initial.seed
        self.initial["groups"], self.initial["state_count"] = len(initial.columns), len(initial.states)
        names = ("values", "group_ends", "states", "state_ends")
        for name, memory in zip(names, self._memory, strict=True):
            self.initial[name] = memory.data_ptr()

    def program(self, file: str, **macros: str) -> Program:
        """A program for lines of this shape."""
        shape = (("TIERBED_DIM", self.dim), ("TIERBED_WIDTH", self.width), ("TIERBED_LINE_BYTES", self.line_bytes))
        return Program(file, (*shape, *macros.items()))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        bytes_ = np.frombuffer(array.tobytes() or b"\0", np.uint8).copy()
        return torch.from_numpy(bytes_).to(self.device.torch_device)
