"""What the tests of the native core share: layouts, batches, and lines as NumPy sees them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from tierbed.engine import _core
from tierbed.engine.options.initializers import (
    as_arrays,
    make_constant_initializer,
    make_normal_initializer,
    make_table_options,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)
from tierbed.engine.row_format import STORED_DTYPES, RowFormat, to_float32, to_stored

F32 = NDArray[np.float32]

SPECIAL_KEYS = [0, 1, 2, 3, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1, 2**32 - 1, 2**32]
INITIALIZERS = [
    make_uniform_initializer(-0.1, 0.1),
    make_normal_initializer(0.5, 2.0),
    make_constant_initializer(0.3),
    make_trunc_normal_initializer(0.0, 1.0, -0.5, 2.0),
    make_trunc_normal_initializer(0.0, 1.0, 3.0, 5.0),
]

any_key = st.sampled_from(SPECIAL_KEYS) | st.integers(0, 20) | st.integers(0, 2**64 - 1)


class Table:
    """A layout and what the naive functions need to know of it."""

    def __init__(
        self,
        columns: Sequence[int],
        states: Sequence[float] = (),
        seed: int = 7,
        tables: int = len(INITIALIZERS),
        state_widths: Sequence[int] | None = None,
        types: tuple[str, str] = ("float32", "float32"),
        num_16bit_states: int = 0,
        max_ids: list[int] | None = None,
    ) -> None:
        """Each state is as wide as the embedding where `state_widths` does not say.

        types: of embedding and of the first `num_16bit_states` states. max_ids: of each table, if ids have numbers.
        """
        options = [
            make_table_options([INITIALIZERS[(table + group) % len(INITIALIZERS)] for group in range(len(columns))])
            for table in range(tables)
        ]
        self.columns, self.states, self.seed, self.tables = list(columns), list(states), seed, tables
        self.kinds, self.parameters, self.quantiles = as_arrays(options, columns)
        self.dim = sum(columns)
        self.state_widths = [self.dim] * len(self.states) if state_widths is None else list(state_widths)
        self.narrow = *types, num_16bit_states
        self._initial_of = seed, self.columns, self.kinds, self.parameters, self.quantiles
        self.layout = _core.Layout(
            self.dim, self.states, self.state_widths, *self._initial_of, *self.narrow, max_ids=max_ids
        )
        self.types = [types[1]] * num_16bit_states + ["float32"] * (len(self.states) - num_16bit_states)
        names = [f"state{index}" for index in range(len(self.states))]
        self.row_format = RowFormat(self.dim, types[0], names, self.state_widths, self.types)
        self.width = self.layout.width
        assert self.width == self.row_format.width
        self._line = ctypes.c_uint32 * (self.width + 2)
        self._initial: dict[tuple[int, int], F32] = {}

    def initial(self, tables: NDArray[np.uint32], keys: NDArray[np.uint64]) -> F32:
        """[n, dim and all states]. The naive functions are slow: each row is computed once."""
        rows = list(zip(tables.tolist(), keys.tolist(), strict=True))
        if absent := [row for row in dict.fromkeys(rows) if row not in self._initial]:
            named = np.array([table for table, _ in absent], np.uint32), np.array([key for _, key in absent], np.uint64)
            values = naive.initial_rows(*named, *self._initial_of, self.states, self.state_widths)
            self._initial |= zip(absent, self.nearest(values), strict=True)
        width = self.dim + sum(self.state_widths)
        return np.array([self._initial[row] for row in rows], np.float32).reshape(len(rows), width)

    def nearest(self, values: F32) -> F32:
        """values [n, dim and all states], each rounded to the nearest that its field holds."""
        return self._by_field(values, lambda part, type, _: to_float32(to_stored(part, type), type))

    def by_chance(self, values: F32, tables: NDArray[np.uint32], keys: NDArray[np.uint64], step: int) -> F32:
        """values [n, dim and all states] of rows, as they are stored when they are trained."""
        hashes = np.array([naive.hash_row(*row) for row in zip(tables.tolist(), keys.tolist(), strict=True)], np.uint64)
        noise = naive.noise(self.seed, hashes, step, values.shape[1])
        return self._by_field(values, lambda part, type, place: naive.trained(part, type, noise[:, place]))

    def _by_field(self, values: F32, change: Callable[[F32, str, slice], F32]) -> F32:
        out, begin = np.empty_like(values), 0
        for field in self.row_format.fields:
            place = slice(begin, begin := begin + field.count)
            out[:, place] = change(values[:, place], field.type, place)
        return out

    def batch(self, keys: Any, tables: Any, padding: int | None = None) -> _core.Batch:
        segment = np.ascontiguousarray(keys, np.uint64), np.ascontiguousarray(tables, np.uint32), None
        return _core.Batch([segment], self.tables, padding)

    def update(self, batch: _core.Batch, grads: F32, rule: str, hyperparams: Sequence[float], step: int) -> int:
        """`_core.update` of a batch of one lookup without bags, grads [size, dim]."""
        return _core.update(batch, self.layout, [grads], [False], [None], rule, hyperparams, step)

    def lines(self, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint64]]:
        """Memory of zeros for `count` lines, to be kept alive, and their addresses."""
        memory = np.zeros((count, self.layout.line_bytes), np.uint8)
        addresses = memory.ctypes.data + self.layout.line_bytes * np.arange(count, dtype=np.uint64)
        return memory, addresses.astype(np.uint64)

    def view(self, address: int) -> tuple[F32, NDArray[np.uint32]]:
        words = np.frombuffer(self._line.from_address(int(address)), np.uint32)
        return words[: self.width].view(np.float32), words[self.width :]

    def values(self, lines: NDArray[np.uint64]) -> F32:
        """[n, dim and all states], a copy of the lines' numbers."""
        return self.decoded(self._words(lines)[:, : self.width])

    def decoded(self, words: NDArray[np.generic]) -> F32:
        """[n, dim and all states], the numbers of the words [n, width] of lines."""
        kept = np.ascontiguousarray(words).view(np.uint8)
        parts = []
        for field in self.row_format.fields:
            dtype = STORED_DTYPES[field.type]
            end = field.offset + field.count * dtype.itemsize
            parts.append(to_float32(np.ascontiguousarray(kept[:, field.offset : end]).view(dtype), field.type))
            assert not kept[:, end : field.end].any(), "padding is not zeros"
        return np.concatenate(parts, 1)

    def records(self, lines: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """[n, 2], a copy of (updates, last step)."""
        return self._words(lines)[:, self.width :]

    def _words(self, lines: NDArray[np.uint64]) -> NDArray[np.uint32]:
        copied = b"".join(ctypes.string_at(line, 4 * (self.width + 2)) for line in lines.tolist())
        return np.frombuffer(bytearray(copied), np.uint32).reshape(len(lines), self.width + 2)


def same_bits(actual: F32, expected: F32) -> None:
    """Equal bit for bit, the sign of zero included; shows the first difference."""
    assert actual.dtype == expected.dtype == np.float32
    assert actual.shape == expected.shape
    differ = np.argwhere(actual.view(np.uint32) != expected.view(np.uint32))
    first = tuple(differ[0]) if len(differ) else ()
    assert not len(differ), f"{len(differ)} differ, first {first}: {actual[first]!r}, not {expected[first]!r}"
