"""Line shape and initial values in device memory, and hit counters per table."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...options.initializers import InitialValues
from ...row_format import COUNTER_BYTES, WORD_BYTES, compute_line_bytes, count_words
from .device import Device, make_struct, make_struct_type
from .program import Program

_VALUES = make_struct_type("uint32 kind", "float32 a b", "float64 q0 q1")
_INITIAL_ROW = make_struct_type(
    "uint64 seed values group_ends", "uint32 num_groups", "uint64 states state_ends", "uint32 num_states has_zero_key",
    "uint64 zero_key",
)  # fmt: skip
_COUNTERS, _COPIES = make_struct_type("uint64 counts size"), 64  # as in items.h
TYPES = {"float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16"}  # structs in kernels/float_types.h


class Layout:
    """A line's format and initial values. `initial` is the InitialRow of kernels/initialise.h, passed by value."""

    def __init__(self, device: Device, initial: InitialValues) -> None:
        self.device = device
        self._programs: dict[tuple[str, ...], Program] = {}
        self.dim = int(sum(initial.columns))
        self.num_tables = len(initial.kinds) // len(initial.columns)
        self.type, num_16bit_states = TYPES[initial.dtype], initial.num_16bit_states
        widths = list(initial.state_widths)
        widths[:num_16bit_states] = [count_words(initial.state_dtype, self.dim)] * num_16bit_states
        ends = count_words(initial.dtype, self.dim) + np.cumsum([0, *widths], dtype=np.uint32)
        self.width = int(ends[-1])
        self.has_16bit_floats = initial.dtype != "float32" or num_16bit_states > 0
        self.float32_line_bytes = compute_line_bytes(self.dim + sum(initial.state_widths))  # of a decoded line
        self.seed = np.uint64(initial.seed)
        self.stored_bytes = self.width * WORD_BYTES + COUNTER_BYTES  # size of a line without padding
        self.line_bytes = compute_line_bytes(self.width)
        self._shape = (
            ("TIERBED_DIM", self.dim), ("TIERBED_WIDTH", self.width), ("TIERBED_LINE_BYTES", self.line_bytes),
            ("TIERBED_EMBEDDING", self.type), ("TIERBED_STATES", TYPES[initial.state_dtype]),
            ("TIERBED_NUM_16BIT_STATES", num_16bit_states),
        )  # fmt: skip
        self.copy_lanes, self.column_lanes = _count_lanes((self.dim + 3) // 4), _count_lanes(self.dim)  # as in layout.h
        values = np.zeros(len(initial.kinds), _VALUES)
        values["kind"] = initial.kinds
        values["a"], values["b"] = np.asarray(initial.parameters).T
        values["q0"], values["q1"] = np.asarray(initial.quantiles).T
        group_ends, states = np.cumsum(initial.columns, dtype=np.uint32), np.asarray(initial.states, np.float32)
        arrays = {"values": values, "group_ends": group_ends, "states": states, "state_ends": ends[1:]}
        memory = {name: self._copy_to_device(array) for name, array in arrays.items()}
        self.initial = make_struct(
            _INITIAL_ROW, seed=initial.seed, num_groups=len(initial.columns), num_states=len(initial.states),
            has_zero_key=initial.zero_key is not None, zero_key=initial.zero_key, **memory,
        )  # fmt: skip
        self._memory = list(memory.values())

    def program(self, file: str, **macros: str) -> Program:
        """Return a program specialised for this line shape."""
        key = (file, *macros.values())
        if key not in self._programs:
            self._programs[key] = Program(file, (*self._shape, *macros.items()))
        return self._programs[key]

    def _copy_to_device(self, array: NDArray[np.generic]) -> Tensor:
        bytes_ = np.frombuffer(array.tobytes() or b"\0", np.uint8).copy()
        return torch.from_numpy(bytes_).to(self.device.torch_device)


def _count_lanes(words: int) -> int:
    return min(1 << max(words - 1, 0).bit_length(), 32)


class HitCounters:
    """Hits and misses [tables, 2], in several copies on the device to avoid contention."""

    def __init__(self, layout: Layout) -> None:
        self._copies = torch.zeros(_COPIES, layout.num_tables, 2, dtype=torch.int64, device=layout.device.torch_device)
        self.struct = make_struct(_COUNTERS, counts=self._copies, size=2 * layout.num_tables)  # DeviceCounters

    def read_total(self) -> NDArray[np.int64]:
        """Return hits and misses [tables, 2]. Waits for the device."""
        return np.asarray(self._copies.sum(0).cpu())
