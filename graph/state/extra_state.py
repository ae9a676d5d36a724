"""A graph's extra state in its state_dict, and the checks that a saved state fits.

Torch's optimizers and schedulers load almost any state, and then fail in a step. So a saved state's structure, types
and shapes are compared with the current state before anything is loaded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ...embedding.optim.eager import EagerOptimizer
from ...embedding.state_dict.saved_rows import EXTRA, SnapshotEmbedding
from ...engine.errors import GraphError, TierbedError
from ...engine.optim.row_optimizer import RowOptimizer
from ..passes.step_epilogue import StepEpilogue
from ..trace.swap import set_grads
from .checkpoint import copied, error_text, gather_random_states, select_random_state, shared_world, versions_of
from .kept import MALFORMED
from .optimizer_set import OptimizerSet, embeddings_of

_SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # schedulers add these to param groups


def check_nothing_accumulated(epilogue: StepEpilogue) -> None:
    """Raise GraphError while accumulated gradients wait for an update, because a state cannot hold gradients."""
    if epilogue.waiting_calls:
        raise GraphError(
            f"gradients of {epilogue.waiting_calls} of {epilogue.accumulate_steps} accumulated calls wait for their "
            "update, and a state cannot hold them; save after the last of these calls, or call drop_grads() first"
        )


class TrainingState(NamedTuple):
    """A model's optimizers, schedulers and scaler."""

    optimizers: Sequence[Optimizer]
    row_optimizers: Sequence[RowOptimizer]
    schedules: Sequence[Any]
    scaler: Any
    owner: str  # for error texts, like the next two fields
    remedy: str
    scaler_remedy: str

    def state(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [scheduler.state_dict() for scheduler in self.schedules],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of `state`. A value of a wrong type raises GraphError or one of MALFORMED halfway through."""
        state = copy.deepcopy(state)  # optimizers change loaded tensors in place
        for number, (optimizer, loaded) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            optimizer.load_state_dict(loaded)
            check_can_step(optimizer, f"optimizer {number} of the state")
        for row_optimizer in self.row_optimizers:
            row_optimizer.compute_hyper(1)  # raises an error if the param group is invalid
        for scheduler, loaded in zip(self.schedules, state["schedules"], strict=True):
            scheduler.load_state_dict(loaded)
        if self.scaler is not None and state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        cpu, *cuda = state["random"]
        torch.set_rng_state(cpu)
        if cuda and torch.cuda.is_initialized():
            torch.cuda.set_rng_state_all(cuda[: torch.cuda.device_count()])


def make_training_state(optimizers: OptimizerSet, epilogue: StepEpilogue) -> TrainingState:
    remedy = "add the same optimizers with add_optimizer, or to score only, call graph.load(path, optimizers=False)"
    row_optimizers, scaler_remedy = [*optimizers.row_optimizers.values()], "call set_grad_scaler({})"
    schedules = optimizers.schedulers()
    return TrainingState([*optimizers], row_optimizers, schedules, epilogue.scaler, "this graph", remedy, scaler_remedy)


def check_extra_state(training: TrainingState, state: dict[str, Any]) -> None:
    """Raise GraphError, or one of MALFORMED, if a state's counts or types of values differ from `training`."""
    optimizers = training.optimizers
    for name, current in (("optimizers", optimizers), ("schedules", training.schedules)):
        if len(current) != len(state[name]):
            raise GraphError(
                f"the state has {len(state[name])} {name}, and {training.owner} has {len(current)}; {training.remedy}"
            )
    for number, (optimizer, saved) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        both_groups = saved["param_groups"], optimizer.param_groups
        saved_sizes, sizes = ([len(group["params"]) for group in groups] for groups in both_groups)
        if saved_sizes != sizes:
            raise GraphError(
                f"optimizer {number} (counted from 0) has groups of {saved_sizes} parameters in the state, and of "
                f"{sizes} in {training.owner}; create it over the same parameters"
            )
        check_like({}, saved["state"], f"optimizer {number}: state")
        for key, parameter_state in saved["state"].items():
            if type(key) is int:  # other keys are the optimizer's own values
                check_like({}, parameter_state, f"optimizer {number}: state")
        scheduled = _SCHEDULED if training.schedules else ()  # without schedulers, no key may be missing
        optional = [name for name, value in optimizer.defaults.items() if value is None]
        for group, saved_group in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
            typed = group | dict.fromkeys(optional)
            check_like(typed, saved_group, f"optimizer {number}: param group", typed.keys() - scheduled)
            if any(_kind(saved_group.get(name)) not in ("NoneType", "bool", "number") for name in optional):
                raise _malformed(f"optimizer {number}: one of {optional} is neither a number nor None in the state")
            if group["params"] != saved_group["params"] and all(type(item) is int for item in group["params"]):
                raise _malformed(f"optimizer {number} has parameters {saved_group['params']} in the state")
    for scheduler, saved in zip(training.schedules, state["schedules"], strict=True):
        current = scheduler.state_dict()
        if type(scheduler).__module__ == LRScheduler.__module__:  # a user's scheduler may change types
            check_like(current, saved, type(scheduler).__name__, current.keys())
            phases = saved.get("_schedule_phases", [])  # OneCycleLR's phases name settings of param groups
            if {item for phase in phases for item in phase.values() if isinstance(item, str)} - _SCHEDULED:
                raise _malformed(f"{type(scheduler).__name__}: a phase names no number of param groups in the state")
        for name in saved.keys() & {"base_lrs", "_last_lr"}:
            if len(saved[name]) != len(scheduler.optimizer.param_groups):
                raise _malformed(f"{type(scheduler).__name__} has {len(saved[name])} learning rates in the state")
    for rank_state in [state["random"], *state.get("ranks", [])]:
        check_like([None], rank_state, "the random states")
        if any(not isinstance(item, Tensor) or item.dtype != torch.uint8 for item in rank_state):
            raise _malformed("a random state is no tensor of bytes")
    scales, scaled = training.scaler is not None and training.scaler.is_enabled(), bool(state["scaler"])
    if scales != scaled:
        holder, other = ("the state", training.owner) if scaled else (training.owner, "the state")
        raise GraphError(
            f"{holder} has a gradient scaler, and {other} has no enabled one; "
            f"{training.scaler_remedy.format('scaler' if scaled else None)} before loading"
        )
    if scaled:
        current = training.scaler.state_dict()
        check_like(current, state["scaler"], "the gradient scaler")
        if any(type(state["scaler"][name]) is not int for name in ("growth_interval", "_growth_tracker")):
            raise _malformed("the gradient scaler has a count that is no whole number")


def _malformed(what: str) -> GraphError:
    return GraphError(f"{what}: the state is malformed; load another")


def check_like(current: Any, saved: Any, where: str, optional: Collection[Any] = ()) -> None:
    """Raise GraphError if `saved` is of another kind than `current`, or lacks a key that is not in `optional`.

    If `current` is None, any value fits. A saved list may have another length, if its items fit the current items.
    """
    if isinstance(current, dict):
        fits = isinstance(saved, dict) and (not current or {*map(type, saved)} <= {*map(type, current)})
        for key in current if fits else ():
            if key in saved:
                check_like(current[key], saved[key], f"{where}[{key!r}]")
            elif isinstance(key, str) and key not in optional:
                raise _malformed(f"{where} lacks {key!r} in the state")
    elif isinstance(current, list | tuple):
        fits = isinstance(saved, list | tuple) and bool(saved) >= bool(current)
        for index, item in enumerate(saved if fits and current else ()):
            check_like(current[min(index, len(current) - 1)], item, f"{where}[{index}]")
    else:
        are_tensors = isinstance(current, Tensor) and isinstance(saved, Tensor)
        fits = current is None or are_tensors or _kind(current) == _kind(saved)
    if not fits:
        raise _malformed(f"{where} is {type(saved).__name__} {saved!r:.80} in the state, and not a {_kind(current)}")


def _kind(value: Any) -> str:
    """Return a value's kind. Two values of the same kind can replace each other."""
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return "number" if is_number and not isinstance(value, bool) else type(value).__name__


def check_can_step(optimizer: Optimizer, where: str) -> None:
    """Raise GraphError or one of MALFORMED if an optimizer cannot step with its loaded state.

    A torch optimizer loads any state and raises only in the step. So for torch.optim, this function steps a copy of the
    optimizer with a tiny parameter (two elements per dimension), and compares the loaded states with the copy's state.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, EagerOptimizer) else optimizer
    cls: Any = type(optimizer)
    expected: dict[Any, dict[str, Any]] = {}
    if not cls.__module__.startswith("torch.optim.") or cls.__name__ in ("LBFGS", "SparseAdam"):
        return
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        raise _malformed(f"{where} has state of parameters that it lacks")
    for number, group in enumerate(optimizer.param_groups):
        if missing := optimizer.defaults.keys() - group.keys():
            raise _malformed(f"{where}: group {number} lacks {sorted(missing)}")
        for parameter in group["params"]:
            signature = number, parameter.dim(), parameter.dtype, parameter.device
            if signature not in expected:
                probe = torch.zeros([2] * parameter.dim(), dtype=signature[2], device=signature[3], requires_grad=True)
                set_grads([probe], [torch.zeros_like(probe)])
                trial = cls([{**group, "params": [probe]}])
                trial.step()
                state = trial.state[probe].items()
                expected[signature] = {k: (v, getattr(v, "shape", None) == probe.shape) for k, v in state}
            loaded = optimizer.state.get(parameter, {})
            check_like(dict.fromkeys(expected[signature] if loaded else ()), loaded, where)
            for name in expected[signature].keys() & loaded.keys():
                value, is_like_parameter = expected[signature][name]
                check_like(value, loaded[name], f"{where}: {name}")
                shapes = [loaded[name].shape, parameter.shape] if is_like_parameter else []
                if len({*shapes}) > 1 and {shape.numel() for shape in shapes} != {1}:  # old shadows have shape [1]
                    raise _malformed(f"{where}: {name} has shape {list(loaded[name].shape)}")
                if name == "step" and not 0 <= float(loaded[name]) < math.inf:
                    raise _malformed(f"{where}: its step is {float(loaded[name])}")


def check_modules(root: nn.Module, state: dict[str, Any], thing: str) -> None:
    """Raise GraphError if a state_dict's names, or its shapes except in lazy modules, do not match `root`."""
    versions = versions_of(state) or {}
    # a module saved by another version converts its tensors itself
    migrating = tuple(
        f"{path}." if path else ""
        for path, module in root.named_modules(remove_duplicate=False)
        if path in versions and versions[path].get("version") != module._version
    )
    both = root.state_dict(), state
    current, saved = ({k: v for k, v in tensors.items() if not k.startswith(migrating)} for tensors in both)
    missing, unexpected = sorted(current.keys() - saved.keys()), sorted(saved.keys() - current.keys())
    if missing or unexpected:
        raise GraphError(
            f"the state lacks {missing} and has {unexpected}, which the {thing} lacks; load it into a {thing} "
            "with the same modules as when it was saved"
        )
    for name, value in current.items():
        if not isinstance(value, Tensor) or is_lazy(value) or name.endswith(EXTRA):
            continue
        if not isinstance(saved[name], Tensor):
            raise _malformed(f"{name} is a {type(saved[name]).__name__} in the state, and not a tensor")
        shape = saved[name].shape
        if value.shape != shape:
            raise GraphError(
                f"{name} has shape {list(shape)} in the state, and {list(value.shape)} in the {thing}; give its module "
                "the size it had when it was saved"
            )


def drop_row_state(root: nn.Module, state: dict[str, Any], optimizers: bool) -> dict[str, Any]:
    """Remove rows from a state_dict, because rows are loaded separately. If not `optimizers`, also the extra state."""
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, SnapshotEmbedding):
            state.pop(f"{path}.{EXTRA}", None)
    if EXTRA in state and not optimizers:
        state[EXTRA] = {}
    return state


def with_rank_states(root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the extra state with all ranks' random states. All ranks call this."""
    other_ranks = gather_random_states(shared_world(embeddings_of(root)), "state_dict() of a graph", state["random"])
    return {**state, "ranks": other_ranks} if other_ranks else state


def load_extra_state(root: nn.Module, optimizers: OptimizerSet, epilogue: StepEpilogue, state: Any) -> None:
    """Load `get_extra_state`'s tuple or its dict. If the state does not fit, raises GraphError and loads nothing."""
    training = make_training_state(optimizers, epilogue)
    backup: Any = None
    try:
        (state,) = state if isinstance(state, tuple) else (state,)
        if state == {}:  # loaded without optimizers
            return
        check_extra_state(training, state)
        if "ranks" in state:
            world = shared_world(embeddings_of(root))
            state = {**state, "random": select_random_state(world, state["random"], state["ranks"])}
        backup = copied(training.state())
        training.load(state)
    except MALFORMED as error:
        if backup is not None:
            training.load(backup)
        if isinstance(error, TierbedError):
            raise
        raise GraphError(f"the state is malformed: {error_text(error)}; load one that state_dict() returned") from error
    epilogue.clear()
