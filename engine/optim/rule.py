"""The Python side of an optimizer's rule, and the registry of all rules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .kernel import Kernel

Group = dict[str, Any]  # one of an optimizer's param groups

# The arguments of a reference, by the names that a kernel's body uses: `w` and element states [n, dim] and row states
# [n, 1], float32, updated in place; `g` [n, dim], `first` [n, 1], `step`, `dim`; hyper-parameters as NumPy scalars.
# Every operation is rounded to float32, as in the kernels.
Row = Any


def decayed(
    g: NDArray[np.float32], w: NDArray[np.float32], weight_decay: np.float32, maximize: np.float32
) -> NDArray[np.float32]:
    """g, negated for `maximize`, with L2 weight decay added."""
    g = -g if maximize else g
    return g + weight_decay * w if weight_decay != 0 else g


def quotient(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
    """a / b, and 0 where b is 0. b is 0 only if a is 0, or so small that its square underflowed."""
    divisor: NDArray[np.float32] = np.where(b == 0, np.float32(2.0**127), b)
    return a / divisor


def _zeros(group: Group) -> Mapping[str, float]:
    return {}


def _always(group: Group) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """How an optimizer trains rows.

    `optimizer`: the exact type; `when`: for which of its param groups. `hyper(group, step)`: each hyper-parameter of
    the kernel by name (others are ignored) at the embedding's step, which counts from 1. `reference`: one step in
    NumPy. `initial(group)`: the initial value of each state, 0 for those not named. `catch_up`: the reference of
    the kernel's, for one row. `theirs`: "module.name" of a class of TorchRec's that the rule trains rows for as well.
    """

    kernel: Kernel
    optimizer: type[torch.optim.Optimizer]
    hyper: Callable[[Group, int], Mapping[str, float]]
    reference: Callable[[Row], None]
    initial: Callable[[Group], Mapping[str, float]] = _zeros
    when: Callable[[Group], bool] = _always
    catch_up: Callable[[Row], None] | None = None
    theirs: str = ""


@cache
def all_rules() -> tuple[Rule, ...]:
    """The RULES of each file in this folder."""
    package = importlib.import_module(__package__)
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = (getattr(importlib.import_module(f"{__package__}.{name}"), "RULES", ()) for name in modules)
    return tuple(rule for rules in found for rule in rules)


def rule_named(name: str) -> Rule:
    """The rule whose kernel has that name. Raises KeyError."""
    return {rule.kernel.name: rule for rule in all_rules()}[name]


@cache
def catches_up(name: str | None) -> bool:
    """Whether rows of the rule of that name need the steps that they missed before they are used."""
    return any(rule.kernel.name == name and rule.catch_up is not None for rule in all_rules())


@cache
def counts_steps(name: str | None) -> bool:
    """True if updates by the rule of that name depend on how many there were, whatever its settings."""
    return any(rule.kernel.name == name and "sqrt_correction2" in rule.kernel.hypers for rule in all_rules())
