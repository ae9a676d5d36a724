"""Connects an optimizer from torch or `tierbed.optim` to the rows of an embedding; see docs/optimizers.md.

Updates are lazy: a row and its optimizer state change only in steps that touch the row. A NaN gradient makes a row NaN.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..errors import OptimizerError
from .base import check_positive, read_betas, read_number
from .kernel import LIMITS
from .past_rates import MAX_KNOTS, append_past_rates
from .row_state import RowState
from .rule import ParamGroup, Rule, load_rules

log = logging.getLogger("tierbed")
_UNSUPPORTED_SETTINGS = ("amsgrad", "centered", "differentiable")
# Keys of a param group that do not affect a step. Torch, its schedulers or the user set these keys.
_INERT = ("params", "param_names", "name", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")
_LAZY_RULES = ("adam", "adamw", "sgd_momentum", "rmsprop")  # their lazy updates differ from torch.optim's dense updates
_DENSE_REMEDIES = {"adam": "use tierbed.optim.CatchUpAdam", "adamw": "use tierbed.optim.CatchUpAdamW"}
_DEFAULT_REMEDY = "use Adagrad or SGD without momentum, and replace weight_decay by a penalty in the loss"
_RATE_TOLERANCE = 1e-3  # a past lr may be off by this fraction of the largest lr without a warning
_NONNEGATIVE_SETTINGS = ("lr", "eps", "weight_decay", "lr_decay", "momentum")  # settings that must not be negative


class RowOptimizer:
    """Trains rows by the settings of an optimizer's param group, read at each step. `row_optimizer` makes it."""

    step_shift = 0  # added to the embedding's step number

    def __init__(self, optimizer: torch.optim.Optimizer, group: ParamGroup) -> None:
        self._optimizer = optimizer
        # store the group's index, because load_state_dict replaces the dict
        self._group_index = next(index for index, other in enumerate(optimizer.param_groups) if other is group)
        self._rule = _find_rule(optimizer, group)
        self.rule = self._rule.kernel.name  # for `_core.update`
        self.states = self._rule.kernel.states
        self._hyperparam_names = self._rule.kernel.all_hyperparams
        values = self._rule.compute_initial(group)
        self.initial_values = [float(values.get(state, 0.0)) for state in self.states]
        self._checked_settings: dict[str, Any] | None = None  # the last settings that passed the checks
        self._should_warn_of_changes = self._rule.kernel.catch_up is not None
        self._warning_threshold = _RATE_TOLERANCE
        self._limits = [0.0] * len(LIMITS)  # from the last checked settings
        self.compute_hyperparams(1)  # raises now if a setting is wrong

    def compute_hyperparams(
        self, step: int, clip_value: float | None = None, previous: Sequence[float] | None = None
    ) -> list[float]:
        """Return the rule's numbers for one step (counted from 1): hyper-parameters, limits, past learning rates.

        `clip_value` clips each gradient element, in addition to the group's `clip_grad_value`. A rule that catches up
        needs `previous`: the result for the previous step, or [] if another rule ran that step. `previous=None` omits
        past rates. Raises OptimizerError if a setting is wrong, or if the settings now belong to another rule.
        """
        group = self._optimizer.param_groups[self._group_index]
        settings = {name: value for name, value in group.items() if name != "params"}
        if settings != self._checked_settings:
            self._check_settings(group, settings)
        if self.step_shift:
            step = max(step + self.step_shift, 1)
        values = {**group, "maximize": bool(group.get("maximize")), **self._rule.compute_hyperparams(group, step)}
        value, norm, row_norm = self._limits
        if clip_value is not None:
            value = min(clip_value, value or clip_value)
        numbers = [*(float(values[name]) for name in self._hyperparam_names), value, norm, row_norm]
        if previous is None or self._rule.kernel.catch_up is None:
            return numbers
        return append_past_rates(self._rule.kernel, numbers, previous, step, self._warn_of_rate_error)

    def set_step_shift(self, shift: int) -> None:
        """Set the number that is added to the embedding's step number."""
        self.step_shift = shift

    def _warn_of_rate_error(self, change: float) -> None:
        if change > self._warning_threshold:
            self._warning_threshold = 10 * change  # warn again if the change grows much larger
            log.warning(
                "lr of %s changes too often to store all past learning rates. One stored rate is wrong by %.2g times "
                "the largest rate. If a row misses more than %d changes of lr, its error may be %.2g times the size of "
                "one step. Change lr once per epoch, or use a schedule whose lr rises and falls less often",
                type(self._optimizer).__name__, change, MAX_KNOTS // 2, 10 * change,
            )  # fmt: skip

    def compute_numbers(self, step: int) -> dict[str, float]:
        """Return the numbers of `compute_hyperparams(step)` by name, such as `lr`."""
        return dict(zip((*self._hyperparam_names, *LIMITS), self.compute_hyperparams(step), strict=True))

    def depends_on_step(self) -> bool:
        """True if an update depends on the step number, as Adam's bias correction does."""
        return self.compute_hyperparams(1) != self.compute_hyperparams(2)

    @property
    def is_lazy(self) -> bool:
        """True if, on a dense table, torch's optimizer would also change rows that a step does not look up."""
        decay = self.rule in ("sgd", "adagrad") and self._optimizer.param_groups[self._group_index].get("weight_decay")
        return self.rule in _LAZY_RULES or bool(decay)

    def _check_settings(self, group: ParamGroup, settings: dict[str, Any]) -> None:
        rule = _find_rule(self._optimizer, group)
        if rule.kernel.name != self.rule:
            raise OptimizerError(
                f"{type(self._optimizer).__name__}: the settings first selected rule {self.rule!r}. They now select "
                f"rule {rule.kernel.name!r}, but the rows store the state of the first rule. Do not change "
                "decoupled_weight_decay. A zero momentum must stay zero, and a nonzero momentum must stay nonzero. The "
                "same holds for CatchUpAdam's weight_decay. OneCycleLR and CyclicLR set momentum: give them "
                "cycle_momentum=False, or make the optimizer with a momentum"
            )
        old = self._checked_settings if self._should_warn_of_changes else None
        if old and (names := [name for name in ("betas", "eps", "weight_decay") if settings[name] != old[name]]):
            self._should_warn_of_changes = False
            log.warning(
                "%s of %s changed. Steps that a row has missed use the new value; in a dense table, they would use the "
                "old value. Keep the setting constant. Give cycle_momentum=False to OneCycleLR and CyclicLR",
                " and ".join(names), type(self._optimizer).__name__,
            )  # fmt: skip
        for name in _NONNEGATIVE_SETTINGS:
            if name in group:
                read_number(group, name)
        if "betas" in group:
            read_betas(group)
        allowed_settings = (*self._optimizer.defaults, *LIMITS, *_INERT)
        unknown = next((name for name in group if name not in allowed_settings), None)
        if unknown is not None:  # torch does not check this
            raise OptimizerError(
                f"param group: {unknown}={group[unknown]!r}; {type(self._optimizer).__name__} has no such setting. "
                f"Leave this setting out of the param group. To limit rows, set one of {', '.join(LIMITS)}"
            )
        self._limits = [check_positive(f"param group: {name}", group.get(name)) or 0.0 for name in LIMITS]
        has_mutable_values = any(isinstance(value, torch.Tensor | list) for value in settings.values())
        self._checked_settings = None if has_mutable_values else settings

    def make_row_state(self, dim: int, state_type: str = "float32") -> RowState:
        """Return the state of a row with `dim` elements. `state_type` is the dtype of element states."""
        kernel = self._rule.kernel
        types = (state_type,) * len(kernel.element_states) + ("float32",) * len(kernel.row_states)
        types = types if state_type != "float32" and kernel.element_states else ()
        return RowState(self.rule, self.states, kernel.state_widths(dim), tuple(self.initial_values), types)


