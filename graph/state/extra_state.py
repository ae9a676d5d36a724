"""A graph's extra state in its state_dict, and the code that checks a saved extra state before it is loaded.

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
from ...embedding.state_dict.saved_rows import EXTRA_STATE_KEY, SnapshotEmbedding
from ...engine.errors import GraphError, TierbedError
from ...engine.optim.row_optimizer import RowOptimizer
from ..passes.step_epilogue import StepEpilogue
from ..trace.swap import set_grads
from .checkpoint import copy_state, format_error, gather_random_states, get_world, read_versions, select_random_state
from .folders import LOADING_ERRORS
from .optimizer_set import OptimizerSet, find_embeddings

_SCHEDULER_KEYS = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}  # added to groups by schedulers


def check_nothing_accumulated(epilogue: StepEpilogue) -> None:
    """Raise GraphError if accumulated gradients are not applied yet, because a state cannot hold gradients."""
    if epilogue.num_waiting_calls:
        raise GraphError(
            f"gradients of {epilogue.num_waiting_calls} of {epilogue.accumulate_steps} accumulated calls wait for "
            "their update, and a state cannot hold them; save after the last of these calls, or call drop_grads() first"
        )


class TrainingState(NamedTuple):
    """A model's optimizers, schedulers and scaler."""

    optimizers: Sequence[Optimizer]
    row_optimizers: Sequence[RowOptimizer]
    schedulers: Sequence[Any]
    scaler: Any
    owner: str  # this field and the next two are for error texts
    remedy: str
    scaler_remedy: str

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [scheduler.state_dict() for scheduler in self.schedulers],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the result of `state_dict`. After a GraphError or LOADING_ERRORS, the state may be partly loaded."""
        state = copy.deepcopy(state)  # optimizers change loaded tensors in place
        for index, (optimizer, loaded) in enumerate(zip(self.optimizers, state["optimizers"], strict=True)):
            optimizer.load_state_dict(loaded)
            check_can_step(optimizer, f"optimizer {index} of the state")
        for row_optimizer in self.row_optimizers:
            row_optimizer.compute_hyperparams(1)  # raises an error if the param group is invalid
        for scheduler, loaded in zip(self.schedulers, state["schedules"], strict=True):
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
    schedules = optimizers.list_schedulers()
    return TrainingState([*optimizers], row_optimizers, schedules, epilogue.scaler, "this graph", remedy, scaler_remedy)


def check_extra_state(training: TrainingState, state: dict[str, Any]) -> None:
    """Check that counts and types in `state` match `training`. Raises GraphError or one of LOADING_ERRORS."""
    optimizers = training.optimizers
    for name, current in (("optimizers", optimizers), ("schedules", training.schedulers)):
        if len(current) != len(state[name]):
            raise GraphError(
                f"the state has {len(state[name])} {name}, and {training.owner} has {len(current)}; {training.remedy}"
            )
    for index, (optimizer, saved) in enumerate(zip(optimizers, state["optimizers"], strict=True)):
        both_groups = saved["param_groups"], optimizer.param_groups
        saved_sizes, sizes = ([len(group["params"]) for group in groups] for groups in both_groups)
        if saved_sizes != sizes:
            raise GraphError(
                f"optimizer {index} (counted from 0): param groups have {saved_sizes} parameters in the state, but "
                f"{sizes} parameters in {training.owner}; create the optimizer over the same parameters"
            )
        check_same_structure({}, saved["state"], f"optimizer {index}: state")
        for key, parameter_state in saved["state"].items():
            if type(key) is int:  # other keys are the optimizer's own values
                check_same_structure({}, parameter_state, f"optimizer {index}: state")
        added_keys = _SCHEDULER_KEYS if training.schedulers else ()  # without schedulers, no key may be missing
        optional = [name for name, value in optimizer.defaults.items() if value is None]
        for group, saved_group in zip(optimizer.state_dict()["param_groups"], saved["param_groups"], strict=True):
            expected = group | dict.fromkeys(optional)
            check_same_structure(expected, saved_group, f"optimizer {index}: param group", expected.keys() - added_keys)
            if any(_name_kind(saved_group.get(name)) not in ("NoneType", "bool", "number") for name in optional):
                raise _make_error(f"optimizer {index}: one of {optional} is neither a number nor None in the state")
            if group["params"] != saved_group["params"] and all(type(item) is int for item in group["params"]):
                raise _make_error(f"optimizer {index} has parameters {saved_group['params']} in the state")
    for scheduler, saved in zip(training.schedulers, state["schedules"], strict=True):
        current = scheduler.state_dict()
        if type(scheduler).__module__ == LRScheduler.__module__:  # a user's scheduler may change types
            check_same_structure(current, saved, type(scheduler).__name__, current.keys())
            phases = saved.get("_schedule_phases", [])  # in OneCycleLR, a phase holds names of param group settings
            if {item for phase in phases for item in phase.values() if isinstance(item, str)} - _SCHEDULER_KEYS:
                raise _make_error(f"{type(scheduler).__name__}: a phase names no number of param groups in the state")
        for name in saved.keys() & {"base_lrs", "_last_lr"}:
            if len(saved[name]) != len(scheduler.optimizer.param_groups):
                raise _make_error(f"{type(scheduler).__name__} has {len(saved[name])} learning rates in the state")
    for rank_state in [state["random"], *state.get("ranks", [])]:
        check_same_structure([None], rank_state, "the random states")
        if any(not isinstance(item, Tensor) or item.dtype != torch.uint8 for item in rank_state):
            raise _make_error("a random state is no tensor of bytes")
    has_scaler, has_saved_scaler = training.scaler is not None and training.scaler.is_enabled(), bool(state["scaler"])
    if has_scaler != has_saved_scaler:
        holder, other = ("the state", training.owner) if has_saved_scaler else (training.owner, "the state")
        raise GraphError(
            f"{holder} has an enabled gradient scaler, but {other} does not; before loading, "
            f"{training.scaler_remedy.format('scaler' if has_saved_scaler else None)}"
        )
    if has_saved_scaler:
        current = training.scaler.state_dict()
        check_same_structure(current, state["scaler"], "the gradient scaler")
        if any(type(state["scaler"][name]) is not int for name in ("growth_interval", "_growth_tracker")):
            raise _make_error("the gradient scaler has a count that is no whole number")


def _make_error(problem: str) -> GraphError:
    return GraphError(f"{problem}: the state is malformed; load another")


def check_same_structure(current: Any, saved: Any, label: str, optional_keys: Collection[Any] = ()) -> None:
    """Raise GraphError if `saved` and `current` differ in kind. `saved` may lack only keys from `optional_keys`.

    If `current` is None, `saved` may be anything. Lists may differ in length, but their items must be of one kind.
    """
    if isinstance(current, dict):
        is_match = isinstance(saved, dict) and (not current or {*map(type, saved)} <= {*map(type, current)})
        for key in current if is_match else ():
            if key in saved:
                check_same_structure(current[key], saved[key], f"{label}[{key!r}]")
            elif isinstance(key, str) and key not in optional_keys:
                raise _make_error(f"{label} lacks {key!r} in the state")
    elif isinstance(current, list | tuple):
        is_match = isinstance(saved, list | tuple) and bool(saved) >= bool(current)
        for index, item in enumerate(saved if is_match and current else ()):
            check_same_structure(current[min(index, len(current) - 1)], item, f"{label}[{index}]")
    else:
        are_tensors = isinstance(current, Tensor) and isinstance(saved, Tensor)
        is_match = current is None or are_tensors or _name_kind(current) == _name_kind(saved)
    if not is_match:
        raise _make_error(f"{label} is {type(saved).__name__} {saved!r:.80} in the state, not a {_name_kind(current)}")


def _name_kind(value: Any) -> str:
    """Return a value's kind. Two values of the same kind can replace each other."""
    is_number = isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return "number" if is_number and not isinstance(value, bool) else type(value).__name__


