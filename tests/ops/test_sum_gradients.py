"""Gradients summed by row, rows by the ranks that own them, and rows that lookups take from a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from support import naive
from support.rows import SPECIAL_KEYS, same_bits
from tierbed.engine import _core
from tierbed.engine.ops.batch import Gradients
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.options.table_spec import table_spec
from tierbed.engine.processors.cpu import CpuProcessor
from tierbed.engine.processors.processor import ByOwner, by_owner

pytestmark = pytest.mark.op

TABLES, PADDING = 3, 2
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FEATURES = (1, -1, 0)  # the column of each feature


def processor_factory(dim: int) -> CpuProcessor:
    return CpuProcessor(
        table_spec("t", dim, torch.int64, [make_constant_initializer(0.0)] * TABLES, PADDING, 0), RowState(), None
    )


Given = tuple[Lookup, Tensor | None]  # a lookup and its weights


@st.composite
def lookups(draw: st.DrawFn) -> list[Given]:
    found = []
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["rows", "bags", "jagged", "features"]))
        lengths = draw(st.lists(st.integers(0, 7), max_size=3)) * (len(FEATURES) if kind == "features" else 1)
        offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
        n = {"rows": int(offsets[-1]), "bags": 4 * len(lengths)}.get(kind, int(offsets[-1]))
        ids = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=n, max_size=n)), dtype=torch.int64)
        if kind == "bags":
            ids = ids.view(-1, 4)
        pooling = None if kind == "rows" else draw(st.sampled_from(["sum", "mean"]))
        features = kind == "features"
        lookup = Lookup(ids, None, offsets if kind in ("jagged", "features") else None, pooling)
        lookup = lookup._replace(feature_columns=FEATURES) if features else lookup
        size = 2 if features else int(np.prod(lookup.shape))
        tables = torch.tensor(draw(st.lists(st.integers(0, TABLES - 1), min_size=size, max_size=size)))
        lookup = lookup._replace(table_ids=tables if features else tables.to(torch.int64).view(lookup.shape))
        weighted = pooling is not None and draw(st.booleans())
        found.append((lookup, torch.randn(ids.shape, generator=generator(n)) if weighted else None))
    return found


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grads_of(given: Sequence[Given], dim: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    made = (torch.randn((*lookup.shape, dim), generator=generator(seed + i)) for i, (lookup, _) in enumerate(given))
    return [grad.to(dtype) for grad in made]


def of_positions(lookup: Lookup, weights: Tensor | None, grad: Tensor, inverse: NDArray[np.int32]) -> naive.F32:
    """The gradient of the row of each position of a lookup, by the reference."""
    flat = grad.to(torch.float32).reshape(-1, grad.shape[-1]).numpy()
    n = lookup.ids.numel()
    if lookup.pooling is None:
        return flat
    offsets = np.arange(0, n + 1, lookup.ids.shape[-1]) if lookup.offsets is None else lookup.offsets.numpy()
    if lookup.feature_columns is not None:  # by feature; of a feature that is not looked up nothing is used
        by_feature = grad.to(torch.float32).transpose(0, 1)
        parts = [by_feature[max(column, 0)] for column in lookup.feature_columns]
        flat = torch.cat(parts).numpy()
    scales = None if weights is None else weights.reshape(-1).numpy()
    return naive.pool_grad(flat, inverse, offsets, lookup.pooling == "mean", scales)


def expected_sums(batch: _core.Batch, given: Sequence[Given], grads: Sequence[Tensor], dim: int) -> naive.F32:
    begin, parts = 0, [np.zeros((0, dim), np.float32)]
    for (lookup, weights), grad in zip(given, grads, strict=True):
        end = begin + lookup.ids.numel()
        parts.append(of_positions(lookup, weights, grad, batch.inverse[begin:end]))
        begin = end
    return naive.reduce(np.concatenate(parts), batch.occurrences, batch.offsets)


def sums(processor: CpuProcessor, given: Sequence[Given], grads: Sequence[Tensor], dtype: torch.dtype) -> NDArray:
    kept = [lookup for lookup, _ in given]
    batch = processor.batch(kept)
    return processor.sum_gradients(batch, Gradients(kept, grads, [w for _, w in given], dtype)).numpy()


@given(lookups(), st.sampled_from([1, 3, 17, 130]), st.sampled_from(DTYPES))
def test_sums_of_rows_equal_the_reference(given: list[Given], dim: int, dtype: torch.dtype) -> None:
    processor = processor_factory(dim)
    kept = [lookup for lookup, _ in given]
    batch = processor.batch(kept)
    grads = grads_of(given, dim, dtype)
    gradients = Gradients(kept, grads, [weights for _, weights in given], dtype)
    wanted = expected_sums(batch, given, grads, dim)
    same_bits(processor.sum_gradients(batch, gradients).numpy(), wanted)
    places = np.random.default_rng(0).permutation(batch.unique + 2)[: batch.unique]
    out = torch.full((batch.unique + 2, dim), 7.0)
    assert processor.sum_gradients(batch, gradients, places, out) is out
    same_bits(out.numpy()[places], wanted)
    assert (np.delete(out.numpy(), places, 0) == 7).all()


def large() -> tuple[list[Given], int]:
    """Two lookups of 9000 ids, some of which occur more often than a block of a sum has room."""
    ids = np.random.default_rng(0).zipf(1.3, 9000).astype(np.int64) % 4000
    offsets = torch.from_numpy(np.cumsum([0, *np.random.default_rng(1).multinomial(6000, np.ones(500) / 500)]))
    weights = torch.randn(6000, generator=generator(1))
    return [
        (Lookup(torch.from_numpy(ids[:3000]), torch.zeros(3000, dtype=torch.int64)), None),
        (Lookup(torch.from_numpy(ids[3000:]), torch.zeros(500, dtype=torch.int64), offsets, "mean"), weights),
    ], 9


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.rotated("threads")
def test_sums_are_the_same_for_any_threads_and_instruction_set(
    native_threads: Callable[[int], None], dtype: torch.dtype, threads: int
) -> None:
    native_threads(threads)
    given, dim = large()
    processor, grads = processor_factory(dim), grads_of(given, dim, dtype)
    batch = processor.batch([lookup for lookup, _ in given])
    wanted = expected_sums(batch, given, grads, dim)
    sets = _core.instruction_sets()
    try:
        for name in sets:
            _core.use_instruction_set(name)
            same_bits(sums(processor, given, grads, dtype), wanted)
    finally:
        _core.use_instruction_set(sets[0])


def by_the_reference(batch: _core.Batch, ranks: int) -> list[list[int]]:
    """The rows of a batch by owner, one after another."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for row, (table, key) in enumerate(zip(batch.tables.tolist(), batch.keys.tolist(), strict=True)):
        rows[naive.owner(table, key, ranks)].append(row)
    return rows


