"""Rows that catch up equal dense Adam, for every reader, however rarely they are touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from support.embeddings import DIM, contents, make
from support.stores import STORES, options
from tierbed import MultiTableEmbedding
from tierbed.engine.errors import OptimizerError
from tierbed.engine.optim import CatchUpAdam
from tierbed.engine.optim.catch_up_adam import ALL, terms
from tierbed.engine.options.lookup import Lookup

pytestmark = pytest.mark.optimizer

ROWS = 24
IDS = torch.arange(ROWS)


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids, the later ones ever more rarely and the last three never, and gradients."""
    generator = torch.Generator().manual_seed(3)
    for step in range(1, steps + 1):
        ids = IDS[: ROWS - 3][step % (1 + IDS[: ROWS - 3] ** 2) == 0].repeat_interleave(2)
        grads = torch.randn((len(ids), DIM), generator=generator) * 10.0 ** -(step % 3)
        yield ids, grads


def trained(embedding: MultiTableEmbedding, steps: int, **settings: object) -> list[Tensor]:
    """What each step's lookup saw."""
    optimizer = CatchUpAdam(embedding.parameters(), lr=0.01, **settings)
    embedding.attach(optimizer, optimizer.param_groups[0])
    seen = []
    for ids, grads in batches(steps):
        pinned = embedding.pin([Lookup(ids)])
        seen.append(pinned.gather(0))
        pinned.update([grads])
    return seen


# betas and a tolerance: Adam's steps are about lr = 1e-2, and float32 rounds weights near 1 by 6e-8 a step
@pytest.mark.parametrize(
    ("betas", "tolerance"),
    [
        ((0.9, 0.999), 2e-7),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (((0.5, 0.8), 2e-7), ((0.9, 0.8), 2e-6), ((0.0, 0.99), 2e-7))
        ),
    ],
)
def test_rows_and_lookups_equal_dense_adam_at_every_one_of_500_steps(
    betas: tuple[float, float], tolerance: float
) -> None:
    embedding = make(options("device"), tables=1)
    dense = torch.nn.Parameter(embedding.get(IDS))
    optimizer = CatchUpAdam(embedding.parameters(), lr=0.01, betas=betas)
    embedding.attach(optimizer, optimizer.param_groups[0])
    reference = torch.optim.Adam([dense], lr=0.01, betas=betas)
    for ids, grads in batches(500):
        pinned = embedding.pin([Lookup(ids)])
        torch.testing.assert_close(pinned.gather(0), dense.detach()[ids], rtol=0, atol=tolerance)
        pinned.update([grads])
        dense.grad = torch.zeros_like(dense).index_add_(0, ids, grads)
        reference.step()
        torch.testing.assert_close(embedding.get(IDS), dense.detach(), rtol=0, atol=tolerance)
    assert (dense.detach()[ROWS - 3 :] == embedding.get(IDS[ROWS - 3 :])).all()


def test_lazy_adam_would_not_pass(tmp_path: Path) -> None:
    embedding = make(options("device"), "adam", tables=1)
    dense = torch.nn.Parameter(embedding.get(IDS))
    reference = torch.optim.Adam([dense], lr=0.01)
    for ids, grads in batches(50):
        embedding.pin([Lookup(ids)]).update([grads])
        dense.grad = torch.zeros_like(dense).index_add_(0, ids, grads)
        reference.step()
    assert (embedding.get(IDS) - dense.detach()).abs().max() > 1e-2


def test_every_reader_sees_the_same_rows_and_reading_writes_none() -> None:
    embedding = make(options("device"), tables=1)
    trained(embedding, 60)
    before = contents(embedding).tobytes()
    rows = embedding.get(IDS)
    with torch.no_grad():
        assert torch.equal(embedding(IDS), rows)
    assert torch.equal(torch.stack([row for _, _, row in embedding]), rows[[key for _, key, _ in embedding]])
    assert contents(embedding).tobytes() == before


def test_put_lets_the_moments_catch_up_and_sets_the_row() -> None:
    put, dense = make(options("device"), tables=1), torch.nn.Parameter(torch.zeros(ROWS, DIM))
    dense.data.copy_(put.get(IDS))
    optimizer, reference = CatchUpAdam(put.parameters(), lr=0.01), torch.optim.Adam([dense], lr=0.01)
    put.attach(optimizer, optimizer.param_groups[0])
    for step, (ids, grads) in enumerate(batches(80), 1):
        put.pin([Lookup(ids)]).update([grads])
        dense.grad = torch.zeros_like(dense).index_add_(0, ids, grads)
        reference.step()
        if step == 70:
            put.put([6, ROWS - 1], torch.ones(2, DIM))
            dense.data[[6, ROWS - 1]] = 1.0
    torch.testing.assert_close(put.get(IDS), dense.detach(), rtol=0, atol=5e-7)


