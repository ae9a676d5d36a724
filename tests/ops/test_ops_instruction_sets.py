"""Every instruction set that the loops were built for gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from support.rows import Table
from tierbed.engine import _core
from tierbed.engine.optim.rule import Rule, all_rules

DIMS = [1, 3, 10, 17, 64, 128, 300]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
PADDING = 3
LOOKUPS = 3  # rows, bags of five, and bags of 0 to 40
LIMITS = [(0.0, 0.0), (0.5, 0.0), (0.0, 1.0, 0.5)]  # value, norm, norm of the row

pytestmark = [
    pytest.mark.op,
    pytest.mark.skipif(len(_core.instruction_sets()) == 1, reason="this processor has the baseline alone"),
]


def check(run: Callable[[], list[NDArray]]) -> None:
    """`run` gives the same bytes on each."""
    sets = _core.instruction_sets()
    try:
        found = {}
        for name in sets:
            _core.use_instruction_set(name)
            found[name] = run()
    finally:
        _core.use_instruction_set(sets[0])
    for name in sets[1:]:
        for index, (actual, expected) in enumerate(zip(found[sets[0]], found[name], strict=True)):
            assert actual.tobytes() == expected.tobytes(), f"array {index} of {sets[0]} differs from {name}"


def make_batch(table: Table) -> _core.Batch:
    """Three lookups of 41 rows with initial values, one of which occurs more often than a block of a sum has room."""
    rng = np.random.default_rng(0)
    keys = np.where(rng.random(800) < 0.5, 7, rng.integers(0, 41, 800)).astype(np.uint64)
    offsets = np.cumsum([0, *rng.integers(0, 41, 12)])
    count = int(offsets[-1])
    segments = [(keys[:150], None, None), (keys[150:400], None, 5), (keys[400 : 400 + count], None, offsets)]
    batch = _core.Batch(segments, table.tables, PADDING)
    assert np.diff(batch.offsets).max() > 256
    _core.initialise_missing(batch, table.layout)
    return batch


def bags(lookup: int) -> int:
    return (150, 50, 12)[lookup]


def positions(batch: _core.Batch, lookup: int) -> int:
    return (150, 250, batch.size - 400)[lookup]


def weights(batch: _core.Batch, lookup: int) -> NDArray[np.float32]:
    return np.random.default_rng(lookup).standard_normal(positions(batch, lookup), np.float32)


def gradients(lookup: int, dim: int, dtype: str) -> NDArray:
    """[bags, dim] of all sizes, some of them subnormal in float16."""
    rng = np.random.default_rng(lookup)
    values = rng.standard_normal((bags(lookup), dim), np.float32) * np.float32(10) ** rng.integers(-7, 3, (1, dim))
    tensor = torch.from_numpy(values.astype(np.float32)).to(DTYPES[dtype])
    return (tensor if dtype == "float32" else tensor.view(torch.uint16)).numpy()


def gather(batch: _core.Batch, table: Table, lookup: int, dtype: str, *how: object) -> NDArray:
    out = np.empty((bags(lookup), table.dim), np.float32 if dtype == "float32" else np.uint16)
    _core.gather(batch, table.layout, lookup, out, *how, dtype=dtype)
    return out


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.rotated("dim")
def test_gather_and_pooling(dim: int, dtype: str, stored: str) -> None:
    table = Table([dim], tables=1, types=(stored, "float32"))
    batch = make_batch(table)

    def run() -> list[NDArray]:
        found = [gather(batch, table, 0, dtype)]
        for lookup in range(1, LOOKUPS):
            for mean in (False, True):
                for scale in (None, weights(batch, lookup)):
                    found.append(gather(batch, table, lookup, dtype, mean, scale))
        return found

    check(run)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.rotated("dim")
def test_gradients_of_weights(dim: int, dtype: str, stored: str) -> None:
    table = Table([dim], tables=1, types=(stored, "float32"))
    batch = make_batch(table)

    def run() -> list[NDArray]:
        found = []
        for lookup in range(1, LOOKUPS):
            for mean in (False, True):
                found.append(np.empty(positions(batch, lookup), np.float32))
                grads = gradients(lookup, dim, dtype)
                _core.weights_grad(batch, table.layout, lookup, grads, found[-1], mean, dtype)
        return found

    check(run)


def hyper(rule: Rule, step: int, limits: tuple[float, ...]) -> list[float]:
    group = rule.optimizer([torch.nn.Parameter(torch.zeros(1))], lr=0.1).param_groups[0]  # type: ignore[call-arg]
    settings = {"momentum": 0.9, "dampening": 0.3, "lr_decay": 0.1, "lambda1": 0.01}
    if rule.kernel.name != "catch_up_adam":  # which has none
        settings["weight_decay"] = 0.01
    if rule.optimizer is torch.optim.RMSprop:
        del settings["momentum"]
    group |= {name: value for name, value in settings.items() if name in group}
    values = {**group, **rule.hyper(group, step)}
    return [*(float(values[name]) for name in rule.kernel.all_hypers), *limits]


@pytest.mark.parametrize("stored", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")], ids=str)
@pytest.mark.parametrize("rule", all_rules(), ids=lambda rule: rule.kernel.name)
@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.rotated("stored")
def test_updates_and_what_lookups_see_of_rows_that_missed_steps(rule: Rule, dim: int, stored: tuple[str, str]) -> None:
    name = rule.kernel.name
    states = rule.kernel.state_widths(dim)
    narrow = len(rule.kernel.element_states) if stored[1] != "float32" else 0
    types = stored[0], stored[1] if narrow else "float32"
    table = Table([dim], [0.1] * len(states), tables=1, state_widths=states, types=types, narrow_states=narrow)

    def run() -> list[NDArray]:
        batch = make_batch(table)
        found = []
        for step, (dtype, limits) in enumerate(zip(DTYPES, LIMITS, strict=True), 1):
            grads = [gradients(lookup, dim, dtype) for lookup in range(LOOKUPS)]
            scales = [None, None, weights(batch, 2)]
            means = [False, True, True]
            _core.update(
                batch, table.layout, grads, means, scales, name, hyper(rule, 4 * step, limits), 4 * step, dtype
            )
            found += [table.values(batch.lines), table.records(batch.lines)]
        assert np.isfinite(found[-2]).all()
        _core.preview_catch_up(batch, table.layout, name, hyper(rule, 60, LIMITS[0]), 60)
        found.append(gather(batch, table, 0, "float32"))
        _core.catch_up(table.layout, batch.lines, name, hyper(rule, 60, LIMITS[0]), 60)
        return [*found, table.values(batch.lines), table.records(batch.lines)]

    check(run)
