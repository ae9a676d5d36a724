"""The Python side of an optimizer's rule, and the registry of all rules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .kernel import Kernel

Group = dict[str, Any]  # one of an optimizer's param groups


@dataclass(frozen=True)
class Rule:
    """How an optimizer trains rows.

    `optimizer`: the exact type; `when`: for which of its param groups. `hyper(group, step)`: hyper-parameters of the
    kernel by name (others are ignored) at the embedding's step, which counts from 1; those it leaves out are the
    group's settings. `initial(group)`: the initial value of each state, 0 for those not named. `theirs`: "module.name"
    of a class of TorchRec's that the rule trains rows for as well.
    """

    kernel: Kernel
    optimizer: type[torch.optim.Optimizer]
    hyper: Callable[[Group, int], Mapping[str, float]] = lambda group, step: {}
    initial: Callable[[Group], Mapping[str, float]] = lambda group: {}
    when: Callable[[Group], bool] = lambda group: True
    theirs: str = ""


@cache
def all_rules() -> tuple[Rule, ...]:
    """The RULES of each file in this folder."""
    package = importlib.import_module(__package__)
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = (getattr(importlib.import_module(f"{__package__}.{name}"), "RULES", ()) for name in modules)
    return tuple(rule for rules in found for rule in rules)


@cache
def catches_up(name: str | None) -> bool:
    """Whether rows of the rule of that name need the steps that they missed before they are used."""
    return any(rule.kernel.name == name and rule.kernel.catch_up is not None for rule in all_rules())


@cache
def counts_steps(name: str | None) -> bool:
    """True if updates by the rule of that name depend on how many there were, whatever its settings."""
    return any(rule.kernel.name == name and "sqrt_correction2" in rule.kernel.all_hypers for rule in all_rules())
