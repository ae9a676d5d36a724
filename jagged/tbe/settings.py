"""FBGEMM's optimizers as those of tierbed: which there are, and how their numbers are read and changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...engine.errors import OptimizerError, OptionError
from ...engine.numeric import real, whole_option
from ...engine.optim.optimizers import RowOptimizer
from ...engine.optim.rowwise_adagrad import RowWiseAdagrad
from ...engine.row_format import LAST_STEP
from .enums import OptimType, WeightDecayMode

_NEAREST = {
    OptimType.SGD: OptimType.EXACT_SGD,
    OptimType.LAMB: OptimType.ADAM,
    OptimType.LARS_SGD: OptimType.EXACT_SGD,
    OptimType.PARTIAL_ROWWISE_ADAM: OptimType.ADAM,
    OptimType.PARTIAL_ROWWISE_LAMB: OptimType.ADAM,
    OptimType.ROWWISE_ADAGRAD: OptimType.EXACT_ROWWISE_ADAGRAD,
    OptimType.SHAMPOO: OptimType.EXACT_ADAGRAD,
    OptimType.SHAMPOO_V2: OptimType.EXACT_ADAGRAD,
    OptimType.MADGRAD: OptimType.EXACT_ADAGRAD,
    OptimType.EXACT_ROWWISE_WEIGHTED_ADAGRAD: OptimType.EXACT_ROWWISE_ADAGRAD,
    OptimType.ENSEMBLE_ROWWISE_ADAGRAD: OptimType.EXACT_ROWWISE_ADAGRAD,
    OptimType.EMAINPLACE_ROWWISE_ADAGRAD: OptimType.EXACT_ROWWISE_ADAGRAD,
}
# the numbers that each optimizer has beside the learning rate
_NUMBERS: dict[OptimType, tuple[str, ...]] = {
    OptimType.EXACT_SGD: (),
    OptimType.EXACT_ADAGRAD: ("eps",),
    OptimType.EXACT_ROWWISE_ADAGRAD: ("eps", "weight_decay"),
    OptimType.ADAM: ("eps", "beta1", "beta2", "weight_decay"),
}
_DECAYS = {
    OptimType.EXACT_ROWWISE_ADAGRAD: (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE),
    OptimType.ADAM: (WeightDecayMode.NONE, WeightDecayMode.DECOUPLE),  # FBGEMM's Adam decays so by weight_decay alone
}
DEFAULTS = {"eps": 1.0e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0}


@dataclass(frozen=True)
class Settings:
    """An optimizer and its numbers, checked: those that it has not are FBGEMM's defaults."""

    optimizer: OptimType
    learning_rate: float
    numbers: Mapping[str, float]  # by the names of DEFAULTS
    weight_decay_mode: WeightDecayMode

    def __post_init__(self) -> None:
        name, has = self.optimizer.name, _NUMBERS.get(self.optimizer)
        if self.optimizer is OptimType.NONE:
            raise OptionError(
                "optimizer=OptimType.NONE would return sparse gradients of rows, which no tensor holds here; use "
                "EmbeddingBagCollection with an EagerOptimizer, and the nearest that updates in backward is EXACT_SGD"
            )
        if has is None:
            nearest = _NEAREST[self.optimizer].name
            raise OptionError(f"optimizer=OptimType.{name} is not built; the nearest is OptimType.{nearest}")
        for number, value in {"learning_rate": self.learning_rate, **self.numbers}.items():
            if real(value) is None:
                raise OptionError(f"{number}={value!r}: give a number")
            if number in DEFAULTS and number not in has and value != DEFAULTS[number]:
                raise OptionError(f"{number}={value!r}: OptimType.{name} has no {number}; leave it out")
        mode, modes = self.weight_decay_mode, _DECAYS.get(self.optimizer, (WeightDecayMode.NONE,))
        if mode not in modes:
            raise OptionError(
                f"weight_decay_mode=WeightDecayMode.{mode.name}: OptimType.{name} has "
                f"{', '.join(f'WeightDecayMode.{one.name}' for one in modes)}"
            )
        if self.optimizer is OptimType.EXACT_ROWWISE_ADAGRAD and mode is WeightDecayMode.NONE:
            self._refuse_unused_decay(self.numbers["weight_decay"])

    def _refuse_unused_decay(self, weight_decay: float) -> None:
        if weight_decay:
            raise OptionError(
                f"weight_decay={weight_decay!r}: with weight_decay_mode=WeightDecayMode.NONE nothing decays; give "
                "WeightDecayMode.L2 or WeightDecayMode.DECOUPLE"
            )

    def made(self, shadows: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer over the parameters of embeddings. OptionError for numbers that it cannot have."""
        x, lr = self.numbers, float(self.learning_rate)
        try:
            if self.optimizer is OptimType.EXACT_SGD:
                return torch.optim.SGD(shadows, lr)
            if self.optimizer is OptimType.EXACT_ADAGRAD:
                return torch.optim.Adagrad(shadows, lr, eps=x["eps"])
            if self.optimizer is OptimType.ADAM:
                betas = (x["beta1"], x["beta2"])
                return torch.optim.AdamW(shadows, lr, betas, x["eps"], x["weight_decay"])
            mode = "l2" if self.weight_decay_mode is WeightDecayMode.L2 else "decoupled"
            return RowWiseAdagrad(shadows, lr, x["eps"], x["weight_decay"], mode)
        except (ValueError, OptimizerError) as error:
            raise OptionError(f"optimizer=OptimType.{self.optimizer.name}: {error}") from None

    def change(self, group: dict[str, Any], changes: Mapping[str, float]) -> None:
        """Write numbers by FBGEMM's names, `lr` among them, to the optimizer's param group. OptionError, and none is.

        The optimizer checks their values at its next step.
        """
        has = ("lr", *_NUMBERS[self.optimizer])
        for name, value in changes.items():
            if name not in has:
                raise OptionError(
                    f"{name}={value!r}: OptimType.{self.optimizer.name} has no {name}; it has {', '.join(has)}"
                )
            if real(value) is None or value < 0 or (name.startswith("beta") and value >= 1):
                raise OptionError(f"{name}={value!r}: give a number >= 0{' and < 1' if 'beta' in name else ''}")
        if self.weight_decay_mode is WeightDecayMode.NONE and self.optimizer is OptimType.EXACT_ROWWISE_ADAGRAD:
            self._refuse_unused_decay(changes.get("weight_decay", 0.0))
        if "betas" in group:
            beta1, beta2 = group["betas"]
            group["betas"] = (changes.get("beta1", beta1), changes.get("beta2", beta2))
        group.update({name: value for name, value in changes.items() if not name.startswith("beta")})


class ShiftedOptimizer(RowOptimizer):
    """A row optimizer whose rule counts steps from another number than the embedding. `shift`: of its step 0."""

    shift = 0

    def hyper(self, step: int, clip_value: float | None = None) -> list[float]:
        return super().hyper(max(step + self.shift, 1), clip_value)


def checked_step(step: Any) -> int:
    """A number of steps that were taken. OptionError."""
    return whole_option("step", step, f"a whole number from 0 to {LAST_STEP - 1}", 0, LAST_STEP - 1)
