"""Optimizers of rows by a short name, with the settings that tests give them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tierbed.engine.optim import LAMB, CatchUpAdam, CatchUpAdamW, PartialRowWiseAdam, RowWiseAdagrad

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.01}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01}),
    "rowwise": (RowWiseAdagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
    "partial": (PartialRowWiseAdam, {"lr": 0.01}),
    "lamb": (LAMB, {"lr": 0.01}),
    "catch-up": (CatchUpAdam, {"lr": 0.01}),
    "catch-up l2": (CatchUpAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "catch-up w": (CatchUpAdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


class Stumbling(dict[str, Any]):
    """A param group that counts how often it is read, and fails at one time."""

    reads, fails_at = 0, -1

    def items(self) -> Any:
        self.reads += 1
        if self.reads == self.fails_at:
            raise ArithmeticError("stumbled")
        return super().items()


# `make test` trains with one of each way to keep state; `make test-slow` with the others as well
FEW = {"momentum", "adam", "rowwise", "catch-up w"}
few_optimizers = pytest.mark.parametrize(
    "optimizer", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS]
)
