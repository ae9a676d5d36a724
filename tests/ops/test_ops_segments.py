"""Batches of several lookups in bags, larger than what one thread takes at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from support.rows import Table, same_bits
from tierbed.engine import _core

pytestmark = pytest.mark.op

CHUNK = 4096  # positions a task
PADDING = 2
Offsets = NDArray[np.int64]


def segment(lengths: list[int], num_tables: int, seed: int, named: bool, dense: bool = False) -> _core.Segment:
    """Ids of bags of these lengths, all the same where `dense`; `named`: with table ids."""
    rng = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths], dtype=np.int64)
    keys = rng.integers(0, 30, offsets[-1], np.uint64)
    tables = rng.integers(0, num_tables, len(lengths), np.uint32) if named else None
    return keys, tables, (lengths[0] if dense else offsets)


def offsets_of(part: _core.Segment) -> Offsets:
    keys, _, bags = part
    return np.arange(0, len(keys) + 1, bags) if isinstance(bags, int) else bags


def tables_of(part: _core.Segment, num_tables: int) -> NDArray[np.uint32]:
    """The table of each position."""
    lengths = np.diff(offsets_of(part))
    tables = np.arange(len(lengths)) % num_tables if part[1] is None else part[1]
    return tables.repeat(lengths).astype(np.uint32)


def check(segments: list[_core.Segment], num_tables: int) -> None:
    """Unique rows, pooled sums and the gradients of rows equal the references."""
    table = Table([2], tables=num_tables)
    batch = _core.Batch(segments, num_tables, PADDING)
    keys = np.concatenate([part[0] for part in segments])
    wanted = naive.unique(keys, np.concatenate([tables_of(part, num_tables) for part in segments]), PADDING)
    for name in ("keys", "tables", "inverse", "occurrences", "offsets"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(wanted, name), err_msg=name)
    assert (batch.size, batch.sources) == (len(keys), sum(len(offsets_of(part)) - 1 for part in segments))

    _core.initialise_missing(batch, table.layout)
    rows = table.initial(wanted.tables, wanted.keys)
    rng = np.random.default_rng(0)
    begin, grads, each = 0, [], []
    for index, part in enumerate(segments):
        inverse, offsets = wanted.inverse[begin : begin + len(part[0])], offsets_of(part)
        begin += len(part[0])
        out = np.empty((len(offsets) - 1, 2), np.float32)
        _core.gather(batch, table.layout, index, out, index % 2 == 1)
        same_bits(out, naive.pool(rows, inverse, offsets, index % 2 == 1))
        grads.append(rng.standard_normal(out.shape, np.float32))
        each.append(naive.pool_grad(grads[-1], inverse, offsets, index % 2 == 1))
    sums = naive.reduce(np.concatenate(each), wanted.occurrences, wanted.offsets)
    hyper = [0.5, 0.0, 0.0, 0.0, 0.0]
    means = [index % 2 == 1 for index in range(len(segments))]
    _core.update(batch, table.layout, grads, means, [None] * len(segments), "sgd", hyper, 1)
    naive.update(rows, np.zeros(len(rows), np.uint32), sums, "sgd", hyper)
    same_bits(table.values(batch.lines), rows)


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=9), st.booleans()), min_size=1, max_size=4),
    st.sampled_from([1, 3, 40]),
)
def test_bags_of_any_lengths(parts: list[tuple[list[int], bool]], num_tables: int) -> None:
    check([segment(lengths, num_tables, seed, named) for seed, (lengths, named) in enumerate(parts)], num_tables)


BORDERS = {
    "a border in a bag of seven": [7] * 1300,
    "one bag over three chunks": [3, 3 * CHUNK, 1],
    "a bag that ends at the border": [CHUNK - 5, 5, 4],
    "empty bags at the border": [CHUNK, *[0] * 50, 1, 0, CHUNK, 0],
    "empty bags first and last": [*[0] * 30, CHUNK + 1, *[0] * 30],
    "empty bags on both sides of a bag over the border": [CHUNK - 1, 0, 0, 2, 0, 0, 9],
}


@pytest.mark.parametrize("named", [False, True], ids=["tables in turn", "table ids"])
@pytest.mark.parametrize("lengths", BORDERS.values(), ids=BORDERS)
def test_a_border_of_chunks_anywhere_among_bags(lengths: list[int], named: bool, threads: int) -> None:
    check([segment(lengths, 3, 0, named)], 3)


def test_lookups_of_every_kind_in_one_batch(threads: int) -> None:
    segments = [
        segment(BORDERS["empty bags at the border"], 5, 1, True),
        segment([7] * 1300, 5, 2, False, dense=True),
        segment([0] * 6, 5, 3, True),
        segment([CHUNK + 9], 5, 4, False, dense=True),
        segment([*range(60), *range(60)], 5, 5, False),
    ]
    check(segments, 5)


@pytest.mark.parametrize("position", [0, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_wrong_table_id_is_named_by_the_first_position_of_its_bag(position: int, threads: int) -> None:
    keys, _, offsets = segment([CHUNK // 2] * 5, 3, 0, True)
    bag = int(np.searchsorted(offsets, position, side="right")) - 1
    tables = np.zeros(5, np.uint32)
    tables[bag] = 3
    keys[keys == PADDING] = 0
    with pytest.raises(IndexError, match=r"table id 3 at position \d+") as caught:
        _core.Batch([(keys, tables, offsets)], 3, PADDING)
    named = int(str(caught.value).split()[-1])
    assert any(begin <= named < end for begin, end in pairwise(offsets.tolist()) if begin == offsets[bag])
