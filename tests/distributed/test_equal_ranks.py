"""Ranks train with the bits of one process that accumulates the same parts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from support.device_ranks import run_device_ranks
from support.optimizers import OPTIMIZERS
from support.parts import Case, Trained, train
from support.ranks import run_ranks
from support.stores import STORES
from tierbed import World

ON_DEVICES = [
    (store, *how)
    for store in ("cached_host", "device", "host", "ssd")
    for how in (("catch-up", torch.bfloat16), ("adagrad", torch.float32), ("adam", torch.float16))
]
OUTPUTS = [torch.float32, torch.bfloat16, torch.float16]
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16, torch.bfloat16)]
CASES = [
    Case(2, "host", "lamb", torch.bfloat16, 2, 8, types=TYPES[0]),
    Case(3, "ssd", "adam", torch.float16, 2, 0, types=TYPES[2]),
]
MORE = [
    Case(3, "ssd_host", "partial", torch.float16, 2, 0, types=TYPES[0]),
    Case(3, "device", "catch-up", torch.float32, 1, 8, types=TYPES[1]),
    Case(4, "ssd", "adam", torch.float16, 2, 8, types=TYPES[2]),
    Case(1, "ssd_host", "adamw", torch.float16, 2, 8, types=TYPES[1]),
    Case(2, "device", "sgd", torch.float32, 1, 0, types=TYPES[2]),
    Case(2, "cached_host", "momentum", torch.float32, 2, 0, types=TYPES[0]),
    Case(2, "ssd", "rowwise", torch.float16, 1, 8, types=TYPES[1]),
    Case(3, "cached_host", "adagrad", torch.bfloat16, 1, 8, types=TYPES[2]),
    *(  # the last parameters in turn
        Case(*one, OUTPUTS[turn % 3], 1 + turn % 2, 8 * (turn // 2 % 2), types=TYPES[turn // 3 % 3])
        for turn, one in enumerate(product((1, 2, 3, 4), STORES, OPTIMIZERS))
    ),
]


def on_rank(world: World, case: Case, path: Path) -> Trained:
    return train(case, path / "ranks", world)


def check(case: Case, path: Path, run: Callable[..., list[Trained]] = run_ranks) -> None:
    """Train on ranks, which `run` starts, and in one process, and compare the bits."""
    alone = train(case, path / "alone", None)
    ranks = run(case.ranks, on_rank, case, path)
    for found in ranks:
        assert all(torch.equal(found.dense[name], value) for name, value in alone.dense.items())
    assert [loss for step in zip(*(found.losses for found in ranks), strict=True) for loss in step] == alone.losses
    rows = [name for found in ranks for name in found.rows]
    assert len(rows) == len(set(rows)), "two ranks have one row"
    assert {name: row for found in ranks for name, row in found.rows.items()} == alone.rows
    if case.ahead and case.ranks > 1 and not case.uneven:
        assert all(one.hits >= 4 for one in ranks), "a step took no batch that was announced"


@pytest.mark.tier
@pytest.mark.optimizer
@pytest.mark.parametrize(
    "case",
    [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in MORE)],
    ids=lambda case: "-".join(map(str, case[:3])),
)
def test_equal_runs(tmp_path: Path, case: Case) -> None:
    check(case, tmp_path)


@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 8])
def test_equal_runs_of_uneven_parts(tmp_path: Path, ahead: int) -> None:
    check(Case(2, "cached_host", "adam", torch.float32, 1, ahead, uneven=True), tmp_path)


def test_equal_runs_of_pooled_rows_that_are_rounded_last(tmp_path: Path) -> None:
    check(Case(2, "host", "sgd", torch.bfloat16, 1, 0), tmp_path)


@pytest.mark.parametrize(
    ("store", "optimizer", "output", "ahead"),
    [
        pytest.param(*one, ahead, marks=() if one == ON_DEVICES[0] and ahead else pytest.mark.slow)
        for one in ON_DEVICES
        for ahead in (0, 8)
    ],
)
def test_equal_runs_on_devices(tmp_path: Path, store: str, optimizer: str, output: torch.dtype, ahead: int) -> None:
    types = (output, torch.bfloat16 if output == torch.float16 else torch.float32)
    check(Case(2, store, optimizer, output, 1, ahead, types=types), tmp_path, run_device_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 8])
def test_equal_runs_of_uneven_parts_on_devices(tmp_path: Path, ahead: int) -> None:
    case = Case(3, "cached_host", "adam", torch.float16, 2, ahead, uneven=True)
    check(case, tmp_path, run_device_ranks)


def on_narrow_wire(world: World, case: Case, path: Path) -> Trained:
    narrow = World(rows=torch.bfloat16, grads=torch.float16)
    try:
        return train(case, path, narrow)
    finally:
        narrow.close()


@pytest.mark.slow
def test_a_narrow_wire_between_devices_has_the_bits_of_one_between_processors(tmp_path: Path) -> None:
    case = Case(2, "cached_host", "adagrad", torch.float32, 1, 8)
    here = run_ranks(2, on_narrow_wire, case, tmp_path / "here")
    for one, other in zip(here, run_device_ranks(2, on_narrow_wire, case, tmp_path / "there"), strict=True):
        assert (one.losses, one.rows) == (other.losses, other.rows)
        assert all(torch.equal(value, other.dense[name]) for name, value in one.dense.items())