def row_optimizer(optimizer: torch.optim.Optimizer, group: ParamGroup) -> RowOptimizer:
    """Make the row optimizer for `group`, one of the optimizer's param groups.

    The optimizer's class must be in `load_rules`; a subclass is not supported. TorchRec's KeyedOptimizer and similar
    wrappers may contain the optimizer. Raises OptimizerError if the class or a setting is not supported. The settings
    `amsgrad`, `centered` and `differentiable` are not supported. A limit must be a positive float32 number.
    """
    return RowOptimizer(_unwrap_optimizer(optimizer, group), group)


def warn_if_lazy(optimizers: Iterable[RowOptimizer]) -> None:
    """Log a warning for each optimizer whose lazy updates differ from its updates of a dense nn.Embedding."""
    for class_name, rule in dict.fromkeys((type(o._optimizer).__name__, o.rule) for o in optimizers if o.is_lazy):
        log.warning(
            "rows are trained by a lazy %s: a step changes only the rows that it looks up. In a dense nn.Embedding, "
            "momentum, moments or weight decay would change all rows in each step. To train rows to the same values as "
            "in a dense nn.Embedding, %s",
            class_name, _DENSE_REMEDIES.get(rule, _DEFAULT_REMEDY),
        )  # fmt: skip


def _unwrap_optimizer(optimizer: Any, group: ParamGroup) -> torch.optim.Optimizer:
    """Return the optimizer of `group`. If `optimizer` is a wrapper such as TorchRec's KeyedOptimizer, unwraps it."""
    optimizer_class = type(optimizer)
    is_clipping = any(base.__module__ == "torchrec.optim.clipping" for base in optimizer_class.__mro__)
    if is_clipping and optimizer._clipping.name != "NONE":
        raise OptimizerError(
            f"{optimizer_class.__name__} clips gradients stored in tensors, but row gradients are not in a tensor. Use "
            "this wrapper only for dense parameters. To clip rows, set clip_grad_value or clip_grad_row_norm in the "
            "rows' param group. To clip all gradients together, call an EagerOptimizer's clip_grad_norm_"
        )
    if not optimizer_class.__module__.startswith("torchrec.optim."):
        return optimizer
    optimizers = [getattr(optimizer, "_optimizer", None), *(inner for _, inner in getattr(optimizer, "_optims", ()))]
    for inner in optimizers:
        if inner is not None and any(group is other for other in inner.param_groups):
            return _unwrap_optimizer(inner, group)
    return optimizer


