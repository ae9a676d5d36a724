"""A rule connects an optimizer class to the kernel that updates rows. `load_rules` lists all rules."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from .kernel import RuleKernel

ParamGroup = dict[str, Any]  # a param group of an optimizer


@dataclass(frozen=True)
class Rule:
    """How an optimizer updates rows."""

    kernel: RuleKernel
    optimizer: type[torch.optim.Optimizer]  # the exact type
    # (group, embedding's step from 1) -> hyper-parameters by name. A missing hyper-parameter is read from the group.
    compute_hyperparams: Callable[[ParamGroup, int], Mapping[str, float]] = lambda group, step: {}
    compute_initial: Callable[[ParamGroup], Mapping[str, float]] = lambda group: {}  # initial state values; default 0
    applies_to: Callable[[ParamGroup], bool] = lambda group: True  # True if the rule can train this param group
    torchrec_name: str = ""  # "module.name" of the TorchRec class that this rule also supports


@cache
def load_rules() -> tuple[Rule, ...]:
    package = importlib.import_module(__package__)
    modules = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    by_module = (getattr(importlib.import_module(f"{__package__}.{name}"), "RULES", ()) for name in modules)
    return tuple(rule for rules in by_module for rule in rules)


@cache
def needs_catch_up(name: str | None) -> bool:
    """True if this rule's rows must catch up on missed steps before the rows are used."""
    return any(rule.kernel.name == name and rule.kernel.catch_up is not None for rule in load_rules())


@cache
def depends_on_step(name: str | None) -> bool:
    """True if this rule's updates depend on the step number, whatever the settings."""
    return any(rule.kernel.name == name and "sqrt_correction2" in rule.kernel.all_hyperparams for rule in load_rules())
