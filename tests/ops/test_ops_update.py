"""Steps of every rule, and what lookups see of rows that missed steps, have the bits of the references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from support.processors import (
    ON_EMULATED,
    ON_GPU,
    Make,
    cpu,
    instruction_set,
    instruction_sets,
    moved,
    on_host,
    processors,
    spec_of,
)
from support.row_rules import MAKERS, optimizer_of, pinned, random_ids, table_of
from support.rows import Table, same_bits
from tierbed.engine import _core
from tierbed.engine.ops.batch import Gradients
from tierbed.engine.optim.kernel import find_kernels
from tierbed.engine.options.lookup import Lookup

pytestmark = pytest.mark.optimizer

TYPES = [
    ("float32", "float32"),
    ("bfloat16", "float32"),
    ("float16", "bfloat16"),
    ("bfloat16", "bfloat16"),
    ("float16", "float32"),
    ("float32", "bfloat16"),
]
DIMS = [1, 3, 17, 64, 100]
RULES = [kernel.name for kernel in find_kernels()]
SGD = "sgd", [1.0, 0.0, 0.0, 0.0, 0.0, 0.0]  # with a learning rate of 1
PADDING = 3
Row = tuple[int, int]


def on_devices(number: int, name: str, dim: int, types: tuple[str, str], marks: Any = ()) -> list[ParameterSet]:
    """A cell on the GPU, and in emulation in one order of threads."""
    return [
        pytest.param(one.values[0], name, dim, types, id=f"{one.id}-{name}-{dim}-{types}", marks=[*one.marks, *marks])
        for one in (*ON_EMULATED[number % 3 :][:1], *ON_GPU)
    ]


def types_of(name: str) -> tuple[str, str]:
    """On a GPU, which has a program for each rule and types."""
    return TYPES[RULES.index(optimizer_of(name).rule) % 3]


def cells() -> list[ParameterSet]:
    """Each maker with types in turn, the others slow."""
    found = []
    for number, name in enumerate(MAKERS):
        for turn, types in enumerate(TYPES):
            marks = () if (number - turn) % 6 == 0 else pytest.mark.slow
            found.append(pytest.param(cpu, name, DIMS[(number + turn) % 5], types, marks=marks))
        for types in TYPES[:3]:
            found += on_devices(number, name, 17, types, [] if types == types_of(name) else [pytest.mark.slow])
    wide = ["adam", "catch-up adam", "partial row-wise lamb", "rowwise adagrad", "sgd"]
    shapes = [*zip(wide, (64, 128, 64, 128, 64), strict=True), *(("adam", dim) for dim in (128, 1, 5, 130))]
    return [*found, *(one for turn, shape in enumerate(shapes) for one in on_devices(turn, *shape, TYPES[turn % 3]))]


def step_of(
    processor: Any,
    store: Any,
    ids: NDArray[np.uint64],
    tables: NDArray[np.uint32],
    grads: NDArray[np.float32],
    rule: str,
) -> int:
    """Returns how many rows were written for the first time."""
    lookup = moved(
        Lookup(torch.from_numpy(ids.view(np.int64)), torch.from_numpy(tables.astype(np.int64))), processor.device
    )
    batch, before = processor.make_batch([lookup]), processor.written_counts.sum()
    store.pin(batch, None)
    given = Gradients([lookup], [torch.from_numpy(grads).to(processor.device)], [None], torch.float32)
    processor.update(batch, given, rule)
    store.unpin(batch, True)
    return int(processor.written_counts.sum() - before)


def check_rows(table: Table, store: Any, expected: dict[Row, tuple[NDArray[np.float32], int, int]]) -> None:
    """Values, updates and last step of all rows."""
    rows = np.concatenate([part for _, part in store.scan()])
    names = sorted(expected, key=lambda row: (naive.bucket(*row), row))
    assert list(zip(rows["table"].tolist(), rows["key"].tolist(), strict=True)) == names
    same_bits(table.decoded(rows["values"]), np.array([expected[name][0] for name in names]))
    counts = list(zip(rows["updates"].tolist(), rows["step"].tolist(), strict=True))
    assert counts == [expected[name][1:] for name in names]


def check_steps(make: Make, name: str, dim: int, types: tuple[str, str], batches: list[tuple[int, Any, Any]]) -> None:
    """batches: the number of a step, its keys and its tables. Steps between belong to other rows."""
    optimizer, rng = optimizer_of(name), np.random.default_rng(dim)
    table = table_of(optimizer, dim, types)
    expected: dict[Row, tuple[NDArray[np.float32], int, int]] = {}
    steps = []
    for step, keys, tables in batches:
        grads = rng.standard_normal((len(keys), dim), np.float32)
        grads *= np.float32(10.0) ** rng.integers(-42, 3, (len(keys), 1)).astype(np.float32)  # some are denormal
        grads[:2] = [[0.0], [-0.0]]
        unique = naive.unique(keys, tables, PADDING)
        rows = list(zip(unique.tables.tolist(), unique.keys.tolist(), strict=True))
        fresh = table.initial(unique.tables, unique.keys)
        before = [expected.get(row, (values, 0, 0)) for row, values in zip(rows, fresh, strict=True)]
        values = np.array([values for values, _, _ in before])
        updates, last = (np.array([row[column] for row in before], np.uint32) for column in (1, 2))
        new = int((updates == 0).sum())
        sums = naive.reduce(grads, unique.occurrences, unique.occurrence_offsets)
        naive.update(values, updates, sums, optimizer.rule, optimizer.compute_hyperparams(step), step, last)
        values = table.by_chance(values, unique.tables, unique.keys, step)
        expected |= {row: (v, u, step) for row, v, u in zip(rows, values, updates.tolist(), strict=True)}
        steps.append((step, keys, tables, grads, new))

    spec = spec_of(dim, types, padding=PADDING)
    for instructions in instruction_sets(make):
        with instruction_set(instructions):
            processor = make(spec, spec.make_row_state(optimizer))
            store = processor.make_full_table("device")
            for step, keys, tables, grads, new in steps:
                processor.send_hyperparams(optimizer.rule, optimizer.compute_hyperparams(step), step)
                assert step_of(processor, store, keys, tables, grads, optimizer.rule) == new
            check_rows(table, store, expected)


@pytest.mark.parametrize(("make", "name", "dim", "types"), cells())
def test_steps_equal_the_reference(make: Make, name: str, dim: int, types: tuple[str, str]) -> None:
    rng, batches = np.random.default_rng(dim), []
    for step in (1, 2, 40):
        keys, tables = random_ids(rng, 24, Table([1]))
        if dim > 60 and step == 2:  # more of one row than a block of a sum has room for
            keys, tables = np.append(keys, [np.uint64(7)] * 300), np.append(tables, [np.uint32(0)] * 300)
        batches.append((step, keys, tables))
    check_steps(make, name, dim, types, batches)


@pytest.mark.parametrize(
    ("name", "types"), list(zip(["momentum", "adam", "catch-up adam"], TYPES, strict=False)), ids=str
)
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.rotated("threads")
def test_many_rows_with_duplicates_are_the_same_for_any_threads(
    name: str, types: tuple[str, str], threads: int, native_threads: Callable[[int], None]
) -> None:
    native_threads(threads)
    rng = np.random.default_rng(0)
    keys = rng.zipf(1.3, 6000).astype(np.uint64) % np.uint64(3000)
    check_steps(cpu, name, 6, types, [(step, keys, rng.integers(0, 5, len(keys), np.uint32)) for step in (1, 4)])


BEHIND = [name for name in MAKERS if name.startswith("catch-up")]


@pytest.mark.parametrize(
    ("make", "name", "dim", "types"),
    [pytest.param(cpu, name, 9, types) for name, types in zip(BEHIND, TYPES, strict=False)]
    + [one for turn, name in enumerate(BEHIND) for one in on_devices(turn, name, 17, types_of(name))],
)
def test_rows_that_are_behind_are_seen_caught_up_and_stay_as_they_are(
    make: Make, name: str, dim: int, types: tuple[str, str]
) -> None:
    optimizer = optimizer_of(name)
    table, spec = table_of(optimizer, dim, types), spec_of(dim, types)
    keys, zeros = np.arange(40, dtype=np.uint64), np.zeros(40, np.uint32)
    processor = make(spec, spec.make_row_state(optimizer))
    store = processor.make_full_table("device")
    for step, count in ((1, 30), (2, 20), (9, 10)):
        grads = np.random.default_rng(step).standard_normal((count, dim), np.float32)
        processor.send_hyperparams(optimizer.rule, optimizer.compute_hyperparams(step), step)
        step_of(processor, store, keys[:count], zeros[:count], grads, optimizer.rule)
    before = np.concatenate([part for _, part in store.scan()])
    values, updates, last = table.initial(zeros, keys), zeros.copy(), zeros.copy()
    order = before["key"].astype(int)
    values[order], updates[order], last[order] = table.decoded(before["values"]), before["updates"], before["step"]
    naive.catch_up(values, updates, last, dim, optimizer.rule, optimizer.compute_hyperparams(200), 200)

    lookup = moved(Lookup(torch.arange(40), torch.zeros(40, dtype=torch.int64)), processor.device)
    batch = processor.make_batch([lookup])
    store.pin(batch, None)
    processor.send_hyperparams(optimizer.rule, optimizer.compute_hyperparams(200), 200)
    processor.preview_catch_up(batch, optimizer.rule)
    seen = on_host(processor.gather(batch, 0, lookup, None, torch.float32))
    same_bits(seen, table.nearest(values)[:, :dim].copy())
    assert np.concatenate([part for _, part in store.scan()]).tobytes() == before.tobytes()
    processor.catch_up(batch, optimizer.rule)
    after = np.concatenate([part for _, part in store.scan()])
    assert make is not cpu or (after["step"] == 199).all()  # of a GPU, the write that follows sets it
    assert (after["updates"] == before["updates"]).all()
    if types == ("float32", "float32"):  # others are rounded by chance
        same_bits(after["values"].copy(), values[order])


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1e8, 1.0, -1e8, 1e-30, float("inf"), float("nan")]), min_size=1, max_size=8)
)
def test_duplicates_are_summed_in_the_order_of_their_positions(parts: list[float]) -> None:
    table = Table([1])
    store = _core.FullTable(table.layout)
    batch = pinned(table, store, np.zeros(len(parts), np.uint64), np.zeros(len(parts), np.uint32))
    values, grads = table.initial(batch.tables, batch.keys), np.array(parts, np.float32)[:, None]
    with np.errstate(all="ignore"):
        total = naive.reduce(grads, batch.occurrences, batch.occurrence_offsets)
        naive.update(values, np.zeros(1, np.uint32), total, *SGD)
    table.update(batch, grads, *SGD, 1)
    np.testing.assert_array_equal(table.values(batch.lines), values)


@pytest.mark.parametrize(("value", "norm"), [(0.5, 0.0), (0.0, 1.0), (0.5, 1.0)])
def test_the_summed_gradient_of_a_row_is_clipped_before_weight_decay(value: float, norm: float) -> None:
    table = Table([4])
    store = _core.FullTable(table.layout)
    grads = np.array([[3, -4, 0, 0], [0.25, 0.1, 0, -0.25], [1, 1, 0, 0], [-1, -1, 0, np.nan]], np.float32)
    batch = pinned(table, store, np.array([1, 2, 3, 3], np.uint64), np.zeros(4, np.uint32))
    before = table.values(batch.lines)
    table.update(batch, grads, "sgd", [1.0, 0.5, 0.0, value, norm, 0.0], 1)
    moved_by = (before * np.float32(0.5) - table.values(batch.lines))[batch.inverse]
    clamped = np.clip([3, -4, 0, 0], -value, value) if value else np.array([3, -4, 0, 0])
    wanted = clamped * min(1.0, norm / np.linalg.norm(clamped)) if norm else clamped
    np.testing.assert_allclose(moved_by[:2], [wanted, grads[1]], atol=1e-6)
    assert np.isnan(moved_by[2][3])


@processors
def test_assign_keeps_the_last_occurrence_and_the_state(make: Make) -> None:
    optimizer = optimizer_of("adagrad")
    spec, table = spec_of(3, padding=8), table_of(optimizer, 3)
    processor = make(spec, spec.make_row_state(optimizer))
    store = processor.make_full_table("device")
    lookup = moved(Lookup(torch.tensor([5, 6, 5, 8, 6, 5]), torch.zeros(6, dtype=torch.int64)), processor.device)
    for step in (4, 9):
        batch = processor.make_batch([lookup])
        store.pin(batch, None)
        processor.assign(batch, np.arange(18, dtype=np.float32).reshape(6, 3), step)
        store.unpin(batch, True)
        assert processor.written_counts.sum() == 2
    state = optimizer.initial_values * 3
    check_rows(
        table,
        store,
        {(0, 5): (np.float32([15, 16, 17, *state]), 2, 9), (0, 6): (np.float32([12, 13, 14, *state]), 2, 9)},
    )


def test_wrong_sizes_are_refused_before_anything_is_read() -> None:
    table = Table([4], [0.0])
    store = _core.FullTable(table.layout)
    batch = pinned(table, store, np.arange(3, dtype=np.uint64), np.zeros(3, np.uint32))
    before, ones = table.values(batch.lines), np.ones((3, 4), np.float32)
    adagrad = "adagrad", [1.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0], 1
    calls = [
        lambda: _core.gather(batch, table.layout, 0, np.empty((4, 4), np.float32)),
        lambda: table.update(batch, ones, "no such rule", [1.0], 1),
        lambda: table.update(batch, ones, "adagrad", [1.0], 1),
        lambda: table.update(batch, ones, "adam", [1.0] * 10, 1),  # one state, where adam keeps two
    ]
    for wrong in (np.ones(shape, np.float32) for shape in ((2, 4), (3, 5), (4, 4))):
        calls.append(lambda wrong=wrong: table.update(batch, wrong, *adagrad))
        calls.append(lambda wrong=wrong: _core.assign(batch, table.layout, wrong, 1))
    for call in calls:
        with pytest.raises((TypeError, ValueError)):
            call()
    same_bits(table.values(batch.lines), before)