def check_can_step(optimizer: Optimizer, label: str) -> None:
    """Raise GraphError or one of LOADING_ERRORS if an optimizer cannot step with its loaded state.

    A torch optimizer loads any state and raises only in the step. So for classes of torch.optim, this function creates
    a trial optimizer for a tiny parameter, and steps the trial optimizer. It then compares the loaded and trial states.
    """
    optimizer = optimizer.optimizer if isinstance(optimizer, EagerOptimizer) else optimizer
    cls: Any = type(optimizer)
    expected_states: dict[Any, dict[str, Any]] = {}
    if not cls.__module__.startswith("torch.optim.") or cls.__name__ in ("LBFGS", "SparseAdam"):
        return
    if any(not isinstance(key, Tensor) for key in optimizer.state):
        raise _make_error(f"{label} has state of parameters that it lacks")
    for index, group in enumerate(optimizer.param_groups):
        if missing := optimizer.defaults.keys() - group.keys():
            raise _make_error(f"{label}: group {index} lacks {sorted(missing)}")
        for parameter in group["params"]:
            signature = index, parameter.dim(), parameter.dtype, parameter.device
            if signature not in expected_states:
                probe = torch.zeros([2] * parameter.dim(), dtype=signature[2], device=signature[3], requires_grad=True)
                set_grads([probe], [torch.zeros_like(probe)])
                trial_optimizer = cls([{**group, "params": [probe]}])
                trial_optimizer.step()
                state = trial_optimizer.state[probe].items()
                expected_states[signature] = {k: (v, getattr(v, "shape", None) == probe.shape) for k, v in state}
            loaded_state = optimizer.state.get(parameter, {})
            check_same_structure(dict.fromkeys(expected_states[signature] if loaded_state else ()), loaded_state, label)
            for name in expected_states[signature].keys() & loaded_state.keys():
                value, is_like_parameter = expected_states[signature][name]
                check_same_structure(value, loaded_state[name], f"{label}: {name}")
                shapes = [loaded_state[name].shape, parameter.shape] if is_like_parameter else []
                if len({*shapes}) > 1:
                    raise _make_error(f"{label}: {name} has shape {list(loaded_state[name].shape)}")
                if name == "step" and not 0 <= float(loaded_state[name]) < math.inf:
                    raise _make_error(f"{label}: its step is {float(loaded_state[name])}")