def check_has_param_groups(optimizer: torch.optim.Optimizer) -> None:
    """Raise OptimizerError if there are no param groups. torchrec.optim's stand-ins for fused optimizers have none."""
    if not hasattr(optimizer, "param_groups"):
        raise _make_class_error(type(optimizer))


def _make_class_error(optimizer_class: type) -> OptimizerError:
    name = f"optimizer {_find_public_name(optimizer_class)}"
    names = list(dict.fromkeys(_find_public_name(rule.optimizer) for rule in load_rules()))
    namesakes = [name for name in names if name.rpartition(".")[2] == optimizer_class.__name__]
    if namesakes and optimizer_class.__module__.partition(".")[0] == "torchrec":
        return OptimizerError(f"{name} cannot update rows; use {namesakes[0]}, with the same formula")
    return OptimizerError(
        f"{name} cannot update rows; use one of {', '.join(names)}. A subclass is refused: it may change the formula"
    )


def _find_rule(optimizer: torch.optim.Optimizer, group: ParamGroup) -> Rule:
    optimizer_class = type(optimizer)
    name = f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"
    rules = [rule for rule in load_rules() if rule.optimizer is optimizer_class or rule.torchrec_name == name]
    if not rules:
        raise _make_class_error(optimizer_class)
    for option in _UNSUPPORTED_SETTINGS:
        if group.get(option):
            raise OptimizerError(f"{optimizer_class.__name__}: {option}=True is not supported; use {option}=False")
    return next(rule for rule in rules if rule.applies_to(group))


def _find_public_name(optimizer_class: type) -> str:
    """Return a class's name as users import it, from the outermost package that exports it."""
    parts = optimizer_class.__module__.split(".")
    if parts[:-1] == __name__.split(".")[:-1]:
        return f"{parts[0]}.optim.{optimizer_class.__qualname__}"
    modules = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    exports = (m for m in modules if getattr(sys.modules.get(m), optimizer_class.__qualname__, None) is optimizer_class)
    return f"{next(exports, optimizer_class.__module__)}.{optimizer_class.__qualname__}"
