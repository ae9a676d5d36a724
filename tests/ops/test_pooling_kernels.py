"""The native loops of pooled lookups equal the references bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from support.rows import Table, same_bits
from tierbed.engine import _core
from tierbed.engine.optim.row_optimizer import row_optimizer

pytestmark = pytest.mark.op

DIMS = [1, 3, 10, 17, 64, 128, 300]
PADDING = 3
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@cache
def table_of(dim: int, tables: int) -> Table:
    return Table([dim], tables=tables)


@dataclass
class Bags:
    """One segment: ids in bags, as the core takes them and as the references do."""

    keys: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    tables: NDArray[np.uint32]  # of the bags
    weights: NDArray[np.float32] | None
    mean: bool
    offsets_given: int | NDArray[np.int64] | None  # what the core gets for bags
    in_order: bool  # table ids are left out

    @property
    def segment(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32] | None, int | NDArray[np.int64] | None]:
        return self.keys, None if self.in_order else self.tables, self.offsets_given

    @property
    def inverse(self) -> NDArray[np.int32]:
        """For the references, which take the rows of positions as they are."""
        return np.where(self.keys == PADDING, -1, np.arange(len(self.keys))).astype(np.int32)

    @property
    def tables_of_keys(self) -> NDArray[np.uint32]:
        return self.tables.repeat(np.diff(self.offsets))

    def rows(self, table: Table) -> NDArray[np.float32]:
        return table.initial(self.tables_of_keys, self.keys)


def bags_of(lengths: list[int], kind: str, weighted: bool, mean: bool, tables: int, seed: int, keys: int = 8) -> Bags:
    """kind: "jagged", "dense" (all of the first length, at least 1) or "rows" (bags of one id, not pooled)."""
    rng = np.random.default_rng(seed)
    if kind != "jagged":
        lengths = [max(1, lengths[0]) if kind == "dense" and lengths else 1] * len(lengths)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    n, in_order = int(offsets[-1]), bool(rng.integers(2))
    pooled = kind != "rows"
    return Bags(
        keys=rng.integers(0, keys, n, np.uint64),
        offsets=offsets,
        tables=np.arange(len(lengths), dtype=np.uint32) % np.uint32(tables)
        if in_order
        else rng.integers(0, tables, len(lengths), np.uint32),
        weights=rng.standard_normal(n, np.float32) if weighted and pooled else None,
        mean=mean and pooled,
        offsets_given=offsets if kind == "jagged" else max(lengths, default=1) if pooled else None,
        in_order=in_order,
    )


any_bags = st.builds(
    bags_of,
    st.lists(st.integers(0, 7), max_size=6),
    st.sampled_from(["jagged", "dense", "rows"]),
    st.booleans(),
    st.booleans(),
    st.just(1),
    st.integers(0, 2**32),
)


def batch_of(table: Table, segments: list[Bags]) -> _core.Batch:
    """A batch whose lines are set to initial rows."""
    batch = _core.Batch([bags.segment for bags in segments], table.tables, PADDING)
    _core.initialise_missing(batch, table.layout)
    return batch


def raw(tensor: torch.Tensor) -> NDArray[np.float32] | NDArray[np.uint16]:
    return (tensor if tensor.dtype == torch.float32 else tensor.view(torch.uint16)).numpy()


def check_gather(table: Table, segments: list[Bags], dtype: str = "float32") -> None:
    batch = batch_of(table, segments)
    for index, bags in enumerate(segments):
        expected = (
            naive.gather(bags.rows(table), bags.inverse)
            if bags.offsets_given is None
            else naive.pool(bags.rows(table), bags.inverse, bags.offsets, bags.mean, bags.weights)
        )
        out = torch.full(expected.shape, torch.nan, dtype=DTYPES[dtype])
        _core.gather(batch, table.layout, index, raw(out), bags.mean, bags.weights, dtype)
        same_bits(out.to(torch.float32).numpy(), torch.from_numpy(expected).to(DTYPES[dtype]).to(torch.float32).numpy())


@given(st.lists(any_bags, min_size=1, max_size=3), st.sampled_from(DIMS), st.sampled_from(list(DTYPES)))
def test_pooled_rows_equal_the_reference(segments: list[Bags], dim: int, dtype: str) -> None:
    check_gather(table_of(dim, 1), segments, dtype)


@given(
    st.lists(st.integers(0, 5), max_size=12),
    st.sampled_from(["jagged", "dense", "rows"]),
    st.sampled_from([2, 7, 1000]),
    st.integers(0, 2**32),
)
def test_bags_of_many_tables_equal_the_reference(lengths: list[int], kind: str, tables: int, seed: int) -> None:
    check_gather(table_of(3, tables), [bags_of(lengths, kind, False, True, tables, seed)])


@given(
    any_bags.filter(lambda bags: bags.offsets_given is not None),
    st.sampled_from(DIMS),
    st.sampled_from(list(DTYPES)),
    st.integers(0, 2**32),
)
def test_gradients_of_weights_equal_the_reference(bags: Bags, dim: int, dtype: str, seed: int) -> None:
    table = table_of(dim, 1)
    batch = batch_of(table, [bags])
    grads = torch.randn(len(bags.tables), dim, generator=torch.Generator().manual_seed(seed)).to(DTYPES[dtype])
    out = np.full(len(bags.keys), np.nan, np.float32)
    _core.weights_grad(batch, table.layout, 0, raw(grads), out, bags.mean, dtype)
    same_bits(
        out,
        naive.weights_grad(bags.rows(table), bags.inverse, bags.offsets, grads.to(torch.float32).numpy(), bags.mean),
    )
    assert not out[bags.keys == PADDING].any()


def check_update(table: Table, segments: list[Bags], seed: int, dtype: str = "float32") -> None:
    batch = batch_of(table, segments)
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(len(bags.tables), table.dim, generator=generator).to(DTYPES[dtype]) for bags in segments]
    keys = np.concatenate([bags.keys for bags in segments])
    tables = np.concatenate([bags.tables_of_keys for bags in segments])
    each = np.concatenate(
        [
            naive.pool_grad(grad.to(torch.float32).numpy(), bags.inverse, bags.offsets, bags.mean, bags.weights)
            for grad, bags in zip(grads, segments, strict=True)
        ]
    )
    wanted = naive.unique(keys, tables, PADDING)
    values = table.initial(wanted.tables, wanted.keys)
    reduced = naive.reduce(each, wanted.occurrences, wanted.offsets)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    hyper = row_optimizer(optimizer, optimizer.param_groups[0]).hyper(1)
    naive.update(values, np.zeros(len(values), np.uint32), reduced, "sgd", hyper)
    _core.update(
        batch,
        table.layout,
        [raw(grad) for grad in grads],
        [bags.mean for bags in segments],
        [bags.weights for bags in segments],
        "sgd",
        hyper,
        1,
        dtype,
    )
    order = np.lexsort((batch.keys, batch.tables)), np.lexsort((wanted.keys, wanted.tables))
    same_bits(table.values(batch.lines)[order[0]], values[order[1]])


@given(
    st.lists(any_bags, min_size=1, max_size=3),
    st.sampled_from(DIMS),
    st.sampled_from(list(DTYPES)),
    st.integers(0, 2**32),
)
def test_updates_of_pooled_rows_equal_the_reference(segments: list[Bags], dim: int, dtype: str, seed: int) -> None:
    check_update(table_of(dim, 1), segments, seed, dtype)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.rotated("threads")
def test_many_bags_are_the_same_for_any_threads(weighted: bool, mean: bool, threads: int) -> None:
    table = table_of(10, 5)
    lengths = np.random.default_rng(1).integers(0, 30, 100).tolist()
    segments = [
        bags_of(lengths, kind, weighted, mean, 5, seed, keys=300)
        for seed, kind in enumerate(["jagged", "dense", "rows"])
    ]
    check_gather(table, segments)
    check_update(table, segments, 0)


def test_empty_bags_and_bags_of_padding_are_zeros_and_move_no_row() -> None:
    table = table_of(4, 1)
    keys = np.full(3, PADDING, np.uint64)
    for mean in (False, True):
        bags = Bags(keys, np.array([0, 0, 2, 3, 3]), np.zeros(4, np.uint32), np.ones(3, np.float32), mean, None, True)
        bags.offsets_given = bags.offsets
        check_gather(table, [bags])
        check_update(table, [bags], 0)


def test_a_mean_counts_repeated_ids_and_leaves_out_padding() -> None:
    table = table_of(3, 1)
    keys = np.array([5, 5, PADDING, 6], np.uint64)
    batch = _core.Batch([(keys, None, 4)], 1, PADDING)
    _core.initialise_missing(batch, table.layout)
    out = np.empty((1, 3), np.float32)
    _core.gather(batch, table.layout, 0, out, True, None, "float32")
    five, six = table.initial(np.zeros(2, np.uint32), np.array([5, 6], np.uint64))
    np.testing.assert_allclose(out[0], (2 * five.astype(np.float64) + six) / 3, rtol=1e-6)