def check_modules(root: nn.Module, state: dict[str, Any], owner: str) -> None:
    """Raise GraphError if a state_dict's names or shapes do not match `root`. Lazy tensors may have any shape."""
    versions = read_versions(state) or {}
    prefixes = tuple(  # a module saved by another version converts its tensors itself
        f"{path}." if path else ""
        for path, module in root.named_modules(remove_duplicate=False)
        if path in versions and versions[path].get("version") != module._version
    )
    state_dicts = root.state_dict(), state
    current, saved = ({k: v for k, v in tensors.items() if not k.startswith(prefixes)} for tensors in state_dicts)
    missing, unexpected = sorted(current.keys() - saved.keys()), sorted(saved.keys() - current.keys())
    if missing or unexpected:
        raise GraphError(
            f"the state lacks {missing} and has {unexpected}, which the {owner} lacks; load it into a {owner} "
            "with the same modules as when it was saved"
        )
    for name, value in current.items():
        if not isinstance(value, Tensor) or is_lazy(value) or name.endswith(EXTRA_STATE_KEY):
            continue
        if not isinstance(saved[name], Tensor):
            raise _make_error(f"{name} is a {type(saved[name]).__name__} in the state, and not a tensor")
        shape = saved[name].shape
        if value.shape != shape:
            raise GraphError(
                f"{name} has shape {list(shape)} in the state, and {list(value.shape)} in the {owner}; give the module "
                "the same size as in the state"
            )


def drop_row_state(root: nn.Module, state: dict[str, Any], loads_optimizers: bool) -> dict[str, Any]:
    """Remove rows from a state_dict: rows are loaded separately. `loads_optimizers=False` clears the extra state."""
    for path, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, SnapshotEmbedding):
            state.pop(f"{path}.{EXTRA_STATE_KEY}", None)
    if EXTRA_STATE_KEY in state and not loads_optimizers:
        state[EXTRA_STATE_KEY] = {}
    return state


def add_rank_states(root: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return the extra state with all ranks' random states. All ranks must call this function together."""
    other_ranks = gather_random_states(get_world(find_embeddings(root)), "state_dict() of a graph", state["random"])
    return {**state, "ranks": other_ranks} if other_ranks else state


def load_extra_state(root: nn.Module, optimizers: OptimizerSet, epilogue: StepEpilogue, state: Any) -> None:
    """Load `state`, a dict or a tuple of one dict. A wrong state raises GraphError and changes nothing."""
    training = make_training_state(optimizers, epilogue)
    backup: Any = None
    try:
        (state,) = state if isinstance(state, tuple) else (state,)
        if state == {}:  # loaded without optimizers
            return
        check_extra_state(training, state)
        if "ranks" in state:
            world = get_world(find_embeddings(root))
            state = {**state, "random": select_random_state(world, state["random"], state["ranks"])}
        backup = copy_state(training.state_dict())
        training.load_state_dict(state)
    except LOADING_ERRORS as error:
        if backup is not None:
            training.load_state_dict(backup)
        if isinstance(error, TierbedError):
            raise
        raise GraphError(f"the state is malformed: {format_error(error)}; load what state_dict() returned") from error
    epilogue.clear()
