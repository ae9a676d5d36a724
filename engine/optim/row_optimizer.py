"""How an optimizer of torch, or one of `tierbed.optim`, trains the rows of an embedding; docs/optimizers.md.

Rows are lazy: a row and its optimizer state change only in steps whose batch contains it. NaN gradients make NaN rows,
as in torch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import OptimizerError
from .base import betas, number, positive
from .kernel import LIMITS
from .past_rates import MAX_KNOTS, with_past
from .row_state import RowState
from .rule import Group, Rule, all_rules

log = logging.getLogger("tierbed")
_REFUSED = ("amsgrad", "centered", "differentiable")
# keys of a group that change no step, from torch, its schedulers and users
_LABELS = ("params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
_LAZY = ("adam", "adamw", "sgd_momentum", "rmsprop")  # rules of torch.optim that are lazy without weight_decay as well
_EQUAL = {"adam": "tierbed.optim.CatchUpAdam gives", "adamw": "tierbed.optim.CatchUpAdamW gives"}  # to torch
_EQUAL_IN_PART = "Adagrad, or SGD without momentum, and a penalty in place of weight_decay, give"
_CLOSE = 1e-3  # of the largest lr: a change of a past one that needs no warning
_NUMBERS = ("lr", "eps", "weight_decay", "lr_decay", "momentum")  # at least 0 in every optimizer that has them


class RowOptimizer:
    """One param group of an optimizer that trains rows. Settings are read from the group at each step.

    Attributes: `rule`, the name for `_core.update`; `states`, the names of the states of a row; `initial`, the initial
    value of each; `shift`, what the rule adds to the embedding's step.
    """

    shift = 0

    def __init__(self, optimizer: torch.optim.Optimizer, group: Group) -> None:
        self._optimizer = optimizer
        # by index, since load_state_dict replaces the dict
        self._index = next(index for index, other in enumerate(optimizer.param_groups) if other is group)
        self._rule = _rule_of(optimizer, group)
        self.rule = self._rule.kernel.name
        self.states = self._rule.kernel.states
        self._names = self._rule.kernel.all_hypers
        values = self._rule.initial(group)
        self.initial = [float(values.get(state, 0.0)) for state in self.states]
        self._checked: dict[str, Any] | None = None  # the last settings that passed the checks
        self._warns_of_changes = self._rule.kernel.catch_up is not None
        self._warns_beyond = _CLOSE
        self._limits = [0.0] * len(LIMITS)  # of these settings
        self.hyper(1)  # raises the errors of the group now

    def hyper(self, step: int, clip_value: float | None = None, before: Sequence[float] | None = None) -> list[float]:
        """The rule's numbers at the embedding's step `step`, which counts from 1; limits at the end.

        Without a `max_row_norm` there is one limit less. clip_value: a clip of this step, in addition to the group's.
        before: those of the step before, for a rule that catches up; [] if that was not the rule's, None if not known.

        Raises OptimizerError if the group now has the settings of another rule than at the start, or a wrong setting.
        """
        group = self._optimizer.param_groups[self._index]
        settings = {name: value for name, value in group.items() if name != "params"}
        if settings != self._checked:
            self._check(group, settings)
        if self.shift:
            step = max(step + self.shift, 1)
        values = {**group, "maximize": bool(group.get("maximize")), **self._rule.hyper(group, step)}
        value, norm, row_norm = self._limits
        if clip_value is not None:
            value = min(clip_value, value or clip_value)
        numbers = [float(values[name]) for name in self._names]
        numbers += (value, norm, row_norm) if row_norm else (value, norm)
        if before is None or self._rule.kernel.catch_up is None:
            return numbers
        return with_past(self._rule.kernel, numbers, before, step, self._note_rates)

    def count_from(self, shift: int) -> None:
        """Let the rule count steps from another number."""
        self.shift = shift

    def _note_rates(self, change: float) -> None:
        if change > self._warns_beyond:
            self._warns_beyond = 10 * change  # it may grow
            log.warning(
                "lr of %s changes too often to keep all past rates: one is off by %.2g of the largest, and rows that "
                "wait for over %d changes may be off by ten times that share of a step; change it by the epoch, or "
                "with fewer rises and falls",
                type(self._optimizer).__name__,
                change,
                MAX_KNOTS // 2,
            )

    def numbers(self, step: int) -> dict[str, float]:
        """The numbers of `hyper` by name, as `lr`."""
        return dict(zip((*self._names, *LIMITS), self.hyper(step), strict=False))

    def counts_steps(self) -> bool:
        """True if an update depends on how many there were, as Adam's correction does."""
        return self.hyper(1) != self.hyper(2)

    @property
    def is_lazy(self) -> bool:
        """True for an optimizer of torch that would change rows of a dense table in steps that do not look them up."""
        decays = self.rule in ("sgd", "adagrad") and self._optimizer.param_groups[self._index].get("weight_decay")
        return self.rule in _LAZY or bool(decays)

    def _check(self, group: Group, settings: dict[str, Any]) -> None:
        rule = _rule_of(self._optimizer, group)
        if rule.kernel.name != self.rule:
            raise OptimizerError(
                f"{type(self._optimizer).__name__} began as rule {self.rule!r} and now has the settings of "
                f"{rule.kernel.name!r}, whose state the rows lack; do not change momentum (from or to zero), the "
                "weight_decay of CatchUpAdam (from or to zero) or decoupled_weight_decay. OneCycleLR and CyclicLR set "
                "momentum: give them cycle_momentum=False, or make the optimizer with a momentum"
            )
        old = self._checked if self._warns_of_changes else None
        if old and (changed := [name for name in ("betas", "eps", "weight_decay") if settings[name] != old[name]]):
            self._warns_of_changes = False
            log.warning(
                "%s of %s changed: steps that a row has missed take the present value, unlike a dense table's; keep it "
                "constant, and give OneCycleLR and CyclicLR cycle_momentum=False",
                " and ".join(changed),
                type(self._optimizer).__name__,
            )
        for name in _NUMBERS:
            if name in group:
                number(group, name)
        if "betas" in group:
            betas(group)
        known = (*self._optimizer.defaults, *LIMITS, *_LABELS)
        unknown = next((name for name in group if name not in known), None)
        if unknown is not None:  # torch never checks for them
            raise OptimizerError(
                f"param group: {unknown}={group[unknown]!r}; {type(self._optimizer).__name__} has no such setting, and "
                f"rows ignore it: leave it out of the embedding's group (rows are limited by {', '.join(LIMITS)})"
            )
        self._limits = [positive(f"param group: {name}", group.get(name)) or 0.0 for name in LIMITS]
        changes_inside = any(isinstance(value, torch.Tensor | list) for value in settings.values())
        self._checked = None if changes_inside else settings

    def row_state(self, dim: int, state_type: str = "float32") -> RowState:
        """The state of a row of `dim` elements. state_type: of the numbers of states that elements have."""
        kernel = self._rule.kernel
        types = (state_type,) * len(kernel.element_states) + ("float32",) * len(kernel.row_states)
        narrow = state_type != "float32" and bool(kernel.element_states)
        return RowState(self.rule, self.states, kernel.state_widths(dim), tuple(self.initial), types if narrow else ())


