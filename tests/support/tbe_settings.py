"""Settings of FBGEMM's table-batched embedding, and its formulas in float64."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import torch
from torch import Tensor

from support.tbe import Batch
from tierbed.jagged import OptimType, PoolingMode, WeightDecayMode

TABLES, MAP, BATCH, STEPS = [(9, 4), (5, 4)], [0, 0, 1], 4, 2
OPTIMIZERS = [OptimType[name] for name in (
    "EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD", "ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB",
    "PARTIAL_ROWWISE_LAMB", "LARS_SGD",
)]  # fmt: skip
ON_CPU = OPTIMIZERS[:3]  # what FBGEMM's wheel for CPUs trains
SETTINGS: dict[str, tuple[Any, ...]] = {
    "weight_decay": (0.1, 0.0),
    "weight_decay_mode": (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE),
    "eps": (1e-8, 1e-3),
    "learning_rate": (0.01, 0.3),
    "momentum": (0.9, 0.5),
    "eta": (0.001, 0.3),
    "beta1": (0.9, 0.6),
    "beta2": (0.999, 0.8),
    "max_norm": (0.0, 0.8),
    "max_gradient": (1.0, 0.4),  # with clipping if it is not the default
    "stochastic_rounding": (True, False),
    "pooling_mode": tuple(PoolingMode),
    "weighted": (False, True),
    "step": (0, 7),
    "late": (False, True),  # numbers of the optimizer set by update_hyper_parameters instead of the constructor
}
LATE = {  # the numbers that can be set later, by optimizer
    **dict.fromkeys(OPTIMIZERS, ("eps", "beta1", "beta2", "weight_decay")),
    OptimType.EXACT_SGD: (),
    OptimType.EXACT_ADAGRAD: ("eps",),
    OptimType.EXACT_ROWWISE_ADAGRAD: ("eps",),
    OptimType.LARS_SGD: ("weight_decay",),
}
CELLS = [dict(zip(SETTINGS, values, strict=True)) for values in product(*SETTINGS.values())]


def reference(kind: str, x: dict[str, Any], w: Tensor, g: Tensor, state: dict[str, Tensor], t: int) -> Tensor:
    """A row after FBGEMM's update, in float64. g: the gradient of all its occurrences."""
    lr, eps, wd, mode = (x[name] for name in ("learning_rate", "eps", "weight_decay", "weight_decay_mode"))
    square = g.square().mean() if "ROWWISE" in kind else g.square()
    if kind == "EXACT_SGD":
        w = w - lr * g
    elif kind == "EXACT_ADAGRAD":
        state["h"] = state.get("h", 0) + square
        w = w - lr * g / (state["h"].sqrt() + eps)
    elif kind == "EXACT_ROWWISE_ADAGRAD":
        g = g + wd * w if mode is WeightDecayMode.L2 else g
        state["h"] = state.get("h", 0) + g.square().mean()
        w = w * (1 - lr * wd if mode is WeightDecayMode.DECOUPLE else 1) - lr * g / (state["h"].sqrt() + eps)
    elif kind == "LARS_SGD":
        rate = lr * x["eta"] * w.norm() / (g.norm() + wd * w.norm())
        state["b"] = x["momentum"] * state.get("b", 0) + rate * (g + wd * w)
        w = w - state["b"]
    else:
        state["m"] = x["beta1"] * state.get("m", 0) + (1 - x["beta1"]) * g
        state["v"] = x["beta2"] * state.get("v", 0) + (1 - x["beta2"]) * square
        m, v = state["m"] / (1 - x["beta1"] ** t), state["v"] / (1 - x["beta2"] ** t)
        move = m / (v.sqrt() + eps) + wd * w
        w = w - lr * move * (w.norm() / move.norm() if "LAMB" in kind else 1)
    return w * min(1.0, x["max_norm"] / float(w.norm())) if x["max_norm"] else w


class Float64:
    """All rows of a table-batched embedding in float64."""

    def __init__(self, kind: OptimType, settings: dict[str, Any], tables: list[Tensor]) -> None:
        self.kind, self.x, self.tables = kind.name, settings, [rows.double() for rows in tables]
        self.states: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.t = settings["step"]

    def step(self, made: Batch, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output, and the gradient of the weights, of which `backward(grad)` follows."""
        pooling, offsets, outputs = self.x["pooling_mode"], made.offsets.tolist(), []
        leaves = [rows.clone().requires_grad_() for rows in self.tables]
        weights = None if made.weights is None else made.weights.double().requires_grad_()
        for feature, table in enumerate(MAP):
            for bag in range(feature * BATCH, (feature + 1) * BATCH):
                part = slice(offsets[bag], offsets[bag + 1])
                rows = leaves[table][made.indices[part]]
                rows = rows if weights is None else rows * weights[part, None]
                count = max(len(rows), 1) if pooling is PoolingMode.MEAN else 1
                outputs.append(rows if pooling is PoolingMode.NONE else rows.sum(0) / count)
        pooled = torch.stack(outputs).view(len(MAP), BATCH, -1).transpose(0, 1).flatten(1) if pooling != 2 else None
        output = torch.cat(outputs) if pooled is None else pooled
        clip = self.x["max_gradient"]
        output.backward(grad.double().clamp(-clip, clip) if clip != 1.0 else grad.double())
        self.t += 1
        ids: list[set[int]] = [set() for _ in leaves]
        for feature, table in enumerate(MAP):
            ids[table] |= set(made.indices[offsets[feature * BATCH] : offsets[(feature + 1) * BATCH]].tolist())
        for table, row in ((table, row) for table, of_table in enumerate(ids) for row in of_table):
            state, leaf = self.states.setdefault((table, row), {}), leaves[table]
            self.tables[table][row] = reference(self.kind, self.x, leaf.detach()[row], leaf.grad[row], state, self.t)
        return output.detach(), None if weights is None else weights.grad


def made_with(make: Any, optimizer: Any, settings: dict[str, Any]) -> Any:
    given = {name: value for name, value in settings.items() if name not in ("weighted", "step", "late")}
    later = {name: given.pop(name) for name in LATE[OptimType(optimizer.value)]} if settings["late"] else {}
    tbe = make(TABLES, MAP, optimizer=optimizer, gradient_clipping=given["max_gradient"] != 1.0, **given)
    if later:
        tbe.update_hyper_parameters(later)
    tbe.set_optimizer_step(settings["step"])
    return tbe


def allowed(optimizer: OptimType, settings: dict[str, Any]) -> bool:
    """Whether a test of refusals has it, or FBGEMM refuses it too."""
    has = [WeightDecayMode.NONE]
    if optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
        has += [WeightDecayMode.L2, WeightDecayMode.DECOUPLE]
    elif optimizer not in ON_CPU and optimizer is not OptimType.LARS_SGD:
        has += [WeightDecayMode.DECOUPLE]
    weightless = settings["pooling_mode"] is PoolingMode.NONE and settings["weighted"]
    return settings["weight_decay_mode"] in has and not weightless


def cells_of(optimizer: OptimType, count: int) -> list[dict[str, Any]]:
    """Some settings that the optimizer may have, always the same."""
    return random.Random(optimizer.name).sample([cell for cell in CELLS if allowed(optimizer, cell)], count)
