"""Maps FBGEMM's optimizers to tierbed's, and checks and changes their hyper-parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...engine.checks import as_number
from ...engine.errors import OptimizerError, OptionError
from ...engine.optim.base import MAX_VALUE, MIN_VALUE
from ...engine.optim.lamb import LAMB, PartialRowWiseLAMB
from ...engine.optim.lars_sgd import LarsSGD
from ...engine.optim.partial_rowwise_adam import PartialRowWiseAdam
from ...engine.optim.row_optimizer import RowOptimizer
from ...engine.optim.rowwise_adagrad import RowWiseAdagrad
from .enums import OptimType, WeightDecayMode, parse_dtype, parse_enum

_NEAREST_SUPPORTED = {  # {unsupported optimizer: the nearest supported one}; for others, EXACT_ROWWISE_ADAGRAD
    OptimType.SGD: OptimType.EXACT_SGD,
    OptimType.SHAMPOO: OptimType.EXACT_ADAGRAD,
    OptimType.SHAMPOO_V2: OptimType.EXACT_ADAGRAD,
    OptimType.MADGRAD: OptimType.EXACT_ADAGRAD,
}
_ADAM_SETTINGS = ("eps", "beta1", "beta2", "weight_decay")
# {optimizer: (tierbed's or torch's class, names of the hyper-parameters besides the learning rate)}
_OPTIMIZERS: dict[OptimType, tuple[Callable[..., torch.optim.Optimizer], tuple[str, ...]]] = {
    OptimType.EXACT_SGD: (torch.optim.SGD, ()),
    OptimType.EXACT_ADAGRAD: (torch.optim.Adagrad, ("eps",)),
    OptimType.EXACT_ROWWISE_ADAGRAD: (RowWiseAdagrad, ("eps", "weight_decay")),
    OptimType.ADAM: (torch.optim.AdamW, _ADAM_SETTINGS),
    OptimType.PARTIAL_ROWWISE_ADAM: (PartialRowWiseAdam, _ADAM_SETTINGS),
    OptimType.LAMB: (LAMB, _ADAM_SETTINGS),
    OptimType.PARTIAL_ROWWISE_LAMB: (PartialRowWiseLAMB, _ADAM_SETTINGS),
    OptimType.LARS_SGD: (LarsSGD, ("momentum", "eta", "weight_decay")),
}
_ADAM_MODES = (WeightDecayMode.NONE, WeightDecayMode.DECOUPLE)  # in both, Adam decays by weight_decay, as in FBGEMM
# {optimizer: supported weight decay modes}; the other optimizers support only NONE
_DECAY_MODES = {kind: _ADAM_MODES for kind, (_, names) in _OPTIMIZERS.items() if names is _ADAM_SETTINGS} | {
    OptimType.EXACT_ROWWISE_ADAGRAD: (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)
}
DEFAULT_LR, DEFAULT_LOAD_FACTOR = 0.01, 0.2  # FBGEMM's defaults
DEFAULT_ARGS = {"eps": 1.0e-8, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.0, "momentum": 0.9, "eta": 0.001}


@dataclass(frozen=True)
class OptimizerSettings:
    """FBGEMM's name of an optimizer, and its checked hyper-parameters."""

    optim_type: OptimType
    learning_rate: float
    hyper_parameters: Mapping[str, float]  # keys as in DEFAULT_ARGS
    weight_decay_mode: WeightDecayMode
    max_norm: float = 0.0  # maximum L2 norm of a row after its update; 0 means no limit

    def __post_init__(self) -> None:
        name = self.optim_type.name
        if self.optim_type not in _OPTIMIZERS:
            nearest = _NEAREST_SUPPORTED.get(self.optim_type, OptimType.EXACT_ROWWISE_ADAGRAD).name
            raise OptionError(f"optimizer=OptimType.{name} is not supported; the nearest is OptimType.{nearest}")
        for key, value in {"learning_rate": self.learning_rate, **self.hyper_parameters}.items():
            if as_number(value) is None:
                raise OptionError(f"{key}={value!r}: give a number")
        max_norm = as_number(self.max_norm)
        if max_norm is None or (max_norm and not MIN_VALUE <= max_norm <= MAX_VALUE):
            raise OptionError(f"max_norm={self.max_norm!r}: give a positive float32 number, or 0 for no limit")
        mode, supported_modes = self.weight_decay_mode, _DECAY_MODES.get(self.optim_type, (WeightDecayMode.NONE,))
        if mode not in supported_modes:
            allowed = ", ".join(f"WeightDecayMode.{mode.name}" for mode in supported_modes)
            raise OptionError(f"weight_decay_mode=WeightDecayMode.{mode.name}: OptimType.{name} supports {allowed}")

    @property
    def _has_decay(self) -> bool:
        mode = self.weight_decay_mode
        return self.optim_type is not OptimType.EXACT_ROWWISE_ADAGRAD or mode is not WeightDecayMode.NONE

    def find_unused(self, names: Collection[str] = ()) -> list[str]:
        """Return "name: reason" for each user setting that changes nothing. names: settings that the user passed."""
        name, (_, supported_names), values = self.optim_type.name, _OPTIMIZERS[self.optim_type], self.hyper_parameters
        user_names = [key for key, value in values.items() if value != DEFAULT_ARGS[key] or (value and key in names)]
        unsupported = [f"{key}: OptimType.{name} has none" for key in user_names if key not in supported_names]
        is_decay_unused = "weight_decay" in user_names and "weight_decay" in supported_names and not self._has_decay
        return unsupported + ["weight_decay: with WeightDecayMode.NONE nothing decays"] * is_decay_unused

    def make_optimizer(self, shadows: list[nn.Parameter]) -> torch.optim.Optimizer:
        """Return an optimizer of the shadow parameters. Raises OptionError if its class refuses a setting."""
        optimizer_class, supported_names = _OPTIMIZERS[self.optim_type]
        kwargs: dict[str, Any] = {name: self.hyper_parameters[name] for name in supported_names}
        if supported_names is _ADAM_SETTINGS:
            kwargs["betas"] = kwargs.pop("beta1"), kwargs.pop("beta2")
        if optimizer_class is RowWiseAdagrad:
            kwargs["weight_decay"] *= self._has_decay
            kwargs["weight_decay_mode"] = "l2" if self.weight_decay_mode is WeightDecayMode.L2 else "decoupled"
        try:
            optimizer = optimizer_class(shadows, lr=float(self.learning_rate), **kwargs)
        except (ValueError, OptimizerError) as error:
            raise OptionError(f"optimizer=OptimType.{self.optim_type.name}: {error}") from None
        if self.max_norm:
            optimizer.param_groups[0]["max_row_norm"] = float(self.max_norm)
        return optimizer

    def update_param_group(self, param_group: dict[str, Any], changes: Mapping[str, float]) -> None:
        """Change settings in a param group. Keys of `changes` are FBGEMM's names; the learning rate is "lr".

        Raises OptionError before it changes any setting. The optimizer checks the values at its next step.
        """
        supported_names = ("lr", *_OPTIMIZERS[self.optim_type][1])
        for name, value in changes.items():
            if name not in supported_names:
                optim_type = f"OptimType.{self.optim_type.name}"
                raise OptionError(f"{name}={value!r}: {optim_type} has no {name}; it has {', '.join(supported_names)}")
            if as_number(value) is None or value < 0 or (name.startswith("beta") and value >= 1):
                raise OptionError(f"{name}={value!r}: give a number >= 0{' and < 1' if 'beta' in name else ''}")
        if not self._has_decay and changes.get("weight_decay"):
            raise OptionError(
                f"weight_decay={changes['weight_decay']!r}: with WeightDecayMode.NONE nothing decays; give "
                "WeightDecayMode.L2 or WeightDecayMode.DECOUPLE as the constructor's weight_decay_mode"
            )
        if "betas" in param_group:
            beta1, beta2 = param_group["betas"]
            param_group["betas"] = (changes.get("beta1", beta1), changes.get("beta2", beta2))
        param_group.update({name: value for name, value in changes.items() if not name.startswith("beta")})


