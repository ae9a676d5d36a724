"""What `plan` predicts: against definitions, a count of sets and hashes, and the caches of the engine."""

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
from support.caches import PLACE_BYTES
from support.embeddings import DIM, attach, make, train
from support.refusals import Refusal, check_refusal
from support.stores import options
from tierbed import InputError, MultiTableEmbedding, OptionError, plan
from tierbed.engine import _core
from tierbed.engine.optim.row_state import RowState
from tierbed.engine.options.initializers import make_constant_initializer
from tierbed.engine.options.table_spec import make_table_spec
from tierbed.planning.plan import Plan, RankPlan
from tierbed.planning.stack_distance import Sample, compute_depths

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
    uses = sample_of(batches).collect_uses()
    found = compute_depths(uses)
    hashes = {naive.hash_row(*row): row for batch in batches for row in batch}  # the engine's
    numbered = [row for _, row in sorted(hashes.items())]  # as rows are numbered
    assert len(numbered) == len(set(uses.row.tolist()))
    columns = uses.batch, uses.row, found.previous, found.num_newer, found.num_tied
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
    uses = sample.collect_uses()
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


def test_a_row_has_the_bytes_of_its_line() -> None:
    half, single, bfloat = torch.float16, torch.float32, torch.bfloat16
    cases = (bfloat, single, 128, 1), (half, bfloat, 16, 16), (bfloat, bfloat, 7, 15), (single, bfloat, 5, 10)
    for dtype, state_dtype, dim, state in cases:
        made = plan([torch.arange(2000)], dim, state, dtype=dtype, state_dtype=state_dtype)
        name = str(state_dtype).removeprefix("torch.")
        widths = (dim,) * (state // dim) + (1,) * (state % dim)
        narrow = (name,) * (state // dim) + ("float32",) * (state % dim) if name != "float32" else ()
        spec = make_table_spec("rows", dim, torch.int64, [make_constant_initializer(0.0)], None, 0, dtype, state_dtype)
        names = tuple(map(str, range(len(widths))))
        layout = spec.make_layout(RowState("rule", names, widths, (0.0,) * len(widths), narrow))
        assert made.line_bytes == layout.line_bytes


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
    assert "64 ranks request 64000 rows per step, 1.00 ids each; owners pin 64000" in text
    assert f"the most loaded {made.ranks.skew:.2f}" in text
    assert f"{made.ranks.bytes().sum() / 1e6:.3f} MB are sent per step in float32" in text
    assert "ranks" not in repr(plan([np.arange(10)], 8, 8))


ROWS, IDS, BATCHES, WARMUP = 50_000, 5000, 30, 15
Trace = list[NDArray[np.int64]]


def scan_mixed() -> Trace:
    """Every fourth id is of a scan over all rows."""
    trace = zipf(ROWS, IDS, BATCHES, seed=1)
    for number, ids in enumerate(trace):
        ids[::4] = np.arange(number * len(ids[::4]), (number + 1) * len(ids[::4])) % ROWS
    return trace


TRACES = {"zipf": lambda: zipf(ROWS, IDS, BATCHES), "scan-mixed": scan_mixed}


def measured(embedding: MultiTableEmbedding, trace: Trace) -> float:
    counts = []
    for part in (trace[:WARMUP], trace[WARMUP:]):
        for ids in part:
            train(embedding, ids, ids % 3)
        device = embedding.metrics()["device"]
        counts.append((int(device["hits"]), int(device["misses"])))
    hits, misses = (after - before for before, after in zip(*counts, strict=True))
    return hits / (hits + misses)


def planned_with_warmup(trace: Trace) -> Plan:
    return plan([(ids, ids % 3) for ids in trace], DIM, DIM, tables=3, warmup=WARMUP)


# shares of all rows: of the benchmark, and more. Below, the overflow area holds rows as well, which a plan leaves out
@pytest.mark.parametrize("share", [0.1, 0.2, 0.4])
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.rotated("name")
def test_the_predicted_hit_rate_is_within_two_points_of_the_measured(name: str, share: float) -> None:
    trace = TRACES[name]()
    made = planned_with_warmup(trace)
    budget = made.bytes(int(share * ROWS)) / 2**20
    with make(options("cached_host", budget_mb=budget)) as embedding:
        attach(embedding, "adagrad")
        hit_rate = measured(embedding, trace)
        assert embedding.metrics()["device"]["capacity"] == made.rows(budget)
    assert abs(made.hit_rate(budget_mb=budget) - hit_rate) < 0.02


# sizes in rows: of the smallest cache that is predicted, with batches of about as many rows, and larger ones
@pytest.mark.parametrize("rows", [4096, 20_000])
@pytest.mark.parametrize("name", TRACES)
@pytest.mark.rotated("name")
def test_the_overflow_area_is_part_of_the_prediction_above_rocksdb(name: str, rows: int, tmp_path: Path) -> None:
    trace = TRACES[name]()
    made = planned_with_warmup(trace)
    budget = made.bytes(rows) / 2**20
    with make(options("ssd", tmp_path, budget_mb=budget, overflow_mb=None)) as embedding:
        attach(embedding, "adagrad")
        hit_rate = measured(embedding, trace)
        metrics = embedding.metrics()
    device = metrics["device"]
    parts = sum(device[name] for name in ("bytes", "overflow_bytes", "window_bytes"))
    assert metrics["table"]["total_bytes"] == parts + metrics["ssd"]["bytes"]
    overflow = made.overflow_mb(budget)
    assert abs(made.hit_rate(budget_mb=budget, overflow_mb=overflow) - hit_rate) < 0.1
    assert 0 <= device["overflow_capacity"] - overflow * 2**20 // (made.line_bytes + PLACE_BYTES) < 1024
    assert device["overflow_bytes"] < 1.1 * max(overflow, 1024 * made.line_bytes / 2**20) * 2**20


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
    (planned([]), InputError, "0 batches after warmup=0 use no rows"),
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
    (planned(world_size=0), OptionError, "world_size=0", "from 1 to 1024"),
    (planned(world_size=1025), OptionError, "world_size=1025"),
    (lambda: ranks_of([np.full((4, 3), 1)], 2).bytes(grads=torch.int8), OptionError, "grads=torch.int8"),
    (lambda: ranks_of([np.full((4, 3), PADDING)], 2), InputError, "no rows"),
]


@pytest.mark.parametrize("refusal", REFUSED)
def test_what_cannot_be_is_refused(refusal: Refusal) -> None:
    check_refusal(refusal)
