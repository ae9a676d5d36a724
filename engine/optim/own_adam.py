"""What the optimizers share that have Adam's settings and moments, and that torch.optim has not."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from . import adam
from .base import OwnOptimizer, betas, number
from .rule import Group


class Moments(NamedTuple):
    """Of a dense parameter, after its gradient: the numbers of `hyper`, the first moment, and what divides it."""

    x: dict[str, float]
    m: Tensor
    root: Tensor


class OwnAdam(OwnOptimizer):
    """Adam's settings. A subclass says by `fed` what its second moment takes, and by `move` how a parameter moves.

    Raises OptimizerError for negative arguments, and for betas that are not below 1.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)
        for group in self.param_groups:
            hyper(group, 1)

    @staticmethod
    def fed(squares: Tensor) -> Tensor:
        """What the second moment takes of the squares of gradients."""
        return squares

    def moments(self, w: Tensor, g: Tensor, state: dict[str, Any], group: Group) -> Moments:
        """Count a step of a parameter, and move its moments."""
        if not state:
            state |= {"exp_avg": torch.zeros_like(w), "exp_avg_sq": torch.zeros_like(self.fed(w))}
        count = state.setdefault("step", torch.tensor(0.0))  # as torch's optimizers count it
        count += 1
        x, m, v = hyper(group, int(count)), state["exp_avg"], state["exp_avg_sq"]
        g = -g if x["maximize"] else g
        m.lerp_(g, x["one_minus_beta1"])
        v.mul_(x["beta2"]).add_(x["one_minus_beta2"] * self.fed(g.square()))
        return Moments(x, m, v.sqrt() / x["sqrt_correction2"] + x["eps"])


def row_mean(squares: Tensor) -> Tensor:
    """The mean over each row, its last dimension, which is kept."""
    return squares.mean(-1, keepdim=True)


def hyper(group: Group, step: int) -> dict[str, float]:
    """The numbers of `adam.hyper`, of a group whose settings are checked. Raises OptimizerError."""
    betas(group)
    for name in ("lr", "eps", "weight_decay"):
        number(group, name)
    return adam.hyper(group, step)