def make_optimizer_settings(arguments: Mapping[str, Any]) -> OptimizerSettings | None:
    """Return settings from FBGEMM's arguments, or None for OptimType.NONE. Raises OptionError."""
    optim_type = parse_enum(OptimType, arguments.get("optimizer", OptimType.EXACT_SGD), "optimizer")
    mode = parse_enum(WeightDecayMode, arguments.get("weight_decay_mode", WeightDecayMode.NONE), "weight_decay_mode")
    if optim_type is OptimType.NONE:
        return None
    hyper_parameters = {name: arguments.get(name, default) for name, default in DEFAULT_ARGS.items()}
    lr, max_norm = arguments.get("learning_rate", DEFAULT_LR), arguments.get("max_norm", 0.0)
    return OptimizerSettings(optim_type, lr, hyper_parameters, mode, max_norm)


def parse_state_dtype(state_dtypes: Any, optimizer: RowOptimizer) -> torch.dtype:
    """Return the dtype of per-element state. state_dtypes: FBGEMM's `optimizer_state_dtypes`. Raises OptionError."""
    widths = optimizer.make_row_state(2).widths  # with dim 1, per-element and per-row states would be equally wide
    dtypes = {f"momentum{i}": torch.float32 for i in range(1, len(widths) + 1)}
    if state_dtypes is None:
        return torch.float32
    if not isinstance(state_dtypes, Mapping) or not state_dtypes.keys() <= dtypes.keys():
        names = f"dtypes by the names {', '.join(dtypes)}" if dtypes else "none, since the optimizer has no state"
        raise OptionError(f"optimizer_state_dtypes={state_dtypes!r}: give {names}")
    dtypes |= {name: parse_dtype(dtype, f"optimizer_state_dtypes[{name!r}]") for name, dtype in state_dtypes.items()}
    element_dtypes: set[torch.dtype] = set()
    for (name, dtype), width in zip(dtypes.items(), widths, strict=True):
        if width > 1:
            element_dtypes.add(dtype)
        elif dtype != torch.float32:
            reason = "this state has one number per row and is always float32"
            raise OptionError(f"optimizer_state_dtypes[{name!r}]={dtype}: {reason}; leave it out")
    if len(element_dtypes) > 1:
        remedy = "all per-element states share a dtype; give each the same"
        raise OptionError(f"optimizer_state_dtypes={state_dtypes!r}: {remedy}")
    return next(iter(element_dtypes), torch.float32)