def row_optimizer(optimizer: torch.optim.Optimizer, group: Group) -> RowOptimizer:
    """The row optimizer of one of `optimizer.param_groups`.

    Raises OptimizerError for any but torch's SGD, Adagrad, Adam, AdamW and RMSprop, those of `tierbed.optim` and
    TorchRec's RowWiseAdagrad, by exact type, or what TorchRec's KeyedOptimizer and its like hold of them; for amsgrad,
    centered or differentiable; for limits that are not positive numbers of float32; for keys of the group that the
    optimizer does not have.
    """
    return RowOptimizer(_holder(optimizer, group), group)


def note_lazy(rows: Iterable[RowOptimizer]) -> None:
    """Log that an optimizer of torch begins to train rows lazily, where it changes all rows of a dense nn.Embedding."""
    for kind, rule in dict.fromkeys((type(one._optimizer).__name__, one.rule) for one in rows if one.is_lazy):
        log.warning(
            "rows are trained by a lazy %s: torch changes all rows of a dense nn.Embedding in each step, by momentum, "
            "moments or weight decay, and here a step changes the rows that it looks up. %s all rows torch's numbers",
            kind,
            _EQUAL.get(rule, _EQUAL_IN_PART),
        )


def _holder(optimizer: Any, group: Group) -> torch.optim.Optimizer:
    """The optimizer that a group is of. TorchRec's KeyedOptimizer and its like show the groups of others."""
    kind = type(optimizer)
    clips = any(base.__module__ == "torchrec.optim.clipping" for base in kind.__mro__)
    if clips and optimizer._clipping.name != "NONE":
        raise OptimizerError(
            f"{kind.__name__} clips gradients that tensors hold, and none holds those of rows; wrap dense parameters "
            "alone by it, and limit rows by clip_grad_value or clip_grad_row_norm in their param group, or clip all by "
            "clip_grad_norm_ of an EagerOptimizer"
        )
    if not kind.__module__.startswith("torchrec.optim."):
        return optimizer
    inner = [getattr(optimizer, "_optimizer", None), *(one for _, one in getattr(optimizer, "_optims", ()))]
    for one in inner:
        if one is not None and any(group is other for other in one.param_groups):
            return _holder(one, group)
    return optimizer


def check_is_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises OptimizerError for a class of torchrec.optim that only names a fused optimizer, and has no step."""
    if not hasattr(optimizer, "param_groups"):
        raise _refusal(type(optimizer))


def _refusal(kind: type) -> OptimizerError:
    names = list(dict.fromkeys(_name(rule.optimizer) for rule in all_rules()))
    ours = [name for name in names if name.rpartition(".")[2] == kind.__name__]
    if ours and kind.__module__.partition(".")[0] == "torchrec":
        return OptimizerError(f"optimizer {_name(kind)} cannot update rows; use {ours[0]}, which has its formula")
    return OptimizerError(
        f"optimizer {_name(kind)} cannot update rows; use one of {', '.join(names)}, not a subclass, which may change "
        "the formula"
    )


def _rule_of(optimizer: torch.optim.Optimizer, group: Group) -> Rule:
    kind = type(optimizer)
    name = f"{kind.__module__}.{kind.__qualname__}"
    rules = [rule for rule in all_rules() if rule.optimizer is kind or rule.theirs == name]
    if not rules:
        raise _refusal(kind)
    for option in _REFUSED:
        if group.get(option):
            raise OptimizerError(f"{kind.__name__}: {option}=True is not supported; use {option}=False")
    return next(rule for rule in rules if rule.when(group))


def _name(kind: type) -> str:
    """The name by which users import a class, from the outermost package that has it."""
    parts = kind.__module__.split(".")
    if parts[:-1] == __name__.split(".")[:-1]:
        return f"{parts[0]}.optim.{kind.__qualname__}"
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    exports = (m for m in modules if getattr(sys.modules.get(m), kind.__qualname__, None) is kind)
    return f"{next(exports, kind.__module__)}.{kind.__qualname__}"
