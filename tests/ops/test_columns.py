"""Moves of columns, and their gradients, differ from the references, or write where no move goes."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from tierbed.engine import _core
from tierbed.engine.row_format import to_stored

pytestmark = pytest.mark.op

DTYPES = ["float32", "float64", "float16", "bfloat16"]


def numbers(rng: np.random.Generator, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    """A matrix [rows, columns] whose rows are apart in memory; of bfloat16 the bits."""
    drawn = (rng.standard_normal((shape[0], shape[1] + 3)) * 10.0 ** rng.integers(-6, 5)).astype(np.float32)
    drawn[rng.random(drawn.shape) < 0.02] = np.inf
    drawn[rng.random(drawn.shape) < 0.02] = -0.0
    wide = drawn.astype(np.float64) if dtype == "float64" else to_stored(drawn, dtype)
    return wide[:, 1 : 1 + shape[1]]


def matrices(arrays: list[NDArray[Any]]) -> list[int]:
    return [number for one in arrays for number in (one.ctypes.data, one.strides[0], one.shape[1])]


@dataclass
class Case:
    """Moves that fill the targets. They may read the same columns."""

    sources: list[NDArray[Any]]
    moves: list[list[int]]  # in any order
    widths: list[int]
    dtype: str

    @property
    def permutes(self) -> NDArray[np.int64]:
        return np.array([[*move, 99] for move in self.moves], np.int64).reshape(-1, 6).flatten()


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dtype, rows = draw(st.sampled_from(DTYPES)), draw(st.sampled_from([0, 1, 3, 700]))
    inputs = draw(st.lists(st.sampled_from([0, 1, 7, 33, 130]), min_size=1, max_size=4))
    outputs = draw(st.lists(st.lists(st.sampled_from([0, 1, 5, 31, 64]), max_size=4), min_size=1, max_size=4))
    moves = []
    for target, parts in enumerate(outputs):
        parts[:] = [min(count, max(inputs)) for count in parts]
        for to, count in zip(accumulate(parts, initial=0), parts, strict=False):
            source = int(rng.choice([at for at, width in enumerate(inputs) if width >= count]))
            moves.append([source, target, int(rng.integers(0, inputs[source] - count + 1)), to, count])
    moves = [moves[at] for at in rng.permutation(len(moves))]
    sources = [numbers(rng, (rows, width), dtype) for width in inputs]
    return Case(sources, moves, [sum(parts) for parts in outputs], dtype)


@pytest.mark.parametrize("threads", [1, 2])
@given(case=cases())
def test_moved_columns_and_their_gradients_are_those_of_the_references(case: Case, threads: int) -> None:
    rows, rng = len(case.sources[0]), np.random.default_rng(0)
    grads = [numbers(rng, (rows, width), case.dtype) for width in case.widths]
    expected = naive.move_columns(case.sources, case.moves, case.widths)
    widths = [one.shape[1] for one in case.sources]
    with np.errstate(all="ignore"):
        sums = naive.add_columns(grads, case.moves, widths, case.dtype)
    try:
        _core.set_num_threads(threads)
        for name in _core.list_instruction_sets():
            _core.use_instruction_set(name)
            made = [np.full((rows, width), 7, case.sources[0].dtype) for width in case.widths]
            given = matrices(case.sources), matrices(made), case.permutes, rows, case.dtype
            assert _core.move_columns(*given, False)
            back = [np.full((rows, width), 7, case.sources[0].dtype) for width in widths]
            assert _core.move_columns(matrices(grads), matrices(back), case.permutes, rows, case.dtype, True)
            assert [one.tobytes() for one in made] == [one.tobytes() for one in expected]
            for one, other in zip(back, sums, strict=True):
                same = one.view(f"u{one.itemsize}") == other.view(f"u{one.itemsize}")
                assert (same | (is_nan(one, case.dtype) & is_nan(other, case.dtype))).all()  # inf - inf
    finally:
        _core.set_num_threads(1)
        _core.use_instruction_set(_core.list_instruction_sets()[0])


def is_nan(numbers: NDArray[Any], dtype: str) -> NDArray[np.bool_]:
    return (numbers & 0x7FFF) > 0x7F80 if dtype == "bfloat16" else np.isnan(numbers)


@pytest.mark.parametrize(
    ("moves", "is_gradient"),
    [
        ([[0, 0, 0, 0, 3], [0, 0, 0, 3, 2]], False),  # a column is left out
        ([[0, 0, 0, 0, 4], [0, 0, 0, 3, 3]], False),  # or written twice
        ([[0, 0, 2, 0, 6]], False),  # beyond the source
        ([[0, 0, 0, 1, 6]], True),  # or the target
        ([[1, 0, 0, 0, 6]], False),
        ([[0, 1, 0, 0, 6]], True),
        ([[0, 0, -1, 0, 6]], False),
        ([[0, 0, 0, 0, -6]], True),
        ([[0, 0, 2**32, 0, 6]], False),
        ([[0, 0, 2**32 - 1, 0, 6]], True),
    ],
)
def test_moves_that_do_not_fit_write_nothing(moves: list[list[int]], is_gradient: bool) -> None:
    source, target = np.ones((4, 7), np.float32), np.zeros((4, 6), np.float32)
    permutes = np.array([[*move, 0] for move in moves], np.int64).flatten()
    given = (target, source) if is_gradient else (source, target)
    kept = given[1].copy()
    assert not _core.move_columns(matrices([given[0]]), matrices([given[1]]), permutes, 4, "float32", is_gradient)
    assert (given[1] == kept).all()
