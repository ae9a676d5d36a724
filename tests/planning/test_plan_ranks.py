"""What `plan` says of ranks, against a count of sets and hashes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from support.refusals import check_refusal
from tierbed import InputError, OptionError, plan
from tierbed.planning.plan import RankPlan

Row = tuple[int, int]  # table, key

TABLES, PADDING = 3, 5


def ranks_of(trace: list[Any], size: int, tables: int = TABLES, warmup: int = 0) -> RankPlan:
    made = plan(trace, dim=6, state=0, tables=tables, padding_idx=PADDING, warmup=warmup, world_size=size)
    assert made.ranks is not None
    return made.ranks


def owner(row: Row, size: int) -> int:
    return (naive.hash_row(*row) >> 34 & 0xFFFF) * size >> 16


def parts_of(batch: NDArray[np.int64], size: int) -> list[set[Row]]:
    """The distinct rows that each rank looks up, of ids [samples, TABLES]."""
    given_parts = [part.numpy() for part in torch.from_numpy(batch).chunk(size)]
    parts = [{(t, int(row[t])) for row in part for t in range(TABLES) if row[t] != PADDING} for part in given_parts]
    return parts + [set()] * (size - len(parts))


@given(st.integers(1, 5), st.lists(st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3)), max_size=4))
def test_rows_and_bytes_of_each_pair_are_those_of_a_count_by_hand(size: int, drawn: list[list[list[int]]]) -> None:
    trace = [np.array(batch, np.int64).reshape(-1, TABLES) for batch in [*drawn, [[1, 2, 3]]]]
    ids, owned = np.zeros((size, size), np.int64), np.zeros(size, np.int64)
    for batch in trace:
        parts = parts_of(batch, size)
        for rank, part in enumerate(parts):
            for row in part:
                ids[rank, owner(row, size)] += 1
        for row in set().union(*parts):
            owned[owner(row, size)] += 1
    ranks = ranks_of(trace, size)
    assert ranks.ids.tolist() == ids.tolist()
    assert ranks.rows.tolist() == owned.tolist()
    assert ranks.lookups.sum() == sum((batch != PADDING).sum() for batch in trace)
    assert ranks.dedup == ranks.lookups.sum() / ids.sum()
    assert ranks.skew == pytest.approx(ids.sum(0).max() / ids.sum(0).mean())
    travel = ids * (16 + 2 * 6) + ids.T * (4 * 6)
    np.fill_diagonal(travel, 0)
    assert ranks.bytes(grads=torch.float16).tolist() == travel.tolist()


def test_one_table_sends_no_table_ids_and_the_warmup_is_not_counted() -> None:
    trace = [torch.arange(100), torch.arange(50), torch.arange(50)]
    ranks = ranks_of(trace, 2, tables=1, warmup=1)
    first, second = ({key for key in keys if key != PADDING} for keys in (range(25), range(25, 50)))
    away = sum(owner((0, key), 2) == 1 for key in first), sum(owner((0, key), 2) == 0 for key in second)
    assert ranks.batches == 2
    assert ranks.bytes().tolist() == [
        [0, 2 * (away[0] * (8 + 4 * 6) + away[1] * 4 * 6)],
        [2 * (away[1] * (8 + 4 * 6) + away[0] * 4 * 6), 0],
    ]


def test_table_ids_go_with_their_part() -> None:
    ids = np.arange(10).reshape(5, 2)
    column = ranks_of([ids], 2, tables=2)
    for tables in (np.arange(2), np.tile(np.arange(2), (5, 1))):
        assert ranks_of([(ids, tables)], 2, tables=2).ids.tolist() == column.ids.tolist()
    assert column.lookups.tolist() == [5, 4]  # of three samples, one with padding, and of two
    assert ranks_of([(np.int64(7), 0)], 2).lookups.tolist() == [1, 0]


def test_rows_fall_evenly_on_ranks_and_a_plan_prints_them() -> None:
    made = plan([np.arange(64_000)], 8, 8, world_size=64)
    assert made.ranks is not None
    assert 1 < made.ranks.skew < 1.15
    text = repr(made)
    assert (
        f"64 ranks request 64000 rows per step, 1.00 ids each; owners pin 64000, the most loaded {made.ranks.skew:.2f}"
        in text
    )
    assert f"{made.ranks.bytes().sum() / 1e6:.3f} MB are sent per step in float32" in text
    assert "ranks" not in repr(plan([np.arange(10)], 8, 8))


def test_a_number_of_ranks_and_a_wire_that_cannot_be() -> None:
    for size in (0, 1025):
        named = f"world_size={size}", "from 1 to 1024"
        check_refusal((lambda size=size: plan([np.arange(3)], 4, 0, world_size=size), OptionError, *named))
    ranks = ranks_of([np.arange(6).reshape(2, 3)], 2)
    check_refusal((lambda: ranks.bytes(grads=torch.int8), OptionError, "grads=torch.int8"))
    check_refusal((lambda: ranks_of([np.full((4, 3), PADDING)], 2), InputError, "no rows"))
