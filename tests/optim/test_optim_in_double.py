"""Rows of bags, with duplicates and over shared tables, against each optimizer's formula in double precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tierbed import EagerOptimizer, MultiTableEmbedding, make_host_mem_store_options, make_uniform_initializer
from tierbed.engine.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad

pytestmark = pytest.mark.optimizer

STEPS, DIM, KEYS, MAX_STEPS = 20, 12, 40, 64
LR, EPS, DECAY, BETAS = 0.02, 1e-6, 0.05, (0.8, 0.95)
Vector = NDArray[np.float64]
State = dict[str, Any]  # of a row, empty at first
Formula = Callable[[Vector, Vector, State, int], Vector]  # of a row's weights, gradient, state and the step -> weights


def norm(x: Vector) -> float:
    return float(np.sqrt(np.square(x).sum()))


def moments(g: Vector, fed: Any, state: State, t: int) -> Vector:
    """The direction of Adam. fed: what the second moment takes."""
    beta1, beta2 = BETAS
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * fed
    direction: Vector = state["m"] / (1 - beta1**t) / (np.sqrt(state["v"] / (1 - beta2**t)) + EPS)
    return direction


def rowwise(w: Vector, g: Vector, state: State, t: int) -> Vector:
    g = g + DECAY * w
    state["s"] = state.get("s", 0.0) + np.square(g).mean()
    return w - LR * g / (np.sqrt(state["s"]) + EPS)


def partial_rowwise_adam(w: Vector, g: Vector, state: State, t: int) -> Vector:
    return w - LR * (moments(g, np.square(g).mean(), state, t) + DECAY * w)


def by_trust(w: Vector, r: Vector) -> Vector:
    return w - LR * norm(w) / norm(r) * r


def lamb(w: Vector, g: Vector, state: State, t: int) -> Vector:
    return by_trust(w, moments(g, np.square(g), state, t) + DECAY * w)


def partial_rowwise_lamb(w: Vector, g: Vector, state: State, t: int) -> Vector:
    return by_trust(w, moments(g, np.square(g).mean(), state, t) + DECAY * w)


def lars(w: Vector, g: Vector, state: State, t: int) -> Vector:
    a = LR * 0.1 * norm(w) / (norm(g) + DECAY * norm(w))
    state["b"] = 0.9 * state.get("b", 0.0) + a * (g + DECAY * w)
    moved: Vector = w - state["b"]
    return moved


def rmsprop(w: Vector, g: Vector, state: State, t: int) -> Vector:
    g = g + DECAY * w
    state["v"] = 0.9 * state.get("v", 0.0) + 0.1 * np.square(g)
    return w - LR * g / (np.sqrt(state["v"]) + EPS)


def limited(w: Vector, g: Vector, state: State, t: int) -> Vector:
    w = w - LR * g
    return w * min(1.0, 0.3 / norm(w))


ADAM = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY}
CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Formula]] = {
    "rowwise": (lambda p: RowWiseAdagrad(p, LR, EPS, DECAY), rowwise),
    "partial_rowwise_adam": (lambda p: PartialRowWiseAdam(p, LR, **ADAM), partial_rowwise_adam),
    "lamb": (lambda p: LAMB(p, LR, **ADAM), lamb),
    "partial_rowwise_lamb": (lambda p: PartialRowWiseLAMB(p, LR, **ADAM), partial_rowwise_lamb),
    "lars": (lambda p: LarsSGD(p, LR, 0.9, DECAY, eta=0.1), lars),
    "rmsprop": (lambda p: torch.optim.RMSprop(p, LR, alpha=0.9, eps=EPS, weight_decay=DECAY), rmsprop),
    "max_row_norm": (lambda p: torch.optim.SGD([{"params": p, "max_row_norm": 0.3}], LR), limited),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_of_bags_are_the_formula_in_double(name: str) -> None:
    make, formula = CASES[name]
    tables = [make_uniform_initializer(-0.5, 0.5)] * 2
    embedding = MultiTableEmbedding(
        "rows", DIM, torch.float32, torch.int64, tables, make_host_mem_store_options(), seed=3
    )
    optimizer = EagerOptimizer(make(list(embedding.parameters())), embedding)
    every = torch.arange(KEYS)
    expected = [embedding.get(every, table).double().numpy() for table in range(2)]
    states: dict[tuple[int, int], State] = {}
    random = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        lengths = random.integers(0, MAX_STEPS + 1, 6)
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        ids = (random.random(offsets[-1]) ** 2 * KEYS).astype(np.int64)  # most are duplicates
        grads = random.standard_normal((6, DIM)).astype(np.float32)
        of_bag = np.array([0, 1, 0, 0, 1, 1])  # features that share tables
        out = embedding(torch.from_numpy(ids), torch.from_numpy(of_bag), torch.from_numpy(offsets), "sum")
        out.backward(torch.from_numpy(grads))
        optimizer.step()
        optimizer.zero_grad()
        summed: dict[tuple[int, int], Vector] = {}
        for bag, table in enumerate(of_bag.tolist()):
            for key in ids[offsets[bag] : offsets[bag + 1]].tolist():
                summed[table, key] = summed.get((table, key), 0.0) + grads[bag].astype(np.float64)
        for (table, key), g in summed.items():
            row = expected[table]
            row[key] = formula(row[key], g, states.setdefault((table, key), {}), step)
    for table, rows in enumerate(expected):
        found = embedding.get(every, table).double().numpy()
        assert np.abs(found - rows).max() <= 1e-5 * np.abs(rows).max()
