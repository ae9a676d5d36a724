"""What a batch tells of its ids beside their rows: buckets, owners, wrong ids, and what it holds while it lives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import naive
from support.processors import Make, moved, processors, spec_of
from support.rows import SPECIAL_KEYS, any_key
from tierbed.engine import _core
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.lookup import Lookup
from tierbed.engine.processors.processor import sort_by_owner

pytestmark = pytest.mark.op

CHUNK = 4096  # positions of a native task
TABLES = 3


@pytest.mark.rotated("threads")
@pytest.mark.parametrize("position", [0, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])
def test_a_wrong_table_id_is_named_by_the_first_position_of_its_bag(position: int, threads: int) -> None:
    offsets = np.arange(0, 5 * CHUNK // 2 + 1, CHUNK // 2)
    bag = position // (CHUNK // 2)
    tables = np.zeros(5, np.uint32)
    tables[bag] = TABLES
    with pytest.raises(IndexError, match=r"table id 3 at position \d+") as caught:
        _core.Batch([(np.ones(offsets[-1], np.uint64), tables, offsets)], TABLES, None)
    assert offsets[bag] <= int(str(caught.value).split()[-1]) < offsets[bag + 1]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), max_size=40), st.lists(st.booleans(), min_size=3))
def test_ids_beyond_the_last_are_padding_and_counted_or_the_first_is_told(
    given: list[tuple[int, int]], drops: list[bool]
) -> None:
    tables = np.array([table for table, _ in given], np.uint32)
    keys = np.array([key for _, key in given], np.uint64)
    last = np.array([4, 7, 2**64 - 1], np.uint64)
    batch = _core.Batch([(keys, tables, None)], TABLES, None, last, drops[:3])
    bad = keys > last[tables]
    expected = naive.unique(keys[~bad], tables[~bad])
    np.testing.assert_array_equal(batch.keys, expected.keys)
    np.testing.assert_array_equal(batch.inverse >= 0, ~bad)
    strict = [(table, key) for table, key in given if key > last[table] and not drops[table]]
    assert batch.first_illegal_id == (strict[0] if strict else None)
    dropped = [sum(table == t and key > last[t] for table, key in given) if drops[t] else 0 for t in range(3)]
    assert batch.dropped_counts == dropped


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({3: np.array([0, 0], np.uint32)}, "each feature once"),
        ({3: np.array([0, 5], np.uint32)}, "each feature once"),
        ({1: np.zeros(3, np.uint32)}, "one table id for each bag, or for each feature"),
        ({1: None}, "features need offsets and table ids"),
        ({2: 4}, "features need offsets and table ids"),
    ],
)
def test_features_that_cannot_be_are_refused(change: dict[int, object], message: str) -> None:
    columns = np.array([1, 0], np.uint32)
    segment = [np.zeros(4, np.uint64), columns, np.array([0, 1, 3, 3, 4]), columns, 2]
    for place, value in change.items():
        segment[place] = value
    with pytest.raises((TypeError, ValueError), match=message):
        _core.Batch([tuple(segment)], TABLES, None)


def test_buckets_are_the_top_bits_of_the_hash() -> None:
    rng = np.random.default_rng(1)
    keys = np.concatenate([np.array(SPECIAL_KEYS, np.uint64), rng.integers(0, 2**64, 500, np.uint64)])
    tables = rng.integers(0, 1000, len(keys), np.uint32)
    expected = [naive.bucket(table, key) for table, key in zip(tables.tolist(), keys.tolist(), strict=True)]
    assert _core.buckets(tables, keys).tolist() == expected


def test_a_sibling_outlives_what_it_was_made_of() -> None:
    keys = np.arange(100_000, dtype=np.uint64)
    sibling = _core.Batch([(keys, None, None)], 1, None).make_sibling()
    _core.Batch([(keys + np.uint64(7), None, None)], 1, None)  # takes the memory of what is gone
    assert sorted(sibling.keys.tolist()) == keys.tolist()


def check_owners(make: Make, keys: list[int], ranks: int, last: int) -> None:
    """Rows by the rank that owns them, `last` last, and within one in the order of the batch."""
    processor = make(spec_of(4, tables=TABLES), RowState())
    ids = torch.from_numpy(np.array(keys, np.uint64).view(np.int64))
    lookup = moved(Lookup(ids, torch.arange(len(ids)) % TABLES), processor.device)
    unique = processor.list_unique_rows(processor.make_batch([lookup]))
    tables, names = unique.table_ids.tolist(), unique.ids.cpu().numpy().view(np.uint64).tolist()
    rows: list[list[int]] = [[] for _ in range(ranks)]
    for row, name in enumerate(zip(tables, names, strict=True)):
        rows[naive.owner(*name, ranks)].append(row)
    found = sort_by_owner(unique, ranks, last)
    assert found.counts == [len(of_owner) for of_owner in rows]
    order = [row for of_owner in (*rows[:last], *rows[last + 1 :], rows[last]) for row in of_owner]
    assert found.keys.tolist() == unique.ids.cpu()[order].tolist()
    assert found.tables.tolist() == unique.table_ids.cpu()[order].tolist()
    assert found.indices[order].tolist() == list(range(len(order)))


@processors
@given(keys=st.lists(any_key, max_size=60), ranks=st.integers(1, 1024), data=st.data())
def test_rows_by_owner_equal_the_reference(make: Make, keys: list[int], ranks: int, data: st.DataObject) -> None:
    check_owners(make, keys, ranks, data.draw(st.integers(0, ranks - 1)))


@processors
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.rotated("threads")
def test_many_rows_by_owner_are_the_same_for_any_threads(
    make: Make, native_threads: Callable[[int], None], threads: int
) -> None:
    native_threads(threads)
    keys = np.random.default_rng(0).integers(0, 2**64, 10_000, np.uint64).tolist()
    for ranks in (1, 3, 1024):
        check_owners(make, keys, ranks, ranks // 2)


@pytest.mark.parametrize("ranks", [1, 3, 64, 1000, 1024])
def test_owners_share_rows_evenly_and_do_not_follow_from_the_bucket(ranks: int) -> None:
    keys = np.arange(64_000, dtype=np.uint64)
    tables = np.arange(len(keys), dtype=np.uint32) % 5
    owners = _core.find_owners(tables, keys, ranks)
    counts, mean = np.bincount(owners, minlength=ranks), len(keys) / ranks
    assert len(counts) == ranks
    # of ranks that own intervals of 16 bits, one has a 64th more at most
    assert (abs(counts - mean) < 6 * np.sqrt(mean) + mean / 64).all()
    both = _core.buckets(tables, keys).astype(np.int64) * 4 + _core.find_owners(tables, keys, 4)
    assert (abs(np.bincount(both, minlength=256) - 250) < 6 * np.sqrt(250)).all()


def test_owners_among_too_many_ranks_are_refused() -> None:
    for ranks in (0, 1025):
        with pytest.raises(ValueError, match="ranks"):
            _core.find_owners(np.zeros(1, np.uint32), np.zeros(1, np.uint64), ranks)
