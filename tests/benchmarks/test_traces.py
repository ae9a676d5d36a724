"""The ids of benchmarks are what they say."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
from traces import Cycles, LogUniform, Shape, Zipf, ids, make_batches


@pytest.mark.parametrize("kind", [Zipf, LogUniform])
def test_a_batch_follows_from_its_number(kind: type[Zipf]) -> None:
    trace = kind(3, 100, 32)
    assert torch.equal(ids(trace, 5), ids(kind(3, 100, 32), 5))
    assert not torch.equal(ids(trace, 5), ids(trace, 6))
    assert 0 <= trace.numbers(7).min() <= trace.numbers(7).max() < 100


def test_zipf_draws_ranks_by_their_power() -> None:
    trace = Zipf(1, 50, 1 << 17)
    drawn = np.bincount(trace.ranks(np.random.default_rng(0), 0)[:, 0], minlength=50) / (1 << 17)
    wanted = np.arange(1, 51) ** -1.05
    np.testing.assert_allclose(drawn, wanted / wanted.sum(), atol=5e-3)


def test_cycles_visit_their_rows_in_turn() -> None:
    trace = Cycles(100, 20)
    batches = [trace.numbers(step)[:, 0] for step in range(20)]
    assert all(len(np.unique(batch)) == 20 for batch in batches)
    small = [batch[:16] for batch in batches]
    assert len(np.unique(np.concatenate(small))) == 20
    rest = np.concatenate([batch[16:] for batch in batches])
    assert len(np.unique(rest)) == 80
    with pytest.raises(ValueError, match="rows twice"):
        Cycles(10, 20).numbers(0)


def test_parts_of_a_batch_are_its_samples() -> None:
    (batch,) = make_batches(Shape(tables=3, rows=50, dim=2, batch=8), 1)
    parts = [batch.part(rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part.rows for part in parts]), batch.rows)
    assert torch.equal(torch.cat([part.grad for part in parts]), batch.grad)