@given(lookups(), st.integers(1, 1024), st.data())
def test_rows_by_owner_equal_the_reference(given: list[Given], ranks: int, data: st.DataObject) -> None:
    processor = processor_factory(4)
    batch = processor.batch([lookup for lookup, _ in given])
    last = data.draw(st.integers(0, ranks - 1))
    found = by_owner(processor.unique_rows(batch), ranks, last)
    rows = by_the_reference(batch, ranks)
    check(batch, found, rows, last)


def check(batch: _core.Batch, found: ByOwner, rows: list[list[int]], last: int) -> None:
    keys, tables, places, counts = found
    assert counts == [len(of_owner) for of_owner in rows]
    turns = [*rows[:last], *rows[last + 1 :], rows[last]]
    order = [row for of_owner in turns for row in of_owner]
    assert keys.tolist() == batch.keys.view(np.int64)[order].tolist()
    assert tables.tolist() == batch.tables[order].tolist()
    assert places[order].tolist() == list(range(len(order)))


def test_many_rows_by_owner_are_the_same_for_any_threads(native_threads: Callable[[int], None]) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, 30_000))
    lookup = Lookup(ids, torch.arange(30_000) % TABLES)
    for threads in (1, 2, 5):
        native_threads(threads)
        processor = processor_factory(4)
        batch = processor.batch([lookup])
        for ranks in (1, 3, 1024):
            found = by_owner(processor.unique_rows(batch), ranks, ranks // 2)
            check(batch, found, by_the_reference(batch, ranks), ranks // 2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64, 1000, 1024])
def test_owners_equal_the_reference_and_share_rows_evenly(ranks: int) -> None:
    keys = np.concatenate([np.array(SPECIAL_KEYS, np.uint64), np.arange(60_000, dtype=np.uint64)])
    tables = np.arange(len(keys), dtype=np.uint32) % 5
    owners = _core.owners(tables, keys, ranks)
    head = [naive.owner(table, key, ranks) for table, key in zip(tables[:500].tolist(), keys.tolist(), strict=False)]
    assert owners[:500].tolist() == head
    counts, mean = np.bincount(owners, minlength=ranks), len(keys) / ranks
    assert len(counts) == ranks
    # of ranks that own intervals of 16 bits, one has a 64th more at most
    assert (abs(counts - mean) < 6 * np.sqrt(mean) + mean / 64).all()


def test_an_owner_does_not_follow_from_the_bucket() -> None:
    keys, tables = np.arange(64_000, dtype=np.uint64), np.zeros(64_000, np.uint32)
    pairs = _core.buckets(tables, keys).astype(np.int64) * 4 + _core.owners(tables, keys, 4)
    counts = np.bincount(pairs, minlength=256)
    assert (abs(counts - 250) < 6 * np.sqrt(250)).all()


@pytest.mark.parametrize("ranks", [0, 1025])
def test_owners_among_too_many_ranks_are_refused(ranks: int) -> None:
    with pytest.raises(ValueError, match="ranks"):
        _core.owners(np.zeros(1, np.uint32), np.zeros(1, np.uint64), ranks)


@given(lookups(), st.sampled_from([1, 3, 17]), st.sampled_from(DTYPES), st.booleans())
def test_lookups_take_rows_from_a_tensor(given: list[Given], dim: int, dtype: torch.dtype, both: bool) -> None:
    """both: some of the rows are what another batch has."""
    processor = processor_factory(dim)
    batch = processor.batch([lookup for lookup, _ in given])
    places = np.random.default_rng(0).permutation(batch.unique + 3)[: batch.unique]
    rows = torch.randn((batch.unique + 3, dim), generator=generator(5))
    mine = rows.numpy()[places]
    here, rest = len(rows) // 2 if both else len(rows), None
    if both:
        ids = torch.arange(2 + len(rows) - here).flip(0) + 10
        rest = processor.batch([Lookup(ids, torch.zeros_like(ids))]), 2
        numbers = torch.from_numpy(rest[0].inverse[2:].copy()).long()
        there = torch.zeros(len(ids), dim)
        there[numbers] = rows[here:]
        processor.set_lines(rest[0], there, np.arange(len(ids)))
    processor.set_lines(batch, rows[:here].clone(), places, rest)
    del rows  # the batch keeps its part
    begin = 0
    for index, (lookup, weights) in enumerate(given):
        if lookup.feature_columns is not None:
            begin += lookup.ids.numel()
            continue
        inverse = batch.inverse[begin : begin + lookup.ids.numel()]
        begin += lookup.ids.numel()
        if lookup.pooling is None:
            wanted = naive.gather(mine, inverse)
        else:
            length = lookup.ids.shape[-1]
            offsets = np.arange(0, len(inverse) + 1, length) if lookup.offsets is None else lookup.offsets.numpy()
            scales = None if weights is None else weights.reshape(-1).numpy()
            wanted = naive.pool(mine, inverse, offsets, lookup.pooling == "mean", scales)
        out = torch.full((*lookup.shape, dim), 7.0, dtype=dtype)
        assert processor.gather(batch, index, lookup, weights, dtype, out) is out
        same_bits(
            out.to(torch.float32).numpy().reshape(-1, dim),
            torch.from_numpy(wanted).to(dtype).to(torch.float32).numpy(),
        )


def test_places_that_are_not_there_are_refused() -> None:
    processor = processor_factory(2)
    lookup = Lookup(torch.arange(3), torch.zeros(3, dtype=torch.int64))
    batch = processor.batch([lookup])
    gradients = Gradients([lookup], [torch.ones(3, 2)], [None], torch.float32)
    assert batch.unique == 2  # one id is padding
    for places in ([0, 2], [-1, 0], [0]):
        with pytest.raises(ValueError, match="place"):
            processor.set_lines(batch, torch.zeros(2, 2), np.array(places))
        with pytest.raises(ValueError, match="place"):
            processor.sum_gradients(batch, gradients, np.array(places), torch.zeros(2, 2))
    for position, places in ((0, [0, 4]), (1, [0, 3]), (0, [1, 3]), (4, [0, 0])):  # the third is of padding
        with pytest.raises(ValueError, match=r"place|position"):
            processor.set_lines(processor.batch([lookup]), torch.zeros(1, 2), np.array(places), (batch, position))
    assert not any(batch.lines)
