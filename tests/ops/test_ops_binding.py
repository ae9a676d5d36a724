"""The native core takes arrays as they are: what it wrote to a converted copy would be lost."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from support.rows import Table
from tierbed.engine import _core

pytestmark = pytest.mark.op


@pytest.fixture
def table() -> Table:
    return Table([4], [0.0])


@pytest.fixture
def batch(table: Table) -> _core.Batch:
    batch = table.batch([1, 2, 3, 1], [0, 1, 2, 0])
    _core.initialise_missing(batch, table.layout)
    return batch


def test_arrays_of_another_type_or_layout_are_neither_written_to_a_copy_nor_converted(
    table: Table, batch: _core.Batch
) -> None:
    strided, fortran = np.zeros((4, 8), np.float32)[:, ::2], np.zeros((4, 4), np.float32, order="F")
    for out in (strided, fortran, np.zeros((4, 4))):
        with pytest.raises((TypeError, ValueError)):
            _core.gather(batch, table.layout, 0, out)
    for segment in (
        (np.array([1.7, -2.0]), None, None),
        (np.arange(4, dtype=np.uint64)[::2], None, None),
        (np.zeros(2, np.uint64), np.zeros(2, np.int64), None),
        (np.zeros(2, np.uint64), None, np.array([0.0, 1.9, 2.0])),
    ):
        with pytest.raises(TypeError):
            _core.Batch([segment], 1, None)


def test_a_view_of_a_settled_batch_outlives_the_next_settle(table: Table, batch: _core.Batch) -> None:
    hyper = [0.1, 0.0, 0.0, 1e-8, 0.0, 0.0, 0.0]
    _core.preview_catch_up(batch, table.layout, "adagrad", hyper, 1)
    views = batch.lookup_lines
    before = views.copy()
    _core.preview_catch_up(batch, table.layout, "adagrad", hyper, 2)
    np.testing.assert_array_equal(views, before)


def test_a_layout_of_another_table_is_refused(table: Table) -> None:
    with pytest.raises(ValueError, match="layout"):
        _core.FullTable(Table([5]).layout).insert_missing(table.batch([1], [0]), table.layout)
    with pytest.raises(ValueError, match="layout"):
        _core.FullTable(table.layout).insert_missing(table.batch([1], [4]), Table([4], [0.0], tables=2).layout)


def test_rows_do_not_depend_on_the_flushing_of_denormals_in_a_thread(threads: int) -> None:
    table = Table([16])
    keys = np.arange(3000, dtype=np.uint64)
    memory, lines = table.lines(len(keys))
    grads = np.full((len(keys), 16), 1e-38, np.float32)
    rows = []
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            memory[:] = 0
            batch = table.batch(keys, np.zeros(len(keys), np.uint32))
            batch.lines[:] = lines
            table.update(batch, grads, "sgd", [0.1, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
            rows.append(memory.copy())
        finally:
            torch.set_flush_denormal(False)
    np.testing.assert_array_equal(rows[0], rows[1])
    assert rows[0].any()


def test_exceptions_of_other_extensions_are_not_translated_to_those_of_tierbed() -> None:
    api = ctypes.pythonapi
    api.PyInterpreterState_Get.restype = ctypes.c_void_p
    api.PyInterpreterState_GetDict.argtypes = [ctypes.c_void_p]
    api.PyInterpreterState_GetDict.restype = ctypes.c_void_p  # a borrowed reference, which py_object would drop
    address = ctypes.c_void_p(api.PyInterpreterState_GetDict(api.PyInterpreterState_Get()))
    shared = ctypes.cast(address, ctypes.py_object).value  # by extensions of nanobind, by domain
    assert any("nanobind" in name and "tierbed" in name for name in shared)
