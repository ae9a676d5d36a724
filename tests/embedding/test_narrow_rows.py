"""Embeddings of bfloat16 and float16 rows: what users read, write, train and are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.embeddings import attach, contents, make, train
from support.graphs import graph_of, id_batches
from support.optimizers import OPTIMIZERS, few_optimizers
from support.stores import STORES, options
from tierbed import InputError, OptimizerError, SnapshotError, StoreError
from tierbed.embedding.optim.eager import EagerOptimizer

NARROW = [torch.bfloat16, torch.float16]
STATES = [torch.float32, torch.bfloat16]
KEYS = torch.arange(200)


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.rotated("store")
def test_rows_that_are_put_come_back_rounded_to_nearest_even(dtype, store, tmp_path) -> None:
    values = torch.randn(200, 5)
    with make(options(store, tmp_path), dtype=dtype) as embedding:
        before = embedding.get(KEYS, 1)
        assert torch.equal(before, before.to(dtype).float())
        embedding.put(KEYS, values, 0)
        wanted = values.to(dtype).float()
        assert torch.equal(embedding.get(KEYS, 0), wanted)
        assert torch.equal(embedding(KEYS, 0), wanted)
        sums = torch.zeros(20, 5)
        for at in range(10):  # in their order
            sums += wanted.view(20, 10, 5)[:, at]
        assert torch.equal(embedding(KEYS.view(20, 10), 0, pooling="sum"), sums)
        stored = {key: row for table, key, row in embedding if table == 0}
        assert all(torch.equal(stored[key], row) for key, row in zip(KEYS.tolist(), wanted, strict=True))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_number_beyond_the_largest_is_refused_with_key_and_value_and_training_stops_at_it(dtype) -> None:
    largest, rows = torch.finfo(dtype).max, torch.zeros(3, 5)
    rows[1, 2] = torch.finfo(torch.float32).max
    with make(options("host"), dtype=dtype) as embedding:
        with pytest.raises(InputError, match=rf"3\.4028.*e\+38 for key 8 overflows dtype={dtype}; give smaller"):
            embedding.put([7, 8, 9], rows, 0)
        assert embedding.size() == 0
        rows[1, 2], rows[0, 0], rows[2, 4] = largest, float("inf"), float("nan")
        embedding.put([7, 8, 9], rows, 0, allow_nonfinite=True)
        assert torch.equal(embedding.get([7, 8], 0), rows[:2])
        assert embedding.get([9], 0)[0, 4].isnan()
        attach(embedding, "sgd", lr=1.0, weight_decay=0.0)
        embedding.put([1], torch.full((1, 5), largest), 0)
        for _ in range(3):
            train(embedding, [1], 0, torch.full((1, 5), -largest / 2000))  # float32 still holds the sum
        assert (embedding.get([1], 0) == largest).all()


@pytest.mark.parametrize("state_dtype", STATES, ids=str)
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@few_optimizers
@pytest.mark.rotated("optimizer")
def test_a_graph_and_a_plain_loop_train_to_the_same_bits(optimizer, dtype, state_dtype) -> None:
    kind, settings = OPTIMIZERS[optimizer]

    def step(rows: Any, ids: Tensor) -> Tensor:
        loss = (rows(ids, 0).sum(-1) - ids).square().mean() / 100
        loss.backward()
        return loss.detach()

    with (
        make(options("host"), dtype=dtype, state_dtype=state_dtype) as in_graph,
        make(options("host"), dtype=dtype, state_dtype=state_dtype) as in_loop,
    ):
        inner = kind(in_graph.parameters(), **settings)  # type: ignore[arg-type]
        graph = graph_of(lambda graph, ids: step(graph.rows, ids), inner, rows=in_graph)
        plain = EagerOptimizer(kind(in_loop.parameters(), **settings), in_loop)  # type: ignore[arg-type]
        for ids in id_batches(30, steps=4):
            loss = step(in_loop, ids)
            plain.step()
            plain.zero_grad()
            assert torch.equal(graph(ids), loss)
        assert contents(in_graph).tobytes() == contents(in_loop).tobytes()
        assert contents(in_graph).dtype["embedding"].base == (np.dtype("<u2") if dtype == NARROW[0] else np.float16)


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_store_of_another_dtype_is_refused_and_a_snapshot_is_converted(store, tmp_path, caplog) -> None:
    halves = {"dtype": torch.bfloat16, "state_dtype": torch.bfloat16}
    with make(options(store, tmp_path), "adam") as embedding:
        train(embedding, KEYS)
        embedding.save_snapshot("wide")
        wide = embedding.get(KEYS, 0)
    narrow = make(options(store, tmp_path), **halves)
    with pytest.raises(StoreError, match=r"of dtype float32, not bfloat16; give dtype=torch\.float32; or save them"):
        narrow.size()
    place = options(store, tmp_path / "other")
    with make(place, "adam", **halves) as other:
        other.save_snapshot("empty")
    (tmp_path / "rows" / "snapshots" / "wide").rename(tmp_path / "other" / "rows" / "snapshots" / "wide")
    with make(place, "adam", **halves) as other:
        with pytest.raises(SnapshotError, match=r"holds rows of dtype float32, not bfloat16.*convert=True"):
            other.load_snapshot("wide")
        other.load_snapshot("wide", convert=True)
        assert torch.equal(other.get(KEYS, 0), wide.bfloat16().float())
        train(other, KEYS)
        other.save_snapshot("narrow")
        trained = contents(other).tobytes()
    with make(place, "adam", **halves) as other:
        assert contents(other).tobytes() == trained
        other.load_snapshot("narrow")
        assert contents(other).tobytes() == trained
    with make(place, dtype=torch.bfloat16) as read:
        read.size()
        [said] = [one.message for one in caplog.records if "state_dtype" in one.message]
        assert "holds state of dtype bfloat16, but state_dtype=torch.float32. The rows can be read" in said
        assert said.endswith("give state_dtype=torch.bfloat16")
    kept = make(place, "adam", dtype=torch.bfloat16)
    with pytest.raises(StoreError, match=r"rows of state_dtype bfloat16, not float32; give state_dtype=torch"):
        kept.size()


def test_rows_without_state_take_an_optimizer_with_a_state_of_16_bits() -> None:
    with make(options("host"), dtype=torch.float16, state_dtype=torch.bfloat16) as embedding:
        embedding.put(KEYS, torch.ones(200, 5), 0)
        attach(embedding, "adagrad")
        train(embedding, KEYS[:10])
        assert embedding.get([199], 0).eq(1).all()
        start = int(contents(embedding)[-1]["sum"].view(np.uint16)[0])
        assert start == int(torch.tensor(0.1).bfloat16().view(torch.uint16))
        with pytest.raises(OptimizerError, match="train with the rows' optimizer; or to begin without state"):
            attach(embedding, "adam")


@pytest.mark.parametrize("how", ["convert", "weights_only"])
def test_rows_that_a_load_replaces_are_not_said_to_be_untrainable(tmp_path, caplog, how) -> None:
    with make(options("host", tmp_path), "adam", state_dtype=torch.bfloat16) as embedding:
        train(embedding, KEYS)
        embedding.save_snapshot("narrow")
    with make(options("host", tmp_path)) as wide:
        wide.load_snapshot("narrow", **{how: True})
        attach(wide, "adam")
        train(wide, KEYS)
    assert "state_dtype" not in caplog.text
