"""Accumulated calls are parts of a step: the gradients of each are summed by row, then those of the parts in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor, nn

from support import naive
from support.embeddings import contents, make
from support.examples import examples
from support.graphs import graph_of, id_batches
from support.stores import STORES, options
from tierbed import CapacityError, Graph, MultiTableEmbedding
from tierbed.engine.optim.row_optimizer import row_optimizer

PADDING = 3
DTYPES = [torch.float32, torch.bfloat16]


class Call(NamedTuple):
    """Ids of table 0, and jagged bags of ids of table 1, with the gradients of both results."""

    ids: Tensor
    of_ids: Tensor
    bagged: Tensor
    offsets: Tensor
    weights: Tensor
    of_bags: Tensor


def train_given(graph: Any, *given: Tensor) -> Tensor:
    """Rows with the gradients that are given."""
    call = Call(*given)
    rows = graph.rows(call.ids, 0)
    bags = graph.rows(call.bagged, 1, offsets=call.offsets, pooling="mean", weights=call.weights)
    ((rows * call.of_ids).sum() + (bags * call.of_bags).sum()).backward()
    return rows


def call_of(seed: int, ids: int, bags: int, dim: int, dtype: torch.dtype) -> Call:
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = rng.permutation(bags) % 6  # of one sum, since each sum is traced
    bagged = torch.from_numpy(rng.zipf(1.5, int(lengths.sum())) % 40)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return Call(
        torch.from_numpy(rng.zipf(1.2, ids) % 300 - 2),
        normal(ids, dim).to(dtype),
        bagged,
        torch.from_numpy(np.cumsum([0, *lengths])),
        normal(len(bagged)),
        normal(bags, dim).to(dtype),
    )


def part_of(call: Call) -> tuple[naive.Unique, naive.F32]:
    """The rows of a call, and one gradient for each."""
    keys = torch.cat([call.ids, call.bagged]).numpy().view(np.uint64)
    tables = np.repeat(np.array([0, 1], np.uint32), [len(call.ids), len(call.bagged)])
    rows = naive.unique(keys, tables, PADDING)
    bags = call.of_bags.to(torch.float32).numpy()
    of_bagged = naive.pool_grad(bags, rows.inverse[len(call.ids) :], call.offsets.numpy(), True, call.weights.numpy())
    grads = np.concatenate([call.of_ids.to(torch.float32).numpy(), of_bagged])
    return rows, naive.reduce(grads, rows.occurrences, rows.occurrence_offsets)


Rows = dict[tuple[int, int], tuple[NDArray[np.float32], int]]  # floats of embedding and state, and updates


def expected_rows(embedding: MultiTableEmbedding, calls: Sequence[Call], every: int, mean: bool) -> Rows:
    """The rows after `calls`, `every` of them an update, by the references."""
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    rule, dim = row_optimizer(optimizer, optimizer.param_groups[0]), embedding.dim
    found: Rows = {}
    for step in range(1, len(calls) // every + 1):
        parts = [part_of(call) for call in calls[(step - 1) * every : step * every]]
        keys, tables = (np.concatenate([getattr(rows, name) for rows, _ in parts]) for name in ("keys", "tables"))
        merged = naive.unique(keys, tables)
        grads = naive.reduce(np.concatenate([sums for _, sums in parts]), merged.occurrences, merged.occurrence_offsets)
        names = list(zip(merged.tables.tolist(), merged.keys.tolist(), strict=True))
        initial = np.empty((len(names), dim), np.float32)
        for table in set(merged.tables.tolist()):
            there = merged.tables == table
            initial[there] = embedding.get(merged.keys[there].view(np.int64), table).numpy()
        started = [
            found.get(name) or (np.append(row, np.zeros(dim, np.float32)), 0)
            for name, row in zip(names, initial, strict=True)
        ]
        values = np.array([row for row, _ in started], np.float32).reshape(len(names), 2 * dim)
        updates = np.array([count for _, count in started], np.uint32)
        scaled = grads * np.float32(1 / every) if mean else grads
        naive.update(values, updates, scaled, rule.rule, rule.compute_hyperparams(step), step)
        found |= {name: (row, int(count)) for name, row, count in zip(names, values, updates, strict=True)}
    return found


def check(embedding: MultiTableEmbedding, calls: Sequence[Call], every: int, mean: bool) -> None:
    with make(options("device"), padding_idx=PADDING, seed=embedding.spec.seed) as fresh:  # for initial rows
        expected = expected_rows(fresh, calls, every, mean)
    rows = contents(embedding)
    names = zip(rows["table"].tolist(), rows["key"].tolist(), strict=True)
    floats, updates = np.ascontiguousarray(rows["values"]), rows["updates"].tolist()
    found = {name: (floats[i].tobytes(), updates[i]) for i, name in enumerate(names)}
    assert found == {name: (row.tobytes(), count) for name, (row, count) in expected.items()}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("ahead", [0, 8])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("store", STORES)
@pytest.mark.pairs
@pytest.mark.rotated("store")
def test_rows_are_those_of_the_reference(
    tmp_path: Path,
    native_threads: Callable[[int], None],
    store: str,
    dtype: torch.dtype,
    mean: bool,
    ahead: int,
    threads: int,
) -> None:
    native_threads(threads)
    with make(options(store, tmp_path), padding_idx=PADDING, output_dtype=dtype) as rows:
        calls = [call_of(seed, 120, 30, rows.dim, dtype) for seed in range(6)]
        graph = graph_of(train_given, torch.optim.Adagrad(rows.parameters(), lr=0.1), rows=rows)
        graph.accumulate_grads(3, mean=mean)
        list(graph.run(calls, ahead=ahead))
        check(rows, calls, 3, mean)
        assert rows.metrics()["table"]["prefetch_hits"] == (2 if ahead else 0)


sizes = st.tuples(st.integers(0, 2**32), st.sampled_from([0, 1, 40]), st.sampled_from([0, 4]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_calls_of_any_sizes(tmp_path: Path, dtype: torch.dtype) -> None:
    with make(options("device", tmp_path), padding_idx=PADDING, output_dtype=dtype) as rows:
        rows.save_snapshot("empty")
        graph = graph_of(train_given, torch.optim.Adagrad(rows.parameters(), lr=0.1), rows=rows)

        @examples(0.25)
        @given(st.lists(sizes, min_size=2, max_size=6), st.sampled_from([1, 2, 3]), st.booleans())
        def trains(given: list[tuple[int, int, int]], every: int, mean: bool) -> None:
            rows.load_snapshot("empty")
            graph.accumulate_grads(every, mean=mean)
            calls = [call_of(seed, ids, bags, rows.dim, dtype) for seed, ids, bags in given]
            for call in calls:
                graph(*call)
            graph.drop_grads()
            check(rows, calls, every, mean)

        trains()


def flat(graph: Any, ids: Tensor) -> Tensor:
    loss: Tensor = (graph.out(graph.rows(ids)) - 1).square().mean()
    loss.backward()
    return loss


def flat_graph(rows: MultiTableEmbedding) -> Graph:
    torch.manual_seed(0)
    out = nn.Linear(rows.spec.dim, 1)
    graph = graph_of(flat, torch.optim.Adagrad([*rows.parameters(), *out.parameters()], lr=0.1), rows=rows, out=out)
    graph.accumulate_grads(2)
    return graph


@cache
def clipped_on(store: str, path: Path | None) -> bytes:
    with make(options(store, path), tables=2) as rows:
        graph = flat_graph(rows)
        graph.clip_grad_norm(0.1)
        for ids in id_batches(16, 2, steps=8):
            graph(ids)
        return contents(rows).tobytes()


@pytest.mark.parametrize("store", STORES)
def test_accumulated_steps_are_the_same_bits_on_every_store(tmp_path: Path, store: str) -> None:
    assert clipped_on(store, tmp_path) == clipped_on("device", None)


def test_a_capacity_that_accumulated_rows_exceed_drops_them_and_lets_go() -> None:
    with make(options("device", capacity=30), None, tables=2) as rows:
        graph = flat_graph(rows)
        first, second = torch.arange(40).view(20, 2), torch.arange(100, 140).view(20, 2)
        graph(first)
        with pytest.raises(CapacityError, match="capacity=30"):
            graph(second)
        assert rows.size() == 0
        graph(first[:5])
        graph(first[:5])
        assert rows.size() == 10
        graph.state_dict()


def test_ids_that_change_between_accumulated_calls_are_those_of_their_call() -> None:
    buffer = np.zeros((4, 2), dtype=np.int64)
    ids = torch.from_numpy(buffer)
    with make(options("device"), None, tables=2) as rows:
        graph = flat_graph(rows)
        for call in range(2):
            buffer[:] = np.arange(8).reshape(4, 2) + 100 * call
            graph(ids)
        assert rows.size() == 16
