"""An initializer draws values out of its range, or options of tables are misread."""

from __future__ import annotations

import json
import pickle
from dataclasses import FrozenInstanceError
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.naive import initial_value
from support.refusals import check_refusal
from tierbed.engine.errors import OptionError
from tierbed.engine.options.initializers import (
    as_arrays,
    initializer_from_dict,
    make_column_options,
    make_constant_initializer,
    make_normal_initializer,
    make_table,
    make_table_options,
    make_trunc_normal_initializer,
    make_uniform_initializer,
)

MADE = [
    (make_uniform_initializer(), {"type": "uniform", "low": 0.0, "high": 1.0}),
    (make_normal_initializer(), {"type": "normal", "mean": 0.0, "std": 1.0}),
    (make_constant_initializer(2), {"type": "constant", "value": 2.0}),
    (make_trunc_normal_initializer(), {"type": "trunc_normal", "mean": 0.0, "std": 1.0, "a": -2.0, "b": 2.0}),
]
TABLE = make_table_options(make_constant_initializer(4))
EXTREME_BITS = [0, 1, 2**24, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]


def draw(initializer, bits: int) -> np.float32:
    kinds, parameters, quantiles = as_arrays([make_table_options(initializer)], [1])
    return initial_value(bits, kinds[0], parameters[0], quantiles[0])


@pytest.mark.parametrize(("initializer", "expected"), MADE)
def test_initializers_read_print_and_pickle_as_dicts(initializer: Any, expected: dict[str, Any]) -> None:
    plain = dict(initializer)
    assert initializer == plain == expected
    assert str(initializer) == str(plain)
    assert initializer_from_dict(plain) == initializer
    assert hash(initializer_from_dict(json.loads(json.dumps(initializer.as_dict())))) == hash(initializer)
    assert pickle.loads(pickle.dumps(initializer)) == initializer
    with pytest.raises(KeyError):
        initializer["as_dict"]
    with pytest.raises(FrozenInstanceError):
        initializer.type = "other"


@pytest.mark.parametrize(
    "refusal",
    [
        (lambda: make_uniform_initializer(2.0, 1.0), "low=2.0", "high=1.0"),
        (lambda: make_uniform_initializer(float("nan"), 1.0), "low=nan"),
        (lambda: make_uniform_initializer(0.0, "x"), "high='x'"),
        (lambda: make_uniform_initializer(-3e38, 3e38), "overflows float32"),
        (lambda: make_normal_initializer(0.0, -1.0), "std=-1.0"),
        (lambda: make_normal_initializer(float("inf"), 1.0), "mean=inf"),
        (lambda: make_normal_initializer(0.0, 1e38), "overflow float32"),
        (lambda: make_constant_initializer(1e39), "value=1e+39"),
        (lambda: make_constant_initializer(10**400), "value=1000"),
        (lambda: make_constant_initializer(None), "value=None"),
        (lambda: make_trunc_normal_initializer(a=1.0, b=1.0), "a=1.0", "b=1.0"),
        (lambda: make_trunc_normal_initializer(a=5.0, b=9.0), "1e-06"),
        (lambda: make_trunc_normal_initializer(mean=3.0, std=0.0, a=-1.0, b=1.0), "1e-06"),
        (lambda: initializer_from_dict({"type": "xavier"}), "'xavier'"),
        (lambda: initializer_from_dict({"low": 0.0}), "None"),
        (lambda: initializer_from_dict(0.5), "0.5"),
        (lambda: initializer_from_dict({"type": "uniform", "std": 1.0}), "std"),
        *[
            (lambda given=given: make_table_options(given), value)
            for given, value in ((7, "7"), ([], "[]"), ([7], "7"))
        ],
        (lambda: as_arrays([TABLE, make_table_options([TABLE.initializer])], [10, 1]), "tables[1]", "1 column options"),
    ],
)
def test_bad_options_name_the_argument_and_the_value(refusal: Any) -> None:
    call, *named = refusal
    check_refusal((call, OptionError, *named))


numbers = st.floats(-100.0, 100.0)


@given(numbers, numbers, st.sampled_from(EXTREME_BITS) | st.integers(0, 2**32 - 1))
def test_uniform_values_never_leave_their_range(x: float, y: float, bits: int) -> None:
    low, high = sorted((x, y))
    assert np.float32(low) <= draw(make_uniform_initializer(low, high), bits) <= np.float32(high)


@given(
    st.floats(-10, 10),
    st.floats(0.01, 10),
    st.floats(-6, 6),
    st.floats(0, 8),
    st.sampled_from(EXTREME_BITS) | st.integers(0, 2**32 - 1),
)
def test_truncated_values_never_leave_their_bounds(
    mean: float, std: float, start: float, length: float, bits: int
) -> None:
    a, b = mean + std * start, mean + std * (start + length)
    try:
        initializer = make_trunc_normal_initializer(mean, std, a, b)
    except OptionError:
        rounded = NormalDist(float(np.float32(mean)), float(np.float32(std)))
        assert rounded.cdf(float(np.float32(b))) - rounded.cdf(float(np.float32(a))) < 1.01e-6
        return
    assert np.float32(a) <= draw(initializer, bits) <= np.float32(b)


def test_truncated_values_reach_both_bounds_and_the_median() -> None:
    initializer = make_trunc_normal_initializer(1.0, 2.0, 0.0, 4.0)
    normal = NormalDist(1.0, 2.0)
    median = normal.inv_cdf((normal.cdf(0.0) + normal.cdf(4.0)) / 2)
    values = [draw(initializer, bits) for bits in (0, 2**31, 2**32 - 1)]
    assert values == pytest.approx([0.0, median, 4.0], abs=1e-6)


def test_no_spread_gives_the_mean_and_bounds_far_outside_leave_the_normal_as_it_is() -> None:
    for initializer in (make_normal_initializer(0.1, 0.0), make_trunc_normal_initializer(0.1, 0.0, -1.0, 1.0)):
        assert {draw(initializer, bits) for bits in EXTREME_BITS} == {np.float32(0.1)}
    wide, plain = make_trunc_normal_initializer(0.0, 1.0, -1e30, 1e30), make_normal_initializer(0.0, 1.0)
    assert [draw(wide, bits) for bits in EXTREME_BITS] == pytest.approx([draw(plain, bits) for bits in EXTREME_BITS])


def test_table_options_take_initializers_columns_and_dicts() -> None:
    uniform, normal = make_uniform_initializer(-1, 1), make_normal_initializer()
    table = make_table_options(uniform)
    assert table == {"initializer": uniform} == make_table_options(dict(uniform)) == make_table_options(table)
    columns = make_table([make_column_options(uniform), make_column_options(normal)])
    assert columns == {"columns": ({"initializer": uniform}, {"initializer": normal})}
    assert make_table_options(json.loads(json.dumps(columns.as_dict()))) == columns


def test_arrays_are_indexed_by_table_then_column() -> None:
    uniform, constant = make_uniform_initializer(-1, 1), make_constant_initializer(4)
    tables = [make_table_options(constant), make_table_options([uniform, constant])]
    kinds, parameters, quantiles = as_arrays(tables, [10, 1])
    assert kinds == [0, 0, 1, 0]
    assert parameters.dtype == np.float32
    assert parameters[:, 0].tolist() == [4, 4, -1, 4]
    assert quantiles.dtype == np.float64
    assert quantiles.shape == (4, 2)
