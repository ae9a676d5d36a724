from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import naive
from support.arithmetic import normal_quantile
from support.places import GOLDEN
from support.processors import Make, moved, on_host, processors, spec_of
from support.rows import INITIALIZERS, SPECIAL_KEYS, Table, any_key, same_bits
from tierbed.engine import _core
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.lookup import Lookup

pytestmark = pytest.mark.op


def native(layout: _core.Layout, tables: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[n, layout.width], of rows of float32 numbers that no tier has."""
    batch = _core.Batch([(keys, tables, None)], int(tables.max()) + 1, None)
    _core.initialise_missing(batch, layout)
    kind = ctypes.c_float * layout.width
    return np.array([kind.from_address(line) for line in batch.lines.tolist()], np.float32)[batch.inverse]


COLUMNS = [[1], [3], [10], [64], [300], [10, 1], [1, 1, 1], [3, 5, 2, 7], [17, 23]]


@pytest.mark.parametrize("columns", COLUMNS, ids=str)
def test_initial_rows_equal_the_reference_to_the_bit(columns: list[int]) -> None:
    table = Table(columns, states=[0.0, 0.1])
    keys = np.array(SPECIAL_KEYS, np.uint64)
    tables = np.arange(len(keys), dtype=np.uint32) % table.tables
    same_bits(native(table.layout, tables, keys), table.initial(tables, keys))


@processors
@pytest.mark.parametrize("columns", COLUMNS[::4], ids=str)
def test_unknown_rows_are_served_from_memory_of_the_batch(make: Make, columns: list[int]) -> None:
    table, processor = Table(columns), make(spec_of(columns), RowState())
    store, out = processor.make_full_table("device"), []
    for keys in (SPECIAL_KEYS, [*SPECIAL_KEYS, 20]):
        ids = torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
        lookup = moved(Lookup(ids, torch.arange(len(ids)) % table.tables), processor.device)
        batch = processor.make_batch([lookup])
        if out:
            store.peek(batch)
        else:
            store.pin(batch, None)
        out.append(on_host(processor.gather(batch, 0, lookup, None, torch.float32)))
        store.unpin(batch, False)
    same_bits(out[1], table.initial(lookup.table_ids.cpu().numpy().astype(np.uint32), np.array(keys, np.uint64)))
    assert out[1][:-1].tobytes() == out[0].tobytes()
    assert store.metrics()["device"]["resident_rows"] == len(SPECIAL_KEYS)


@given(st.integers(0, 2**64 - 1), any_key, st.integers(0, 300))
def test_any_seed_key_and_table(seed: int, key: int, table_id: int) -> None:
    table = Table([4, 3], seed=seed, tables=table_id + 1)
    keys, tables = np.array([key], np.uint64), np.array([table_id], np.uint32)
    same_bits(native(table.layout, tables, keys), table.initial(tables, keys))


def test_many_rows_are_the_same_for_any_threads(threads: int) -> None:
    table = Table([2, 2])
    keys = np.random.default_rng(0).integers(0, 2**64, 5000, np.uint64)
    tables = np.arange(len(keys), dtype=np.uint32) % len(INITIALIZERS)
    same_bits(native(table.layout, tables, keys), table.initial(tables, keys))


def test_golden_rows_never_change() -> None:
    """Rows that were never written live nowhere: a machine or a version that draws others changes trained models."""
    with np.load(GOLDEN / "initial_rows.npz") as golden:
        g = {name: golden[name] for name in golden.files}
    arguments = int(g["seed"]), g["columns"].tolist(), g["kinds"].tolist(), g["parameters"], g["quantiles"]
    same_bits(naive.initial_rows(g["tables"], g["keys"], *arguments), g["rows"])
    layout = _core.Layout(sum(arguments[1]), [], [], *arguments)
    same_bits(native(layout, g["tables"], g["keys"]), g["rows"])


@given(st.floats(2.0**-60, 1.0, exclude_max=True) | st.integers(1, 2**53 - 1).map(lambda n: n * 2.0**-53))
def test_quantile_equals_the_reference_to_the_bit(p: float) -> None:
    assert _core.normal_quantile(p).hex() == normal_quantile(p).hex()


@pytest.mark.parametrize("p", [0.075, 0.925, 0.5, 1.3887943864964021e-11, 1 - 1.3887943864964021e-11])
def test_quantile_equals_the_reference_where_its_branches_meet(p: float) -> None:
    near = [p]
    for direction in (0.0, 1.0):
        for _ in range(20):
            near.append(float(np.nextafter(near[-1], direction)))
    assert [_core.normal_quantile(x).hex() for x in near] == [normal_quantile(x).hex() for x in near]