def test_a_wrong_setting_of_the_group_leaves_no_batch_pinned() -> None:
    embedding = make(options("cached_host"), tables=1)
    optimizer = CatchUpAdam(embedding.parameters(), lr=0.01)
    embedding.attach(optimizer, optimizer.param_groups[0])
    embedding.pin([Lookup(IDS)]).update([torch.ones(ROWS, DIM)])
    embedding.pin([Lookup(IDS[:1])]).update([torch.ones(1, DIM)])
    optimizer.param_groups[0]["lr"] = -1.0
    for _ in range(2):
        with pytest.raises(OptimizerError, match=r"lr=-1\.0"):
            embedding.pin([Lookup(IDS)])
        with pytest.raises(OptimizerError, match=r"lr=-1\.0"):
            embedding.put(IDS, torch.ones(ROWS, DIM))
    optimizer.param_groups[0]["lr"] = 0.01
    embedding.put(IDS, torch.ones(ROWS, DIM))
    assert (embedding.pin([Lookup(IDS)]).gather(0) == 1).all()


@pytest.mark.parametrize("store", ["device", "host", "ssd"])
def test_numbers_of_the_rule_before_are_not_taken_for_those_of_catch_up_adam(tmp_path: Path, store: str) -> None:
    for path in (tmp_path, None) if store != "ssd" else (tmp_path,):
        with make(options(store, path), tables=1, padding_idx=0) as embedding:
            sgd = torch.optim.SGD(embedding.parameters(), lr=0.1)
            embedding.attach(sgd, sgd.param_groups[0])
            embedding.pin([Lookup(IDS[:1])]).update([torch.ones(1, DIM)])
            optimizer = CatchUpAdam(embedding.parameters(), lr=0.01)
            embedding.attach(optimizer, optimizer.param_groups[0])
            embedding.put([3], torch.ones(1, DIM))
            description = embedding._table().describe()
            assert (description["optimizer"], description["hyper"], description["step"]) == ("catch_up_adam", [], 1)
    with make(options(store, tmp_path), tables=1, padding_idx=0) as reader:
        assert (reader.get(IDS[3:4]) == 1).all()
        assert [row.tolist() for _, _, row in reader] == [[1.0] * DIM]


def test_rows_do_not_depend_on_the_store_or_threads(tmp_path: Path, native_threads: Callable[[int], None]) -> None:
    native_threads(1)
    first = make(options("device"), tables=1)
    expected, rows = trained(first, 30), first.get(IDS)
    for store in STORES:
        for threads in (2, 16):
            native_threads(threads)
            other = make(options(store, tmp_path), name=f"{store}{threads}", tables=1)
            seen = trained(other, 30)
            assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True)), (store, threads)
            assert torch.equal(other.get(IDS), rows)
            assert contents(other).tobytes() == contents(first).tobytes()


@pytest.mark.parametrize("store", ["host", "ssd"])
def test_a_reader_without_the_optimizer_and_a_resumed_run_go_on_from_the_same_rows(tmp_path: Path, store: str) -> None:
    with make(options(store, tmp_path), tables=1) as embedding:
        trained(embedding, 40)
        rows = embedding.get(IDS)
        embedding.save_snapshot("forty")
    with make(options(store, tmp_path), tables=1) as reader:
        assert torch.equal(reader.get(IDS), rows)
        assert torch.equal(torch.stack([row for _, _, row in reader]), rows[[key for _, key, _ in reader]])
    with make(options(store, tmp_path), tables=1) as resumed:
        resumed.load_snapshot("forty")
        assert torch.equal(resumed.get(IDS), rows)


@pytest.mark.parametrize(
    ("betas", "count"), [((0.9, 0.999), 207), ((0.0, 0.9), 1), ((0.9, 0.8), ALL), ((0.5, 0.0), ALL)]
)
def test_missed_steps_are_taken_one_by_one_until_what_is_left_is_below_the_rounding(
    betas: tuple[float, float], count: int
) -> None:
    assert terms(*betas) == count
    if count < ALL:
        ratio = betas[0] / np.sqrt(betas[1])
        left = ratio ** np.arange(count, 100 * count + 100) * np.sqrt(1 + np.arange(count, 100 * count + 100))
        assert left.sum() <= 2**-24
