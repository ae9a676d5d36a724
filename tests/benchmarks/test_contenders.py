"""The sides of benchmarks are one model to start with, and one that differs has no figure."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from support.places import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))
import contenders
from contenders import Collection, Fbgemm, Rows, Torch, check
from floor import Floor
from groups import kernels
from traces import Shape, make_batches
from workload import Mismatch

SHAPE = Shape(2, 100, 16, 16)


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, length=3), replace(SHAPE, optimizer="rowwise_adagrad")])
def test_tierbed_and_fbgemm_and_the_floor_compute_the_same(shape: Shape) -> None:
    batches = make_batches(shape)
    check(Rows(shape, batches), [Fbgemm(shape, batches), Floor(shape, batches)])


def test_bags_of_unlike_lengths_are_those_of_fbgemm() -> None:
    shape = replace(SHAPE, length=(3, 1))
    batches = make_batches(shape)
    check(Collection(shape, batches), [Fbgemm(shape, batches)])


@pytest.mark.parametrize("optimizer", ["adagrad", "adam"])
def test_tierbed_and_torch_compute_the_same(optimizer: str) -> None:
    shape = replace(SHAPE, optimizer=optimizer)
    batches = make_batches(shape)
    check(Rows(shape, batches), [Torch(shape, batches), Floor(shape, batches)])


def test_rows_of_another_rate_have_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = make_batches(SHAPE)
    ours = Rows(SHAPE, batches)
    monkeypatch.setattr(contenders, "LR", 1.01 * contenders.LR)
    with pytest.raises(Mismatch, match=r"rows of batch 0 by tierbed and FBGEMM differ by .* of the largest magnitude"):
        check(ours, [Fbgemm(SHAPE, batches)])


def test_a_rule_of_another_optimizer_has_no_figure() -> None:
    batches = make_batches(SHAPE)
    rows = Rows(SHAPE, batches, filled=False)
    kernels.check_dense("adagrad", rows, batches[0])
    with pytest.raises(Mismatch, match="lamb: rows and the dense optimizer's"):
        kernels.check_dense("lamb", rows, batches[0])
