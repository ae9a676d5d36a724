"""Stack distances against their definition, and what `plan` says of arguments and prints."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from support import naive
from support.refusals import Refusal, check_refusal
from tierbed import InputError, OptionError, plan
from tierbed.engine import _core
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.options.table_spec import table_spec
from tierbed.planning.plan import Plan
from tierbed.planning.stack_distance import Sample, depths

Row = tuple[int, int]  # table, key

some_batches = st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=25), max_size=12)


def naive_depths(batches: list[list[Row]]) -> list[tuple[int, int] | None]:
    """For each use, by batch and row: distinct rows that were used since, others of that batch that were not."""
    result: list[tuple[int, int] | None] = []
    sets = [set(rows) for rows in batches]
    for number, rows in enumerate(sets):
        for row in sorted(rows):
            last = max((b for b in range(number) if row in sets[b]), default=None)
            if last is None:
                result.append(None)
                continue
            newer = set().union(*sets[last + 1 : number])
            result.append((len(newer), len(sets[last] - newer - {row})))
    return result


def sample_of(batches: list[list[Row]], most: int = 1 << 20) -> Sample:
    sample = Sample(most)
    for rows in batches:
        tables = np.array([table for table, _ in rows], np.uint32)
        keys = np.array([key for _, key in rows], np.uint64)
        sample.add(_core.Batch([(keys, tables, None)], 3, None))
    return sample


@given(some_batches)
def test_depths_are_those_of_the_definition(batches: list[list[Row]]) -> None:
    uses = sample_of(batches).uses()
    found = depths(uses)
    hashes = {naive.hash_row(*row): row for batch in batches for row in batch}  # the engine's
    numbered = [row for _, row in sorted(hashes.items())]  # as rows are numbered
    assert len(numbered) == len(set(uses.row.tolist()))
    columns = uses.batch, uses.row, found.before, found.newer, found.tied
    mine = {
        (batch, numbered[row]): None if before < 0 else (newer, tied)
        for batch, row, before, newer, tied in zip(*(column.tolist() for column in columns), strict=True)
    }
    wanted = [(number, row) for number, batch in enumerate(batches) for row in sorted(set(batch))]
    assert [mine[use] for use in wanted] == naive_depths(batches)
    assert len(mine) == len(wanted)


def test_a_bounded_sample_keeps_all_uses_of_the_rows_that_it_keeps() -> None:
    random = np.random.default_rng(0)
    batches = [[(0, int(key)) for key in random.integers(0, 4000, 1000)] for _ in range(20)]
    sample = sample_of(batches, most=2000)
    uses = sample.uses()
    assert sample.rate < 1 / 4
    assert len(uses.row) <= 2000
    counts = Counter(key for batch in batches for _, key in set(batch))
    kept = {key: count for key, count in counts.items() if naive.hash_row(0, key) < sample.rate * 2**64}
    assert sorted(Counter(uses.row.tolist()).values()) == sorted(kept.values())


def zipf(rows: int, ids: int, batches: int, alpha: float = 1.05, seed: int = 0) -> list[NDArray[np.int64]]:
    """Ids drawn with probabilities rank ** -alpha, of random numbers."""
    random = np.random.default_rng(seed)
    mass = np.cumsum(np.arange(1, rows + 1) ** -alpha)
    numbers = random.permutation(rows)
    return [numbers[np.searchsorted(mass, random.random(ids) * mass[-1])] for _ in range(batches)]


def test_a_plan_says_what_it_saw() -> None:
    trace = [(np.array([3, 3, 4]), np.array([0, 1, 1])), (torch.tensor([3, 9]), 1)]
    made = plan(trace, dim=4, state=4, tables=3)
    assert made.seen.tolist() == [1, 3, 0]
    assert made.uses.tolist() == [1, 4, 0]
    assert made.line_bytes == 48  # 8 floats, updates and last step, to a multiple of 16
    assert (made.rate, made.batches) == (1.0, 2)
    assert made.hit_rate(rows=1 << 20) == 1 / 5
    assert made.hit_rate(rows=1 << 20, table=1) == 1 / 4
    assert made.hit_rate(rows=1 << 20, table=0) == 0


def test_ids_are_taken_as_lookups_take_them() -> None:
    ids = np.array([[1, 2, -1], [1, 5, -1]])
    trace = [ids, torch.tensor(ids, dtype=torch.int32), ids.astype(np.uint64), (ids, np.arange(3)), ids.tolist()]
    made = plan(trace, dim=4, state=0, tables=3, padding_idx=-1)
    assert made.seen.tolist() == [1, 2, 0]
    assert made.hit_rate(rows=1 << 20) == 12 / 15
    assert plan(trace, dim=4, state=0, tables=3, padding_idx=-1, warmup=1).hit_rate(rows=1 << 20) == 1


def test_the_parts_of_a_shared_cache_make_its_hit_rate() -> None:
    trace = [np.stack([a, b % 50], 1) for a, b in zip(zipf(9000, 1500, 20), zipf(9000, 1500, 20, seed=1), strict=True)]
    made = plan(trace, dim=8, state=8, tables=2)
    for rows in (4096, 5000, 8192):
        parts = [made.hit_rate(rows=rows, table=table) for table in (0, 1)]
        assert made.hit_rate(rows=rows) == pytest.approx(np.average(parts, weights=made.uses))
        assert parts[1] > parts[0]
    curve = made.curve(1)
    assert (np.diff(curve.rows) > 0).all()
    assert (np.diff(curve.miss_ratio) <= 1e-12).all()
    assert curve.miss_ratio[-1] == pytest.approx(1 - made.hit_rate(rows=int(curve.rows[-1]), table=1))
    assert curve.budget_mb[3] * 2**20 == pytest.approx(made.bytes(int(curve.rows[3])))


def test_sampling_a_share_of_the_rows_moves_the_curve_little() -> None:
    trace = zipf(30_000, 4000, 30)
    exact, sampled = plan(trace, 8, 8, samples=1 << 20), plan(trace, 8, 8, samples=1 << 14)
    assert exact.rate == 1 > sampled.rate
    for rows in (4096, 8000, 16_000):
        assert abs(exact.hit_rate(rows=rows) - sampled.hit_rate(rows=rows)) < 0.02
    assert sampled.seen.sum() == pytest.approx(exact.seen.sum(), rel=0.03)


def test_a_plan_prints_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = plan(zipf(40_000, 6000, 20), dim=8, state=0)
    text = repr(made)
    assert f"{int(made.seen.sum())} different ones in all\n81 bytes a cached row: 8 numbers and 0 of" in text
    assert "cache_budget_mb" in text
    assert "fewer than 4096 rows are not predicted" in repr(plan([np.arange(4095)], 4, 4))
    assert f"{made.hit_rate(rows=round(made.seen.sum() / 2)):.1%}" in text
    made.plot(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    plan([(np.arange(4), 1)], dim=8, state=0, tables=2).plot(tmp_path / "tables.svg")
    assert "table 1" in (tmp_path / "tables.svg").read_text()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OptionError, match=r"tierbed\[plot\]"):
        made.plot(tmp_path / "none.png")


def planned(trace: list[object] | None = None, **arguments: Any) -> Callable[[], Plan]:
    return lambda: plan([np.arange(3)] if trace is None else trace, **{"dim": 4, "state": 0, **arguments})


@cache
def made() -> Plan:
    return plan([(np.arange(100), 0)], dim=4, state=0, tables=2)


REFUSED: list[Refusal] = [
    (planned(dim=0), OptionError, "dim=0"),
    (planned(state=-1), OptionError, "state=-1"),
    (planned(samples=10), OptionError, "samples=10"),
    (planned(dtype=torch.int8), OptionError, "dtype=torch.int8"),
    (planned(state_dtype=torch.float16), OptionError, "state_dtype=torch.float16"),
    (planned([]), InputError, "no rows in 0 batches"),
    (planned([np.arange(4).reshape(2, 2), np.zeros((2, 2))], tables=2), InputError, "batch 1 of trace", "float64"),
    (planned([np.arange(3)], tables=2), InputError, "batch 0 of trace", "(3,)", "(..., 2)"),
    (planned([(np.arange(3), np.arange(2))], tables=2), InputError, "do not broadcast"),
    (planned([(np.arange(3), np.array([0, 1, 2]))], tables=2), InputError, "table ids from 0 to 2"),
    (lambda: made().hit_rate(), OptionError, "give exactly one"),
    (lambda: made().hit_rate(rows=4096, budget_mb=1), OptionError, "give exactly one"),
    (lambda: made().hit_rate(budget_mb=0.01), OptionError, "budget_mb=0.01", ">= 0.2"),
    (lambda: made().hit_rate(rows=1000), OptionError, "rows=1000"),
    (lambda: made().curve(2), OptionError, "table=2", "from 0 to 1"),
    (lambda: made().hit_rate(rows=4096, table=1), OptionError, "no ids for it"),
    (lambda: made().curve(points=1), OptionError, "points=1"),
]


@pytest.mark.parametrize("refusal", REFUSED)
def test_what_cannot_be_is_refused(refusal: Refusal) -> None:
    check_refusal(refusal)


@pytest.mark.parametrize(
    ("dtype", "state_dtype", "dim", "state"),
    [
        (torch.bfloat16, torch.float32, 128, 1),
        (torch.float16, torch.bfloat16, 16, 16),
        (torch.bfloat16, torch.bfloat16, 7, 15),
        (torch.float32, torch.bfloat16, 5, 10),
    ],
)
def test_bytes_of_a_row_are_those_of_its_line(
    dtype: torch.dtype, state_dtype: torch.dtype, dim: int, state: int
) -> None:
    made = plan([torch.arange(2000)], dim, state, dtype=dtype, state_dtype=state_dtype)
    types = (dtype, state_dtype)
    names = tuple(str(one).removeprefix("torch.") for one in types)
    widths = (dim,) * (state // dim) + (1,) * (state % dim)
    narrow = (names[1],) * (state // dim) + ("float32",) * (state % dim) if names[1] != "float32" else ()
    spec = table_spec("rows", dim, torch.int64, [make_constant_initializer(0.0)], None, 0, *types)
    layout = spec.layout(RowState("rule", tuple(map(str, range(len(widths)))), widths, (0.0,) * len(widths), narrow))
    assert made.line_bytes == layout.line_bytes
